"""Definitions: objects that the client has sent under a key, functions and data from `put`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from skyward.errors import SerializationError
from skyward.objects import encoding
from skyward.objects.payloads import Pieces
from skyward.wire.channel import Channel
from skyward.wire.messages import Define
from skyward.worker.inbox import Inbox


@dataclass(slots=True)
class KeptObject:
    """An object defined under a key; decoded when first used."""

    pieces: Pieces | None
    """None after `value` has been decoded."""
    frozen: bool
    value: Any = None
    again: Callable[[], Pieces] | None = None
    """Finds the pieces once more, for a task that gets an object of its own."""


class Definitions:
    """The definitions of one executor."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self._known: dict[bytes, KeptObject] = {}
        self._coming: dict[bytes, tuple[Define, bytearray]] = {}
        """The objects whose buffers are still on their way from a peer."""

    def add(self, channel: Channel, define: Define, body: bytearray) -> None:
        """Keep an object; if its buffers are missing, the task that names it reports the key."""
        if self._inbox.awaits(define.payload):
            self._coming[define.key] = define, body
            return
        pieces, _ = self._inbox.find(channel, define.payload, body)
        if pieces is not None:
            again = None
            if define.fresh:
                again = functools.partial(self._found_again, channel, define, bytes(body))
            # With `fresh`, the pieces stay, so that the cache keeps the buffers.
            self._known[define.key] = KeptObject(pieces, define.frozen, again=again)

    def _found_again(self, channel: Channel, define: Define, body: bytes) -> Pieces:
        pieces, _ = self._inbox.find(channel, define.payload, bytearray(body))
        assert pieces is not None
        return pieces

    def forget(self, keys: Iterable[bytes]) -> None:
        """Drop the objects under these keys: the client will not refer to them again."""
        for key in keys:
            self._known.pop(key, None)
            self._coming.pop(key, None)

    def has(self, key: bytes) -> bool:
        """Whether the object under a key is here."""
        return key in self._known and key not in self._coming

    def awaits(self, keys: Iterable[bytes]) -> bool:
        """Whether a buffer of these objects is on its way."""
        return any(
            self._inbox.awaits(self._coming[key][0].payload) for key in keys if key in self._coming
        )

    def lacking(self, channel: Channel, keys: Iterable[bytes]) -> list[bytes]:
        """The keys without an object, after all buffers have arrived or will not arrive."""
        lacking = []
        for key in keys:
            if key in self._coming:
                self.add(channel, *self._coming.pop(key))
            if key not in self._known:
                lacking.append(key)
        return lacking

    def resolve(self, key: bytes) -> Any:
        """The object under a key."""
        definition = self._known.get(key)
        if definition is None:
            raise SerializationError(
                "a handle from sky.put that this worker was not given; pass the handle as an "
                "argument, on the pool that `sky.put` was called on"
            )
        if definition.again is not None:
            return encoding.decode(*definition.again())
        pieces = definition.pieces
        if pieces is not None:
            data, buffers, storages = pieces
            if definition.frozen:
                # All tasks of this process share the object, so its numpy arrays become read-only.
                plain = len(buffers) - len(storages)
                buffers = [b.toreadonly() for b in buffers[:plain]] + buffers[plain:]
            definition.value = encoding.decode(data, buffers, storages)
            definition.pieces = None
        return definition.value
