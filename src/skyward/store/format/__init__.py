"""What the files of a store contain: manifests, trees, and objects full of tensors."""
