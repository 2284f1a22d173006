"""Volumes of a node: each is at its path while a process of this machine uses it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any, Protocol, TextIO

import msgspec
import psutil
import xxhash

from skyward import kernel
from skyward.errors import PoolError, ProtocolError
from skyward.files.items import FileItem, Listing, check_names
from skyward.files.mounts import PACKAGES, Mount, mount
from skyward.files.scanner import Scanner, digest_of
from skyward.files.transfer import Told

AT_ONCE = 8
"""How many files travel at the same time."""


# Made now: msgspec ends the process if two threads are the first to read a struct that has others.
_listings = msgspec.msgpack.Decoder(Listing)


class ServedVolume(Protocol):
    """What is at the path of a volume."""

    def write_back(self, told: Told) -> int:
        """Write what has changed to the source; returns how many files, if that is known."""

    def remove(self) -> None:
        """Take it away."""


class MountedVolume:
    """A mounted file system: what is written goes to its source by itself."""

    def __init__(self, mounted: Mount) -> None:
        self._mounted = mounted

    def write_back(self, told: Told) -> int:
        """Nothing to do."""
        return 0

    def remove(self) -> None:
        """Unmount it."""
        self._mounted.unmount()
        with contextlib.suppress(OSError):
            self._mounted.at.rmdir()


class CopiedVolume:
    """A copy, whose changes are written back by any of the processes that share it."""

    def __init__(self, copy: BucketCopy, read_only: bool, listing: Path) -> None:
        """`listing` is a file with what the source has, as far as these processes know."""
        self._copy, self._read_only, self._listing = copy, read_only, listing

    def bring(self, told: Told) -> None:
        """Make the copy."""
        self._copy.bring(told, may_be_new=not self._read_only)
        self._remember()

    def write_back(self, told: Told) -> int:
        """Write back what has changed, unless the volume is read-only."""
        if self._read_only:
            return 0
        self._copy.before = _listings.decode(self._listing.read_bytes())
        written = self._copy.write_back(told)
        self._remember()
        return written

    def recover(self, told: Told) -> int:
        """Write back what processes wrote that were killed; refuses what has changed since."""
        try:
            self._copy.before = _listings.decode(self._listing.read_bytes())
            conflicts = self._copy.conflicts()
            if not conflicts:
                return self.write_back(told)
        except (PoolError, OSError, msgspec.DecodeError) as problem:
            raise self._unrecovered(f"that cannot be written back: {problem}") from problem
        shown = ", ".join(conflicts[:5]) + (", ..." if len(conflicts) > 5 else "")
        raise self._unrecovered(f"in files that have also changed at the source: {shown}")

    def _unrecovered(self, what: str) -> PoolError:
        at = self._copy.at
        return PoolError(
            f"{at} on the node has changes of a pool that was killed, {what}. To keep those of the "
            f"node, copy the files to {self._copy.url}; then, or to keep those of the source, "
            f"delete {at} on the node; or choose another target"
        )

    def _remember(self) -> None:
        self._listing.write_bytes(msgspec.msgpack.encode(self._copy.before))

    def remove(self) -> None:
        """Delete the copy."""
        shutil.rmtree(self._copy.at, ignore_errors=True)


class LinkedVolume:
    """A link to a folder of this same machine."""

    def __init__(self, link: Path) -> None:
        self._link = link

    def write_back(self, told: Told) -> int:
        """Nothing to do."""
        return 0

    def remove(self) -> None:
        """Remove the link."""
        with contextlib.suppress(FileNotFoundError):
            self._link.unlink()


_User = tuple[int, float]
"""A process: its id, and when it began, because another one may get the same id later."""


class _PathUse(msgspec.Struct):
    """Who uses the path of a volume, and what is there."""

    source: str = ""
    users: list[_User] = []
    """The processes; one that has the volume twice is there twice."""
    copied: bool = False
    """Whether there is a copy, with what functions may have written."""
    writes: bool = False
    """Whether what functions write to the copy goes back."""


class NodeVolume:
    """A volume of this node; nodes on the same machine share what is at its path."""

    def __init__(self, source: str, target: str, *, read_only: bool) -> None:
        self.source, self.target, self.read_only = source, Path(target), read_only
        self._served: ServedVolume | None = None

    def open(self, told: Told) -> None:
        """Have the volume at its path."""
        with self._record() as (record, save):
            if record.users and record.source != self.source:
                raise PoolError(
                    f"{self.target} is taken: another pool has {record.source} there; choose "
                    "another target"
                )
            if not record.users:
                ours = record.source == self.source
                if ours and record.copied and record.writes and self.target.is_dir():
                    self._copied(read_only=False).recover(told)
                record.copied = record.writes = False
                # If this process is killed while it copies, the next one knows whose files these
                # are; those of another source it does not take for its own.
                if ours or not os.path.lexists(self.target):
                    record.source = self.source
                    save()
                self._served = self._serve(told, ours=ours)
                record.copied = isinstance(self._served, CopiedVolume)
            elif record.copied:
                # The process that made the copy may leave before this one.
                self._served = self._copied(read_only=self.read_only)
            record.source = self.source
            record.writes |= not self.read_only
            record.users.append(_this_process())

    def write_back(self, told: Told) -> int:
        """Write what has changed to the source; returns how many files."""
        with self._record():
            return 0 if self._served is None else self._served.write_back(told)

    def close(self, told: Told) -> int:
        """Write back, and take the volume away; returns how many files were written."""
        served, self._served = self._served, None
        written, failure = 0, None
        with self._record() as (record, _):
            try:
                written = 0 if served is None else served.write_back(told)
            except Exception as problem:
                failure = problem
            if _this_process() in record.users:
                record.users.remove(_this_process())
            if not record.users and failure is None:
                record.copied = False
                if served is None:
                    _clear(self.target)
                else:
                    served.remove()
        if failure is not None:
            raise PoolError(
                f"{failure}; what functions wrote is still on the node, in {self.target}, and the "
                "next pool with this volume writes it back"
            ) from failure
        return written

    def _serve(self, told: Told, *, ours: bool) -> ServedVolume:
        if "://" not in self.source:
            return self._link()
        made = [each for each in (self.target, *self.target.parents) if not each.exists()]
        self._make_folder(ours)
        try:
            return self._filled(told)
        except BaseException:
            for folder in made:
                # What was copied already stays, for the next attempt.
                with contextlib.suppress(OSError):
                    folder.rmdir()
            raise

    def _filled(self, told: Told) -> ServedVolume:
        """Mount the source at the path, or copy it there."""
        mounted, reasons = mount(self.source, self.target, read_only=self.read_only)
        if mounted is not None:
            return MountedVolume(mounted)
        if self.source.startswith("nfs://"):
            raise PoolError(
                f"{self.source} cannot be mounted at {self.target}: {'; '.join(reasons)}; mounting "
                "NFS needs root on the node"
            )
        try:
            copied = self._copied(read_only=self.read_only)
            copied.bring(told)
        except PoolError as problem:
            also = f" (and could not be mounted: {'; '.join(reasons)})" if reasons else ""
            raise PoolError(f"{problem}{also}") from problem
        return copied

    def _copied(self, *, read_only: bool) -> CopiedVolume:
        copy = BucketCopy(self.source, self.target)
        return CopiedVolume(copy, read_only, self._place.with_suffix(".listing"))

    def _link(self) -> ServedVolume:
        if self.target.is_symlink() and os.readlink(self.target) == self.source:
            return LinkedVolume(self.target)
        if os.path.lexists(self.target):
            raise self._taken()
        try:
            self.target.parent.mkdir(parents=True, exist_ok=True)
            self.target.symlink_to(self.source)
        except OSError as problem:
            raise self._not_allowed(problem) from problem
        return LinkedVolume(self.target)

    def _make_folder(self, ours: bool) -> None:
        try:
            self.target.mkdir(parents=True, exist_ok=True)
            if os.path.ismount(self.target):
                if not ours:
                    raise self._taken()
                # An agent that was killed has left it; its program may still be there.
                Mount(self.target, "", None).unmount()
            if any(self.target.iterdir()) and not ours:
                raise self._taken()
        except FileExistsError:
            raise self._taken() from None
        except OSError as problem:
            raise self._not_allowed(problem) from problem

    def _taken(self) -> PoolError:
        return PoolError(
            f"{self.target} is taken: the node has files there already; choose another target for "
            f"{self.source}"
        )

    def _not_allowed(self, problem: OSError) -> PoolError:
        return PoolError(
            f"{self.target} cannot be made on the node: {problem.strerror}; choose a target that "
            "its user may make, such as one below /tmp"
        )

    @property
    def _place(self) -> Path:
        folder = Path(tempfile.gettempdir()) / f"skyward-volumes-{os.getuid()}"
        return folder / xxhash.xxh3_64_hexdigest(os.fsencode(self.target))

    @contextlib.contextmanager
    def _record(self) -> Iterator[tuple[_PathUse, Callable[[], None]]]:
        """Who uses the path, as a file of this machine that one process at a time changes.

        The file stays while there are users, or what they wrote was not written back. The function
        writes it before the end of the block.
        """
        path = self._place
        path.parent.mkdir(mode=0o700, exist_ok=True)
        if not kernel.is_own_folder(path.parent):
            raise PoolError(
                f"{path.parent} belongs to somebody else, who could read and forge what volumes "
                "note there; remove it, or set TMPDIR on the node"
            )
        with _locked(path) as file:
            file.seek(0)
            written = file.read()
            record = msgspec.json.decode(written, type=_PathUse) if written else _PathUse()
            # An agent that was killed has not said that it left.
            record.users = [(pid, began) for pid, began in record.users if _began(pid) == began]

            def save() -> None:
                file.seek(0)
                file.truncate()
                file.write(msgspec.json.encode(record).decode())
                file.flush()

            try:
                yield record, save
            except BaseException:
                if not (written or os.path.lexists(self.target)):
                    path.unlink()
                raise
            if record.users or record.copied:
                save()
                return
            path.unlink()
            path.with_suffix(".listing").unlink(missing_ok=True)


def _this_process() -> _User:
    pid = os.getpid()
    return pid, _began(pid) or 0.0


def _began(pid: int) -> float | None:
    """When a process began, in a unit of the system's; None if there is none, or it has ended."""
    try:
        # In ticks since the machine started: the time of day may be set while processes run.
        after_name = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2]
        state, *fields = after_name.split()
        return None if state in "ZX" else float(fields[18])
    except OSError:
        pass
    try:
        return float(psutil.Process(pid).create_time())
    except psutil.Error:
        return None


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[TextIO]:
    """A file that one process at a time has open; it is made if it is not there."""
    while True:
        with path.open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            # Another process may have removed it while this one waited.
            if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
                yield file
                return


