"""The model store: weights saved as content-addressed safetensors, published version by version.

The modules; each imports only those above it:

- `format`: the contents of a store's files.
- `places`: where the files are. `format` and `places` do not import each other.
- `catalog`, `progress`: the versions of a store, and the progress of a save or load.
- `saving`, `loading`, `collecting`: write tensors, read tensors, and delete unused ones.
- `exchange`: import and export files of other tools.
- `on_node`, `server`: saving and loading by a torch device's node, and for clients over HTTP.
- `models`: `ModelStore`, the object that the user holds.
"""
