"""Kept objects: the tensors of a result, or of a value with a name, are those of a node's device.

The pickle of such an object names storages by their numbers. Those of a result go from the process
that ran the function to memory of the device's process, which the client has made for them; those
of a value are there already, and the device's process holds them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from skyward.errors import SerializationError
from skyward.objects import references, tensors
from skyward.objects.tensors import Reduced, Shelf, StorageBook, StorageRef

if TYPE_CHECKING:
    import torch

Span = tuple[int, int]
"""The first byte of a storage that is kept, and the end of the part that is."""
Place = tuple[int, int]
"""Where a storage's bytes go: the number of a piece of memory, and an offset in the piece."""


class KeptBook(StorageBook):
    """The storages of an object, some of which are kept on a device; the others travel."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[KeptRef] = []

    def keep(self, storage: torch.UntypedStorage) -> StorageRef:
        """A reference to a storage that is kept."""
        self.kept.append(KeptRef(len(self.kept), storage))
        return self.kept[-1]

    def send(self, kind: type[StorageRef], storage: torch.UntypedStorage) -> StorageRef:
        """A reference to a storage that travels with the pickle."""
        self.refs.append(kind(len(self.refs), storage))
        return self.refs[-1]

    def note(self, value: object) -> None:
        """Look at an object that is encoded, before its tensors are."""

    def reduce_device(self, device: torch.device) -> Any:
        """How a device is rebuilt; `NotImplemented` if as itself."""
        raise NotImplementedError


class ResultBook(KeptBook):
    """The storages of a function's result, in the process that ran the function.

    `by_value` sends their bytes with the pickle instead.
    """

    def __init__(
        self, opened: Sequence[tuple[torch.UntypedStorage, bytes]], *, by_value: bool = False
    ) -> None:
        """`opened` are the device's own storages that the function was given."""
        super().__init__()
        self._opened = {storage._cdata: description for storage, description in opened}
        self._by_value = by_value
        self._on_host: set[int] = set()

    def new_reference(self, storage: torch.UntypedStorage) -> StorageRef:
        """The reference to a storage that the result has not named before."""
        description = self._opened.get(storage._cdata)
        if description is not None:
            return ReturnedRef(description, storage)
        if storage._cdata in self._on_host:
            return self.send(HostRef, storage)
        return self.send(StorageRef, storage) if self._by_value else self.keep(storage)

    def note(self, value: object) -> None:
        """Note which tensors of an optimiser belong to the host: its counts of steps.

        On a device, each step of the optimiser would read every one of them.
        """
        import torch

        if not isinstance(value, torch.optim.Optimizer):
            return
        if any(group.get("capturable") or group.get("fused") for group in value.param_groups):
            return
        for state in value.state.values():
            for part in state.values() if isinstance(state, dict) else ():
                if isinstance(part, torch.Tensor) and part.is_cpu and not part.dim():
                    self._on_host.add(part.untyped_storage()._cdata)

    def reduce_device(self, device: torch.device) -> Any:
        """How a device in a result is rebuilt: as the device that has the result's tensors."""
        return NotImplemented if device.type == "meta" else (_device, ())

    @property
    def spans(self) -> list[Span]:
        """The part of each kept storage that the result's tensors cover."""
        return [(ref.first, ref.last) if ref.last else (0, 0) for ref in self.kept]

    def fill(self, pieces: list[bytes], places: list[Place]) -> None:
        """Copy every kept storage to its place; `CannotOpenError` if this process cannot."""
        import torch

        opened = [references.flat(description) for description in pieces]
        for device in {ref.storage.device for ref in self.kept}:
            if device.type == "cuda":
                # The function may have written on a stream of its own.
                torch.cuda.synchronize(device)
        for ref, (first, last), (piece, start) in zip(self.kept, self.spans, places, strict=True):
            if last > first:
                source = torch.empty(0, dtype=torch.uint8, device=ref.storage.device)
                part = source.set_(ref.storage)[first:last]
                opened[piece][start : start + last - first].copy_(part)
        # A GPU copies later, but the client may read as soon as it has the result.
        references.settle()


class KeptRef(StorageRef):
    """A storage that is kept."""

    def __reduce__(self) -> Reduced:
        return _kept, (self.index,)


class ReturnedRef(StorageRef):
    """A storage of the device that the function was given, and returns."""

    def __init__(self, description: bytes, storage: torch.UntypedStorage) -> None:
        super().__init__(0, storage)
        self._description = description

    def __reduce__(self) -> Reduced:
        return _returned, (self._description,)


class HostRef(StorageRef):
    """A storage whose tensors belong to the host."""

    def __reduce__(self) -> Reduced:
        return _on_host, (self.index,)


class ValueBook(KeptBook):
    """The storages of a value that is kept by name: those of a sky device, in the client."""

    def new_reference(self, storage: torch.UntypedStorage) -> StorageRef:
        """The reference to a storage that the value has not named before."""
        if storage.device.type == "sky":
            return self.keep(storage)
        # Tensors of the host stay tensors of the host.
        return self.send(HostRef, storage)

    def reduce_device(self, device: torch.device) -> Any:
        """How a device in the value is rebuilt: a sky device as the one that the tensors are on."""
        return (_device, ()) if device.type == "sky" else NotImplemented


class KeptTensors(Protocol):
    """The tensors of one kept object, as the client finds them on the device."""

    @property
    def device(self) -> torch.device:
        """The device that the tensors are on."""

    def storage(self, index: int) -> tuple[torch.UntypedStorage, int]:
        """A kept storage, and the first byte of the original that it holds."""

    def argument(self, description: bytes) -> torch.UntypedStorage:
        """The client's own storage, which the function was given and has returned."""


@dataclass(frozen=True, slots=True)
class ValueTensors:
    """The tensors of a value that was kept by name."""

    device: torch.device
    storages: Sequence[torch.UntypedStorage]

    def storage(self, index: int) -> tuple[torch.UntypedStorage, int]:
        """A storage, all of which is there."""
        return self.storages[index], 0

    def argument(self, description: bytes) -> torch.UntypedStorage:
        """Refuse: a value that is kept is no result of a function."""
        raise SerializationError("a kept value refers to a tensor that a function was given")


class KeptShelf(Shelf):
    """The storages of a kept object: by value they come to the host, and go back."""

    def __init__(
        self, buffers: list[memoryview], places: list[tuple[int, int]], kept: KeptTensors
    ) -> None:
        super().__init__(buffers, places)
        self.kept = kept

    def storage(self, index: int, device: str) -> tuple[torch.UntypedStorage, int]:
        """The storage on the device."""
        import torch

        host, first = super().storage(index, "")
        flat = torch.empty(0, dtype=torch.uint8).set_(host)
        return flat.to(self.kept.device).untyped_storage(), first

    def on_host(self, index: int) -> tuple[torch.UntypedStorage, int]:
        """A storage that belongs to the host."""
        return super().storage(index, "")


def _shelf() -> KeptShelf:
    shelf = tensors.shelf()
    if not isinstance(shelf, KeptShelf):
        raise SerializationError("a kept object was loaded outside of its own payload")
    return shelf


def _kept(index: int) -> tuple[torch.UntypedStorage, int]:
    return _shelf().kept.storage(index)


def _returned(description: bytes) -> tuple[torch.UntypedStorage, int]:
    return _shelf().kept.argument(description), 0


def _on_host(index: int) -> tuple[torch.UntypedStorage, int]:
    return _shelf().on_host(index)


def _device() -> torch.device:
    return _shelf().kept.device
