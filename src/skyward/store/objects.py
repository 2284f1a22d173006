"""An object: a safetensors file whose tensors are named by their contents, and it by its header.

The header lists the digest of every tensor, and the object's name is the digest of the header, so
a name vouches for every byte. A random ending makes each upload a file of its own: what the
garbage collector has condemned is never written again under the same name.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import xxhash

from skyward.store.layout import SAFETENSORS, Span
from skyward.store.manifest import ITEM_SIZES

ALIGNMENT = 64
HEADER_LIMIT = 100 << 20
"""What safetensors itself allows."""
_UNKNOWN = "0" * 32
"""Stands for a digest in a head that is only to have the right length."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One region on its way into an object."""

    digest: str
    """Empty as long as nobody has hashed it."""
    span: Span
    data: memoryview


def alignment(piece: Piece) -> int:
    """Pieces go in falling order of this, so that each begins at a multiple of its element."""
    item = ITEM_SIZES[piece.span.dtype]
    return item if piece.span.dtype in SAFETENSORS else 1


def header(pieces: Sequence[Piece]) -> tuple[bytes, list[int]]:
    """The head of an object with these pieces, and where in the object each one begins."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offsets = []
    at = 0
    for piece in pieces:
        size = len(piece.data)
        dtype = SAFETENSORS.get(piece.span.dtype)
        table[piece.digest or _UNKNOWN] = {
            "dtype": dtype or "U8",
            "shape": list(piece.span.shape) if dtype else [size],
            "data_offsets": [at, at + size],
        }
        offsets.append(at)
        at += size
    head = framed(table)
    return head, [len(head) + offset for offset in offsets]


def framed(table: dict[str, Any]) -> bytes:
    """The head of a safetensors file: the length of its table, and that, up to the data."""
    text = msgspec.json.encode(table)
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def identity(head: bytes) -> str:
    """The part of an object's name that its contents decide."""
    return xxhash.xxh3_128_hexdigest(head)


def new_name(identity: str) -> str:
    """A name for a new object of this identity, never used before."""
    return f"{identity}-{os.urandom(4).hex()}"


_doubted: set[str] = set()


def doubt(names: Iterable[str]) -> None:
    """Note the objects of a version that was found damaged.

    From now on, no save of this process reuses them on a manifest's word: saving what should have
    been loaded makes a version that is whole.
    """
    _doubted.update(names)


def is_doubted(name: str) -> bool:
    """Whether an object was in a damaged version; no two objects anywhere share a name."""
    return name in _doubted
