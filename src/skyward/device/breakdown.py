"""A breakdown of a profiled block's time: what kept its device from being done sooner."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

from skyward.device.recording import Kind, Recording

TRANSFERS = (Kind.UPLOADING, Kind.DOWNLOADING)
WAITS = (
    Kind.READING,
    Kind.ASKING_SHAPE,
    Kind.SYNCHRONIZING,
    Kind.ASKING_OTHER,
    Kind.FINISHING,
)

Interval = tuple[int, int]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same moments as intervals in order that do not touch."""
    made: list[Interval] = []
    for start, end in sorted(intervals):
        if made and start <= made[-1][1]:
            if end > made[-1][1]:
                made[-1] = (made[-1][0], end)
        elif start < end:
            made.append((start, end))
    return made


def overlap(some: list[Interval], others: list[Interval]) -> list[Interval]:
    """The moments in both; each must be a union."""
    made, i, j = [], 0, 0
    while i < len(some) and j < len(others):
        start, end = max(some[i][0], others[j][0]), min(some[i][1], others[j][1])
        if start < end:
            made.append((start, end))
        if some[i][1] < others[j][1]:
            i += 1
        else:
            j += 1
    return made


def seconds(intervals: list[Interval]) -> float:
    """How long the intervals of a union last together."""
    return sum(end - start for start, end in intervals) / 1e9


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Where the time of a block went, in seconds.

    Every moment of `wall` counts once, for the first of these that holds. `worker_bound`: the
    worker carried out operations, or its GPU ran their kernels. `transferring`: tensors of more
    than 64 KiB came or went. `reading`: the client waited for an answer, such as a value, a shape
    or the end of `synchronize`. `client_bound`: the worker had nothing to do, because the client
    had not issued the next operation.
    """

    wall: float
    worker_bound: float
    transferring: float
    reading: float
    client_bound: float
    waited: float
    """How much of `worker_bound` the client spent waiting."""
    kernels: float | None
    """How much of `worker_bound` the GPU ran kernels; None on a CPU."""
    operations: int
    reads: int
    bytes_uploaded: int
    bytes_downloaded: int

    @classmethod
    def of(cls, recording: Recording) -> Breakdown:
        """The breakdown of a recording."""
        block = [(recording.start, recording.end)]
        operations, spans = recording.operations, recording.spans

        def inside(intervals: Iterable[Interval]) -> list[Interval]:
            return overlap(union(intervals), block)

        kernels = inside((o.kernel_start, o.kernel_end) for o in operations if o.kernel_end)
        busy = inside(
            chain(((o.run_start, o.run_end) for o in operations if o.run_end), iter(kernels))
        )
        moving = inside(
            chain(
                ((s.start, s.end) for s in spans if s.kind in TRANSFERS),
                ((s.start, s.end) for s in recording.worker_spans if s.kind == Kind.TAKING_UPLOAD),
            )
        )
        waiting = inside((s.start, s.end) for s in spans if s.kind in WAITS)
        wall = seconds(block)
        first, second = seconds(busy), seconds(union([*busy, *moving]))
        third = seconds(union([*busy, *moving, *waiting]))
        return cls(
            wall=wall,
            worker_bound=first,
            transferring=second - first,
            reading=third - second,
            client_bound=wall - third,
            waited=seconds(overlap(busy, waiting)),
            kernels=seconds(kernels) if any(o.kernel_end for o in operations) else None,
            operations=len(operations) + recording.operations_dropped,
            reads=sum(s.kind in WAITS and s.kind != Kind.FINISHING for s in spans),
            bytes_uploaded=sum(s.bytes for s in spans if s.kind == Kind.UPLOADING),
            bytes_downloaded=sum(
                s.bytes for s in spans if s.kind in (Kind.DOWNLOADING, Kind.READING)
            ),
        )

    def lines(self) -> list[str]:
        """The five lines that say it, the first without the device's name."""
        gpu = "" if self.kernels is None else f"; its GPU for {_time(self.kernels)} of it"
        rows = [
            (
                self.worker_bound,
                "worker-bound",
                f"the worker computed{gpu}; the client waited for {_time(self.waited)} of it",
            ),
            (
                self.transferring,
                "transfers",
                f"{_size(self.bytes_uploaded)} up, {_size(self.bytes_downloaded)} down",
            ),
            (
                self.reading,
                "reads",
                "the worker was done, and an answer on its way (.item(), .cpu(), ...); "
                f"waits: {self.reads}",
            ),
            (
                self.client_bound,
                "client-bound",
                "the worker had nothing to do: the client had not issued the next operation",
            ),
        ]
        wall = max(self.wall, 1e-9)
        return [
            f"{_time(self.wall)}, {self.operations} operations",
            *(f"{100 * part / wall:6.1f} %  {name:<12}  {text}" for part, name, text in rows),
        ]


def _time(length: float) -> str:
    return f"{length:.2f} s" if length >= 1 else f"{1000 * length:.1f} ms"


def _size(count: int) -> str:
    size = float(count)
    for unit in ("B", "KB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"
