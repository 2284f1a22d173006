"""Copying: reads and writes files and folders of the node for the client.

Relative paths are relative to the node's working directory, and "~" is the user's home. A file is
written under a temporary name and appears when it is complete.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import secrets
import shutil
import socket
import stat
from collections.abc import Iterator
from typing import Annotated, Any

import msgspec

from skyward.wire.asking import PART
from skyward.wire.messages import Size
from skyward.worker.services import Caller, Parts, answers

BATCH = 500
"""How many entries of a folder one reply lists."""
PERMISSIONS = 0o777
FILE, FOLDER, LINK, OTHER = "file", "folder", "link", "other"

Mode = Annotated[int, msgspec.Meta(ge=0, le=PERMISSIONS)]


def _place(caller: Caller, path: str) -> str:
    if "\0" in path:
        raise ValueError(f"{path!r} is no path")
    return os.path.normpath(
        os.path.join(caller.node.config.working_directory, os.path.expanduser(path))
    )


@answers("copying", "look")
def look_at(caller: Caller, path: str) -> dict[str, Any]:
    """What is at a path."""
    return look(_place(caller, path))


@answers("copying", "folder")
def make_folder_at(caller: Caller, path: str, mode: Mode = 0o755, staged: bool = False) -> None:
    """Make a folder, unless it is there.

    With `staged`, it is removed if the client leaves before it gives it its final name.
    """
    path = _place(caller, path)
    if staged:
        check_unfinished(path)
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        caller.leaving.callback(remove_unfinished, path)
    make_folder(path, mode)


@answers("copying", "link")
def make_link_at(caller: Caller, path: str, target: str) -> None:
    """Make a symbolic link in place of what is there, unless that is a folder."""
    make_link(_place(caller, path), target)


@answers("copying")
def move(caller: Caller, path: str, to: str) -> None:
    """Give something its final name."""
    os.rename(_place(caller, path), _place(caller, to))


@answers("copying")
def remove(caller: Caller, path: str) -> None:
    """Remove what an incomplete copy has left."""
    remove_unfinished(_place(caller, path))


@answers("copying", "list")
def list_folder(caller: Caller, path: str) -> Parts:
    """Everything below a folder."""
    for batch in _batches(walk(_place(caller, path))):
        yield batch, ()
    return []


@answers("copying")
def read(caller: Caller, path: str) -> Parts:
    """The bytes of a file."""
    for data in contents(_place(caller, path)):
        yield None, (data,)


def look(path: str) -> dict[str, Any]:
    """What is at a path, through links: its kind, size and mode; kind "" if nothing is there."""
    parent = os.path.dirname(path)
    free = shutil.disk_usage(parent).free if os.path.isdir(parent) else 0
    try:
        seen = os.stat(path)
    except FileNotFoundError:
        return {"path": path, "kind": "", "parent": os.path.isdir(parent), "free": free}
    return {"path": path, "parent": True, "free": free, **_facts(seen)}


def walk(root: str) -> Iterator[dict[str, Any]]:
    """Everything below a folder, each folder before what is in it; links are not followed."""
    waiting = [""]
    while waiting:
        below = waiting.pop()
        with os.scandir(os.path.join(root, below)) as entries:
            for entry in entries:
                name = f"{below}/{entry.name}" if below else entry.name
                facts = _facts(entry.stat(follow_symlinks=False))
                if facts["kind"] == LINK:
                    facts["target"] = os.readlink(entry.path)
                elif facts["kind"] == FOLDER:
                    waiting.append(name)
                yield {"name": name, **facts}


def _facts(seen: os.stat_result) -> dict[str, Any]:
    kinds = {stat.S_IFREG: FILE, stat.S_IFDIR: FOLDER, stat.S_IFLNK: LINK}
    return {
        "identity": f"{_machine()}:{seen.st_dev}:{seen.st_ino}",
        "kind": kinds.get(stat.S_IFMT(seen.st_mode), OTHER),
        "size": seen.st_size if stat.S_ISREG(seen.st_mode) else 0,
        "mode": stat.S_IMODE(seen.st_mode) & PERMISSIONS,
    }


@functools.cache
def _machine() -> str:
    """The same for all processes of a machine since it was started."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()
    return socket.gethostname()


def _batches(entries: Iterator[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    batch: list[dict[str, Any]] = []
    for entry in entries:
        batch.append(entry)
        if len(batch) >= BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def contents(path: str) -> Iterator[bytes]:
    """The bytes of a file, in parts."""
    # A pipe without a writer would hold the open for ever.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "is no plain file", path)
        while data := os.read(descriptor, PART):
            yield data
    finally:
        os.close(descriptor)


class UnfinishedFile:
    """A file that is being written under a temporary name in the folder of its final name."""

    def __init__(self, path: str, size: int, mode: int) -> None:
        """Refuses a folder, a missing folder, and a file for which there is no room."""
        if os.path.isdir(path):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        folder = os.path.dirname(path)
        free = shutil.disk_usage(folder).free
        if size > free:
            raise OSError(errno.ENOSPC, f"needs {size} bytes, {free} are free", path)
        self.path, self._mode = path, mode
        self.temporary = f"{folder}/.{os.path.basename(path)[:200]}.{secrets.token_hex(4)}.part"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._descriptor = os.open(self.temporary, flags, 0o600)

    def write(self, data: bytes | bytearray) -> None:
        """Add bytes."""
        view = memoryview(data)
        while view:
            view = view[os.write(self._descriptor, view) :]

    def finish(self) -> None:
        """Give the file its mode and its name."""
        os.fchmod(self._descriptor, self._mode)
        self._close()
        os.replace(self.temporary, self.path)

    def discard(self) -> None:
        """Remove the file, unless it is finished."""
        self._close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.temporary)

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


@answers("copying")
def write(
    caller: Caller, path: str, size: Size, mode: Mode = 0o644, asks_first: bool = False
) -> None:
    """Write a file; its bytes follow in parts, up to one without bytes.

    After a failure, the parts that still come are passed over. With `asks_first` the client waits
    for a first answer before it sends any bytes.
    """
    arriving: UnfinishedFile | None = None
    problem: Exception | None = None
    try:
        try:
            arriving = UnfinishedFile(_place(caller, path), size, mode)
        except OSError as failure:
            problem = failure
        if asks_first:
            if problem is not None:
                raise problem
            caller.reply()
        for body in caller.parts():
            if arriving is not None and problem is None:
                try:
                    arriving.write(body)
                except OSError as failure:
                    problem = failure
        if problem is not None:
            raise problem
        if arriving is not None:
            arriving.finish()
    finally:
        if arriving is not None:
            arriving.discard()


def make_folder(path: str, mode: int) -> None:
    """Make a folder, unless it is there; its owner can always write into it."""
    try:
        os.mkdir(path)
    except FileExistsError:
        if not os.path.isdir(path):
            raise
        return
    os.chmod(path, mode | stat.S_IRWXU)


def make_link(path: str, target: str) -> None:
    """Make a symbolic link in place of what is there, unless that is a folder."""
    temporary = f"{os.path.dirname(path)}/.{secrets.token_hex(4)}.part"
    os.symlink(target, temporary)
    try:
        os.replace(temporary, path)
    except OSError:
        os.unlink(temporary)
        raise


def remove_unfinished(path: str) -> None:
    """Remove what an incomplete copy has left; nothing else has such a name."""
    check_unfinished(path)
    shutil.rmtree(path, ignore_errors=True)


def check_unfinished(path: str) -> None:
    """Refuse a name that an incomplete copy does not have."""
    if not path.endswith(".part"):
        raise ValueError(f"{path} is not the temporary folder of a copy")
