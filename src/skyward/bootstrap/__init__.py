"""How a bare machine becomes a node."""
