"""Torch devices of a pool: each opened once, by a process of its own on the node."""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from skyward.errors import ConfigurationError, SkywardError
from skyward.wire.channel import Channel
from skyward.wire.messages import CloseDevice, DeviceDown, DeviceUp, Message, OpenDevice

if TYPE_CHECKING:
    from skyward.device.client import Device

START_SECONDS = 300.0
"""The first start on a machine compiles the worker core and imports torch."""


class DeviceDesk:
    """Asks nodes for device processes, and keeps what was opened."""

    def __init__(
        self,
        tell: Callable[[int, Message], None],
        connect: Callable[[int, str, str], Channel],
    ) -> None:
        self._tell, self._connect = tell, connect
        self._numbers = itertools.count(1)
        self._waiting: dict[int, tuple[int, queue.SimpleQueue[DeviceUp | DeviceDown]]] = {}
        self._open: dict[int, tuple[int, set[str], Device]] = {}
        self._lock = threading.RLock()

    def get(self, node: int, kind: str) -> int:
        """The index of the device of that kind on that node, opened now if it was not yet."""
        with self._lock:
            found = self._find(node, kind)
            return self._start(node, kind) if found is None else found

    def find(self, index: int) -> tuple[int, set[str]] | None:
        """The node of an open device, and what it is called there."""
        # Without the lock, which is held for as long as a device takes to start.
        for node, kinds, device in list(self._open.values()):
            if device.index == index:
                return node, kinds
        return None

    def _find(self, node: int, kind: str, *, asked: str = "") -> int | None:
        for at, kinds, device in list(self._open.values()):
            if at == node and kind in kinds:
                kinds.update(filter(None, [asked]))
                return device.index
        return None

    def _start(self, node: int, kind: str) -> int:
        from skyward.device.client import Device
        from skyward.device.core import core

        core()  # compiled here first: if that fails, nothing has been started
        number = next(self._numbers)
        answers: queue.SimpleQueue[DeviceUp | DeviceDown] = queue.SimpleQueue()
        self._waiting[number] = (node, answers)
        try:
            self._tell(node, OpenDevice(number, kind))
            answer = answers.get(timeout=START_SECONDS)
        except queue.Empty:
            raise SkywardError(
                f"the device process on node {node} did not start within {START_SECONDS:.0f} s"
            ) from None
        finally:
            del self._waiting[number]
        if isinstance(answer, DeviceDown):
            raise ConfigurationError(f"device({kind!r}, node={node}): {answer.reason}")
        endpoint, real = answer.endpoint, answer.kind
        # "auto" and "cuda" may be the same device, and its tensors must be able to meet.
        same = self._find(node, real, asked=kind)
        if same is not None:
            self._tell(node, CloseDevice(number))
            return same
        try:
            device = Device(
                lambda role: self._connect(node, endpoint, role),
                real,
                node,
                lost=lambda why: self._given_up(node, number, why),
            )
        except BaseException:
            with contextlib.suppress(SkywardError):
                self._tell(node, CloseDevice(number))
            raise
        self._open[number] = (node, {kind, real}, device)
        return device.index

    def heard(self, message: DeviceUp | DeviceDown) -> None:
        """A device process is there, or gone."""
        waiting = self._waiting.get(message.number)
        if waiting is not None:
            waiting[1].put(message)
        elif isinstance(message, DeviceDown):
            self._lose([message.number], message.reason)

    def node_lost(self, node: int, why: str) -> None:
        """A node is gone, and with it the processes of its devices."""
        for number, (at, answers) in list(self._waiting.items()):
            if at == node:
                answers.put(DeviceDown(number, why))
        self._lose([n for n, (at, _, _) in list(self._open.items()) if at == node], why)

    def _given_up(self, node: int, number: int, why: str) -> None:
        """A device can no longer be reached; if its process lives, it is of no more use."""
        self._lose([number], why)
        with contextlib.suppress(SkywardError):
            self._tell(node, CloseDevice(number))

    def _lose(self, numbers: list[int], why: str) -> None:
        def lose() -> None:
            for number in numbers:
                lost = self._open.pop(number, None)
                if lost is None:
                    # It may be just opening, and is there once that is done.
                    with self._lock:
                        lost = self._open.pop(number, None)
                if lost is not None:
                    lost[2].close(why)

        # On a thread of its own: whoever opens a device holds the lock and waits for this one.
        threading.Thread(target=lose, name="skyward-device-lost", daemon=True).start()

    def close(self, why: str) -> None:
        """Close every device and end their processes."""
        for number, (_, answers) in list(self._waiting.items()):
            answers.put(DeviceDown(number, why))
        with self._lock:
            devices, self._open = self._open, {}
        for number, (node, _, device) in devices.items():
            device.close(why)
            with contextlib.suppress(SkywardError):
                self._tell(node, CloseDevice(number))
