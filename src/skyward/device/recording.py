"""A device's recording: when each operation was issued and run, and what else took time."""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass
from typing import NamedTuple

_HEAD = struct.Struct("<10Q")
_OPERATION = struct.Struct("<6Q4I")
_SPAN = struct.Struct("<3Q2I")


class Operation(NamedTuple):
    """One operation; times are nanoseconds of the client's clock, 0 where they are not known."""

    issue_start: int
    issue_end: int
    run_start: int
    run_end: int
    kernel_start: int
    kernel_end: int
    name: int
    thread: int
    stream: int
    reserved: int


class Kind(enum.IntEnum):
    """What a span of time was spent on; the numbers are those of `wire/recording.h`."""

    UPLOADING = 0
    DOWNLOADING = 1
    READING = 2
    ASKING_SHAPE = 3
    SYNCHRONIZING = 4
    ASKING_OTHER = 5
    FLUSHING = 6
    FINISHING = 7
    TAKING_UPLOAD = 8
    SENDING_VALUE = 9
    AWAITING_DEVICE = 10


class TimeSpan(NamedTuple):
    """A span of time of the client or the worker, by the client's clock."""

    start: int
    end: int
    bytes: int
    kind: int
    thread: int


@dataclass(frozen=True, slots=True)
class Recording:
    """Everything recorded of one device, between two moments of the client's clock."""

    start: int
    end: int
    clock_error: int
    """How far the worker's times may be off, in nanoseconds."""
    operations_dropped: int
    spans_dropped: int
    operations: list[Operation]
    spans: list[TimeSpan]
    worker_spans: list[TimeSpan]
    names: list[str]
    missing: str
    """Why the worker's part is missing; empty if it is not."""

    @classmethod
    def read(cls, content: bytes) -> Recording:
        """A recording as the core writes it."""
        start, end, error, lost, spans_lost, *counts, names, missing = _HEAD.unpack_from(content)
        operations, spans, worker_spans = counts
        view, at = memoryview(content), _HEAD.size

        def take(size: int) -> memoryview:
            nonlocal at
            at += size
            return view[at - size : at]

        return cls(
            start,
            end,
            error,
            lost,
            spans_lost,
            [*map(Operation._make, _OPERATION.iter_unpack(take(operations * _OPERATION.size)))],
            [*map(TimeSpan._make, _SPAN.iter_unpack(take(spans * _SPAN.size)))],
            [*map(TimeSpan._make, _SPAN.iter_unpack(take(worker_spans * _SPAN.size)))],
            bytes(take(names)).decode().split("\0")[:-1],
            bytes(take(missing)).decode(errors="replace"),
        )
