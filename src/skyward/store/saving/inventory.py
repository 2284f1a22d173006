"""The inventory of one save: the regions that the store is known to have, by digest."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from skyward.errors import StoreError
from skyward.store.catalog import Catalog
from skyward.store.format import objects
from skyward.store.format.manifest import StoredObject

_RECENT = 16
"""How many versions of the same model are searched for tensors to reuse."""

_log = logging.getLogger("skyward.store")


@dataclass(frozen=True, slots=True)
class Location:
    """Where the bytes of one region are stored."""

    object: StoredObject
    start: int
    size: int
    source: tuple[str, int] | None
    """The version whose manifest names the object; None for an object that this save wrote."""


class Inventory:
    """Stored regions by digest."""

    def __init__(self) -> None:
        self._locations: dict[str, Location] = {}
        self._sizes: set[int] = set()

    @classmethod
    def of(cls, catalog: Catalog, name: str) -> Inventory:
        """The regions of the model's last versions, and of every other model's newest version."""
        found = cls()
        for owner, numbers in catalog.numbers().items():
            for number in reversed(numbers[-(_RECENT if owner == name else 1) :]):
                found._add_version(catalog, owner, number)
        return found

    def _add_version(self, catalog: Catalog, name: str, version: int) -> None:
        try:
            manifest = catalog.remember(name, version)
        except StoreError as problem:
            # If another version is damaged, the save goes on without reusing its tensors.
            _log.warning("not reusing tensors of %r version %d: %s", name, version, problem)
            return
        for region in manifest.regions:
            stored = manifest.objects[region.object]
            if not objects.is_distrusted(stored.name):
                self.add(
                    region.digest, Location(stored, region.start, region.size, (name, version))
                )

    def add(self, digest: str, location: Location) -> bool:
        """Note where a region is stored; returns False if a location is known already."""
        if digest in self._locations:
            return False
        self._locations[digest] = location
        self._sizes.add(location.size)
        return True

    def __contains__(self, digest: str) -> bool:
        return digest in self._locations

    def __getitem__(self, digest: str) -> Location:
        return self._locations[digest]

    def has_size(self, size: int) -> bool:
        """Whether a region of this many bytes is, or was, in the inventory."""
        return size in self._sizes

    def object_names(self) -> set[str]:
        """The names of all objects that hold a region."""
        return {location.object.name for location in self._locations.values()}

    def drop(self, lost: Iterable[StoredObject]) -> None:
        """Forget every region that lies in a lost object."""
        gone = set(lost)
        self._locations = {
            digest: location
            for digest, location in self._locations.items()
            if location.object not in gone
        }
