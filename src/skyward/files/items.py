"""What a folder holds, item by item, as one end tells the other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from skyward.errors import ProtocolError

Kind = Literal["file", "link", "folder"]


class FileItem(msgspec.Struct, frozen=True, array_like=True):
    """One file, link or folder, by its path below the root."""

    name: str
    kind: Kind
    size: int = 0
    executable: bool = False
    content: bytes = b""
    """The digest of a file's bytes, or where a link leads."""


class Listing(msgspec.Struct, frozen=True):
    """Everything below one root."""

    items: tuple[FileItem, ...]

    @property
    def files(self) -> int:
        """How many files there are."""
        return sum(item.kind == "file" for item in self.items)

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(item.size for item in self.items)


def encode(items: Sequence[FileItem]) -> bytes:
    """The items as bytes."""
    return msgspec.msgpack.encode(items)


def decode(data: bytes | bytearray) -> list[FileItem]:
    """The items that `encode` was given; raises `ProtocolError` for others."""
    try:
        items = msgspec.msgpack.decode(data, type=list[FileItem])
    except msgspec.DecodeError as problem:
        raise ProtocolError(f"not a list of files: {problem}") from None
    check_names(item.name for item in items)
    return items


def check_names(names: Iterable[str]) -> None:
    """Refuse names that lead out of the root."""
    for name in names:
        parts = name.split("/")
        if name.startswith("/") or "\0" in name or any(part in ("", ".", "..") for part in parts):
            raise ProtocolError(f"{name!r} is no path below a folder")
