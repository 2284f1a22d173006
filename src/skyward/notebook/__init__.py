"""Notebooks: the magics `%sky` and `%%sky`, loaded with `%load_ext skyward`."""
