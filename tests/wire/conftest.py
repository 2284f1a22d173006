"""What the tests of the wire share: a round trip through everything but the socket."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import pytest
from hypothesis import HealthCheck, settings

from skyward.objects import encoding, payloads
from skyward.wire import messages
from skyward.wire.messages import Buffer, Define

# A busy machine is slow, and that is no failure.
settings.register_profile("steady", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("steady")


class Trip(Protocol):
    def __call__(self, value: Any, *, own_modules: bool = False) -> Any: ...


def _trip(value: Any, *, own_modules: bool = False) -> Any:
    packed = payloads.pack(encoding.encode(value, own_modules=own_modules), None)
    meta = messages.encode(Define(b"key", packed.payload, False))
    arrived = messages.decode_as(Define, Define.KIND, meta)
    body = bytearray().join(packed.body)
    return encoding.decode(*payloads.unpack(arrived.payload, body, _nowhere))


def _nowhere(ref: Buffer) -> memoryview:
    raise AssertionError(f"{ref} is not inline")


@pytest.fixture(scope="session")
def trip() -> Trip:
    """Encode, lay out, read the layout, decode: what comes out at the other end."""
    return _trip


@pytest.fixture(scope="session")
def loaded() -> Callable[[encoding.Encoded], Any]:
    """What an `Encoded` stands for."""

    def load(encoded: encoding.Encoded) -> Any:
        buffers = [memoryview(bytearray(buffer)) for buffer in encoded.buffers]
        return encoding.decode(b"".join(encoded.pieces), buffers, encoded.storages)

    return load
