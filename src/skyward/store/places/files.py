"""The files of a store: the interface that every kind of place has."""

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
    """A file being written; when the block ends, it is deleted unless it was published."""

    def write(self, start: int, data: memoryview) -> bytes:
        """Write from `start` on, and return the digest of the written bytes."""

    def publish(self, path: str, head: bytes) -> None:
        """Write the beginning of the file, and give the complete file its name."""


class Files(Protocol):
    """Files below one root, named by paths with forward slashes.

    A missing file raises `FileNotFoundError`; any other failure raises a `StoreError` that names
    the file and the next step.
    """

    url: str
    """The name of the root in messages, without credentials."""

    transfers: int
    """How many reads or writes are worthwhile at a time."""

    whole: int
    """The size from which a tensor is a file of its own."""

    drafts: bool
    """Whether a file can be written before its name is known."""

    def read(self, path: str, start: int, length: int) -> bytes:
        """Bytes from `start` on; fewer than `length` only at the end of the file."""

    def read_into(self, path: str, start: int, buffer: memoryview) -> int:
        """Fill the buffer from `start` on; returns fewer bytes only at the end of the file."""

    def view(self, path: str) -> memoryview | None:
        """The file as private, writable memory without a copy; None if the place cannot do that."""

    def size(self, path: str) -> int | None:
        """The length of the file; None if there is no such file."""

    def write(self, path: str, parts: Sequence[Buffer]) -> None:
        """Write a file: a reader sees either the old file or the complete new one."""

    def draft(self) -> AbstractContextManager[Draft] | None:
        """A file that is written before its name is known; None if `drafts` is False."""

    def create(self, path: str, data: bytes) -> bool:
        """Write a file unless it exists already; returns whether this call wrote it."""

    def list(self, folder: str) -> list[FileEntry]:
        """Every file below a folder, at any depth; empty if there is no such folder."""

    def delete(self, path: str) -> None:
        """Remove a file; a missing file is no error."""
