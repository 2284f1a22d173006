"""The model server, `sky models serve`: a store's folder over HTTP."""
