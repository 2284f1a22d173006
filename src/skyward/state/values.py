"""Keys and values of shared objects as bytes; the owner never decodes them."""

from __future__ import annotations

import pickle
from typing import Any

import msgspec

from skyward.errors import ConfigurationError
from skyward.objects import encoding

VALUE_MAX = 8 << 20
"""How many bytes one value may have, encoded."""
KEY_MAX = 16 << 10

_PLAIN = frozenset((int, float, str, bytes, bool, type(None)))
_WITH_BUFFERS = b"\x00"
"""The first byte of a value that is more than a pickle, whose first byte is 0x80."""

_packer = msgspec.msgpack.Encoder()
_key_reader = msgspec.msgpack.Decoder()
_reader = msgspec.msgpack.Decoder(tuple[bytes, list[bytes], list[tuple[int, int]]])


def encode_key(key: Any, what: str) -> bytes:
    """A key as bytes; two keys are the same if their bytes are.

    So 1, 1.0 and True are three keys, unlike in a dict of Python's.
    """
    if not _is_key(key):
        raise ConfigurationError(
            f"{what}: {_short(key)} cannot be a key; use a str, bytes, int, float, bool or None, "
            "or a tuple of them"
        )
    try:
        encoded = _packer.encode(key)
    except (OverflowError, UnicodeEncodeError) as problem:
        raise ConfigurationError(
            f"{what}: {_short(key)} cannot be a key ({problem}); use its str"
        ) from None
    if len(encoded) > KEY_MAX:
        raise ConfigurationError(
            f"{what}: a key of {len(encoded)} bytes; at most {KEY_MAX} are possible: use a hash"
        )
    return encoded


def decode_key(encoded: bytes) -> Any:
    """The key."""
    return _frozen(_key_reader.decode(encoded))


def encode(value: Any, what: str) -> bytes:
    """A value as bytes; `what` names it in errors."""
    if type(value) in _PLAIN:
        encoded = pickle.dumps(value, 5)
    else:
        encoded = _encode_any(value, what)
    if len(encoded) > VALUE_MAX:
        raise ConfigurationError(
            f"{what} has {len(encoded) / 1e6:.1f} MB, but shared state is for small values, at "
            f"most {VALUE_MAX / 1e6:.1f} MB; pass large data to functions with sky.put, or keep it "
            "in a sky.ModelStore or a file, and share its name"
        )
    return encoded


def decode(encoded: bytes) -> Any:
    """The value."""
    if encoded[:1] != _WITH_BUFFERS:
        return pickle.loads(encoded)
    data, buffers, storages = _reader.decode(memoryview(encoded)[1:])
    # A user may change the arrays, and each of them has the value for itself.
    views = [memoryview(bytearray(buffer)) for buffer in buffers]
    return encoding.decode(data, views, storages)


def _encode_any(value: Any, what: str) -> bytes:
    encoded = encoding.encode(value, own_modules=True, what=what)
    if encoded.handles:
        raise ConfigurationError(
            f"{what} refers to {encoded.handles[0]!r}, which only calls can carry; pass it to the "
            "functions as an argument"
        )
    whole = b"".join(encoded.pieces)
    if not encoded.buffers:
        return whole
    buffers = [bytes(buffer) for buffer in encoded.buffers]
    return _WITH_BUFFERS + _packer.encode((whole, buffers, encoded.storages))


def _is_key(key: Any) -> bool:
    if type(key) is tuple:
        return all(map(_is_key, key))
    return type(key) in _PLAIN


def _frozen(key: Any) -> Any:
    return tuple(map(_frozen, key)) if type(key) is list else key


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
