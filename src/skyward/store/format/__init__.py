"""The contents of a store's files: manifests, trees, and objects with tensors."""
