"""Device tensors: a call on their own node gets them by reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

Holder = tuple[int, int | None]
"""A node, and a worker of it if only that worker can reach the device."""


class DeviceTensors:
    """The sky tensors among one call's arguments, and the node that the call must run on."""

    def __init__(self, holder_of: Callable[[int], Holder | None], on: int | None) -> None:
        self._holder_of, self._on = holder_of, on
        self.holder: Holder | None = None
        """Where the call must run; None as long as it refers to no tensor."""

    def __call__(self, storages: list[torch.UntypedStorage]) -> list[bytes] | None:
        """How the holder opens each of these storages; None if it cannot open all of them.

        Waits for the devices, and raises errors of earlier operations on them.
        """
        from skyward.device.core import core

        by_device: dict[int, list[torch.UntypedStorage]] = {}
        for storage in storages:
            by_device.setdefault(storage.device.index, []).append(storage)
        holders = {self._holder_of(index) for index in by_device}
        holder = holders.pop()
        if holders or holder is None or (self._on is not None and self._on != holder[0]):
            return None
        descriptions: dict[int, bytes] = {}
        for index, held in by_device.items():
            pointers = [storage.data_ptr() for storage in held]
            descriptions |= zip(pointers, core().export(index, pointers), strict=True)
        if not all(descriptions.values()):
            return None
        self.holder = holder
        return [descriptions[storage.data_ptr()] for storage in storages]
