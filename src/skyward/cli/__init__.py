"""The command line, `sky`: a module for each command, imported when it is used."""
