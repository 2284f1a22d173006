"""How bytes travel: frames, messages, channels, identity, connections, listeners and links."""
