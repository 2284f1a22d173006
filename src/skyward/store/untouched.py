"""Memory that still holds what was loaded: known by its pages, without reading them.

A tensor loaded from a folder is a private mapping of a file. Writing to one of its pages gives the
process a copy of that page, and the kernel tells copies from pages of the file. So a region
without a copied page has the digest it was loaded with, however it may have been written to.
"""

from __future__ import annotations

import mmap
import os
import weakref
from dataclasses import dataclass

from skyward.store.mapping import Mapping
from skyward.wire import memory

_ENTRY = 8
# The last byte of an entry in the page map begins with: in memory, swapped out, of a file.
_KIND = 5
_ABSENT, _FILE_IN_MEMORY = 0b000, 0b101
_FINE = bytes(byte for byte in range(256) if byte >> _KIND in (_ABSENT, _FILE_IN_MEMORY))


@dataclass(frozen=True, slots=True, eq=False)
class _Origin:
    mapping: weakref.ref[Mapping]
    size: int
    digest: str


_origins: dict[int, _Origin] = {}


def remember(block: memoryview, digest: str) -> None:
    """Note the digest of a region that was mapped from a file and verified."""
    mapping = block.obj
    start = memory.address(block)
    if not isinstance(mapping, Mapping) or start is None:
        return

    def forget(gone: weakref.ref[Mapping]) -> None:
        # Another mapping may have taken the address before this one's end was told.
        if _origins.get(start) is origin:
            del _origins[start]

    origin = _Origin(weakref.ref(mapping, forget), len(block), digest)
    _origins[start] = origin


def digest(block: memoryview) -> str | None:
    """The digest of memory that is as it was loaded; None when it is not, or nobody knows."""
    start = memory.address(block)
    origin = None if start is None else _origins.get(start)
    if start is None or origin is None or origin.size != len(block):
        return None
    if origin.mapping() is None or not _all_of_the_file(start, len(block)):
        return None
    return origin.digest


def _all_of_the_file(start: int, size: int) -> bool:
    first, last = start // mmap.PAGESIZE, -(-(start + size) // mmap.PAGESIZE)
    entries = bytearray((last - first) * _ENTRY)
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as pages:
            if os.preadv(pages.fileno(), [entries], first * _ENTRY) != len(entries):
                return False
    except OSError:
        return False
    return not entries[_ENTRY - 1 :: _ENTRY].translate(None, delete=_FINE)
