"""Saving a version in three stages: classify the regions, hash them, upload what is new."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from importlib import metadata as packages
from typing import TYPE_CHECKING, Any

import msgspec

from skyward.store.catalog import Catalog, check_length
from skyward.store.format import tree
from skyward.store.format.layout import Span, lay_out
from skyward.store.format.manifest import FORMAT, Manifest, Region, StoredObject, View
from skyward.store.places.files import Files
from skyward.store.progress import UNWATCHED, Progress
from skyward.store.saving.classification import classify
from skyward.store.saving.hashing import hashed
from skyward.store.saving.inventory import Inventory, Location
from skyward.store.saving.leases import GRACE, Lease, lease_of, lost_objects
from skyward.store.saving.uploads import StoredRegion, Uploads, changed

if TYPE_CHECKING:
    import torch

__all__ = ["GRACE", "Saving"]

_ATTEMPTS = 1000
"""How many version numbers a save tries before it gives up."""


class Saving:
    """One save: the regions that the store is known to have, and those that the save has added."""

    def __init__(
        self, files: Files, catalog: Catalog, name: str, progress: Progress = UNWATCHED
    ) -> None:
        self._files = files
        self._catalog = catalog
        self._name = name
        self._progress = progress
        self._inventory = Inventory.of(catalog, name)
        self._added = 0

    def save(self, value: object, metadata: dict[str, Any], class_path: str | None) -> Manifest:
        """Store a value as the next version."""
        shape, tensors = tree.encode(value)
        return self.save_tree(shape, tensors, metadata, class_path)

    def save_tree(
        self,
        shape: Any,
        tensors: Sequence[tuple[str, torch.Tensor]],
        metadata: dict[str, Any],
        class_path: str | None,
    ) -> Manifest:
        """Store a value in the form of `tree.encode`: its tree, and its tensors with paths."""
        spans, views = lay_out(tensors)
        check_length(self._name, len(msgspec.json.encode((shape, metadata, views))))
        counts = [_writes(tensor) for _, tensor in tensors]
        with lease_of(self._files) as lease:
            regions = self._stored_under(lease, spans)
            for (path, tensor), count in zip(tensors, counts, strict=True):
                if _writes(tensor) != count:
                    raise changed(path)
            drafts = self._drafts(shape, views, regions, metadata, class_path)
            return self._catalog.publish(drafts, self._name)

    def _stored_under(self, lease: Lease, spans: Sequence[Span]) -> list[tuple[str, Location]]:
        """The digest and location of each span, every reused object named by the lease.

        The save writes the lease first, and then checks the manifests of the reused objects again.
        A collector that does not see the lease has listed the manifests before that check.
        """
        while True:
            regions = self._stored(spans)
            reused = {where.object: where.source for _, where in regions if where.source}
            if not reused:
                return regions
            lease.write(reused)
            lost = lost_objects(self._files, self._catalog, reused)
            if not lost:
                return regions
            self._inventory.drop(lost)

    def _stored(self, spans: Sequence[Span]) -> list[tuple[str, Location]]:
        """The three stages: classify, hash, upload."""
        digests: dict[Span, str] = {}
        uploading: set[str] = set()
        self._progress.begin(sum(span.size for span in spans))
        with Uploads(self._files, self._progress) as uploads:
            for batch in classify(spans, self._inventory, self._files):
                for piece in batch.new:
                    uploads.add(piece)
                if any(span not in digests for span in batch.resembled):
                    self._note(uploads.settle(), digests)
                for piece in hashed(batch.unsure):
                    digests[piece.span] = piece.digest
                    if piece.digest in self._inventory or piece.digest in uploading:
                        self._progress.reused(len(piece.data))
                    else:
                        uploading.add(piece.digest)
                        uploads.add(piece)
            self._note(uploads.finish(), digests)
        return [(digests[span], self._inventory[digests[span]]) for span in spans]

    def _note(self, stored: list[StoredRegion], digests: dict[Span, str]) -> None:
        for each in stored:
            digests[each.span] = each.digest
            if self._inventory.add(each.digest, each.location) and each.is_new:
                self._added += each.location.size

    def _drafts(
        self,
        shape: Any,
        views: list[View],
        regions: list[tuple[str, Location]],
        metadata: dict[str, Any],
        class_path: str | None,
    ) -> Iterator[Manifest]:
        """The manifest under one free version number after another."""
        import torch

        numbers: dict[StoredObject, int] = {}
        stored = [
            Region(digest, where.size, numbers.setdefault(where.object, len(numbers)), where.start)
            for digest, where in regions
        ]
        first = self._catalog.last_number(self._name) + 1
        for version in range(first, first + _ATTEMPTS):
            yield Manifest(
                format=FORMAT,
                name=self._name,
                version=version,
                created=datetime.now(UTC),
                skyward=packages.version("skyward-torch"),
                torch=str(torch.__version__),
                class_path=class_path,
                metadata=metadata,
                added=self._added,
                objects=list(numbers),
                regions=stored,
                tensors=views,
                tree=shape,
            )


def _writes(tensor: torch.Tensor) -> int:
    """A number that every write to the tensor changes, as far as torch sees the write."""
    return 0 if tensor.is_inference() else tensor._version
