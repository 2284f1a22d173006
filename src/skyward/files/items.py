"""What a folder holds, item by item, as one end tells the other."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import msgspec

from skyward.errors import ProtocolError

Kind = Literal["file", "link", "folder"]


class FileItem(msgspec.Struct, frozen=True, array_like=True):
    """One file, link or folder, by its path below the root."""

    name: str
    kind: Kind
    size: int = 0
    mode: int = 0o644
    """Who may read, write and run a file."""
    content: bytes = b""
    """The digest of a file's bytes, empty if nobody has read it, or where a link leads."""

    @property
    def key(self) -> bytes:
        """The same for files that hold the same, as far as that is known."""
        return self.content or f"/{self.size}/{self.name}".encode()

    def is_like(self, other: FileItem) -> bool:
        """Whether the other one holds the same, whatever its mode is."""
        return (self.kind, self.size, self.content) == (other.kind, other.size, other.content)

    @property
    def leads_out(self) -> bool:
        """Whether this is a link that may lead out of the root."""
        if self.kind != "link":
            return False
        parts = os.fsdecode(self.content).split("/")
        up = sum(1 for _ in itertools.takewhile(lambda part: part == "..", parts))
        # Behind another link, "x/.." may be anywhere.
        return not parts[0] or up > self.name.count("/") or ".." in parts[up:]


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
    check_items(items)
    return items


def check_items(items: Sequence[FileItem]) -> None:
    """Refuse items that lead out of the root, by their names or through a link among them."""
    check_names(item.name for item in items)
    links = {item.name for item in items if item.kind == "link"}
    for item in items if links else ():
        through = next((each for each in parents(item.name) if each in links), None)
        if through is not None:
            raise ProtocolError(f"{item.name!r} is below {through!r}, which is a link")


def parents(name: str) -> Iterator[str]:
    """The folders above a name, without the root, the nearest one first."""
    while name := name.rpartition("/")[0]:
        yield name


def check_names(names: Iterable[str]) -> None:
    """Refuse names that lead out of the root."""
    for name in names:
        parts = name.split("/")
        if name.startswith("/") or "\0" in name or any(part in ("", ".", "..") for part in parts):
            raise ProtocolError(f"{name!r} is no path below a folder")
