"""How bytes travel: frames, channels, identity, object encoding and blobs."""
