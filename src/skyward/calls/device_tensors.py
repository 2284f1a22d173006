"""Device tensors: a call gets those of its own node by reference, and others as copies there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

Holder = tuple[int, int | None]
"""A node, and a worker of it if only that worker can reach the device."""


class DeviceTensors:
    """The sky tensors among one call's arguments, and the node that the call must run on."""

    def __init__(
        self,
        holder_of: Callable[[int], Holder | None],
        on: int | None,
        open_on: Callable[[int], int | None] = lambda node: None,
    ) -> None:
        """`open_on` is the index of an open device of a node."""
        self._holder_of, self._on, self._open_on = holder_of, on, open_on
        self.holder: Holder | None = None
        """Where the call must run; None as long as it refers to no tensor."""

    def __call__(
        self, storages: list[torch.UntypedStorage]
    ) -> list[tuple[bytes, torch.UntypedStorage]] | None:
        """How the holder opens each of these storages, or a copy that it has; None if it cannot.

        Waits for the devices, and raises errors of earlier operations on them.
        """
        from skyward.device.core import core

        known: dict[int, Holder] = {}
        for index in {storage.device.index for storage in storages}:
            holder = self._holder_of(index)
            if holder is None:
                return None
            known[index] = holder
        target = self._target(storages, known)
        if target is None:
            return None
        target_holder, device = target
        there = [
            storage if known[storage.device.index] == target_holder else _moved(storage, device)
            for storage in storages
        ]
        by_device: dict[int, list[int]] = {}
        for storage in there:
            if storage is None:
                return None
            by_device.setdefault(storage.device.index, []).append(storage.data_ptr())
        descriptions: dict[int, bytes] = {}
        for index, pointers in by_device.items():
            descriptions |= zip(pointers, core().export(index, pointers), strict=True)
        if not all(descriptions.values()):
            return None
        self.holder = target_holder
        return [(descriptions[each.data_ptr()], each) for each in there if each is not None]

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
        index = self._open_on(self._on)
        found = None if index is None else self._holder_of(index)
        return None if found is None or index is None else (found, index)


def _moved(storage: torch.UntypedStorage, index: int) -> torch.UntypedStorage | None:
    """A copy of a storage on another device; None if there is no way between the two devices."""
    import torch

    flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    try:
        return flat.to(torch.device("sky", index)).untyped_storage()
    except RuntimeError:
        # The bytes go through the client; if a device is gone, reading them says so.
        return None
