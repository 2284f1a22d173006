"""Models at rest: weights saved as content-addressed safetensors, published version by version."""