def _clear(target: Path) -> None:
    """Remove what a process that left before has put at a path."""
    if target.is_symlink():
        target.unlink()
    elif os.path.ismount(target):
        Mount(target, "", None).unmount()
    else:
        shutil.rmtree(target, ignore_errors=True)


class BucketCopy:
    """A folder of the node with the files of a URL."""

    def __init__(self, url: str, at: Path) -> None:
        self.url, self.at = url, at
        self._files, self._root = _opened(url)
        self._scanner = Scanner(at, everything=True, remember=False)
        self.before = Listing(())
        """What the source has, as far as it is known."""

    def bring(self, told: Told, *, may_be_new: bool = False) -> None:
        """Copy everything here; files that are here already, with the same size, are not.

        With `may_be_new`, the source may be a path in a bucket, or in a folder, that is not there
        yet: it comes with what is written back.
        """
        try:
            found: dict[str, Any] = self._files.find(self._root, detail=True)
            is_there = bool(found) or self._files.exists(self._root)
            if not is_there and may_be_new:
                is_there = self._files.exists(_holder(self._root))
        except Exception as problem:
            raise _refused(self.url, problem) from problem
        if not is_there:
            raise PoolError(
                f"there is nothing at {self.url}; check the name of the bucket and the path"
            )
        wanted = {}
        for path, about in found.items():
            place = self.at / self._name(path)
            size = int(about.get("size") or 0)
            if not (place.is_file() and place.stat().st_size == size):
                wanted[path] = (place, size)
        total = sum(size for _, size in wanted.values())
        free = shutil.disk_usage(self.at).free
        if total > free:
            raise PoolError(
                f"{self.url} has {total / 1e9:.1f} GB, and {self.at} has room for "
                f"{free / 1e9:.1f} GB; mount it (s3fs, gcsfuse or rclone on the node), name a part "
                "of it, or use a larger disk (disk_gb=...)"
            )
        progress = CopyProgress(f"copying {self.url}", total, told)

        def get(path: str) -> None:
            place, size = wanted[path]
            place.parent.mkdir(parents=True, exist_ok=True)
            part = place.with_name(f"{place.name}.skyward-part")
            self._files.get_file(path, str(part))
            part.replace(place)
            progress.add(size)

        self._each(get, wanted)
        self.before = self._scanner.scan()

    def _name(self, key: str) -> str:
        """The path of a key below the volume."""
        name = str(PurePosixPath(key.removeprefix(self._root).lstrip("/")))
        try:
            check_names([name])
        except ProtocolError:
            raise PoolError(
                f"{self.url}: the key {key!r} is no path below a folder; rename it, or name a part "
                "of the bucket without it"
            ) from None
        return name

    def write_back(self, told: Told) -> int:
        """Copy the files that were made or changed here to the URL; returns how many."""
        now = self._scanner.scan()
        changed = {item.name: item.size for item in self._changed(now)}
        progress = CopyProgress(f"writing back to {self.url}", sum(changed.values()), told)

        def put(name: str) -> None:
            self._files.put_file(str(self.at / name), f"{self._root.rstrip('/')}/{name}")
            progress.add(changed[name])

        if changed:
            with_parents = {name.rpartition("/")[0] for name in changed}
            try:
                for parent in sorted(with_parents):
                    # Folders of a disk have to be made; buckets have none.
                    self._files.makedirs(f"{self._root.rstrip('/')}/{parent}", exist_ok=True)
            except Exception as problem:
                raise _refused(self.url, problem) from problem
            self._each(put, changed)
        self.before = now
        return len(changed)

    def _changed(self, now: Listing) -> list[FileItem]:
        """The files that were made or changed here."""
        before = {item.name: item.content for item in self.before.items}
        return [
            item
            for item in now.items
            if item.kind == "file" and before.get(item.name) != item.content
        ]

    def conflicts(self) -> list[str]:
        """The files that were changed here, and otherwise at the URL since `before`."""
        known = {item.name: item.content for item in self.before.items}
        changed = {item.name: item.content for item in self._changed(self._scanner.scan())}
        found: list[str] = []

        def compare(name: str) -> None:
            there = self._digest_at_source(name)
            if there not in (None, known.get(name), changed[name]):
                found.append(name)

        self._each(compare, changed)
        return sorted(found)

    def _digest_at_source(self, name: str) -> bytes | None:
        with tempfile.NamedTemporaryFile(prefix="skyward-compared-") as file:
            try:
                self._files.get_file(f"{self._root.rstrip('/')}/{name}", file.name)
            except FileNotFoundError:
                return None
            return digest_of(file.name)

    def _each(self, action: Callable[[str], None], names: Iterable[str]) -> None:
        with ThreadPoolExecutor(AT_ONCE, "skyward-copy") as threads:
            doing = [threads.submit(action, name) for name in names]
            try:
                for each in doing:
                    each.result()
            except Exception as problem:
                for each in doing:
                    each.cancel()
                raise _refused(self.url, problem) from problem


