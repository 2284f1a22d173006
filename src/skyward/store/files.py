"""Where a store's bytes live: one small protocol, and a module for each kind of place."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

from skyward.errors import ConfigurationError, StoreError
from skyward.store.access import is_loopback

Part = bytes | memoryview

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+(::|://)")
_HIDDEN = re.compile(r"://[^/\s'\"]+@")
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "sftp": "sftp", "ssh": "sftp"}


@dataclass(frozen=True, slots=True)
class Entry:
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

    def write(self, path: str, parts: Sequence[Part]) -> None:
        """Write a file whole: a reader sees what was there before or all of this."""

    def draft(self) -> AbstractContextManager[Draft] | None:
        """A file to be written before its name is known; None where `drafts` is False."""

    def create(self, path: str, data: bytes) -> bool:
        """Write a file whole unless one is there already, and say whether it is this one now."""

    def list(self, folder: str) -> list[Entry]:
        """Every file below a folder, however deep; none when there is no such folder."""

    def delete(self, path: str) -> None:
        """Remove a file; one that is gone already is fine."""


@dataclass(frozen=True, slots=True)
class Address:
    """All that another process needs to open the same files, and no more than the user gave."""

    url: str = field(repr=False)
    token: str | None = field(repr=False)
    durable: bool

    def open(self) -> Files:
        """The files there."""
        return open_files(self.url, self.token, self.durable)

    @property
    def of_one_machine(self) -> bool:
        """Whether the same address may be another place, or none, on another machine."""
        if self.url.startswith(("http://", "https://")):
            return is_loopback(urlsplit(self.url).hostname or "")
        schemes = set(re.findall(r"([A-Za-z0-9+.-]+)(?:::|://)", self.url))
        return not schemes or bool(schemes & {"file", "local", "memory"})


def address_of(
    files: Files, url: str | os.PathLike[str], token: str | None, durable: bool
) -> Address:
    """The address of files that are open; a folder's is absolute."""
    from skyward.store.local import LocalFiles

    return Address(files.url if isinstance(files, LocalFiles) else os.fspath(url), token, durable)


def absent(files: Files) -> bool:
    """Whether the files are those of a folder that does not exist."""
    from skyward.store.local import LocalFiles

    return isinstance(files, LocalFiles) and not os.path.exists(files.url)


def open_files(url: str | os.PathLike[str], token: str | None, durable: bool) -> Files:
    """The files at a path or URL."""
    text = os.fspath(url) if isinstance(url, str | os.PathLike) else None
    if not isinstance(text, str) or not text.strip():
        raise ConfigurationError(
            f"ModelStore({url!r}): not a place for models; "
            "pass a folder or a URL such as 's3://bucket/models'"
        )
    if not _URL.match(text) or text.startswith("file://"):
        if token is not None:
            raise ConfigurationError(
                f"ModelStore({text!r}, token=...): a folder takes no token; leave it out"
            )
        from skyward.store.local import LocalFiles

        path = _path_of(text) if text.startswith("file://") else text
        root = Path(path).expanduser().absolute()
        if os.path.exists(root) and not os.path.isdir(root):
            raise ConfigurationError(
                f"ModelStore({text!r}): {root} is a file, and a store is a folder; "
                "pass the folder, or the path of a new one"
            )
        return LocalFiles(root, durable=durable)
    if text.startswith(("http://", "https://")):
        from skyward.store.http import HttpFiles

        return HttpFiles(text, token)
    return _open_remote(text, token)


def _path_of(url: str) -> str:
    """The path of a file:// URL, in which `?` and `#` are letters like others."""
    host, slash, path = url.removeprefix("file://").partition("/")
    if host not in ("", "localhost") or not slash:
        raise ConfigurationError(
            f"ModelStore({url!r}): names no folder of this machine; "
            "write file:///folder/models, or the path alone"
        )
    return unquote(f"/{path}")


def _open_remote(url: str, token: str | None) -> Files:
    scheme = re.split("::|://", url, maxsplit=1)[0]
    shown = _HIDDEN.sub("://***@", url)
    if token is not None and scheme not in ("gs", "gcs"):
        raise ConfigurationError(
            f"ModelStore({shown!r}, token=...): {scheme} takes no token here; "
            "put its credentials where its own tools look for them"
        )
    extra = _EXTRAS.get(scheme)
    try:
        core = importlib.import_module("fsspec.core")
    except ImportError:
        raise ConfigurationError(
            f"ModelStore({shown!r}): needs fsspec; "
            f"install skyward[{extra or 'store'}], or use a folder"
        ) from None
    options = {} if token is None else {"token": token}
    try:
        fs, root = core.url_to_fs(url, **options)
    except ImportError as problem:
        advice = f"install skyward[{extra}]" if extra else str(problem)
        raise ConfigurationError(
            f"ModelStore({shown!r}): the package for {scheme}:// is missing; {advice}"
        ) from problem
    except ValueError as problem:
        raise ConfigurationError(
            f"ModelStore({shown!r}): {problem}; pass a folder or a URL such as 's3://bucket/models'"
        ) from problem
    except Exception as problem:
        # Some connect at once, and each has exceptions of its own.
        told = _HIDDEN.sub("://***@", f"{type(problem).__name__}: {problem}")
        raise StoreError(
            f"{shown}: opening failed: {told}; check the address, the network and your credentials"
        ) from problem
    from skyward.store.remote import FsspecFiles

    return FsspecFiles(fs, root, shown)
