"""Includes: the user's own files that go to a node, without caches and the like."""

from __future__ import annotations

import fnmatch
import gzip
import hashlib
import io
import os
import re
import stat
import tarfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from skyward.errors import ImageError

MUCH = 100_000_000
"""From this many bytes on, the largest paths are named."""
LEFT_OUT = (
    ".git",
    ".hg",
    ".svn",
    ".venv",
    "venv",
    "__pycache__",
    "*.py[cod]",
    "node_modules",
    ".mypy_cache",
    ".ruff_cache",
    ".pytest_cache",
    ".hypothesis",
    ".tox",
    ".nox",
    ".ipynb_checkpoints",
    "*.egg-info",
    ".DS_Store",
)
"""Left out, unless the user names one as an include."""
_LEFT_OUT = re.compile("|".join(map(fnmatch.translate, LEFT_OUT)))
_BUILD_OUTPUTS = ("build", "dist")
_PROJECT_FILES = ("pyproject.toml", "setup.py", "setup.cfg")
_PIECE = 1 << 20


@dataclass(frozen=True, slots=True)
class Entry:
    """One file, folder or link of a bundle."""

    name: str
    """Its path on the node, relative to the working directory."""
    path: Path
    kind: bytes
    size: int
    mode: int
    target: str
    """Where a link leads."""
    changed: int


@dataclass(frozen=True, slots=True)
class Bundle:
    """Everything an image includes, as found on this machine."""

    entries: tuple[Entry, ...]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(entry.size for entry in self.entries)

    @property
    def digest(self) -> str:
        """A name for the contents; the files are read again only when one of them has changed."""
        known = _digests.get(self.entries)
        if known is None:
            known = _digest(self.entries, None)
            if len(_digests) > 7:
                _digests.pop(next(iter(_digests)))
            _digests[self.entries] = known
        return known

    def archive(self) -> tuple[bytes, str]:
        """A compressed tar, and the digest of its contents; the same files give the same bytes."""
        compressed = io.BytesIO()
        with (
            gzip.GzipFile("", "wb", compresslevel=1, fileobj=compressed, mtime=0) as pressed,
            tarfile.open(fileobj=pressed, mode="w", format=tarfile.PAX_FORMAT) as tar,
        ):
            digest = _digest(self.entries, tar)
        return compressed.getvalue(), digest

    def link_into(self, folder: Path) -> None:
        """Show everything in a folder of this machine: folders are made, files are linked to."""
        for entry in self.entries:
            path = folder / entry.name
            if entry.kind == tarfile.DIRTYPE:
                path.mkdir(parents=True, exist_ok=True)
            else:
                path.symlink_to(entry.target or entry.path)

    def describe(self) -> str:
        """The number and size of the files and, from `MUCH` on, the largest paths."""
        files = sum(entry.kind == tarfile.REGTYPE for entry in self.entries)
        told = f"includes: {files} file{'' if files == 1 else 's'}, {shown_size(self.size)}"
        if self.size <= MUCH:
            return told
        sizes: Counter[str] = Counter()
        for entry in self.entries:
            sizes["/".join(entry.name.split("/")[:2])] += entry.size
        largest = ", ".join(f"{name} ({shown_size(size)})" for name, size in sizes.most_common(5))
        return (
            f"{told}; the largest: {largest}; leave out what nodes do not need with excludes=[...]"
        )


_digests: dict[tuple[Entry, ...], str] = {}


def find(includes: Sequence[str], excludes: Sequence[str] = ()) -> Bundle:
    """Find the files to send; raises `ImageError` for one that is missing or cannot be sent.

    A path below the working directory keeps its relative path; any other gets its own name.
    """
    found: dict[str, Entry] = {}
    origin: dict[str, str] = {}
    for include in includes:
        given = Path(include).expanduser()
        here = Path.cwd()
        absolute = Path(os.path.abspath(given))
        below = absolute.is_relative_to(here)
        name = (absolute.relative_to(here) if below else Path(absolute.name)).as_posix()
        # An include that is a link stands for what the link leads to.
        root = _resolved(absolute)
        if root is None or not root.exists():
            raise ImageError(
                f"Image(includes=[{include!r}]): there is no {absolute}; paths are relative to the "
                f"working directory, which is {here}"
            )
        for entry in _walk(root, "" if name == "." else name, excludes, include):
            other = origin.setdefault(entry.name, include)
            if other != include and found[entry.name].path != entry.path:
                raise ImageError(
                    f"Image(includes=[{other!r}, {include!r}]): both would be {entry.name!r} on "
                    "the node; rename one, or start the script in a folder that holds both"
                )
            found[entry.name] = entry
    return Bundle(tuple(found[name] for name in sorted(found)))


def _walk(root: Path, name: str, excludes: Sequence[str], include: str) -> Iterator[Entry]:
    yield from _parents(name)
    waiting = [(root, name)]
    while waiting:
        path, name = waiting.pop()
        entry = _entry(path, name, root, include)
        if entry is None:
            continue
        if name:
            yield entry
        if entry.kind != tarfile.DIRTYPE:
            continue
        try:
            names = os.listdir(path)
        except PermissionError as problem:
            raise ImageError(
                f"Image(includes=[{include!r}]): may not read {path}; "
                f"make it readable or add {path.name!r} to excludes"
            ) from problem
        built = any(project in names for project in _PROJECT_FILES)
        for child in names:
            inside = f"{name}/{child}" if name else child
            if built and child in _BUILD_OUTPUTS and (path / child).is_dir():
                continue
            if not _is_left_out(child, inside, (path / child).relative_to(root), excludes):
                waiting.append((path / child, inside))


