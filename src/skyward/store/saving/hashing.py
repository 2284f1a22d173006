"""The second stage of a save: the digests of regions, several regions at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from skyward.objects import memory
from skyward.store.format.objects import Piece


def hashed(pieces: Sequence[Piece]) -> list[Piece]:
    """The same pieces, each with the digest of its bytes."""
    digests = memory.digests([piece.data for piece in pieces])
    return [
        replace(piece, digest=digest.hex()) for piece, digest in zip(pieces, digests, strict=True)
    ]
