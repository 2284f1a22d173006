"""The scanner: what a folder holds now; a file is read again only when its time or size changed."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import stat
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import platformdirs
import xxhash

from skyward.files import includes
from skyward.files.items import FileItem, Listing, parents

GIT_SECONDS = 60.0
FRESH_NS = 2_000_000_000
"""A file that changed this recently may change again within the resolution of its time, so that
its digest is not remembered."""
_PIECE = 1 << 20

Known = dict[str, tuple[int, int, int, bytes]]
"""Of each path: its time, size and inode when it was read, and the digest of its bytes."""


class Scanner:
    """Scans one folder again and again, and remembers the digests of its files."""

    def __init__(
        self,
        root: Path,
        excludes: Sequence[str] = (),
        *,
        everything: bool = False,
        remember: bool = True,
        digests: bool = True,
    ) -> None:
        """With `everything`, no file is left out because git or other tools ignore it.

        With `remember`, the digests are kept on disk for other processes. Without `digests`, no
        file is read.
        """
        self.root = root
        self._excludes, self._everything = tuple(excludes), everything
        self._remember, self._digests = remember, digests
        self._known: Known | None = None if remember else {}
        self._changed = False
        self._lock = threading.Lock()

    def scan(self) -> Listing:
        """What the folder holds now, sorted by name."""
        with self._lock:
            if self._known is None:
                self._known = _load(self.root)
            known, seen = self._known, set[str]()
            now = time.time_ns()
            items: dict[str, FileItem] = {}
            listed = None if self._everything else self._listed()
            waiting = self._walked("") if listed is None else iter(listed)
            nested: list[str] = []
            for name in itertools.chain(waiting, self._inside(nested)):
                item = self._item(name, known, now)
                if item is not None:
                    items[name] = item
                    seen.add(name)
                    _add_parents(items, name)
                    if listed is not None and item.kind == "folder" and name in listed:
                        # A repository within the repository, of which git names the folder alone.
                        nested.append(name)
            for name in known.keys() - seen:
                del known[name]
                self._changed = True
            if self._changed and self._remember:
                _save(self.root, known)
                self._changed = False
            return Listing(tuple(items[name] for name in sorted(items)))

    def _item(self, name: str, known: Known, now: int) -> FileItem | None:
        path = f"{self.root}/{name}"
        try:
            name.encode()
        except UnicodeEncodeError:
            raise OSError(f"the name {os.fsencode(name)!r} is not UTF-8") from None
        try:
            status = os.lstat(path)
            if stat.S_ISLNK(status.st_mode):
                return FileItem(name, "link", content=os.fsencode(os.readlink(path)))
            if stat.S_ISDIR(status.st_mode):
                return FileItem(name, "folder")
            if not stat.S_ISREG(status.st_mode):
                return None
            mark = (status.st_mtime_ns, status.st_size, status.st_ino)
            before = known.get(name)
            if before is not None and before[:3] == mark:
                digest = before[3]
            elif not self._digests:
                digest = b""
            else:
                digest = digest_of(path, status.st_size)
                self._changed = True
                if now - status.st_mtime_ns > FRESH_NS:
                    known[name] = (*mark, digest)
                else:
                    known.pop(name, None)
        except (FileNotFoundError, NotADirectoryError):
            # Deleted since its folder was listed, as temporary files are; or git knows a folder
            # that is a file now.
            return None
        return FileItem(name, "file", status.st_size, status.st_mode & 0o777, digest)

    def _listed(self) -> dict[str, None] | None:
        """The names that git lists, without those that stay here."""
        listed = _listed_by_git(self.root)
        if listed is None:
            return None
        stays = {"": False}

        def stays_here(name: str) -> bool:
            # Most files share their folders with others: each folder is looked at once.
            if name not in stays:
                parent, _, own = name.rpartition("/")
                stays[name] = stays_here(parent) or includes.is_left_out(own, name, self._excludes)
            return stays[name]

        return {name: None for name in listed if not stays_here(name)}

    def _inside(self, folders: list[str]) -> Iterator[str]:
        for folder in folders:
            yield from self._walked(folder)

    def _walked(self, below: str) -> Iterator[str]:
        waiting = [below]
        while waiting:
            folder = waiting.pop()
            try:
                entries = sorted(os.scandir(self.root / folder), key=lambda entry: entry.name)
            except (FileNotFoundError, NotADirectoryError):
                if not folder:
                    raise
                # Deleted since its own folder was listed.
                continue
            else:
                for entry in entries:
                    name = f"{folder}/{entry.name}" if folder else entry.name
                    usual = () if self._everything else includes.LEFT_OUT
                    if includes.is_left_out(entry.name, name, self._excludes, usual):
                        continue
                    yield name
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(name)


def digest_of(path: Path | str, size: int = 1 << 62) -> bytes:
    """The digest of a file's first bytes, so many of them: a log may grow meanwhile."""
    digest = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as file:
        while piece := file.read(min(_PIECE, size)):
            digest.update(piece)
            size -= len(piece)
    return digest.digest()


def holds(path: Path, item: FileItem) -> bool:
    """Whether a path has what an item says, whatever its mode is."""
    try:
        status = path.lstat()
        if item.kind == "link":
            return path.is_symlink() and os.fsencode(os.readlink(path)) == item.content
        if item.kind == "folder":
            return stat.S_ISDIR(status.st_mode)
        if not stat.S_ISREG(status.st_mode) or status.st_size != item.size:
            return False
        return digest_of(path) == item.content
    except OSError:
        return False


def _add_parents(items: dict[str, FileItem], name: str) -> None:
    for parent in parents(name):
        if parent in items:
            break
        items[parent] = FileItem(parent, "folder")


def _listed_by_git(root: Path) -> list[str] | None:
    """The files that git does not ignore; None where there is no repository, or no git."""
    git = shutil.which("git")
    if git is None or not any((each / ".git").exists() for each in (root, *root.parents)):
        return None
    command = [git, "-C", str(root), "ls-files", "-z", "-co", "--exclude-standard", "--deduplicate"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=GIT_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode:
        # A repository of another user, or a broken one.
        return None
    return [os.fsdecode(name).rstrip("/") for name in done.stdout.split(b"\0") if name]


def _remembered(root: Path) -> Path:
    folder = os.environ.get("SKYWARD_CACHE") or platformdirs.user_cache_dir("skyward")
    return Path(folder) / "digests" / xxhash.xxh3_64_hexdigest(os.fsencode(root))


def _load(root: Path) -> Known:
    with contextlib.suppress(OSError, msgspec.DecodeError):
        return msgspec.msgpack.decode(_remembered(root).read_bytes(), type=Known)
    return {}


def _save(root: Path, known: Known) -> None:
    # Without a cache, files are read once more by the next process.
    with contextlib.suppress(OSError):
        place = _remembered(root)
        place.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=place.parent)
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.msgpack.encode(known))
        os.replace(name, place)
