"""How objects become bytes: encoding, tensors, modules, references and blobs."""
