"""A store in a folder of this machine: files are mapped to read, and renamed into place."""

from __future__ import annotations

import builtins
import collections
import contextlib
import ctypes
import errno
import mmap
import os
import stat
import sys
import uuid
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

from skyward.errors import StoreError
from skyward.objects import memory
from skyward.store.places import Buffer, Draft, FileEntry, Files, full


class LocalFiles(Files):
    """The files of one folder.

    With `durable`, a file is on the disk when `write` returns. Without it, the operating system has
    the file, and a power failure may still destroy it.
    """

    transfers = 3
    whole = 1 << 20
    drafts = True

    def __init__(self, root: Path, *, durable: bool = False) -> None:
        self.url = str(root)
        self._root = root
        self._durable = durable

    @property
    def absent(self) -> bool:
        return not self._root.exists()

    def read(self, path: str, start: int, length: int) -> bytes:
        with self.reported("reading", path), self._path(path).open("rb") as file:
            file.seek(start)
            return file.read(length)

    def read_into(self, path: str, start: int, buffer: memoryview) -> int:
        done = 0
        with self.reported("reading", path), self._path(path).open("rb", buffering=0) as file:
            file.seek(start)
            while done < len(buffer) and (count := file.readinto(buffer[done:])):
                done += count
        return done

    def view(self, path: str) -> memoryview | None:
        """The file, mapped copy-on-write; it stays readable after the file is removed."""
        with self.reported("reading", path), self._path(path).open("rb") as file:
            return mapped(file.fileno())

    def size(self, path: str) -> int | None:
        try:
            with self.reported("reading", path):
                return self._path(path).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def write(self, path: str, parts: Sequence[Buffer]) -> None:
        """Write to a temporary file, then rename it."""
        with self.reported("writing", path), self.temporary() as (temporary, descriptor):
            start = 0
            for part in parts:
                memory.write_all(descriptor, start, memoryview(part))
                start += len(part)
            self.rename(descriptor, temporary, path)

    @contextlib.contextmanager
    def draft(self) -> Iterator[Draft]:
        """A temporary file, until it is renamed."""
        with self.reported("writing", "tmp"), self.temporary() as (temporary, descriptor):
            yield _Draft(self, temporary, descriptor)

    def create(self, path: str, data: bytes) -> bool:
        """Write to a temporary file, then link it; the link fails if the file exists."""
        with self.reported("writing", path), self.temporary() as (temporary, descriptor):
            memory.write_all(descriptor, 0, memoryview(data))
            return self.link(descriptor, temporary, path)

    def list(self, folder: str) -> builtins.list[FileEntry]:
        """Every file below a folder; raises if a part of it cannot be read.

        Follows links to folders, since files behind a link are in use, too. Each folder is listed
        once, under its real path if that is below `folder`.
        """
        found: list[FileEntry] = []
        seen: set[tuple[int, int]] = set()
        folders, links = collections.deque([folder]), collections.deque[str]()
        while folders or links:
            path = (folders or links).popleft()
            with self.reported("listing", path), contextlib.suppress(FileNotFoundError):
                about = self._path(path).stat()
                if (about.st_dev, about.st_ino) not in seen:
                    seen.add((about.st_dev, about.st_ino))
                    self._list_one(path, found, folders, links)
        return found

    def _list_one(
        self,
        folder: str,
        found: builtins.list[FileEntry],
        folders: collections.deque[str],
        links: collections.deque[str],
    ) -> None:
        with os.scandir(self._path(folder)) as entries:
            for entry in entries:
                path = f"{folder}/{entry.name}"
                with contextlib.suppress(FileNotFoundError):
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(path)
                        continue
                    about = entry.stat()
                    if stat.S_ISDIR(about.st_mode):
                        links.append(path)
                    else:
                        found.append(FileEntry(path, about.st_size, about.st_mtime))

    def delete(self, path: str) -> None:
        with self.reported("deleting", path):
            self._path(path).unlink(missing_ok=True)

    def _path(self, path: str) -> Path:
        return self._root.joinpath(*path.split("/"))

    def rename(self, descriptor: int, temporary: Path, path: str) -> None:
        """Give a temporary file its name."""
        target = self._ready(descriptor, path)
        temporary.replace(target)
        self._sync(target.parent)

    def link(self, descriptor: int, temporary: Path, path: str) -> bool:
        """Give a temporary file its name, unless another file has the name already.

        After an error, the name is removed again, as far as the disk lets us. Another process may
        have seen it.
        """
        target = self._ready(descriptor, path)
        try:
            os.link(temporary, target)
        except FileExistsError:
            return False
        try:
            self._sync(target.parent)
        except OSError:
            with contextlib.suppress(OSError):
                target.unlink(missing_ok=True)
            raise
        return True

    @contextlib.contextmanager
    def temporary(self) -> Iterator[tuple[Path, int]]:
        """A new file in `tmp/` to write to; it is deleted afterwards unless it was renamed."""
        folder = self._root / "tmp"
        self._make_folder(folder)
        temporary = folder / uuid.uuid4().hex
        try:
            with temporary.open("xb", buffering=0) as file:
                yield temporary, file.fileno()
        finally:
            temporary.unlink(missing_ok=True)

    def _ready(self, descriptor: int, path: str) -> Path:
        """Make the folder of a written file, and sync both if durable; returns the final path."""
        if self._durable:
            os.fsync(descriptor)
        target = self._path(path)
        self._make_folder(target.parent)
        return target

    def _make_folder(self, folder: Path) -> None:
        """Make a folder and its parents; if durable, they are on the disk before they are used."""
        if not folder.is_dir():
            self._make_folder(folder.parent)
            folder.mkdir(exist_ok=True)
            self._sync(folder.parent)

    def _sync(self, folder: Path) -> None:
        if self._durable:
            handle = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)

    @contextlib.contextmanager
    def reported(self, doing: str, path: str) -> Iterator[None]:
        """Turn an error of the operating system into one that says what to do."""
        try:
            yield
        except (FileNotFoundError, StoreError):
            raise
        except OSError as problem:
            where = f"{self.url}/{path}: {doing} failed: {problem.strerror or problem}"
            if problem.errno in (errno.ENOSPC, errno.EDQUOT):
                raise full(where) from problem
            if problem.errno in (errno.EMFILE, errno.ENFILE):
                raise StoreError(
                    f"{where}; close files that are not needed, or raise the limit (`ulimit -n`)"
                ) from problem
            raise StoreError(
                f"{where}; check that the folder is there and that you may use it"
            ) from problem