def _parents(name: str) -> Iterator[Entry]:
    for parent in reversed(Path(name).parents[:-1]):
        yield Entry(parent.as_posix(), Path(), tarfile.DIRTYPE, 0, 0o755, "", 0)


def _entry(path: Path, name: str, root: Path, include: str) -> Entry | None:
    try:
        seen = path.lstat()
    except FileNotFoundError:
        # Deleted since its folder was listed, as temporary files are.
        return None
    mode = seen.st_mode & 0o777
    if stat.S_ISLNK(seen.st_mode):
        target = _inside_target(path, root)
        if target is None:
            raise ImageError(
                f"Image(includes=[{include!r}]): {path} is a link to {os.readlink(path)!r}, "
                "outside of what is included or nowhere; include what it leads to, or leave it out "
                f"with excludes=[{path.name!r}]"
            )
        return Entry(name, path, tarfile.SYMTYPE, 0, 0o777, target, 0)
    if stat.S_ISDIR(seen.st_mode):
        # The owner has to fill the folder there, and to delete it.
        return Entry(name, Path(), tarfile.DIRTYPE, 0, mode | 0o700, "", 0)
    if stat.S_ISREG(seen.st_mode):
        changed = seen.st_mtime_ns
        return Entry(name, path, tarfile.REGTYPE, seen.st_size, mode, "", changed)
    # Sockets, pipes and devices are of no use on another machine.
    return None


def _inside_target(link: Path, root: Path) -> str | None:
    """Where a link inside `root` leads, relative to itself; None when that is outside."""
    target = _resolved(link)
    if target is None or not target.is_relative_to(root):
        return None
    return os.path.relpath(target, link.parent)


def _resolved(path: Path) -> Path | None:
    """Where a path leads through all links; None when the links form a circle."""
    try:
        return path.resolve()
    except (OSError, RuntimeError):
        return None


def is_left_out(
    child: str, inside: str, excludes: Sequence[str], usual: Sequence[str] = LEFT_OUT
) -> bool:
    """Whether a file named `child`, at the path `inside`, stays here."""
    return _is_left_out(child, inside, Path(inside), excludes, usual)


def _is_left_out(
    child: str,
    inside: str,
    below: Path,
    excludes: Sequence[str],
    usual: Sequence[str] = LEFT_OUT,
) -> bool:
    if usual is LEFT_OUT:
        if _LEFT_OUT.match(child):
            return True
    elif any(fnmatch.fnmatchcase(child, pattern) for pattern in usual):
        return True
    for exclude in excludes:
        pattern = exclude.rstrip("/").removeprefix("./")
        if "/" not in pattern:
            if fnmatch.fnmatchcase(child, pattern):
                return True
            continue
        patterns = {pattern, pattern.removeprefix("**/"), pattern.removesuffix("/**")}
        for path in (inside, below.as_posix()):
            if any(fnmatch.fnmatchcase(path, one) for one in patterns):
                return True
    return False


def _digest(entries: Sequence[Entry], tar: tarfile.TarFile | None) -> str:
    """Read every file once, into the digest and into the tar if there is one."""
    whole = hashlib.sha256()
    for entry in entries:
        member = tarfile.TarInfo(entry.name)
        member.type = entry.kind
        member.linkname = entry.target
        member.mode = entry.mode
        data = hashlib.sha256()
        if entry.kind == tarfile.REGTYPE:
            with _opened(entry) as file:
                member.size = os.fstat(file.fileno()).st_size
                reading = _Reading(file, data)
                if tar is not None:
                    _add(tar, member, reading, entry)
                else:
                    while reading.read(_PIECE):
                        pass
        elif tar is not None:
            tar.addfile(member)
        line = (entry.name, entry.kind, entry.mode, entry.target, data.hexdigest())
        whole.update(repr(line).encode())
    return whole.hexdigest()[:20]


def _add(tar: tarfile.TarFile, member: tarfile.TarInfo, file: _Reading, entry: Entry) -> None:
    try:
        tar.addfile(member, file)
    except OSError as problem:
        raise ImageError(
            f"Image(includes=...): {entry.path} was cut off while it was read: {problem}; include "
            f"it once it is complete, or leave it out with excludes=[{entry.path.name!r}]"
        ) from problem


def _opened(entry: Entry) -> io.BufferedReader:
    try:
        return open(entry.path, "rb")
    except OSError as problem:
        raise ImageError(
            f"Image(includes=...): cannot read {entry.path}: {problem.strerror}; make it readable "
            f"or leave it out with excludes=[{entry.path.name!r}]"
        ) from problem


class _Reading(io.RawIOBase):
    """A file whose bytes are hashed as they are read."""

    def __init__(self, file: io.BufferedReader, digest: hashlib._Hash) -> None:
        self._file = file
        self._digest = digest

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self._digest.update(data)
        return data


def shown_size(count: int) -> str:
    """A number of bytes as people write it."""
    amount, unit = float(count), "bytes"
    for larger in ("kB", "MB", "GB"):
        if amount < 1000:
            break
        amount, unit = amount / 1000, larger
    return f"{amount:.0f} {unit}" if unit == "bytes" or amount >= 10 else f"{amount:.1f} {unit}"
