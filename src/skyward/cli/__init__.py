"""The command line, `sky`: each command is imported when it is used."""
