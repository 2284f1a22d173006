"""The "sky" torch device: tensors that live on a worker, operations that stream to it."""
