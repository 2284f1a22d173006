"""Kept results: the client makes memory on a node's device for the tensors of a task's result."""

from __future__ import annotations

import functools
import itertools
import queue
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from skyward.errors import ConfigurationError, SerializationError
from skyward.objects.kept import KeptTensors, Place, Span
from skyward.objects.memory import rounded_up
from skyward.wire.messages import Places

if TYPE_CHECKING:
    import torch


_SMALL = 64 << 10
"""Smaller storages come to one piece of memory, and are then copied on the device: each piece that
another process opens costs a descriptor and whole pages."""


class KeptResult:
    """The memory for the results of one task."""

    def __init__(
        self,
        device: Callable[[int, int], torch.device],
        given: Mapping[bytes, torch.UntypedStorage],
    ) -> None:
        """`device` is that of a node and worker, `given` are the device's storages in the call."""
        self._device_of, self._given = device, dict(given)
        self._room: _Room | None = None

    def make_room(self, task: int, node: int, worker: int, spans: list[Span]) -> Places:
        """Memory for storages on the device of the worker that runs the task.

        Opens the device if it is not open, and waits for everything issued on it before.
        """
        from skyward.device.core import core

        room = _Room(self._device_of(node, worker), spans)
        pointers = [piece.untyped_storage().data_ptr() for piece in room.pieces]
        descriptions = core().export(room.device.index, pointers)
        self._room = room
        return Places(task, *((descriptions, room.places) if all(descriptions) else ([], [])))

    def arrived(self, node: int, worker: int) -> ResultTensors:
        """The tensors of a result that has arrived; the next result of a stream gets others."""
        room, self._room = self._room, None
        device = functools.partial(self._device_of, node, worker)
        return ResultTensors(device, room, self._given)

    def discard(self) -> None:
        """Free the memory: nobody will take the result."""
        free([self._room, self._given])
        self._room, self._given = None, {}


class _Room:
    """Memory of a device for storages."""

    def __init__(self, device: torch.device, spans: list[Span]) -> None:
        import torch

        self.device, self.spans = device, spans
        large = [last - first for first, last in spans if last - first >= _SMALL]
        own = itertools.count()
        self.places: list[Place] = []
        end = 0
        for first, last in spans:
            if last - first >= _SMALL:
                self.places.append((next(own), 0))
            else:
                self.places.append((len(large), end))
                end += rounded_up(last - first)
        self.pieces = [
            torch.empty(length, dtype=torch.uint8, device=device)
            for length in ([*large, end] if end else large)
        ]

    def storage(self, index: int) -> tuple[torch.UntypedStorage, int]:
        """A storage of its own, and the first byte of the original that it holds."""
        import torch

        (first, last), (piece, start) = self.spans[index], self.places[index]
        if last - first >= _SMALL:
            return self.pieces[piece].untyped_storage(), first
        if last == first:
            return torch.empty(0, dtype=torch.uint8, device=self.device).untyped_storage(), 0
        return self.pieces[piece][start : start + last - first].clone().untyped_storage(), first


class ResultTensors(KeptTensors):
    """The tensors of one result, until the result is decoded."""

    def __init__(
        self,
        device: Callable[[], torch.device],
        room: _Room | None,
        given: Mapping[bytes, torch.UntypedStorage],
    ) -> None:
        self._device, self._room, self._given = device, room, given

    @property
    def device(self) -> torch.device:
        """The device that the tensors are on; opened if the result has no tensor."""
        return self._device() if self._room is None else self._room.device

    def storage(self, index: int) -> tuple[torch.UntypedStorage, int]:
        """A kept storage, and the first byte of the original that it holds."""
        assert self._room is not None
        return self._room.storage(index)

    def argument(self, description: bytes) -> torch.UntypedStorage:
        """The client's own storage, which the function was given and has returned."""
        found = self._given.get(description)
        if found is None:
            raise SerializationError(
                "a result refers to a tensor that its function was not given; return a copy of it"
            )
        return found

    def discard(self) -> None:
        """Free the memory: nobody will take the result."""
        free([self._room, self._given])
        self._room, self._given = None, {}


def node_of_result(
    name: str, device: Any, on: int | None, holder: Callable[[int], tuple[int, int | None] | None]
) -> int | None:
    """The node that a call must run on for its result to be kept where it should."""
    if isinstance(device, str):
        return on
    found = holder(device.index)
    if found is None:
        problem = "which is no open device of this pool"
    elif on is not None and on != found[0]:
        problem = f"which is on node {found[0]}, but the call runs on node {on}"
    else:
        return found[0]
    raise ConfigurationError(
        f"{name} is to leave its result on {device}, {problem}; give sky.remote the "
        "kind of a device instead, such as 'auto'"
    )


_Held = list[object]


def free(held: _Held) -> None:
    """Drop what the list holds, soon; nothing else may hold it."""
    _waiting().put(held)


@functools.cache
def _waiting() -> queue.SimpleQueue[_Held]:
    # One thread for all: to start one for each call takes longer than the call has time for.
    waiting: queue.SimpleQueue[_Held] = queue.SimpleQueue()
    threading.Thread(target=_serve, args=(waiting,), name="skyward-free", daemon=True).start()
    return waiting


def _serve(waiting: queue.SimpleQueue[_Held]) -> None:
    while True:
        waiting.get().clear()
