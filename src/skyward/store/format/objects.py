"""An object: a safetensors file; digests name the tensors in it, and the file itself.

The header lists the digest of every tensor, and the object's name is the digest of the header, so
the name guards every byte. A random ending makes each upload a file of its own: no save ever writes
to a name that the garbage collector is about to delete.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import xxhash

from skyward.store.format import safetensors
from skyward.store.format.layout import Span
from skyward.store.format.manifest import ITEM_SIZES
from skyward.store.format.safetensors import DTYPES, TensorEntry

_UNKNOWN = "0" * 32
"""Takes the place of a digest where only the length of the head matters."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One region on its way into an object."""

    digest: str
    """Empty until the piece is hashed."""
    span: Span
    data: memoryview


def alignment(piece: Piece) -> int:
    """The sort key of pieces, largest first: each then begins at a multiple of its element size."""
    item = ITEM_SIZES[piece.span.dtype]
    return item if piece.span.dtype in DTYPES else 1


def header(pieces: Sequence[Piece]) -> tuple[bytes, list[int]]:
    """The head of an object with these pieces, and where in the object each one begins."""
    return safetensors.head([_entry(piece) for piece in pieces], {"format": "pt"})


def _entry(piece: Piece) -> TensorEntry:
    """A piece as the head lists it; as plain bytes if safetensors lacks the dtype."""
    size = len(piece.data)
    dtype = DTYPES.get(piece.span.dtype)
    shape = list(piece.span.shape) if dtype else [size]
    return TensorEntry(piece.digest or _UNKNOWN, dtype or "U8", shape, size)


def identity(head: bytes) -> str:
    """The part of an object's name that depends on its contents."""
    return xxhash.xxh3_128_hexdigest(head)


def new_name(identity: str) -> str:
    """A name for a new object of this identity, never used before."""
    return f"{identity}-{os.urandom(4).hex()}"


_distrusted: set[str] = set()


def distrust(names: Iterable[str]) -> None:
    """Note the objects of a damaged version.

    From now on, saves of this process do not reuse these objects, even if a manifest names them. So
    the user can save the right tensors again and gets an undamaged version.
    """
    _distrusted.update(names)


def is_distrusted(name: str) -> bool:
    """Whether an object was in a damaged version; the name of an object is unique everywhere."""
    return name in _distrusted
