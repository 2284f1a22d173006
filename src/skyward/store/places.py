"""The places of a store: what every kind of place can do, and who may use one."""

from __future__ import annotations

import builtins
import ipaddress
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from skyward.checks import argument
from skyward.errors import ConfigurationError, StoreFullError

Buffer = bytes | memoryview

TOKEN = "SKYWARD_STORE_TOKEN"
"""The environment variable that holds the token, so that no command line shows it."""
AUTHORITY = "SKYWARD_STORE_CA"
"""The environment variable that names a file of certificates to trust besides the system's."""
MARK = "Skyward-Store"
"""The header by which a client recognises the answers of a model server."""
PROTOCOL = "1"

_TOKEN = re.compile(r"[!-~]+")


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


class Files(ABC):
    """Files below one root, named by paths with forward slashes.

    A missing file raises `FileNotFoundError`; any other failure raises a `StoreError` that names
    the file and the next step.
    """

    url: str
    """The name of the root in messages, without credentials."""

    transfers = 4
    """How many reads or writes are worthwhile at a time."""

    whole = 16 << 20
    """The size from which a tensor is a file of its own."""

    drafts = False
    """Whether a file can be written before its name is known."""

    @property
    def absent(self) -> bool:
        """Whether this is a folder that does not exist, as before the first save."""
        return False

    @abstractmethod
    def read(self, path: str, start: int, length: int) -> bytes:
        """Bytes from `start` on; fewer than `length` only at the end of the file."""

    @abstractmethod
    def read_into(self, path: str, start: int, buffer: memoryview) -> int:
        """Fill the buffer from `start` on; returns fewer bytes only at the end of the file."""

    def view(self, path: str) -> memoryview | None:
        """The file as private, writable memory without a copy; None if the place cannot do that."""
        return None

    @abstractmethod
    def size(self, path: str) -> int | None:
        """The length of the file; None if there is no such file."""

    @abstractmethod
    def write(self, path: str, parts: Sequence[Buffer]) -> None:
        """Write a file: a reader sees either the old file or the complete new one."""

    def draft(self) -> AbstractContextManager[Draft]:
        """A file that is written before its name is known, if `drafts` says that there is one."""
        raise NotImplementedError

    @abstractmethod
    def create(self, path: str, data: bytes) -> bool:
        """Write a file unless it exists already; returns whether this call wrote it."""

    @abstractmethod
    def list(self, folder: str) -> builtins.list[FileEntry]:
        """Every file below a folder, at any depth; empty if there is no such folder."""

    @abstractmethod
    def delete(self, path: str) -> None:
        """Remove a file; a missing file is no error."""


def store_at(url: object, *, token: bool = False) -> str:
    """A store in messages: `ModelStore('models')` in Python, `--store models` on the command line.

    >>> store_at("models", token=True)
    "ModelStore('models', token=...)"
    """
    python = f"ModelStore({url!r}, token=...)" if token else f"ModelStore({url!r})"
    return argument("store", url, python=python)


def full(where: str, place: str = "") -> StoreFullError:
    """The error for a store without room, whose place may be a server."""
    return StoreFullError(
        f"{where}; make room{place}, or delete versions and call {argument('gc', python='gc()')}, "
        "then save again: what has been written is not written twice"
    )


def chosen_token(token: str | None) -> str | None:
    """The given token, or the environment's; raises if it does not fit in a header."""
    return _checked(token if token is not None else os.environ.get(TOKEN) or None)


def guarding_token(token: str | None) -> str | None:
    """The same for a server: an empty variable is an error, and does not open the store to all."""
    return _checked(token if token is not None else os.environ.get(TOKEN))


def _checked(found: str | None) -> str | None:
    if found is not None and (not isinstance(found, str) or not _TOKEN.fullmatch(found)):
        raise ConfigurationError(
            f"{argument('token')}: not a token, which is one or more letters, digits and signs of "
            f"ASCII without spaces; correct it, or {TOKEN} if you passed none"
        )
    return found


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
