"""A folder that is made equal to another one: what is missing is asked for, the rest is removed."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from skyward.files.items import FileItem, check_items, parents
from skyward.files.scanner import holds

STAGING = ".skyward-"
"""How the names of folders begin in which files wait until all have come."""

Mark = tuple[int, int, int]
"""The time, size and inode of a file."""


class ArrivingFile:
    """A file that arrives, in pieces, under a name that is not its own yet."""

    def __init__(self, folder: Path, item: FileItem) -> None:
        self.item = item
        descriptor, name = tempfile.mkstemp(dir=folder)
        self.path = Path(name)
        self._file = os.fdopen(descriptor, "wb")
        self._size = 0
        self._digest = xxhash.xxh3_128() if item.content else None

    def add(self, data: bytes | bytearray | memoryview) -> None:
        """Take the next bytes."""
        self._file.write(data)
        self._size += len(data)
        if self._digest is not None:
            self._digest.update(data)

    def is_whole(self) -> bool:
        """End the file; whether its bytes are those that were promised."""
        self._file.close()
        if self._digest is None:
            return self._size == self.item.size
        return self._digest.digest() == self.item.content

    def drop(self) -> None:
        """Give the file up."""
        self._file.close()
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()


class Tree:
    """A folder that follows another; one thread at a time changes it.

    Files that the other folder never had are left alone. A file that was changed here is replaced.
    """

    def __init__(self, root: Path, *, keeps_modes: bool = False) -> None:
        """With `keeps_modes`, a file that is replaced stays readable by those who could read it."""
        self.root = root
        self.known: dict[str, FileItem] = {}
        """What the other folder is known to have, by name."""
        self._keeps_modes = keeps_modes
        self._placed: dict[str, tuple[FileItem, Mark]] = {}
        """The items that were put here, and how they looked then."""
        self._untouched: set[str] = set()
        """The names of those that still looked so when the last comparison was made."""
        self._wanted: list[FileItem] = []
        self._staging: Path | None = None
        self._arrived: dict[bytes, Path] = {}
        self._incoming: ArrivingFile | None = None
        self._changed_there: list[str] = []

    def compare(self, items: list[FileItem]) -> list[int]:
        """Take the items that are wanted; returns the numbers of those whose bytes are missing."""
        self.abandon()
        check_items(items)
        self._wanted = items
        self._untouched = {
            name for name, (_, mark) in self._placed.items() if self._is_as_placed(name, mark)
        }
        there = {self._placed[name][0].key for name in self._untouched}
        missing = []
        for number, item in enumerate(items):
            if item.kind != "file" or not item.size or item.key in there:
                continue
            # Nodes may share a folder: what another one has put here need not come again.
            if item.name not in self._untouched and self._has(item):
                there.add(item.key)
                self._placed[item.name] = self._found(item)
                self._untouched.add(item.name)
                continue
            there.add(item.key)  # one copy is enough for all that are the same
            missing.append(number)
        return missing

    def add(self, number: int, data: bytes | bytearray | memoryview, last: bool) -> None:
        """Take bytes of an item that was missing; they come in order, one item after the other."""
        item = self._wanted[number]
        if self._incoming is None:
            self._incoming = ArrivingFile(self._stage(), item)
        self._incoming.add(data)
        if last:
            incoming, self._incoming = self._incoming, None
            if incoming.is_whole():
                self._arrived[item.key] = incoming.path
            else:
                incoming.drop()
                self._changed_there.append(item.name)

    def finish(self) -> dict[str, Any]:
        """Put everything in its place and remove what is no longer wanted.

        Returns how many files were written and removed, and the names of items whose bytes were not
        those promised, since they changed meanwhile: these are as before.
        """
        again = set(self._changed_there)
        self.root.mkdir(parents=True, exist_ok=True)
        changes = [
            item for item in self._wanted if item.name not in again and not self._is_placed(item)
        ]
        # Before anything is removed: a file may only have got another name.
        for item in changes:
            if not self._find_bytes(item):
                again.add(item.name)
        removed = self._remove_others({item.name: item.kind for item in self._wanted})
        uses = Counter(item.key for item in changes if item.kind == "file")
        written = 0
        for item in changes:
            if item.name in again:
                continue
            written += item.kind == "file"
            self._place(item, uses)
        self.known = {item.name: item for item in self._wanted if item.name not in again} | {
            name: self.known[name] for name in again if name in self.known
        }
        self.abandon()
        return {"written": written, "removed": removed, "again": sorted(again)}

    def abandon(self) -> None:
        """Forget what has arrived and was not put in its place."""
        if self._incoming is not None:
            self._incoming.drop()
            self._incoming = None
        if self._staging is not None:
            shutil.rmtree(self._staging, ignore_errors=True)
            self._staging = None
        self._arrived.clear()
        self._changed_there.clear()

    def _stage(self) -> Path:
        if self._staging is None:
            self.root.mkdir(parents=True, exist_ok=True)
            # On the same file system as the root, so that files are moved and not copied.
            self._staging = Path(tempfile.mkdtemp(prefix=STAGING, dir=self.root))
        return self._staging

    def _is_placed(self, item: FileItem) -> bool:
        return item.name in self._untouched and self._placed[item.name][0] == item

    def _is_as_placed(self, name: str, mark: Mark) -> bool:
        try:
            return _mark(os.lstat(f"{self.root}/{name}")) == mark
        except OSError:
            return False

    def _has(self, item: FileItem) -> bool:
        """Whether a file is here although it was not put here by us."""
        return not blocked(self.root, item.name) and holds(self.root / item.name, item)

    def _found(self, item: FileItem) -> tuple[FileItem, Mark]:
        """An item that was here before, as it is."""
        status = os.lstat(f"{self.root}/{item.name}")
        if not self._keeps_modes:
            item = msgspec.structs.replace(item, mode=status.st_mode & 0o777)
        return item, _mark(status)

    def _find_bytes(self, item: FileItem) -> bool:
        """Have the bytes of an item ready, if it has any and they did not come from the client."""
        if item.kind != "file" or not item.size or item.key in self._arrived:
            return True
        for name, (placed, mark) in self._placed.items():
            if placed.key == item.key and self._is_as_placed(name, mark):
                copy = self._stage() / f"copy-{len(self._arrived)}"
                shutil.copyfile(self.root / name, copy)
                self._arrived[item.key] = copy
                return True
        return False

    def _remove_others(self, wanted: dict[str, str]) -> int:
        """Remove what was put here and is wanted no more, or as something else."""
        removed = 0
        for name in sorted(self._placed, reverse=True):
            kind = self._placed[name][0].kind
            stays = wanted.get(name)
            if stays is not None and (stays == "folder") == (kind == "folder"):
                continue
            path = self.root / name
            del self._placed[name]
            if blocked(self.root, name):
                # A function has put a link where its folder was: what is behind it is not ours.
                continue
            try:
                if kind == "folder":
                    path.rmdir()
                else:
                    path.unlink()
                    removed += 1
            except FileNotFoundError:
                pass
            except OSError:
                # A folder in which functions have left files: it stays with them.
                if kind != "folder":
                    raise
        return removed

    def _place(self, item: FileItem, uses: Counter[bytes]) -> None:
        path = self.root / item.name
        if in_the_way := blocked(self.root, item.name):
            raise FileExistsError(
                f"{self.root / in_the_way} is a link or a file, so {item.name!r} cannot be written "
                "below it; remove it"
            )
        if item.kind == "folder":
            is_new = not path.is_dir()
            path.mkdir(parents=True, exist_ok=True)
            if is_new and item.mode & stat.S_IXUSR:
                # Of a copy, which tells the modes of folders, too.
                path.chmod(item.mode & 0o777 | stat.S_IRWXU)
        else:
            if path.is_dir() and not path.is_symlink():
                raise FileExistsError(
                    f"{path} is a folder with files that were not sent, and {item.name!r} is now a "
                    f"{item.kind}; remove the folder on the node"
                )
            path.parent.mkdir(parents=True, exist_ok=True)
            mode = item.mode & 0o777
            if self._keeps_modes and path.is_file() and not path.is_symlink():
                mode = path.stat().st_mode & 0o777
            ready = self._ready(item, uses, mode)
            os.replace(ready, path)
        self._placed[item.name] = (item, _mark(path.lstat()))

    def _ready(self, item: FileItem, uses: Counter[bytes], mode: int) -> Path:
        """A file or link in the staging folder, to be moved to its place."""
        ready = self._stage() / "ready"
        if item.kind == "link":
            ready.symlink_to(os.fsdecode(item.content))
            return ready
        if not item.size:
            ready.touch()
        elif uses[item.key] > 1:
            shutil.copyfile(self._arrived[item.key], ready)
        else:
            ready = self._arrived[item.key]
        uses[item.key] -= 1
        ready.chmod(mode)
        return ready


def blocked(root: Path, name: str) -> str:
    """What is in the way of a name: a link or a file where a folder above it should be."""
    for parent in parents(name):
        with contextlib.suppress(OSError):
            if not stat.S_ISDIR(os.lstat(f"{root}/{parent}").st_mode):
                return parent
    return ""


def _mark(status: os.stat_result) -> Mark:
    if stat.S_ISDIR(status.st_mode):
        # The time of a folder changes with its files.
        return (0, 0, 0)
    return (status.st_mtime_ns, status.st_size, status.st_ino)