def _holder(root: str) -> str:
    """What must be there for a new path: its bucket, or the folder that it is in."""
    bucket = root.partition("/")[0]
    return bucket or root.rstrip("/").rpartition("/")[0] or "/"


class CopyProgress:
    """Tells how much has been copied; any thread may add to it."""

    def __init__(self, what: str, total: int, told: Told) -> None:
        self._what, self._total, self._told = what, total, told
        self._done = 0
        self._lock = threading.Lock()

    def add(self, size: int) -> None:
        """Count bytes, and tell."""
        with self._lock:
            self._done += size
            self._told(f"{self._what}, {self._done / 1e6:.1f} of {self._total / 1e6:.1f} MB")


def _opened(url: str) -> tuple[Any, str]:
    # Here: nodes without such volumes need no fsspec.
    try:
        from fsspec.core import url_to_fs  # type: ignore[import-untyped]

        files, root = url_to_fs(url)
    except ImportError as problem:
        package = PACKAGES.get(url.partition("://")[0], "fsspec")
        raise PoolError(
            f"{url}: the node can neither mount it nor copy it: {problem}; install a program that "
            f"mounts it, or have Image(pip=[{package!r}])"
        ) from problem
    except ValueError as problem:
        raise PoolError(f"{url}: {problem}; give a URL that fsspec knows") from problem
    except Exception as problem:
        raise _refused(url, problem) from problem
    return files, root


def _refused(url: str, problem: Exception) -> PoolError:
    if isinstance(problem, PoolError):
        return problem
    told = f"{type(problem).__name__}: {problem}"
    words = told.lower()
    if any(word in words for word in ("credential", "forbidden", "denied", "401", "403")):
        advice = (
            "give the nodes credentials: Image(env={...}) with the variables of the service, or a "
            "role of the machine"
        )
    elif "no space" in words:
        advice = "the node's disk is full; use a larger one (disk_gb=...)"
    else:
        advice = "check the URL, and that the nodes reach the service"
    return PoolError(f"{url}: {told[:300]}; {advice}")
