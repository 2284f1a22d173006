"""Device tensors: a call gets those of its own node by reference, and others as copies there.

The calls of a broadcast get copies alone, each its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from skyward.objects.encoding import Refer

Holder = tuple[int, int | None]
"""A node, and a worker of it if only that worker can reach the device."""


class CallDevices(Protocol):
    """The torch devices of a pool, as its calls need them."""

    def holder(self, index: int) -> Holder | None:
        """Who holds a device; None if it is not one of the pool's."""

    def ranks_of(
        self, index: int, workers: Sequence[tuple[int, int]]
    ) -> Mapping[tuple[int, int], int] | None:
        """The rank that each worker has in a mesh; None if the device is no mesh."""

    def open_on(self, node: int) -> list[int]:
        """The indices of the open devices of a node, without meshes."""

    def for_result(self, wanted: str | torch.device, node: int, worker: int) -> torch.device:
        """The device that the results of a worker stay on."""


class DeviceTensors:
    """The sky tensors among one call's arguments, and the node that the call must run on."""

    def __init__(self, devices: CallDevices, on: int | None) -> None:
        self._devices, self._on = devices, on
        self.holder: Holder | None = None
        """Where the call must run; None as long as it refers to no tensor."""

    def __call__(
        self, storages: list[torch.UntypedStorage]
    ) -> list[tuple[bytes, torch.UntypedStorage]] | None:
        """How the holder opens each of these storages, or a copy that it has; None if it cannot.

        Waits for the devices, and raises errors of earlier operations on them.
        """
        known: dict[int, Holder] = {}
        for index in {storage.device.index for storage in storages}:
            holder = self._devices.holder(index)
            if holder is None:
                return None
            known[index] = holder
        target = self._target(storages, known)
        if target is None:
            return None
        target_holder, device = target
        described = _described(
            [
                storage if known[storage.device.index] == target_holder else _moved(storage, device)
                for storage in storages
            ]
        )
        if described is not None:
            self.holder = target_holder
        return described

    def _target(
        self, storages: list[torch.UntypedStorage], known: Mapping[int, Holder]
    ) -> tuple[Holder, int] | None:
        """The holder that the call goes to, and a device of it: where most of the bytes are."""
        sizes: dict[Holder, int] = {}
        for storage in storages:
            holder = known[storage.device.index]
            if self._on is None or holder[0] == self._on:
                sizes[holder] = sizes.get(holder, 0) + storage.nbytes()
        if sizes:
            most = max(sizes, key=lambda holder: sizes[holder])
            return most, next(index for index, holder in known.items() if holder == most)
        assert self._on is not None
        for index in self._devices.open_on(self._on):
            found = self._devices.holder(index)
            if found is not None:
                return found, index
        return None


class BroadcastTensors:
    """The sky tensors among the arguments of a broadcast: copies for every worker.

    Of tensors of a mesh, each worker has its own already, those of its rank. The first call that
    is encoded has the copies for all workers begin: what goes to several nodes is then passed on
    from one to the next.
    """

    def __init__(self, devices: CallDevices, workers: Sequence[tuple[int, int]]) -> None:
        self._devices, self._workers = devices, workers
        self._has_begun = False
        self._copies: dict[tuple[int, int], list[torch.UntypedStorage | None]] = {}
        self._meshes: dict[int, Mapping[tuple[int, int], int]] = {}

    def waits_for(self, worker: tuple[int, int]) -> bool:
        """Whether copies were made for this worker that no call refers to yet."""
        return worker in self._copies

    def refer(self, worker: tuple[int, int]) -> Refer:
        """How the call of one worker refers to its copies; None if there is no device for them."""

        def described(
            storages: list[torch.UntypedStorage],
        ) -> list[tuple[bytes, torch.UntypedStorage]] | None:
            if not self._has_begun:
                self._begin(storages)
            copies = self._copies.pop(worker, None)
            if copies is None:
                return None
            return _described(copies, {at: ranks[worker] for at, ranks in self._meshes.items()})

        return described

    def _begin(self, storages: list[torch.UntypedStorage]) -> None:
        self._has_begun = True
        for index in {storage.device.index for storage in storages}:
            ranks = self._devices.ranks_of(index, self._workers)
            if ranks is not None:
                self._meshes[index] = ranks
        for each in self._workers:
            self._copy(each, storages)

    def _copy(self, worker: tuple[int, int], storages: list[torch.UntypedStorage]) -> None:
        node, number = worker
        reached = [(node, None), (node, number)]
        devices = [
            index for index in self._devices.open_on(node) if self._devices.holder(index) in reached
        ]
        # A copy on a mesh is on the worker's rank, too.
        devices += sorted(self._meshes)
        if not devices:
            return
        self._copies[worker] = [
            storage
            if (own := storage.device.index) in self._meshes
            else _moved(storage, own if own in devices else devices[0])
            for storage in storages
        ]


def _described(
    storages: Sequence[torch.UntypedStorage | None], ranks: Mapping[int, int] | None = None
) -> list[tuple[bytes, torch.UntypedStorage]] | None:
    """Storages with how others on their node open them; None if one is not there or cannot be.

    Of a mesh, it is those of the given rank.
    """
    from skyward.device.core import core

    by_device: dict[int, list[int]] = {}
    for storage in storages:
        if storage is None:
            return None
        by_device.setdefault(storage.device.index, []).append(storage.data_ptr())
    descriptions: dict[int, bytes] = {}
    for index, pointers in by_device.items():
        descriptions |= zip(
            pointers, core().export(index, pointers, (ranks or {}).get(index)), strict=True
        )
    if not all(descriptions.values()):
        return None
    return [(descriptions[each.data_ptr()], each) for each in storages if each is not None]


def _moved(storage: torch.UntypedStorage, index: int) -> torch.UntypedStorage | None:
    """A copy of a storage on a device; None if there is no way between the two devices."""
    import torch

    flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    try:
        return flat.to(torch.device("sky", index), copy=True).untyped_storage()
    except RuntimeError:
        # The bytes go through the client; if a device is gone, reading them says so.
        return None
