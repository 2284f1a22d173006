"""Placing: the node of a torch device loads a version itself, into the device's own memory."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import xxhash

from skyward.errors import ConfigurationError, StoreError
from skyward.functions import function
from skyward.store import manifest as manifests
from skyward.store.catalog import Catalog
from skyward.store.errands import Errands, Refusal
from skyward.store.files import Address, Files
from skyward.store.loading import Loading
from skyward.store.manifest import Manifest
from skyward.store.progress import Progress
from skyward.wire import references

if TYPE_CHECKING:
    import torch

_TOGETHER = 128 << 20
"""So many bytes are asked for at once, which is what `into=` takes there beside the model."""
_SMALL = 1 << 20
"""Tensors below this come together in one piece of memory, and are taken apart on the device: each
piece that another process opens costs a descriptor and whole pages."""
_ALIGNMENT = 64
_IDLE_SECONDS = 60.0
"""How long a node keeps what it has opened for a load of which it hears no more."""


def loading_on(
    address: Address, files: Files, manifest: Manifest, progress: Progress, device: torch.device
) -> Loading:
    """Who reads what a device gets: this process, or the node of a sky device."""
    if device.type != "sky":
        return Loading(files, manifest, progress)
    return Placing(address, files, manifest, progress, device)


@dataclass(frozen=True, slots=True)
class Order:
    """One load, as the node is told of it."""

    id: str
    address: Address
    name: str
    version: int
    identity: str
    """Of the manifest as it was read here: elsewhere, the same path may be another store."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where a region's bytes go: into which piece of memory, and where in that."""

    region: int
    piece: int
    start: int


class Placing(Loading):
    """The regions of one version on a sky device, read and verified by the device's node.

    If the node cannot reach a store that lies on one machine, that is read here, and sent.
    """

    def __init__(
        self,
        address: Address,
        files: Files,
        manifest: Manifest,
        progress: Progress,
        device: torch.device,
    ) -> None:
        super().__init__(files, manifest, progress)
        self._errands = Errands(address, files, device)
        self._order = Order(
            uuid.uuid4().hex, address, manifest.name, manifest.version, _identity(manifest)
        )

    def verify(self, wanted: Iterable[int]) -> None:
        """Check regions ahead of `regions`, where that costs no second download."""
        indices = sorted(set(wanted))
        answer = self._errands.run(_verify(self._order, indices))
        if isinstance(answer, Refusal):
            super().verify(indices)

    def regions(self, wanted: Iterable[int]) -> Iterator[tuple[int, torch.Tensor]]:
        """Each region as flat bytes of its own, on the device unless it was read here."""
        import torch

        batches = list(self._batches(wanted))
        for number, batch in enumerate(batches):
            last = number == len(batches) - 1
            placed = self._placed(batch, last) if self._errands.possible else None
            if placed is None:
                yield from super().regions(index for late in batches[number:] for index in late)
                return
            self._progress.advance(self.size(batch))
            yield from placed
        # A device that died meanwhile is noticed here, and not by whoever uses the model first.
        torch.accelerator.synchronize(self._errands.device)

    def _batches(self, wanted: Iterable[int]) -> Iterator[list[int]]:
        """What is asked for at once: whole objects, so that none is read twice."""
        by_object: dict[int, list[int]] = {}
        for index in sorted(set(wanted)):
            by_object.setdefault(self._manifest.regions[index].object, []).append(index)
        batch: list[int] = []
        size = 0
        for indices in by_object.values():
            batch += indices
            size += sum(self._manifest.regions[index].size for index in indices)
            if size >= _TOGETHER:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch

    def _placed(self, batch: list[int], last: bool) -> list[tuple[int, torch.Tensor]] | None:
        import torch

        sizes = {index: self._manifest.regions[index].size for index in batch}
        large = [index for index in batch if sizes[index] >= _SMALL]
        small = [index for index in batch if sizes[index] < _SMALL]
        targets = [Target(index, piece, 0) for piece, index in enumerate(large)]
        end = 0
        for index in small:
            targets.append(Target(index, len(large), end))
            end += -(-sizes[index] // _ALIGNMENT) * _ALIGNMENT
        lengths = [sizes[index] for index in large] + ([end] if small else [])
        device = self._errands.device
        pieces = [torch.empty(length, dtype=torch.uint8, device=device) for length in lengths]
        # The export waits until the memory is there, and the node answers when it is filled: what
        # is issued on the device after this finds the bytes.
        memory = self._errands.export([piece.untyped_storage() for piece in pieces])
        if memory is None:
            return None
        answer = self._errands.run(_fill(self._order, targets, memory, last))
        if isinstance(answer, Refusal):
            return None
        placed = dict(zip(large, pieces, strict=False))
        for target in targets[len(large) :]:
            part = pieces[-1][target.start : target.start + sizes[target.region]]
            placed[target.region] = part.clone()
        return [(index, placed[index]) for index in batch]


def _identity(manifest: Manifest) -> str:
    return xxhash.xxh3_128_hexdigest(manifests.encode(manifest))


# On the node.


class Opened:
    """What the loads in progress have opened: manifests, connections, and what was verified.

    A load is dropped when it is over; one whose client is gone, when nobody has asked for it any
    more for so many seconds.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._loadings: dict[Order, Loading | Refusal] = {}
        self._timers: dict[Order, threading.Timer] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._loadings)

    def get(self, order: Order) -> Loading | Refusal:
        """The version as this node sees it; what one load has verified stays verified for it."""
        with self._lock:
            loading = self._loadings.get(order)
        if loading is None:
            loading = _open(order)
        self.drop(order)
        timer = threading.Timer(self._seconds, self.drop, [order])
        timer.daemon = True
        with self._lock:
            self._loadings[order] = loading
            self._timers[order] = timer
        timer.start()
        return loading

    def drop(self, order: Order) -> None:
        """Forget a load."""
        with self._lock:
            self._loadings.pop(order, None)
            timer = self._timers.pop(order, None)
        if timer is not None:
            timer.cancel()


_loads = Opened(_IDLE_SECONDS)


# The functions below travel with the values of the globals they use, but not with functions.
def _opened(order: Order) -> Loading | Refusal:
    return _loads.get(order)


def _over(order: Order) -> None:
    _loads.drop(order)


def _open(order: Order) -> Loading | Refusal:
    try:
        files = order.address.open()
        manifest = Catalog(files).read(order.name, order.version)
    except (StoreError, ConfigurationError, ImportError) as problem:
        return Refusal("store", f"{type(problem).__name__}: {problem}")
    if _identity(manifest) != order.identity:
        return Refusal("store", f"its {order.name!r} version {order.version} is another one")
    return Loading(files, manifest)


@function(name="load_model", retries=1)
def _verify(order: Order, wanted: list[int]) -> Refusal | None:
    loading = _opened(order)
    if isinstance(loading, Refusal):
        return loading
    loading.verify(wanted)
    return None


@function(name="load_model", retries=1)
def _fill(order: Order, targets: list[Target], memory: list[bytes], last: bool) -> Refusal | None:
    """Copy regions to the memory described; at most one object is held beside it."""
    loading = _opened(order)
    if isinstance(loading, Refusal):
        return loading
    try:
        pieces = [references.flat(description) for description in memory]
    except references.UnreachableError as problem:
        return Refusal("memory", str(problem))
    by_region = {target.region: target for target in targets}
    for region, flat in loading.regions(by_region):
        target = by_region[region]
        pieces[target.piece][target.start : target.start + len(flat)].copy_(flat)
    if last:
        _over(order)
    return None
