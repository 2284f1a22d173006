"""Leases: a running save names the objects that it reuses, so that the collector keeps them."""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import msgspec

from skyward.errors import StoreDamagedError, StoreError
from skyward.store.catalog import Catalog
from skyward.store.format.manifest import StoredObject, object_path
from skyward.store.places.files import Files

GRACE = 24 * 3600.0
"""How long the garbage collector keeps a file that no manifest names."""
_LENGTH_LIMIT = 64 << 20

_log = logging.getLogger("skyward.store")


class Lease:
    """The lease of one save."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._path = f"saves/{uuid.uuid4().hex}.json"

    def write(self, reused: Iterable[StoredObject]) -> None:
        """Name the objects that the save reuses."""
        named = msgspec.json.encode({"objects": [stored.name for stored in reused]})
        self._files.write(self._path, [named])

    def drop(self) -> None:
        """End the lease."""
        try:
            self._files.delete(self._path)
        except StoreError as problem:
            # The lease ends by itself, and the save succeeded or failed for another reason.
            _log.info("a lease stays for a day: %s", problem)


@contextlib.contextmanager
def lease_of(files: Files) -> Iterator[Lease]:
    """A lease that ends with the save."""
    lease = Lease(files)
    try:
        yield lease
    finally:
        lease.drop()


def leased(files: Files, path: str) -> list[str]:
    """The objects that the lease at a path names."""
    try:
        data = files.read(path, 0, _LENGTH_LIMIT)
        named = msgspec.json.decode(data, type=dict[str, list[str]])["objects"]
    except FileNotFoundError:
        return []
    except (msgspec.MsgspecError, KeyError):
        raise StoreDamagedError(
            f"{files.url}/{path}: not a list of the objects a save uses; "
            "delete the file when no save is running, then collect again"
        ) from None
    return named


def lost_objects(
    files: Files, catalog: Catalog, reused: Mapping[StoredObject, tuple[str, int]]
) -> set[StoredObject]:
    """The reused objects that no longer exist, or whose version no longer exists."""
    deleted = {source for source in set(reused.values()) if not catalog.has(*source)}
    streams = files.transfers

    def missing(some: list[StoredObject]) -> list[StoredObject]:
        return [each for each in some if files.size(object_path(each.name)) != each.size]

    stored = list(reused)
    with ThreadPoolExecutor(streams) as pool:
        found = pool.map(missing, [stored[each::streams] for each in range(streams)])
        lost = {each for some in found for each in some}
    return lost | {each for each in stored if reused[each] in deleted}
