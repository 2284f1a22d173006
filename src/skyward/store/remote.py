"""A store behind any fsspec filesystem: S3, Google Cloud Storage, SFTP and the rest."""

from __future__ import annotations

import builtins
import contextlib
import errno
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

from skyward.errors import StoreError
from skyward.store.places import Buffer, FileEntry, Files, full

_BLOCK = 16 << 20
"""A write is cut into parts of this size, of which each transfer keeps about two in memory."""

_WHOLE = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oci"})
"""Filesystems where an upload appears only when it is complete; on others, it is renamed."""

_EXCLUSIVE = _WHOLE | {"memory"}
"""Filesystems where `pipe_file(mode="create")` makes a whole file, for one writer only."""

_memory = threading.Lock()
"""The memory's own "create" looks first and writes afterwards, and threads may do both at once."""

_TIMES = ("LastModified", "mtime", "last_modified", "updated", "created")


class FsspecFiles(Files):
    """The files below one path of an fsspec filesystem."""

    def __init__(self, fs: Any, root: str, url: str) -> None:
        self.url = url.rstrip("/")
        self._fs = fs
        self._root = root.rstrip("/")
        protocols = [fs.protocol] if isinstance(fs.protocol, str) else fs.protocol
        self._appears_whole = bool(_WHOLE & set(protocols))
        self._exclusive = bool(_EXCLUSIVE & set(protocols))
        self._turn = _memory if "memory" in protocols else contextlib.nullcontext()

    def read(self, path: str, start: int, length: int) -> bytes:
        with self._reported("reading", path):
            try:
                return bytes(self._fs.cat_file(self._path(path), start=start, end=start + length))
            except Exception:
                # Object stores refuse a range that begins at or behind the end of the file.
                if start >= self._fs.size(self._path(path)):
                    return b""
                raise

    def read_into(self, path: str, start: int, buffer: memoryview) -> int:
        data = self.read(path, start, len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def size(self, path: str) -> int | None:
        with self._reported("reading", path):
            self._fs.invalidate_cache()
            try:
                about = self._fs.info(self._path(path))
            except FileNotFoundError:
                return None
            return None if about["type"] == "directory" else int(about["size"])

    def write(self, path: str, parts: Sequence[Buffer]) -> None:
        with self._reported("writing", path):
            if self._appears_whole:
                self._upload(path, parts)
            else:
                self._rename(path, parts)

    def create(self, path: str, data: bytes) -> bool:
        """Upload a file unless it exists.

        S3 and similar stores decide which writer was first. On other filesystems, the writer reads
        the file back, to learn whose file was kept. Reading back also shows whether a repeated
        request, whose first answer got lost, or another writer made the file.
        """
        with self._reported("writing", path):
            if not self._exclusive:
                if self.size(path) is not None:
                    return False
                self._rename(path, [data])
            else:
                self._make_folder(path)
                try:
                    with self._turn:
                        self._fs.pipe_file(self._path(path), data, mode="create")
                except FileExistsError:
                    pass
                except OSError as problem:
                    if "recondition" not in str(problem) and "already exists" not in str(problem):
                        raise
            return self.read(path, 0, len(data) + 1) == data

    def list(self, folder: str) -> builtins.list[FileEntry]:
        with self._reported("listing", folder):
            self._fs.invalidate_cache()
            found = self._found(folder) if self._appears_whole else self._walked(folder)
        base = len(self._root) + 1
        return [
            FileEntry(name[base:], int(about.get("size") or 0), _modified(about))
            for name, about in found.items()
        ]

    def _found(self, folder: str) -> dict[str, dict[str, Any]]:
        try:
            found = self._fs.find(self._path(folder), detail=True)
        except FileNotFoundError:
            return {}
        return {name: about for name, about in found.items() if about.get("type") != "directory"}

    def _walked(self, folder: str) -> dict[str, dict[str, Any]]:
        """The same, but `find` leaves out every folder that it fails to list."""
        found: dict[str, dict[str, Any]] = {}
        folders = [self._path(folder)]
        while folders:
            place = folders.pop()
            with contextlib.suppress(FileNotFoundError):
                for about in self._fs.ls(place, detail=True):
                    name = about["name"].rstrip("/")
                    if about["type"] not in ("file", "directory"):
                        try:  # follow the link
                            about = self._fs.info(name)
                        except FileNotFoundError:
                            continue
                    if about["type"] != "directory":
                        found[name] = about
                    elif name.strip("/") != place.strip("/"):
                        folders.append(name)
        return found

    def delete(self, path: str) -> None:
        with self._reported("deleting", path), contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._path(path))

    def _path(self, path: str) -> str:
        return f"{self._root}/{path}"

    def _make_folder(self, path: str) -> None:
        if not self._appears_whole:
            self._fs.makedirs(self._path(path).rpartition("/")[0], exist_ok=True)

    def _rename(self, path: str, parts: Sequence[Buffer]) -> None:
        """Upload to a temporary file, then rename it."""
        temporary = f"tmp/{uuid.uuid4().hex}"
        try:
            self._upload(temporary, parts)
            self._make_folder(path)
            self._fs.mv(self._path(temporary), self._path(path))
        except BaseException:
            with contextlib.suppress(Exception):
                self._fs.rm_file(self._path(temporary))
            raise

    def _upload(self, path: str, parts: Sequence[Buffer]) -> None:
        self._make_folder(path)
        target = self._path(path)
        if sum(len(part) for part in parts) <= _BLOCK:
            self._fs.pipe_file(target, b"".join(parts))
            return
        file = self._fs.open(target, "wb", block_size=_BLOCK)
        try:
            for part in parts:
                view = memoryview(part)
                for at in range(0, len(view), _BLOCK):
                    file.write(view[at : at + _BLOCK])
        except BaseException:
            # Closing would publish the part that was written.
            with contextlib.suppress(Exception):
                file.discard()
            file.closed = True
            raise
        file.close()

    @contextlib.contextmanager
    def _reported(self, doing: str, path: str) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, StoreError):
            raise
        except Exception as problem:
            # Each filesystem has exceptions of its own, few of them an OSError.
            where = f"{self.url}/{path}: {doing} failed: {type(problem).__name__}: {problem}"
            if getattr(problem, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
                raise full(where) from problem
            raise StoreError(
                f"{where}; check the address, the network and your credentials"
            ) from problem


def _modified(about: dict[str, Any]) -> float:
    for key in _TIMES:
        moment = about.get(key)
        if isinstance(moment, datetime):
            return moment.timestamp()
        if isinstance(moment, int | float):
            return float(moment)
    # Without a time, count the file as new, so that it is not collected by mistake.
    return time.time()
