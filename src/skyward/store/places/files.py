"""The files of a store as every kind of place offers them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

Buffer = bytes | memoryview


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file as a listing shows it."""

    path: str
    size: int
    modified: float


class Draft(Protocol):
    """A file being written; it is gone on leaving unless it was published."""

    def write(self, start: int, data: memoryview) -> bytes:
        """Write from `start` on, and return the digest of what was written."""

    def publish(self, path: str, head: bytes) -> None:
        """Write the beginning, and let the file appear whole."""


class Files(Protocol):
    """Files below one root, named by paths with forward slashes.

    A file that is not there raises `FileNotFoundError`; everything else that goes wrong raises a
    `StoreError` that names the file and the next step.
    """

    url: str
    """What messages call the root; no credentials in it."""

    transfers: int
    """How many reads or writes at a time pay off here."""

    whole: int
    """From this size on, a tensor is a file of its own here."""

    drafts: bool
    """Whether a file can be written here before its name is known."""

    def read(self, path: str, start: int, length: int) -> bytes:
        """Bytes from `start` on; fewer than `length` only where the file ends."""

    def read_into(self, path: str, start: int, buffer: memoryview) -> int:
        """Fill the buffer from `start` on; returns less than its length where the file ends."""

    def view(self, path: str) -> memoryview | None:
        """The file as private, writable memory without a copy, where the place can do that."""

    def size(self, path: str) -> int | None:
        """How long the file is; None when it is not there."""

    def write(self, path: str, parts: Sequence[Buffer]) -> None:
        """Write a file whole: a reader sees what was there before or all of this."""

    def draft(self) -> AbstractContextManager[Draft] | None:
        """A file to be written before its name is known; None where `drafts` is False."""

    def create(self, path: str, data: bytes) -> bool:
        """Write a file whole unless one is there already, and say whether it is this one now."""

    def list(self, folder: str) -> list[FileEntry]:
        """Every file below a folder, however deep; none when there is no such folder."""

    def delete(self, path: str) -> None:
        """Remove a file; one that is gone already is fine."""
