"""The packer: calls, code and data become parcels; large buffers are hashed and kept.

A packed call is one that another process has encoded, to be sent as it is.
"""

from __future__ import annotations

import os
import queue
import shutil
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from skyward.calls.kept import free
from skyward.calls.relays import RELAY_MIN
from skyward.errors import ConfigurationError
from skyward.functions import Function, Future, Pending
from skyward.objects import encoding, memory, modules
from skyward.objects.encoding import Code, Encoded
from skyward.objects.handles import Handle
from skyward.objects.memory import BLOB_MIN, Blob, BlobStore, Sources

if TYPE_CHECKING:
    from skyward.objects.encoding import Refer

DEFINITIONS_MAX = 1024
RETURN_SECONDS = 0.01
"""How long to wait for executors to release replaced contents: a round trip, not a task."""


def blob_room() -> tuple[int, str | None]:
    """How many bytes of blobs to keep, and in which folder; None means in memory."""
    folder = os.environ.get("SKYWARD_BLOB_DIR") or None
    cap = min(memory.machine_memory() // 8, 4 << 30)
    if folder is not None:
        if not os.path.isdir(folder):
            raise ConfigurationError(
                f"SKYWARD_BLOB_DIR={folder!r}: it is not a folder; make it, or unset the variable "
                "to use memory"
            )
        # All segments must fit: those with blobs, those that executors still map, and free ones.
        cap = min(cap, shutil.disk_usage(folder).free // 4)
    given = os.environ.get("SKYWARD_BLOB_CAP")
    if given is None:
        return cap, folder
    if not given.isdecimal():
        raise ConfigurationError(f"SKYWARD_BLOB_CAP={given!r}: give a number of bytes")
    return int(given), folder


class Recipient(Protocol):
    """An executor that keeps the parcels it was sent."""

    def forget(
        self,
        *,
        segments: Sequence[int] = (),
        keys: Sequence[bytes] = (),
        digests: Sequence[bytes] = (),
    ) -> None:
        """Tell the executor which objects and segments no task will refer to again."""


class Packer:
    """Makes parcels, and keeps one parcel for each key under which executors keep an object."""

    def __init__(self, *, encrypted: bool, relayed: bool) -> None:
        self.recipients: set[Recipient] = set()
        """The executors that may keep objects that were packed here."""
        self._encrypted = encrypted
        self._relayed = relayed
        self._shares = not encrypted
        self.cap, folder = blob_room()
        self.store = BlobStore(self.cap, folder)
        self._sources = Sources()
        self._definitions: OrderedDict[bytes, NamedParcel] = OrderedDict()
        self._forgotten: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._lock = threading.Lock()

    def share(self) -> None:
        """Copy large buffers to shared memory from now on: an executor of this host maps them."""
        self._shares = True

    def call(
        self,
        pending: Pending[Any],
        *,
        keep: bool,
        for_many: bool = False,
        refer: Refer | None = None,
    ) -> tuple[Parcel, list[Iterator[Any]]]:
        """Pack a call's arguments; also returns the iterators that travel item by item.

        `keep` copies arguments that the caller may change before they are sent. `for_many` says
        that several workers get the same arguments. `refer` decides which tensors stay on their
        device.
        """
        if isinstance(pending, PackedCall):
            return self.parcel(pending.arguments, keep=keep, for_many=for_many), []
        function = pending.function
        args, kwargs = pending.args, pending.kwargs
        inputs: list[Iterator[Any]] = []
        if function.streamed_parameters:
            args, kwargs, inputs = split_streams(pending)
        if not for_many and (small := encoding.encode_small(args, kwargs)) is not None:
            return Parcel(small), inputs
        call = encoding.Arguments(function.name, function.parameter_names, args, kwargs)
        encoded = encoding.encode(call, own_modules=True, refer=refer)
        parcel = self.parcel(encoded, keep=keep, for_many=for_many)
        if encoded.referred:
            parcel.by_value = lambda: self.parcel(
                encoding.encode(call, own_modules=True), keep=True
            )
        return parcel, inputs

    def parcel(self, encoded: Encoded, *, keep: bool, for_many: bool = False) -> Parcel:
        """Pack an encoded object: name its large buffers, and copy them to shared memory."""
        if for_many and self._relayed and encoded.pickle_length >= RELAY_MIN:
            encoded = encoded.with_pickle_as_buffer()
        parcel = Parcel(encoded)
        if not encoded.buffers:
            return parcel
        large = [buffer for buffer in encoded.buffers if len(buffer) >= BLOB_MIN]
        if keep and len(large) < len(encoded.buffers):
            encoded.buffers = [
                buffer if len(buffer) >= BLOB_MIN else memoryview(bytes(buffer))
                for buffer in encoded.buffers
            ]
        if not large:
            return parcel
        held = keep or self._shares
        before = self._sources.surely_new(large) if held else None
        if before is not None:
            if before:
                self._drop_stale(before)
            parcel.blobs = self.store.place_new(large)
            parcel.digests = [blob.digest for blob in parcel.blobs]
            self._sources.replaced(large, parcel.digests)
        else:
            parcel.digests = memory.digests(large)
            stale = self._sources.replaced(large, parcel.digests)
            if stale:
                self._drop_stale(stale)
            if held:
                parcel.blobs = self.store.place(large, parcel.digests)
        if held:
            # The bytes are in shared memory now, so the caller may change or free its memory.
            encoded.buffers = [
                memory.placeholder(len(buffer)) if len(buffer) >= BLOB_MIN else buffer
                for buffer in encoded.buffers
            ]
        if self._encrypted:
            parcel.large = large
        return parcel

    def _drop_stale(self, stale: list[bytes]) -> None:
        """Drop contents that the caller has replaced, so that the new ones can use their memory."""
        segments = [self.store.evict(digest) for digest in stale]
        retired = self._take_retired()
        for recipient in list(self.recipients):
            recipient.forget(digests=stale, segments=retired)
        for segment in segments:
            if segment is not None:
                self.store.arena.await_return(segment, RETURN_SECONDS)

    def shared(self, parcel: Parcel) -> Parcel:
        """The same parcel for one more task, with blobs pinned for that task."""
        for blob in parcel.blobs:
            self.store.pin(blob.segment)
        return Parcel(parcel.encoded, list(parcel.blobs), parcel.digests, parcel.large)

    def release(self, parcel: Parcel) -> None:
        """Free the memory of a parcel that no lane will send again."""
        if parcel.blobs:
            blobs, parcel.blobs = parcel.blobs, []
            for blob in blobs:
                self.store.unpin(blob.segment.id)
        if parcel.by_value is not None:
            held: list[object] = [parcel.by_value, parcel.encoded.referred]
            parcel.by_value, parcel.encoded.referred = None, {}
            free(held)

    def code(self, code: Code) -> NamedParcel:
        """Pack a function's code; the same code gives the same parcel."""
        with self._lock:
            known = self._definitions.get(code.key)
            if known is not None:
                self._definitions.move_to_end(code.key)
                return known
        made = NamedParcel(code.key, self._kept(code.encoded), False)
        with self._lock:
            self._definitions[code.key] = made
            old = None
            if len(self._definitions) > DEFINITIONS_MAX:
                old = next((d for d in self._definitions.values() if not d.frozen), None)
            if old is not None:
                del self._definitions[old.key]
        if old is not None:
            self.release(old.parcel)
        return made

    def _kept(self, encoded: Encoded) -> Parcel:
        return self.parcel(_copied(encoded), keep=True, for_many=True)

    def handle(self, handle: Handle[Any] | Future[Any]) -> NamedParcel:
        """Pack data given to `put`, or a call's result; the parcel lives as long as the handle."""
        with self._lock:
            known = self._definitions.get(handle.key)
        if known is not None:
            return known
        made = NamedParcel(handle.key, self._kept(handle.encoded), True, handle.fresh)
        with self._lock:
            self._definitions[handle.key] = made
        weakref.finalize(handle, self._forgotten.put, handle.key).atexit = False
        return made

    @property
    def has_unused(self) -> bool:
        """Whether `tell_unused` has something to tell."""
        return bool(self.store.retired or self.store.evicted) or not self._forgotten.empty()

    def tell_unused(self) -> None:
        """Tell the executors which segments and which data of `put` are no longer in use."""
        if not self.has_unused:
            return
        retired, forgotten = self._take_retired(), self._take_forgotten()
        if retired or forgotten:
            for recipient in list(self.recipients):
                recipient.forget(segments=retired, keys=forgotten)

    def _take_forgotten(self) -> list[bytes]:
        """Release the data of handles that have been freed; returns their keys."""
        keys: list[bytes] = []
        while not self._forgotten.empty():
            keys.append(self._forgotten.get())
        if not keys:
            return keys
        with self._lock:
            dropped = [self._definitions.pop(key, None) for key in keys]
        for definition in dropped:
            if definition is not None:
                self.release(definition.parcel)
        return keys

    def _take_retired(self) -> list[int]:
        """Segments without blobs, which executors need not map any longer."""
        retired = []
        while self.store.retired:
            retired.append(self.store.retired.popleft())
        self.store.evicted.clear()
        return retired

    def close(self) -> None:
        """Give all memory back."""
        self.store.close()


def split_streams(
    pending: Pending[Any],
) -> tuple[tuple[Any, ...], dict[str, Any], list[Iterator[Any]]]:
    """Replace the streamed arguments by references; also returns the iterators."""
    streamed = pending.function.streamed_parameters
    inputs: list[Iterator[Any]] = []

    def swap(name: str, value: Any) -> Any:
        if name not in streamed or value is None:
            return value
        inputs.append(iter(value))
        return encoding.StreamRef(len(inputs) - 1)

    names = pending.function.parameter_names
    args = tuple(
        swap(names[index] if index < len(names) else "", value)
        for index, value in enumerate(pending.args)
    )
    kwargs = {name: swap(name, value) for name, value in pending.kwargs.items()}
    return args, kwargs, inputs


def _copied(encoded: Encoded) -> Encoded:
    return Encoded(encoded.pieces, list(encoded.buffers), encoded.storages, encoded.handles)


# Parcels.


HEAVY_BYTES = 1 << 18


@dataclass(slots=True, eq=False)
class Parcel:
    """An encoded object; its large buffers have digests, and may be held in shareable memory."""

    encoded: Encoded
    blobs: list[Blob] = field(default_factory=list)
    """The large buffers in shareable memory; empty if they are sent from the caller's memory."""
    digests: list[bytes] = field(default_factory=list)
    large: list[memoryview] = field(default_factory=list)
    by_value: Callable[[], Parcel] | None = None
    """Makes the same parcel without references to a device's memory, for an executor that cannot
    open that memory."""

    @property
    def heavy(self) -> bool:
        """Whether sending the parcel may move many bytes through a socket."""
        return bool(self.large) or self.encoded.size > HEAVY_BYTES


@dataclass(slots=True, eq=False)
class NamedParcel:
    """A parcel that executors keep under a key: a function's code, or data from `put`."""

    key: bytes
    parcel: Parcel
    frozen: bool
    """Whether it is data from `put`, which executors keep until its handle dies."""
    fresh: bool = False
    """Whether each task gets an object of its own: the result of another task."""


class PackedHandle:
    """Data from `put`, or a call's result, that another process has encoded."""

    __slots__ = ("__weakref__", "encoded", "fresh", "key")

    def __init__(self, key: bytes, encoded: Encoded, *, fresh: bool = False) -> None:
        """`fresh`: each task gets an object of its own, as of a call's result."""
        self.key, self.encoded, self.fresh = key, encoded, fresh


class PackedFunction(Function[..., Any]):
    """A function that only workers decode."""

    def __init__(
        self,
        key: bytes,
        encoded: Encoded,
        *,
        name: str,
        timeout: float | None,
        retries: int,
        fail_fast: bool,
    ) -> None:
        super().__init__(
            _elsewhere, name=name, timeout=timeout, retries=retries, fail_fast=fail_fast
        )
        self._packed = Code(key, encoded, modules.References(_elsewhere))

    def code(self) -> Code:
        """The body as it came."""
        return self._packed


class PackedCall(Pending[Any]):
    """A call whose arguments only workers decode."""

    __slots__ = ("_encoded",)

    _encoded: Encoded

    def __init__(self, function: Function[..., Any], arguments: Encoded) -> None:
        super().__init__(function, (), {})
        object.__setattr__(self, "_encoded", arguments)

    @property
    def arguments(self) -> Encoded:
        """The arguments, for one task."""
        ours = self._encoded
        return Encoded(ours.pieces, list(ours.buffers), ours.storages, ours.handles)


def encoded_of(
    pickle: memoryview,
    buffers: Sequence[memoryview],
    storages: Sequence[tuple[int, int]],
    handles: Sequence[PackedHandle],
) -> Encoded:
    """An encoded object that was received, to be sent again."""
    return Encoded([pickle], list(buffers), list(storages), list(handles))


def _elsewhere() -> None:
    raise NotImplementedError("the body of a packed function is on workers alone")
