"""Kept values: objects that an agent keeps by name in the memory of its node, whoever made them.

The agent makes a file in memory for a value, an executor fills it, and any executor of the node
reads it later. The agent itself never decodes a value. The tensors of a device stay where they are,
in the device's process; the file has the rest.
"""

from __future__ import annotations

import itertools
import mmap
import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from pickle import PickleBuffer
from typing import Any

from skyward import kernel
from skyward.errors import PoolError
from skyward.objects import encoding, references, stored
from skyward.worker.devices import DeviceChild, NodeDevices


@dataclass(frozen=True, slots=True)
class HeldTensors:
    """The tensors of a value that are in the memory of a device's process."""

    process: DeviceChild
    numbers: list[int]
    bytes: int


@dataclass(slots=True)
class ValueFile:
    """A file that holds one value, or will."""

    descriptor: int
    path: str
    """How other processes of the node open it."""
    size: int = 0
    kind: str = ""
    """The device whose tensors the value has; empty if it has none."""
    since: float = field(default_factory=time.time)
    users: int = 1
    """How many hold it: its name, and the clients that read it."""
    tensors: HeldTensors | None = None
    """None if all of the value is in the file."""

    def described(self, name: str) -> dict[str, Any]:
        """The value as others see it."""
        return {
            "name": name,
            "device": self.kind,
            "on_device": self.tensors is not None,
            "bytes": self.size + (self.tensors.bytes if self.tensors else 0),
            "since": self.since,
            "lost": self.tensors.process.lost if self.tensors else "",
        }


class NamedValues:
    """The values of one node; the agent has them."""

    def __init__(self, folder: str, devices: NodeDevices) -> None:
        self._folder, self._devices = Path(folder), devices
        self._numbers = itertools.count(1)
        self._begun: dict[int, ValueFile] = {}
        self._named: dict[str, ValueFile] = {}
        self._lock = threading.Lock()

    def begin(self) -> tuple[int, str]:
        """Make an empty file for a value; returns its number and its path."""
        number = next(self._numbers)
        if kernel.HAS_MEMORY_FILES:
            descriptor = os.memfd_create("skyward-value", os.MFD_CLOEXEC)
            path = f"/proc/{os.getpid()}/fd/{descriptor}"
        else:
            path = str(self._folder / f"value.{number}")
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with self._lock:
            self._begun[number] = ValueFile(descriptor, path)
        return number, path

    def finish(
        self, number: int, name: str, kind: str, pid: int, numbers: list[int], size: int
    ) -> int:
        """Give a filled file its name, in place of an earlier value; returns its size.

        If the value has tensors in a device's process, that process is `pid`, and they are
        `numbers`, of `size` bytes together.
        """
        with self._lock:
            value = self._begun.pop(number)
        value.size, value.kind = os.fstat(value.descriptor).st_size, kind
        if pid:
            try:
                process = self._devices.hold(pid, numbers)
            except PoolError:
                self._discard(value)
                raise
            value.tensors = HeldTensors(process, numbers, size)
        with self._lock:
            before, self._named[name] = self._named.get(name), value
        if before is not None:
            self.release(before)
        return value.size

    def give_up(self, number: int) -> None:
        """Discard a file that got no name."""
        with self._lock:
            value = self._begun.pop(number, None)
        if value is not None:
            self._discard(value)

    def hold(self, name: str) -> ValueFile | None:
        """The value of that name, which is there until `release`."""
        with self._lock:
            value = self._named.get(name)
            if value is not None:
                value.users += 1
        return value

    def release(self, value: ValueFile) -> None:
        """Discard a value that nobody else holds: only then its path may name another file."""
        with self._lock:
            value.users -= 1
            unused = value.users == 0
        if unused:
            self._discard(value)

    def want(self, value: ValueFile) -> None:
        """Note that a client is about to use a value: its device should be that of the value."""
        if value.tensors is not None:
            self._devices.want(value.tensors.process)

    def all(self) -> dict[str, ValueFile]:
        """The values by name."""
        with self._lock:
            return dict(self._named)

    def forget(self, name: str) -> bool:
        """Discard a value; whether there was one."""
        with self._lock:
            value = self._named.pop(name, None)
        if value is not None:
            self.release(value)
        return value is not None

    def close(self) -> None:
        """Discard all values."""
        with self._lock:
            values = [*self._begun.values(), *self._named.values()]
            self._begun, self._named = {}, {}
        for value in values:
            self.release(value)

    def _discard(self, value: ValueFile) -> None:
        os.close(value.descriptor)
        if not value.path.startswith("/proc/"):
            Path(value.path).unlink(missing_ok=True)
        if value.tensors is not None:
            self._devices.drop(value.tensors.process, value.tensors.numbers)


Storages = list[tuple[int, int]]
KeptStorage = tuple[int, int, bytes]
"""A storage in a device's process: its number, its bytes, and how others open it (or nothing)."""


@dataclass(frozen=True, slots=True)
class EncodedValue:
    """What is in a value's file."""

    pickle: Any
    """Any bytes, as all buffers are."""
    buffers: list[Any]
    storages: Storages
    kept: list[KeptStorage] = field(default_factory=list)


def fill(path: str, value: Any) -> None:
    """Write a value into the file that an agent has made; in an executor of the node."""
    encoded = encoding.encode(value, own_modules=True, what="the value to keep")
    store(path, EncodedValue(b"".join(encoded.pieces), list(encoded.buffers), encoded.storages))


def store(path: str, value: EncodedValue) -> None:
    """Write a value that is encoded already."""
    with open(path, "r+b") as file:
        stored.append(file, [value.pickle], value.buffers, value.storages, value.kept)


def load(path: str, size: int) -> EncodedValue:
    """What is in a value's file; its buffers are copies that this process may change."""
    with open(path, "rb") as file:
        block = memoryview(
            mmap.mmap(
                file.fileno(), size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE
            )
        )
    kept, (pickle, buffers, storages) = next(stored.objects(block))
    return EncodedValue(pickle, buffers, storages, [tuple(each) for each in kept])


def read(path: str, size: int) -> Any:
    """The value in a file; its arrays and tensors are copies that this process may change."""
    found = load(path, size)
    return encoding.decode(found.pickle, found.buffers, found.storages)


def loaded(path: str, size: int) -> EncodedValue:
    """What is in a value's file, for the client, which decodes it."""
    found = load(path, size)
    buffers = [PickleBuffer(each) for each in found.buffers]
    return EncodedValue(bytes(found.pickle), buffers, found.storages, found.kept)


def opened(descriptions: list[bytes]) -> list[Any]:
    """The memory of another process's tensors, as flat tensors; in an executor of the node."""
    try:
        return [references.flat(each) for each in descriptions]
    except references.CannotOpenError as problem:
        raise PoolError(f"the memory of a kept tensor cannot be opened: {problem}") from problem
