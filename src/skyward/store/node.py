"""Saving and loading by the node of a torch device, so that the weights skip the client."""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import xxhash

from skyward.errors import ConfigurationError, StoreError
from skyward.functions import Pending, function
from skyward.objects import references
from skyward.objects.memory import rounded_up
from skyward.store import manifest as manifests
from skyward.store.address import Address
from skyward.store.catalog import Catalog
from skyward.store.load import Loading
from skyward.store.manifest import Manifest
from skyward.store.places import Files
from skyward.store.progress import Progress
from skyward.store.save import Saving
from skyward.store.values import plain_tensor

if TYPE_CHECKING:
    import torch

_SENT_LIMIT = 16 << 20
"""The client sends its own tensors, such as an optimiser's step counts, along up to this size."""
_SMALL_SAVED = 64 << 10
"""Smaller storages are copied to one: each that another process opens costs a descriptor."""
_TOGETHER = 128 << 20
"""One request loads about this many bytes; `into=` needs as much memory beside the model."""
_SMALL_LOADED = 1 << 20
"""Tensors below this size are loaded into one shared piece of memory and then copied on the device:
each piece that another process opens costs a descriptor and whole pages."""
_IDLE_SECONDS = 60.0
"""How long a node keeps a load open after the load's last request."""

T = TypeVar("T")

_log = logging.getLogger("skyward.store")


@dataclass(frozen=True, slots=True)
class Refusal:
    """A node's answer if it cannot reach the store or the memory that a request names."""

    what: str
    """What the node cannot reach: "store", or "memory" of its own device."""
    why: str


class NodeRequests:
    """Sends calls to the node of a sky device until the node refuses one."""

    def __init__(self, address: Address, files: Files, device: torch.device) -> None:
        import torch

        # Imported here: a process that only saves to a folder needs no pool.
        from skyward.compute.home import home_of
        from skyward.device.mesh import mesh_at

        self._address = address
        self._url = files.url
        # "sky" alone means the current device; a device that is gone raises here.
        self.device = torch.empty(0, device=device).device
        # The ranks of a mesh may have different values: what is saved of them, the client knows.
        self._home = None if mesh_at(self.device) else home_of(self.device)

    @property
    def possible(self) -> bool:
        """Whether the device has a node that has not refused yet."""
        return self._home is not None

    def run(self, pending: Pending[T]) -> T | Refusal:
        """Run a call on the node; after a refusal the client has to do the work."""
        if self._home is None:
            return Refusal("store", "the device belongs to no open pool")
        outcome = self._home.run(pending)
        if isinstance(outcome, Refusal):
            self._note_refusal(outcome)
        return outcome

    def export(self, storages: list[torch.UntypedStorage]) -> list[bytes] | None:
        """Descriptions by which other processes of the node open storages; None if they cannot.

        Waits for everything that was issued on the device before.
        """
        from skyward.device.core import core

        pointers = [storage.data_ptr() for storage in storages]
        descriptions = core().export(self.device.index, pointers)
        if all(descriptions):
            return descriptions
        self._note_refusal(Refusal("memory", "it is of a kind that cannot be shared"))
        return None

    def _note_refusal(self, refusal: Refusal) -> None:
        """Send no more requests; warn that the client does the work, or raise if it should not."""
        node, self._home = self._home, None
        if refusal.what == "memory":
            _log.warning(
                "a second process of %s cannot open its device's memory (%s); "
                "the bytes of the model go through this machine",
                node,
                refusal.why,
            )
        elif self._address.of_one_machine:
            _log.warning(
                "%s does not see the store %s (%s); the bytes of the model go through this "
                "machine: keep the store where both can reach it to spare that",
                node,
                self._url,
                refusal.why,
            )
        else:
            raise StoreError(
                f"{node} cannot use {self._url}, though this machine can: {refusal.why}; give the "
                "node what it needs with sky.Image(pip=[...], env={...}), because credentials of "
                "this machine are not passed on, or go through device='cpu' and .to(device)"
            )


# Saving.


