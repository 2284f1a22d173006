"""Files that follow the user's: folders of the client and of nodes, made equal by content."""
