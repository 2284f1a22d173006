"""Parcels: calls, code and data made ready to be sent, their large buffers hashed and held."""

from __future__ import annotations

import os
import queue
import shutil
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

from skyward.errors import ConfigurationError
from skyward.functions import Code, Handle, Pending
from skyward.pool.references import References
from skyward.pool.relays import RELAY_MIN
from skyward.pool.task import Definition, Parcel
from skyward.wire import memory, objects
from skyward.wire.blobs import BLOB_MIN, BlobStore, Sources
from skyward.wire.objects import Encoded

DEFINITIONS_MAX = 1024
RETURN_SECONDS = 0.01
"""How long the memory of replaced contents is waited for: a round trip, not a task."""


def blob_room() -> tuple[int, str | None]:
    """Bytes of blobs to keep, and the folder for them; without one they are in memory."""
    folder = os.environ.get("SKYWARD_BLOB_DIR") or None
    cap = min(memory.machine_memory() // 8, 4 << 30)
    if folder is not None:
        if not os.path.isdir(folder):
            raise ConfigurationError(
                f"SKYWARD_BLOB_DIR={folder!r}: it is not a folder; make it, or unset the variable "
                "to use memory"
            )
        # Kept, on their way out, and waiting to be used again: together they must fit.
        cap = min(cap, shutil.disk_usage(folder).free // 4)
    given = os.environ.get("SKYWARD_BLOB_CAP")
    if given is None:
        return cap, folder
    if not given.isdecimal():
        raise ConfigurationError(f"SKYWARD_BLOB_CAP={given!r}: give a number of bytes")
    return int(given), folder


class Packer:
    """Makes parcels, and keeps one definition for everything workers hold under a key."""

    def __init__(
        self, *, encrypted: bool, relayed: bool, stale: Callable[[list[bytes], list[int]], None]
    ) -> None:
        self._encrypted = encrypted
        self._relayed = relayed
        self._tell_stale = stale
        self.cap, folder = blob_room()
        self.store = BlobStore(self.cap, folder)
        self._sources = Sources()
        self._definitions: OrderedDict[bytes, Definition] = OrderedDict()
        self._forgotten: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._lock = threading.Lock()

    def call(
        self,
        pending: Pending[Any],
        *,
        keep: bool,
        for_many: bool = False,
        refer: References | None = None,
    ) -> tuple[Parcel, list[Iterator[Any]]]:
        """A call's arguments, and the iterators among them that travel item by item.

        `keep` copies what the caller may change before it is sent; `for_many` says that others
        are sent the same; `refer` decides which tensors stay where they are.
        """
        function = pending.function
        args, kwargs, inputs = split_streams(pending)
        call = objects.Call(function.name, function.parameter_names, args, kwargs)
        encoded = objects.encode(call, own_modules=True, refer=refer)
        parcel = self.parcel(encoded, keep=keep, for_many=for_many)
        if encoded.referred:
            parcel.by_value = lambda: self.parcel(objects.encode(call, own_modules=True), keep=True)
        return parcel, inputs

    def parcel(self, encoded: Encoded, *, keep: bool, for_many: bool = False) -> Parcel:
        """An encoded object with its large buffers named, and held if that is needed."""
        if for_many and self._relayed and encoded.pickle_length >= RELAY_MIN:
            encoded = encoded.with_pickle_apart()
        parcel = Parcel(encoded)
        large = [buffer for buffer in encoded.buffers if len(buffer) >= BLOB_MIN]
        if keep and len(large) < len(encoded.buffers):
            encoded.buffers = [
                buffer if len(buffer) >= BLOB_MIN else memoryview(bytes(buffer))
                for buffer in encoded.buffers
            ]
        if not large or not memory.can_share():
            return parcel
        held = keep or not self._encrypted
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
            # The bytes are in shared memory now; the caller's own may change or go.
            encoded.buffers = [
                memory.placeholder(len(buffer)) if len(buffer) >= BLOB_MIN else buffer
                for buffer in encoded.buffers
            ]
        if self._encrypted:
            parcel.large = large
        return parcel

    def _drop_stale(self, stale: list[bytes]) -> None:
        """Contents were replaced where they came from: let the new ones take their memory."""
        segments = [self.store.evict(digest) for digest in stale]
        self._tell_stale(stale, self.take_retired())
        for segment in segments:
            if segment is not None:
                self.store.arena.await_return(segment, RETURN_SECONDS)

    def shared(self, parcel: Parcel) -> Parcel:
        """The same parcel for one more task, which holds its blobs for itself."""
        for blob in parcel.blobs:
            self.store.pin(blob.segment)
        return Parcel(parcel.encoded, list(parcel.blobs), parcel.digests, parcel.large)

    def release(self, parcel: Parcel) -> None:
        """Nobody will send this parcel again."""
        blobs, parcel.blobs = parcel.blobs, []
        for blob in blobs:
            self.store.unpin(blob.segment.id)
        if parcel.by_value is not None:
            # Elsewhere: freeing a tensor may wait for its device, and the loop must not.
            held = [parcel.by_value, parcel.encoded.referred]
            parcel.by_value, parcel.encoded.referred = None, []
            threading.Thread(target=held.clear, name="skyward-free", daemon=True).start()

    def code(self, code: Code) -> Definition:
        """The definition of a function's code."""
        with self._lock:
            known = self._definitions.get(code.key)
            if known is not None:
                self._definitions.move_to_end(code.key)
                return known
        made = Definition(code.key, self._kept(code.encoded), False)
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

    def handle(self, handle: Handle[Any]) -> Definition:
        """The definition of data given to `put`; it lives as long as the handle."""
        with self._lock:
            known = self._definitions.get(handle.key)
        if known is not None:
            return known
        made = Definition(handle.key, self._kept(handle.encoded), True)
        with self._lock:
            self._definitions[handle.key] = made
        weakref.finalize(handle, self._forgotten.put, handle.key).atexit = False
        return made

    def take_forgotten(self) -> list[bytes]:
        """Keys of handles that have died since; their data is let go here."""
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

    def take_retired(self) -> list[int]:
        """Segments that hold nothing any more, for those who map them to let go."""
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
    """Arguments with those that stream replaced by references, and their iterators."""
    streamed = pending.function.streamed_parameters
    if not streamed:
        return pending.args, pending.kwargs, []
    inputs: list[Iterator[Any]] = []

    def swap(name: str, value: Any) -> Any:
        if name not in streamed or value is None:
            return value
        inputs.append(iter(value))
        return objects.StreamRef(len(inputs) - 1)

    names = pending.function.parameter_names
    args = tuple(
        swap(names[index] if index < len(names) else "", value)
        for index, value in enumerate(pending.args)
    )
    kwargs = {name: swap(name, value) for name, value in pending.kwargs.items()}
    return args, kwargs, inputs


def _copied(encoded: Encoded) -> Encoded:
    return Encoded(encoded.pieces, list(encoded.buffers), encoded.storages, encoded.handles)
