"""The address of a store: a path or URL, and the files there."""

from __future__ import annotations

import importlib
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

from skyward.errors import ConfigurationError, StoreError
from skyward.store.local import LocalFiles
from skyward.store.places import Files, is_loopback, store_at
from skyward.store.remote import FsspecFiles

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+(::|://)")
_HIDDEN = re.compile(r"://[^/\s'\"]+@")
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "sftp": "sftp", "ssh": "sftp"}


@dataclass(frozen=True, slots=True)
class Address:
    """The user's arguments, from which another process opens the same files."""

    url: str = field(repr=False)
    token: str | None = field(repr=False)
    durable: bool

    def open(self) -> Files:
        """The files at the address."""
        return open_files(self.url, self.token, self.durable)

    @property
    def of_one_machine(self) -> bool:
        """Whether the address may mean another place, or none, on another machine."""
        if self.url.startswith(("http://", "https://")):
            return is_loopback(urlsplit(self.url).hostname or "")
        schemes = set(re.findall(r"([A-Za-z0-9+.-]+)(?:::|://)", self.url))
        return not schemes or bool(schemes & {"file", "local", "memory"})


def address_of(
    files: Files, url: str | os.PathLike[str], token: str | None, durable: bool
) -> Address:
    """The address of open files; the address of a folder is an absolute path."""
    return Address(files.url if isinstance(files, LocalFiles) else os.fspath(url), token, durable)


def open_files(url: str | os.PathLike[str], token: str | None, durable: bool) -> Files:
    """The files at a path or URL."""
    text = os.fspath(url) if isinstance(url, str | os.PathLike) else None
    if not isinstance(text, str) or not text.strip():
        raise ConfigurationError(
            f"{store_at(url)}: not a place for models; "
            "pass a folder or a URL such as 's3://bucket/models'"
        )
    if not _URL.match(text) or text.startswith("file://"):
        if token is not None:
            raise ConfigurationError(
                f"{store_at(text, token=True)}: a folder takes no token; leave it out"
            )
        path = _path_of(text) if text.startswith("file://") else text
        root = Path(path).expanduser().absolute()
        if os.path.exists(root) and not os.path.isdir(root):
            raise ConfigurationError(
                f"{store_at(text)}: {root} is a file, and a store is a folder; "
                "pass the folder, or the path of a new one"
            )
        return LocalFiles(root, durable=durable)
    if text.startswith(("http://", "https://")):
        # With urllib3, which other stores do not need.
        from skyward.store.http import HttpFiles

        return HttpFiles(text, token)
    return _open_remote(text, token)


def _path_of(url: str) -> str:
    """The path of a file:// URL; `?` and `#` are ordinary letters of a path."""
    host, slash, path = url.removeprefix("file://").partition("/")
    if host not in ("", "localhost") or not slash:
        raise ConfigurationError(
            f"{store_at(url)}: names no folder of this machine; "
            "write file:///folder/models, or the path alone"
        )
    return unquote(f"/{path}")


def _open_remote(url: str, token: str | None) -> Files:
    scheme = re.split("::|://", url, maxsplit=1)[0]
    shown = _HIDDEN.sub("://***@", url)
    if token is not None and scheme not in ("gs", "gcs"):
        raise ConfigurationError(
            f"{store_at(shown, token=True)}: {scheme} takes no token here; "
            "put its credentials where its own tools look for them"
        )
    extra = _EXTRAS.get(scheme)
    try:
        core = importlib.import_module("fsspec.core")
    except ImportError:
        raise ConfigurationError(
            f"{store_at(shown)}: needs fsspec; install skyward-torch[{extra or 'store'}], "
            "or use a folder"
        ) from None
    options = {} if token is None else {"token": token}
    try:
        fs, root = core.url_to_fs(url, **options)
    except ImportError as problem:
        advice = f"install skyward-torch[{extra}]" if extra else str(problem)
        raise ConfigurationError(
            f"{store_at(shown)}: the package for {scheme}:// is missing; {advice}"
        ) from problem
    except ValueError as problem:
        raise ConfigurationError(
            f"{store_at(shown)}: {problem}; pass a folder or a URL such as 's3://bucket/models'"
        ) from problem
    except Exception as problem:
        # Some filesystems connect at once, and each has exceptions of its own.
        reason = _HIDDEN.sub("://***@", f"{type(problem).__name__}: {problem}")
        raise StoreError(
            f"{shown}: opening failed: {reason}; "
            "check the address, the network and your credentials"
        ) from problem
    return FsspecFiles(fs, root, shown)
