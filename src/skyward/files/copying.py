"""Copying: the files of a bucket in a folder of the node, and what changed there back again."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

from skyward.errors import PoolError, ProtocolError
from skyward.files.items import FileItem, Listing, check_names
from skyward.files.scanning import Scanner, digest_of
from skyward.files.transfer import Told

AT_ONCE = 8
"""How many files travel at the same time."""

PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs"}
"""The packages that fsspec needs for a scheme."""


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
