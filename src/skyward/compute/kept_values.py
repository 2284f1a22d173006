"""Kept values: what a client leaves on a kept pool by name, for itself or the next client."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pickle import PickleBuffer
from typing import TYPE_CHECKING, Any, TypeVar

import cloudpickle

from skyward.errors import ConfigurationError, NodeLostError, PoolError, StateLostError
from skyward.functions import Function, Pending, remote
from skyward.nodes.fleet import Fleet
from skyward.objects import encoding
from skyward.objects.kept import ValueBook, ValueTensors
from skyward.wire.channel import ServiceConnection
from skyward.worker import kept_values
from skyward.worker.kept_values import EncodedValue

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
ATTEMPTS = 5
"""How often a conversation with a node's agent begins whose connection is cut."""

_fill = Function(kept_values.fill, name="keep")
_store = Function(kept_values.store, name="keep")
_read = Function(kept_values.read, name="kept")
_loaded = Function(kept_values.loaded, name="kept")
_opened = Function(kept_values.opened, name="kept")


@dataclass(frozen=True, slots=True)
class KeptValue:
    """A value that a pool keeps."""

    name: str
    node: int
    """The node that has it."""
    device: str
    """The device that has its tensors, such as "cuda:0"; empty if it is in the node's memory."""
    bytes: int
    since: float
    """When it was kept, in seconds since 1970."""
    lost: str = ""
    """How its device's process ended, if that is gone; the value is gone with it."""


class _CutError(NodeLostError):
    """The connection to a node's agent was lost, or not made, though the node serves."""

    def __init__(self, problem: BaseException) -> None:
        super().__init__(
            f"the connection to the node was lost {ATTEMPTS} times while it was asked for kept "
            f"values ({problem}); see `compute.nodes`, and call again"
        )