class _Draft:
    """A file that has no name in the store yet."""

    def __init__(self, files: LocalFiles, temporary: Path, descriptor: int) -> None:
        self._files = files
        self._temporary = temporary
        self._descriptor = descriptor

    def write(self, start: int, data: memoryview) -> bytes:
        """Write and hash in one pass."""
        with self._files.reported("writing", "objects"):
            return memory.write_named(self._descriptor, start, data)

    def publish(self, path: str, head: bytes) -> None:
        """Write the beginning, then rename."""
        with self._files.reported("writing", path):
            memory.write_all(self._descriptor, 0, memoryview(head))
            self._files.rename(self._descriptor, self._temporary, path)


# A file as private memory, with no descriptor left open. The `mmap` of the standard library holds a
# descriptor for as long as the memory lives (up to Python 3.12 always), and a process may have as
# few as 1024: fewer than a model has tensors.

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_FAILED = ctypes.c_void_p(-1).value


class _Mapping(ctypes.Array[ctypes.c_char]):
    """Owns the mapped memory: every view of the memory, and every slice of one, keeps it alive.

    One type serves all lengths, because making a type costs more than the mapping itself; `mapped`
    cuts the view to the file's length.
    """

    _type_ = ctypes.c_char
    _length_ = sys.maxsize


def mapped(descriptor: int) -> memoryview:
    """The whole file as memory; it is unmapped when its last view is freed."""
    size = os.fstat(descriptor).st_size
    if size == 0:
        return memoryview(bytearray())
    writable = mmap.PROT_READ | mmap.PROT_WRITE
    address = _libc.mmap(None, size, writable, mmap.MAP_PRIVATE, descriptor, 0)
    if address is None or address == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    memory = _Mapping.from_address(address)
    # Not at the interpreter's exit: threads and destructors may still read the memory, and the
    # kernel unmaps it when the process ends.
    weakref.finalize(memory, _libc.munmap, address, size).atexit = False
    return memoryview(memory).cast("B")[:size]