@dataclass(frozen=True, slots=True)
class TensorLocation:
    """A tensor on the device: the number of its storage, and its layout in the storage."""

    piece: int
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def save_on_node(
    address: Address,
    files: Files,
    name: str,
    tree: Any,
    tensors: Sequence[tuple[str, torch.Tensor]],
    metadata: dict[str, Any],
    class_path: str | None,
) -> Manifest | None:
    """Have the node save the tensors of its device; None if the client has to save them."""
    devices = {
        tensor.device for _, tensor in tensors if tensor.device.type == "sky" and tensor.numel()
    }
    if len(devices) != 1:
        return None
    plain = [(path, plain_tensor(path, tensor)) for path, tensor in tensors]
    own = [tensor.untyped_storage() for _, tensor in plain if tensor.device.type != "sky"]
    sizes = {storage._cdata: storage.nbytes() for storage in own}
    if any(storage.device.type != "cpu" for storage in own) or sum(sizes.values()) > _SENT_LIMIT:
        return None
    requests = NodeRequests(address, files, devices.pop())
    if not requests.possible:
        return None
    pieces = _SharedStorages()
    parts = [
        (path, pieces.locate(tensor) if tensor.device.type == "sky" else tensor)
        for path, tensor in plain
    ]
    storages = pieces.gathered()  # the memory must stay allocated until the node is done
    memory = requests.export(storages)
    if memory is None:
        return None
    # Only this client knows the name of this file: a node that finds the file has the same store.
    mark = f"tmp/{uuid.uuid4().hex}"
    files.write(mark, [b"is the store of this name the same one?\n"])
    try:
        saved = requests.run(
            _save_on_node(address, mark, name, tree, parts, memory, metadata, class_path)
        )
    finally:
        files.delete(mark)
    return None if isinstance(saved, Refusal) else saved


class _SharedStorages:
    """The storages of tensors on a device; small ones are gathered in one."""

    def __init__(self) -> None:
        self._places: dict[int, tuple[int, int]] = {}
        self._large: list[torch.UntypedStorage] = []
        self._small: list[torch.UntypedStorage] = []
        self._end = 0

    def locate(self, tensor: torch.Tensor) -> TensorLocation:
        """Add the storage of a tensor; returns where the tensor lies."""
        storage = tensor.untyped_storage()
        piece, start = self._place(storage) if tensor.numel() else (0, 0)
        offset = start // tensor.element_size() + int(tensor.storage_offset())
        return TensorLocation(
            piece, tensor.dtype, offset, tuple(tensor.shape), tuple(tensor.stride())
        )

    def _place(self, storage: torch.UntypedStorage) -> tuple[int, int]:
        key = storage.data_ptr()
        if key not in self._places:
            if storage.nbytes() < _SMALL_SAVED:
                self._small.append(storage)
                self._places[key] = (0, self._end)
                self._end += rounded_up(storage.nbytes())
            else:
                self._large.append(storage)
                self._places[key] = (len(self._large), 0)
        return self._places[key]

    def gathered(self) -> list[torch.UntypedStorage]:
        """The storages by number; the first holds the small ones."""
        import torch

        device = (self._small + self._large)[0].device
        gathered = torch.empty(self._end, dtype=torch.uint8, device=device)
        for storage in self._small:
            _, start = self._places[storage.data_ptr()]
            flat = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
            gathered[start : start + len(flat)].copy_(flat)
        return [gathered.untyped_storage(), *self._large]


@function(name="save_model")
def _save_on_node(
    address: Address,
    mark: str,
    name: str,
    tree: Any,
    parts: list[tuple[str, TensorLocation | torch.Tensor]],
    memory: list[bytes],
    metadata: dict[str, Any],
    class_path: str | None,
) -> Manifest | Refusal:
    import torch

    try:
        files = address.open()
        if files.size(mark) is None:
            return Refusal("store", "a file that the client wrote is missing")
    except (StoreError, ConfigurationError, ImportError) as problem:
        return Refusal("store", f"{type(problem).__name__}: {problem}")
    try:
        storages = [references.storage(description) for description in memory]
    except references.CannotOpenError as problem:
        return Refusal("memory", str(problem))

    def tensor(part: TensorLocation | torch.Tensor) -> torch.Tensor:
        if isinstance(part, torch.Tensor):
            return part
        storage = storages[part.piece]
        empty = torch.empty(0, dtype=part.dtype, device=storage.device)
        if 0 in part.shape:
            return empty.reshape(part.shape)
        return empty.set_(storage, part.offset, part.shape, part.strides)

    tensors = [(path, tensor(part)) for path, part in parts]
    return Saving(Catalog(files), name).save(tree, tensors, metadata, class_path)


# Loading.


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
        batch: list[int] = []
        size = 0
        for indices in self._by_object(wanted).values():
            batch += indices
            size += self.size(indices)
            if size >= _TOGETHER:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch

    def _loaded(self, batch: list[int], last: bool) -> list[tuple[int, torch.Tensor]] | None:
        import torch

        sizes = {index: self._manifest.regions[index].size for index in batch}
        large = [index for index in batch if sizes[index] >= _SMALL_LOADED]
        small = [index for index in batch if sizes[index] < _SMALL_LOADED]
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
