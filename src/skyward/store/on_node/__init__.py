"""Saving and loading by the node of a torch device, so that the weights skip the client."""
