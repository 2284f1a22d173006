"""The model store: weights saved as content-addressed safetensors, published version by version.

What lies where, each room importing only those above it:

- `format`: what the files of a store contain.
- `places`: where the files are. `format` and `places` know nothing of each other.
- `catalog`, `progress`: the versions there are, and what a user sees of a save or load.
- `saving`, `loading`, `collecting`: tensors into the store, out of it, and the garbage between.
- `exchange`: files of other tools, into the store and out of it.
- `on_node`, `server`: the same done by a torch device's node, and for clients over HTTP.
- `models`: `ModelStore`, which the user holds.
"""
