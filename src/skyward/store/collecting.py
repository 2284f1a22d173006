"""The garbage collector: removes objects that no version and no running save names."""

from __future__ import annotations

import contextlib
import time

from skyward.errors import ModelNotFoundError
from skyward.store.catalog import Catalog
from skyward.store.format.manifest import object_path
from skyward.store.places.files import Files
from skyward.store.saving.leases import GRACE, leased


def collect(files: Files, catalog: Catalog, older_than: float) -> int:
    """Remove the files that no manifest and no lease names; returns how many bytes that freed.

    A manifest that cannot be read stops the collection, because its objects are unknown. The
    manifests are read again after the leases, because a save publishes before it drops its lease:
    a save that published in between is seen now, and every other save still holds its lease.
    """
    now = time.time()
    old = [
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
    for entry in old:
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
