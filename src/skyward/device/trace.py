"""A trace: a profile as Chrome's trace format has it, which Perfetto and chrome://tracing show."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from skyward.device.recording import Kind, Recording, TimeSpan

CLIENT = 1
"""The client's process in the trace; the workers follow."""
TRACKS = 10_000_000
"""Where our own tracks begin: the numbers below are those of threads."""
ARROWS_MOST = 20_000
"""A trace of more operations has no arrows: they would take most of the file."""

LABELS = {
    Kind.UPLOADING: "upload",
    Kind.DOWNLOADING: "download",
    Kind.READING: "read",
    Kind.ASKING_SHAPE: "ask for a shape",
    Kind.SYNCHRONIZING: "synchronize",
    Kind.ASKING_OTHER: "ask for a state",
    Kind.FLUSHING: "flush",
    Kind.FINISHING: "wait for the end of the block",
    Kind.TAKING_UPLOAD: "take an upload",
    Kind.SENDING_VALUE: "send a value",
    Kind.AWAITING_DEVICE: "wait for the device",
}
CLIENT_TRACKS = {
    "waits": (
        Kind.READING,
        Kind.ASKING_SHAPE,
        Kind.SYNCHRONIZING,
        Kind.ASKING_OTHER,
        Kind.FINISHING,
    ),
    "transfers": (Kind.UPLOADING, Kind.DOWNLOADING),
    "wire": (Kind.FLUSHING,),
}
WORKER_SPANS = (Kind.TAKING_UPLOAD, Kind.SENDING_VALUE, Kind.AWAITING_DEVICE)


class Recorded(NamedTuple):
    """A device's recording, and what the device is."""

    name: str
    place: str
    recording: Recording


def write(
    path: Path, recorded: list[Recorded], threads: Mapping[int, str], notes: Mapping[str, object]
) -> None:
    """Write one trace of all devices; `threads` names the client's threads."""
    with path.open("w") as file:
        file.write('{"displayTimeUnit": "ms", "otherData": ')
        json.dump(notes, file)
        file.write(', "traceEvents": [\n')
        file.write(",\n".join(_events(recorded, threads)))
        file.write("\n]}\n")


def _events(recorded: list[Recorded], threads: Mapping[int, str]) -> Iterator[str]:
    zero = min(each.recording.start for each in recorded)
    yield _named("process", CLIENT, 0, "client", 0)
    seen = sorted({o.thread for each in recorded for o in each.recording.operations})
    for order, thread in enumerate(seen):
        name = threads.get(thread, f"thread {thread}")
        yield _named("thread", CLIENT, thread, f"issue ({name})", order)
    for number, each in enumerate(recorded):
        yield from _client(each, number, zero, is_alone=len(recorded) == 1)
        yield from _worker(each, CLIENT + 1 + number, zero)
        if len(each.recording.operations) <= ARROWS_MOST:
            yield from _arrows(each, number, zero)


def _client(each: Recorded, number: int, zero: int, *, is_alone: bool) -> Iterator[str]:
    names = [json.dumps(name) for name in each.recording.names]
    for o in sorted(each.recording.operations):
        yield _slice(CLIENT, o.thread, names[o.name], o.issue_start - zero, o.issue_end - zero)
    for order, (track, kinds) in enumerate(CLIENT_TRACKS.items()):
        tid = TRACKS + 10 * number + order
        name = track if is_alone else f"{track} ({each.name})"
        yield _named("thread", CLIENT, tid, name, tid)
        yield from _spans(CLIENT, tid, zero, each.recording.spans, kinds)


def _worker(each: Recorded, pid: int, zero: int) -> Iterator[str]:
    recording = each.recording
    names = [json.dumps(name) for name in recording.names]
    yield _named("process", pid, 0, f"worker {each.name} ({each.place})", pid)
    yield _named("thread", pid, TRACKS, "operations", 0)
    for o in recording.operations:
        if o.run_end:
            yield _slice(pid, TRACKS, names[o.name], o.run_start - zero, o.run_end - zero)
    yield from _spans(pid, TRACKS, zero, recording.worker_spans, WORKER_SPANS)
    for stream in sorted({o.stream for o in recording.operations if o.kernel_end}):
        tid = TRACKS + 1 + stream
        name = f"kernels, stream {stream}" if stream else "kernels"
        yield _named("thread", pid, tid, name, 1 + stream)
        for o in recording.operations:
            if o.stream == stream and o.kernel_end > o.kernel_start:
                start, end = o.kernel_start - zero, o.kernel_end - zero
                yield _slice(pid, tid, names[o.name], start, end)


def _spans(
    pid: int, tid: int, zero: int, spans: Iterable[TimeSpan], kinds: tuple[Kind, ...]
) -> Iterator[str]:
    labels = {int(kind): json.dumps(LABELS[kind]) for kind in kinds}
    for span in sorted(s for s in spans if s.kind in labels):
        yield _slice(
            pid, tid, labels[span.kind], span.start - zero, span.end - zero, bytes=span.bytes
        )


def _arrows(each: Recorded, number: int, zero: int) -> Iterator[str]:
    """From the issue of each operation to its run, and on to its kernel."""
    pid = CLIENT + 1 + number
    for order, o in enumerate(each.recording.operations):
        if not o.run_end:
            continue
        id = f"{number}.{order}"
        yield _arrow("s", id, CLIENT, o.thread, o.issue_start - zero)
        has_kernel = o.kernel_end > o.kernel_start
        yield _arrow("t" if has_kernel else "f", id, pid, TRACKS, o.run_start - zero)
        if has_kernel:
            yield _arrow("f", id, pid, TRACKS + 1 + o.stream, o.kernel_start - zero)


def _named(what: str, pid: int, tid: int, name: str, order: int) -> str:
    where = f'"ph": "M", "pid": {pid}, "tid": {tid}'
    return (
        f'{{"name": "{what}_name", {where}, "args": {{"name": {json.dumps(name)}}}}},\n'
        f'{{"name": "{what}_sort_index", {where}, "args": {{"sort_index": {order}}}}}'
    )


def _slice(pid: int, tid: int, name: str, start: int, end: int, bytes: int = 0) -> str:
    """A slice of a track; times are nanoseconds, which the format writes as microseconds."""
    args = f', "args": {{"bytes": {bytes}}}' if bytes else ""
    return (
        f'{{"name": {name}, "ph": "X", "pid": {pid}, "tid": {tid}, '
        f'"ts": {start / 1000:.3f}, "dur": {(end - start) / 1000:.3f}{args}}}'
    )


def _arrow(phase: str, id: str, pid: int, tid: int, at: int) -> str:
    return (
        f'{{"name": "issued", "cat": "issue", "ph": "{phase}", "bp": "e", "id": "{id}", '
        f'"pid": {pid}, "tid": {tid}, "ts": {at / 1000:.3f}}}'
    )
