"""Where the files of a store are: a folder, a model server, or a filesystem of fsspec."""