class KeptValues:
    """The values that a pool keeps by name, for one client."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def keep(self, name: str, value: object) -> None:
        """Keep a value, in place of an earlier one of that name."""
        check_name(name, "keep")
        devices = _devices(value)
        node, kind = self._home(name, devices)
        self._converse(lambda: self._keep(name, value, devices, node, kind))
        for other in self._serving():
            if other != node:
                self._ask(other, "forget", name=name)

    def _keep(self, name: str, value: object, devices: list[int], node: int, kind: str) -> None:
        with self._service(node) as service:
            number, path = _answer(service, "begin")
            on_device = _encode(value, devices[0]) if devices else None
            if on_device is None:
                pid, numbers, size = 0, [], 0
                self._run_with(service, _fill(path, value), node)
            else:
                pid = self._fleet.devices.process_of(devices[0])
                self._fleet.devices.keep(devices[0])
                numbers, size = on_device.numbers, on_device.bytes
                self._run_with(service, _store(path, on_device.encoded), node)
            told = {"number": number, "name": name, "kind": kind}
            _answer(service, "finish", **told, pid=pid, numbers=numbers, bytes=size)

    def get(self, name: str) -> Any:
        """The value that was kept by that name."""
        check_name(name, "kept")
        return self._converse(lambda: self._get(name))

    def _get(self, name: str) -> Any:
        for node in self._serving():
            try:
                service = self._service(node)
            except _CutError:
                raise
            except NodeLostError:
                continue
            # The value stays as it is as long as the connection is open.
            with service, encoding.own_classes():
                found = _answer(service, "find", name=name)
                if found is None:
                    continue
                if found["on_device"]:
                    return self._take_up(name, node, found, service)
                call = _read if not found["device"] else remote(_read, device=found["device"])
                return self._run_with(service, call(found["path"], found["size"]), node)
        there = ", ".join(each.name for each in self.all()) or "nothing"
        raise ConfigurationError(
            f"kept({name!r}): the pool keeps no value of that name; it keeps {there}"
        )

    def all(self) -> list[KeptValue]:
        """The values, by their names."""
        found: dict[str, KeptValue] = {}
        for node in self._serving():
            for told in self._ask(node, "list") or ():
                device = told["device"] if told["on_device"] else ""
                found[told["name"]] = KeptValue(
                    told["name"], node, device, told["bytes"], told["since"], told["lost"]
                )
        return [found[name] for name in sorted(found)]

    def forget(self, name: str) -> None:
        """Discard what was kept by that name; nothing happens if there is nothing."""
        for node in self._serving():
            self._ask(node, "forget", name=name)

    def _run(self, pending: Pending[Any], node: int) -> Any:
        if self._fleet.deliveries.follows:
            self._fleet.before_calls()
        calls = self._fleet.dispatcher
        return calls.run(calls.prepare(pending, on=node, keep=False))

    def _run_with(self, service: ServiceConnection, pending: Pending[Any], node: int) -> Any:
        """Run a function that opens what the agent has for this connection."""
        try:
            return self._run(pending, node)
        except Exception:
            # If the connection was cut, the function may have found nothing there.
            _answer(service, "list")
            raise

    def _serving(self) -> list[int]:
        return [view.node for view in self._fleet.views() if view.state == "ready"]

    def _service(self, node: int) -> ServiceConnection:
        """A connection to a node's agent; `_CutError` if there is none though the node serves."""
        try:
            return self._fleet.service(node, "values")
        except NodeLostError as problem:
            if node in self._serving():
                raise _CutError(problem.__cause__ or problem) from problem
            raise

    def _ask(self, node: int, what: str, **arguments: Any) -> Any:
        def ask() -> Any:
            with self._service(node) as service:
                return _answer(service, what, **arguments)

        try:
            return self._converse(ask)
        except _CutError:
            raise
        except NodeLostError:
            # Its values are lost with it.
            return None

    def _converse(self, act: Callable[[], T]) -> T:
        """What comes of a conversation with an agent; begun anew if its connection is cut.

        Each may be had twice: what it has begun ends with its connection.
        """
        for _ in range(ATTEMPTS - 1):
            with contextlib.suppress(_CutError):
                return act()
        return act()

    def _home(self, name: str, devices: list[int]) -> tuple[int, str]:
        """The node that keeps a value with tensors on these devices, and the kind of the device."""
        homes = {each: self._fleet.devices.home(each) for each in devices}
        there = {home for home in homes.values() if home is not None}
        if None in homes.values() or len(there) > 1:
            raise ConfigurationError(
                f"keep({name!r}): its tensors are on {', '.join(f'sky:{i}' for i in devices)}, and "
                "only those of one device of this pool are kept together; keep the parts by "
                "several names"
            )
        if there:
            return there.pop()
        return min(self._serving(), default=0), ""

    def _take_up(
        self, name: str, node: int, found: dict[str, Any], service: ServiceConnection
    ) -> Any:
        """A value whose tensors are in a device's process."""
        _check_there(name, node, found)
        encoded = self._run_with(service, _loaded(found["path"], found["size"]), node)
        try:
            self._fleet.dispatcher.check_open()
            index = self._fleet.devices.of_process(node, found["device"], found["pid"])
            if self._fleet.devices.process_of(index) == found["pid"]:
                self._fleet.devices.keep(index)
                return _decode(encoded, index, _adopted(encoded, index))
            return _decode(encoded, index, self._copied(name, node, encoded, index))
        except Exception:
            # Its process may have ended meanwhile: then the agent knows how.
            again = _answer(service, "find", name=name)
            if again is not None and again["pid"] == found["pid"]:
                _check_there(name, node, again)
            raise

    def _copied(self, name: str, node: int, encoded: EncodedValue, index: int) -> list[Any]:
        """Copies of tensors that are in the process of another client's device."""
        import torch

        filled = [each for each in encoded.kept if each[1]]
        descriptions = [description for _, _, description in filled]
        if not all(descriptions):
            raise PoolError(
                f"kept({name!r}): another client has its tensors on node {node} now, and that "
                "device cannot share its memory; ask again when that client has left, or have it "
                "keep a copy in the node's memory, such as the state dict moved to the CPU"
            )
        call = remote(_opened, device=torch.device("sky", index))
        copies = iter(self._run(call(descriptions), node) if descriptions else ())
        return [next(copies).untyped_storage() if size else None for _, size, _ in encoded.kept]


