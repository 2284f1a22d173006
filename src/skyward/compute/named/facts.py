"""The facts of a call by name that the encoded call does not have, and its files on the head."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import msgspec


class CallFacts(msgspec.Struct):
    """How a call is to run; the first object of its file has them."""

    function: str
    key: bytes
    """The name of its code, by content."""
    timeout: float | None
    retries: int
    on: int | None
    everywhere: bool
    code_handles: list[bytes]
    """The data from `put` that the code refers to, by their keys."""
    handles: list[bytes]
    """The data from `put` that the arguments refer to."""
    fail_fast: bool = False


def mapped(path: Path) -> memoryview:
    """The bytes of a file, as memory that only this process changes."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        return memoryview(
            mmap.mmap(
                file.fileno(), size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE
            )
        )
