"""Objects in files: encoded objects one after the other, each with facts about it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import IO, Any

import msgspec

from skyward.errors import ProtocolError
from skyward.objects.payloads import Pieces

_LENGTH = 8
_ALIGNMENT = 64

Head = tuple[Any, int, list[int], list[tuple[int, int]]]
"""The facts, the length of the pickle, those of the buffers, and the tensors' storages."""


def append(
    file: IO[bytes],
    pickle: Sequence[bytes | memoryview],
    buffers: Sequence[memoryview] = (),
    storages: Sequence[tuple[int, int]] = (),
    facts: Any = None,
) -> None:
    """Write an encoded object behind those that the file has."""
    length = sum(map(len, pickle))
    head: Head = (facts, length, [len(each) for each in buffers], list(storages))
    told = msgspec.msgpack.encode(head)
    file.write(len(told).to_bytes(_LENGTH, "little") + told)
    for piece in pickle:
        file.write(piece)
    for buffer in buffers:
        file.seek(_aligned(file.tell()))
        file.write(buffer)
    # The next one begins there, and the block that a reader maps ends there.
    file.truncate(_aligned(file.tell()))
    file.seek(_aligned(file.tell()))


def objects(block: memoryview) -> Iterator[tuple[Any, Pieces]]:
    """The objects of a file, each with its facts; they are parts of the block."""
    at = 0
    while at < len(block):
        begin = at + _LENGTH
        at = begin + int.from_bytes(block[at:begin], "little")
        facts, length, lengths, storages = _head(block[begin:at])
        pickle = block[at : at + length]
        at += length
        buffers = []
        for each in lengths:
            at = _aligned(at)
            buffers.append(block[at : at + each])
            at += each
        at = _aligned(at)
        yield facts, (pickle, buffers, storages)


def arriving(parts: Iterable[bytes | bytearray]) -> Iterator[tuple[Any, Pieces, int]]:
    """The objects of a file that comes in parts: each with its facts, and where it ends.

    Each has memory of its own, and only one is in memory.
    """
    waiting, end = bytearray(), 0
    for part in parts:
        waiting += part
        while (size := _size(waiting)) and len(waiting) >= size:
            block = memoryview(waiting[:size])
            del waiting[:size]
            end += size
            for facts, pieces in objects(block):
                yield facts, pieces, end


def _size(data: bytearray) -> int:
    """How many bytes the first object of the data has; 0 if that is not there yet."""
    at = _LENGTH + int.from_bytes(data[:_LENGTH], "little")
    if len(data) < max(at, _LENGTH):
        return 0
    _, length, lengths, _ = _head(memoryview(data)[_LENGTH:at])
    at += length
    for each in lengths:
        at = _aligned(at) + each
    return _aligned(at)


def _head(data: memoryview) -> Head:
    try:
        head: Head = msgspec.msgpack.decode(data, type=Head)
    except msgspec.DecodeError as problem:
        raise ProtocolError(f"a file of encoded objects is damaged: {problem}") from problem
    return head


def _aligned(at: int) -> int:
    return -(-at // _ALIGNMENT) * _ALIGNMENT
