"""Loading on a node: the node of a torch device reads a version into the device's memory."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import xxhash

from skyward.errors import ConfigurationError, StoreError
from skyward.functions import function
from skyward.objects import references
from skyward.objects.memory import rounded_up
from skyward.store.catalog import Catalog
from skyward.store.format import manifest as manifests
from skyward.store.format.manifest import Manifest
from skyward.store.loading import Loading
from skyward.store.on_node.requests import NodeRequests, Refusal
from skyward.store.places.files import Files
from skyward.store.places.opening import Address
from skyward.store.progress import Progress

if TYPE_CHECKING:
    import torch

_TOGETHER = 128 << 20
"""One request loads about this many bytes; `into=` needs as much memory beside the model."""
_SMALL = 1 << 20
"""Tensors below this size are loaded into one shared piece of memory and then copied on the device:
each piece that another process opens costs a descriptor and whole pages."""
_IDLE_SECONDS = 60.0
"""How long a node keeps a load open after the load's last request."""


def loading_for_device(
    address: Address, files: Files, manifest: Manifest, progress: Progress, device: torch.device
) -> Loading:
    """The reader for a device: this process, or the node of a sky device."""
    if device.type != "sky":
        return Loading(files, manifest, progress)
    return NodeLoading(address, files, manifest, progress, device)


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One load, as the client describes it to the node."""

    id: str
    address: Address
    name: str
    version: int
    identity: str
    """Digest of the client's manifest: on the node, the same path may be another store."""


@dataclass(frozen=True, slots=True)
class RegionTarget:
    """Where the node writes a region: the number of a piece of memory, and an offset in it."""

    region: int
    piece: int
    start: int


class NodeLoading(Loading):
    """The regions of one version on a sky device, read and verified by the device's node.

    If the node cannot reach a store on the client's machine, the client reads the regions.
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
        self._requests = NodeRequests(address, files, device)
        self._request = LoadRequest(
            uuid.uuid4().hex, address, manifest.name, manifest.version, _identity(manifest)
        )

    def verify(self, wanted: Iterable[int]) -> None:
        """Verify regions before `regions` reads them, if that needs no second download."""
        indices = sorted(set(wanted))
        answer = self._requests.run(_verify_on_node(self._request, indices))
        if isinstance(answer, Refusal):
            super().verify(indices)

    def regions(self, wanted: Iterable[int]) -> Iterator[tuple[int, torch.Tensor]]:
        """Each region as flat bytes of its own, on the device unless the client reads it."""
        import torch

        batches = list(self._batches(wanted))
        for number, batch in enumerate(batches):
            last = number == len(batches) - 1
            loaded = self._loaded(batch, last) if self._requests.possible else None
            if loaded is None:
                yield from super().regions(index for late in batches[number:] for index in late)
                return
            self._progress.advance(self.size(batch))
            yield from loaded
        # If the device has died, this raises now, not at the first use of the model.
        torch.accelerator.synchronize(self._requests.device)

    def _batches(self, wanted: Iterable[int]) -> Iterator[list[int]]:
        """The regions of each request: those of whole objects, so that no object is read twice."""
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

    def _loaded(self, batch: list[int], last: bool) -> list[tuple[int, torch.Tensor]] | None:
        import torch

        sizes = {index: self._manifest.regions[index].size for index in batch}
        large = [index for index in batch if sizes[index] >= _SMALL]
        small = [index for index in batch if sizes[index] < _SMALL]
        targets = [RegionTarget(index, piece, 0) for piece, index in enumerate(large)]
        end = 0
        for index in small:
            targets.append(RegionTarget(index, len(large), end))
            end += rounded_up(sizes[index])
        lengths = [sizes[index] for index in large] + ([end] if small else [])
        device = self._requests.device
        pieces = [torch.empty(length, dtype=torch.uint8, device=device) for length in lengths]
        # The export waits until the memory is allocated, and the node answers when the memory is
        # filled: later operations on the device find the bytes.
        memory = self._requests.export([piece.untyped_storage() for piece in pieces])
        if memory is None:
            return None
        answer = self._requests.run(_load_on_node(self._request, targets, memory, last))
        if isinstance(answer, Refusal):
            return None
        found = dict(zip(large, pieces, strict=False))
        for target in targets[len(large) :]:
            part = pieces[-1][target.start : target.start + sizes[target.region]]
            found[target.region] = part.clone()
        return [(index, found[index]) for index in batch]


def _identity(manifest: Manifest) -> str:
    return xxhash.xxh3_128_hexdigest(manifests.encode(manifest))


# On the node.


class OpenLoads:
    """The loads in progress on a node: their manifests, connections and verified regions.

    A load is dropped when it is over, or some seconds after the last request if its client is gone.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._open: dict[LoadRequest, Loading | Refusal] = {}
        self._timers: dict[LoadRequest, threading.Timer] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._open)

    def get(self, request: LoadRequest) -> Loading | Refusal:
        """The load, opened unless it is open; regions that it has verified stay verified."""
        with self._lock:
            loading = self._open.get(request)
        if loading is None:
            loading = _open(request)
        self.drop(request)
        timer = threading.Timer(self._seconds, self.drop, [request])
        timer.daemon = True
        with self._lock:
            self._open[request] = loading
            self._timers[request] = timer
        timer.start()
        return loading

    def drop(self, request: LoadRequest) -> None:
        """Forget a load."""
        with self._lock:
            self._open.pop(request, None)
            timer = self._timers.pop(request, None)
        if timer is not None:
            timer.cancel()


_loads = OpenLoads(_IDLE_SECONDS)


# A function that is sent to a node is sent with the values of the globals that it uses. The two
# functions below keep `_loads` on the node.
def _opened(request: LoadRequest) -> Loading | Refusal:
    return _loads.get(request)


def _drop(request: LoadRequest) -> None:
    _loads.drop(request)


def _open(request: LoadRequest) -> Loading | Refusal:
    try:
        files = request.address.open()
        manifest = Catalog(files).read(request.name, request.version)
    except (StoreError, ConfigurationError, ImportError) as problem:
        return Refusal("store", f"{type(problem).__name__}: {problem}")
    if _identity(manifest) != request.identity:
        return Refusal("store", f"its {request.name!r} version {request.version} is another one")
    return Loading(files, manifest)


@function(name="load_model", retries=1)
def _verify_on_node(request: LoadRequest, wanted: list[int]) -> Refusal | None:
    loading = _opened(request)
    if isinstance(loading, Refusal):
        return loading
    loading.verify(wanted)
    return None


@function(name="load_model", retries=1)
def _load_on_node(
    request: LoadRequest, targets: list[RegionTarget], memory: list[bytes], last: bool
) -> Refusal | None:
    """Copy regions to the described memory; holds one object at a time besides."""
    loading = _opened(request)
    if isinstance(loading, Refusal):
        return loading
    try:
        pieces = [references.flat(description) for description in memory]
    except references.CannotOpenError as problem:
        return Refusal("memory", str(problem))
    by_region = {target.region: target for target in targets}
    for region, flat in loading.regions(by_region):
        target = by_region[region]
        pieces[target.piece][target.start : target.start + len(flat)].copy_(flat)
    if last:
        _drop(request)
    return None
