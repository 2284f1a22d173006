"""The model store: weights saved as content-addressed safetensors, published version by version.

The modules; each imports only those above it:

- `manifest`, `values`: the contents of a store's files, and what a saved value is in them.
- `places`, `local`, `http`, `remote`, `address`: where the files are.
- `catalog`, `progress`: the versions of a store, and the progress of a save or load.
- `save`, `load`, `fill`: write tensors, read tensors, and fill a module with them.
- `exchange`: import and export files of other tools.
- `node`: saving and loading by a torch device's node.
- `web`, `server`: a store's folder for clients over HTTP.
- `models`, `checkpoints`: `ModelStore`, the object that the user holds; a torch device saved whole.
"""