def _answer(service: ServiceConnection, what: str, **arguments: Any) -> Any:
    try:
        return service.ask(what, **arguments)
    except (OSError, EOFError) as problem:
        raise _CutError(problem) from problem


def _check_there(name: str, node: int, found: dict[str, Any]) -> None:
    if found["lost"]:
        raise StateLostError(
            f"kept({name!r}): its tensors were in the process of {found['device']} on node {node}, "
            f"which has ended: {found['lost']}; load the value again, and keep it by this name"
        )


class _DeviceFinder(cloudpickle.Pickler):  # type: ignore[misc]
    """Finds the devices of an object's tensors; reads none of their bytes."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO())
        self.found: set[int] = set()

    def persistent_id(self, value: object) -> object | None:
        """Leave tensors out of the pickle, and note their devices."""
        import torch

        if not isinstance(value, torch.Tensor):
            return None
        if value.device.type == "sky":
            self.found.add(value.device.index or 0)
        return "tensor"


def _devices(value: object) -> list[int]:
    if "torch" not in sys.modules:
        return []
    finder = _DeviceFinder()
    finder.dump(value)
    return sorted(finder.found)


def check_name(name: object, method: str) -> None:
    """Refuse what is no name of a value."""
    if not isinstance(name, str) or not name:
        raise ConfigurationError(f"{method}({name!r}): give a name, such as 'model'")


@dataclass(frozen=True, slots=True)
class _DeviceValue:
    """A value that is to be kept: all but its tensors on the device, and what these are there."""

    encoded: EncodedValue
    numbers: list[int]
    """The storages, as the device's process numbers them."""
    bytes: int
    """How many bytes they have together."""


def _encode(value: object, index: int) -> _DeviceValue | None:
    """Encode a value for keeping; None if some of it has to be copied to the node's memory.

    Waits for everything issued on the device before, and raises errors of that.
    """
    from skyward.device.core import core

    book = ValueBook()
    encoded = encoding.encode(value, own_modules=True, what="the value to keep", keep=book)
    if encoded.handles:
        # Only an executor has the data of `sky.put`.
        return None
    storages = [ref.storage for ref in book.kept]
    filled = [storage for storage in storages if storage.nbytes()]
    pointers = [storage.data_ptr() for storage in filled]
    found = core().kept_storages(index, pointers) if pointers else []
    numbers = [number for number, _ in found]
    if 0 in numbers or len(set(numbers)) < len(numbers):
        # A slice of a storage, or a lazy clone: the process has no memory for it alone.
        return None
    places = iter(zip(filled, found, strict=True))
    kept = [_storage(next(places)) if each.nbytes() else (0, 0, b"") for each in storages]
    encoded_value = EncodedValue(
        b"".join(encoded.pieces),
        [PickleBuffer(each) for each in encoded.buffers],
        encoded.storages,
        kept,
    )
    return _DeviceValue(encoded_value, numbers, sum(storage.nbytes() for storage in filled))


def _storage(
    place: tuple[torch.UntypedStorage, tuple[int, bytes]],
) -> tuple[int, int, bytes]:
    storage, (number, description) = place
    return number, storage.nbytes(), description


def _adopted(encoded: EncodedValue, index: int) -> list[torch.UntypedStorage | None]:
    """The storages of a value, over the memory that the device's process has held for them."""
    from skyward.device.core import core

    places = [(number, size) for number, size, _ in encoded.kept if size]
    storages = iter(core().adopt(index, places) if places else ())
    return [next(storages) if size else None for _, size, _ in encoded.kept]


def _decode(
    encoded: EncodedValue, index: int, storages: Sequence[torch.UntypedStorage | None]
) -> Any:
    """A value with these storages of the device; None stands for an empty one."""
    import torch

    device = torch.device("sky", index)
    empty = torch.empty(0, dtype=torch.uint8, device=device)
    tensors = ValueTensors(
        device, [empty.new_empty(0).untyped_storage() if s is None else s for s in storages]
    )
    buffers = [memoryview(each) for each in encoded.buffers]
    return encoding.decode(encoded.pickle, buffers, encoded.storages, tensors)
