"""The garbage collector: removes objects that no version and no save in flight names."""

from __future__ import annotations

import contextlib
import time

from skyward.errors import ModelNotFoundError
from skyward.store.catalog import Catalog
from skyward.store.files import Files
from skyward.store.manifest import object_path
from skyward.store.saving import GRACE, leased


def collect(files: Files, catalog: Catalog, older_than: float) -> int:
    """Remove what nothing names, and say how many bytes that freed.

    A manifest that cannot be read stops it: nobody knows what that one names. The manifests are
    read again after the leases, because a save publishes before it drops its lease; whoever
    published in between is seen here, and everyone else still holds a lease or a manifest.
    """
    now = time.time()
    doomed = [
        entry
        for folder in ("objects", "tmp", "saves")
        for entry in files.list(folder)
        if entry.modified < now - older_than
    ]
    named: set[str] = set()
    seen: set[tuple[str, int]] = set()
    _mark(catalog, named, seen)
    for entry in files.list("saves"):
        if entry.modified >= now - GRACE:
            named.update(object_path(name) for name in leased(files, entry.path))
    _mark(catalog, named, seen)
    freed = 0
    for entry in doomed:
        abandoned = not entry.path.startswith("saves/") or entry.modified < now - GRACE
        if entry.path not in named and abandoned:
            files.delete(entry.path)
            freed += entry.size
    return freed


def _mark(catalog: Catalog, named: set[str], seen: set[tuple[str, int]]) -> None:
    for name, numbers in catalog.numbers().items():
        for number in numbers:
            if (name, number) in seen:
                continue
            seen.add((name, number))
            with contextlib.suppress(ModelNotFoundError):  # deleted since it was listed
                manifest = catalog.read(name, number)
                named.update(object_path(stored.name) for stored in manifest.objects)
