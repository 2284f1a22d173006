"""What a pool knows of its machines, and does with them."""
