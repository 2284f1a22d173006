"""Payloads: encoded objects as the bodies of frames, and back."""

from __future__ import annotations

import linecache
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from skyward.errors import ProtocolError, RemoteError, TaskCancelledError
from skyward.objects import encoding
from skyward.objects.encoding import Encoded
from skyward.objects.exceptions import add_note
from skyward.objects.memory import ALIGNMENT, BLOB_MIN
from skyward.wire.channel import Channel
from skyward.wire.frames import Frame
from skyward.wire.messages import INLINE, STREAMED, Buffer, Failure, Payload

Pieces = tuple[memoryview, list[memoryview], list[tuple[int, int]]]
"""A received object: its pickle, its buffers, and each tensor storage's first byte and size."""

_PADDING = bytes(ALIGNMENT)


@dataclass(slots=True)
class Packed:
    """A payload ready to send."""

    payload: Payload
    body: list[bytes | memoryview]


def pack(encoded: Encoded, large: Callable[[list[memoryview]], list[Buffer]] | None) -> Packed:
    """Lay out an encoded object; `large` says where large buffers are; None means inline."""
    body: list[bytes | memoryview] = list(encoded.pieces)
    length = at = encoded.pickle_length
    if not encoded.buffers:
        return Packed(Payload(length, inline=at), body)
    big = [b for b in encoded.buffers if len(b) >= BLOB_MIN] if large is not None else []
    placed = iter(large(big) if large is not None and big else ())
    refs = []
    for buffer in encoded.buffers:
        if large is not None and len(buffer) >= BLOB_MIN:
            refs.append(next(placed))
            continue
        gap = -at % ALIGNMENT
        if gap:
            body.append(_PADDING[:gap])
        at += gap
        refs.append(Buffer(len(buffer), INLINE, offset=at))
        body.append(buffer)
        at += len(buffer)
    return Packed(Payload(length, refs, encoded.storages, inline=at), body)


def check(frame: Frame, payload: Payload) -> None:
    """Refuse a payload whose numbers do not match, before any memory is allocated for it."""
    streamed = sum(ref.length for ref in payload.buffers if ref.where == STREAMED)
    if payload.inline + streamed != frame.body_length:
        problem = "does not account for its body"
    elif len(payload.segments) != len(frame.descriptors):
        problem = f"has {len(payload.segments)} segments, {len(frame.descriptors)} descriptors"
    elif not all(ref.length for ref in payload.buffers if ref.where != INLINE):
        problem = "has an empty buffer outside of its body"
    else:
        return
    for descriptor in frame.descriptors:
        os.close(descriptor)
    raise ProtocolError(f"a payload that {problem}")


def unpack(
    payload: Payload,
    body: bytearray | memoryview,
    find: Callable[[Buffer], memoryview],
) -> Pieces:
    """The pieces for `encoding.decode`; `find` returns the buffers that are not inline."""
    view = memoryview(body)
    if not payload.buffers and not payload.storages and payload.pickle == len(view):
        return view, [], []
    in_buffer = not payload.pickle
    if payload.pickle > len(view) or len(payload.storages) + in_buffer > len(payload.buffers):
        raise ProtocolError("a payload that does not fit its body")
    buffers = []
    for ref in payload.buffers:
        if ref.where != INLINE:
            buffers.append(find(ref))
            continue
        if ref.offset < payload.pickle or ref.offset + ref.length > len(view):
            raise ProtocolError("a buffer outside of its body")
        buffers.append(view[ref.offset : ref.offset + ref.length])
    pickle = buffers.pop(0) if in_buffer else view[: payload.pickle]
    return pickle, buffers, payload.storages


def read_body(
    channel: Channel,
    frame: Frame,
    payload: Payload,
    places: Sequence[memoryview],
    told: Callable[[int], None] = lambda done: None,
) -> bytearray:
    """Read the inline part of a frame's body, and the streamed buffers behind it into `places`.

    Calls `told` now and then with how many bytes of the streamed buffers have come.
    """
    if payload.inline < 0 or payload.inline + sum(map(len, places)) != frame.body_length:
        raise ProtocolError("a payload that does not account for its body")
    if frame.body is None:
        body = bytearray(payload.inline)
        channel.read_body(
            frame, [memoryview(body), *places], lambda done: told(max(0, done - payload.inline))
        )
        return body
    at = payload.inline
    for place in places:
        place[:] = frame.body[at : at + len(place)]
        at += len(place)
    return frame.body


def nowhere(ref: Buffer) -> memoryview:
    """Where the buffers of a payload are if all are inline."""
    raise ProtocolError("a buffer that is nowhere")


def raised(failure: Failure, pieces: Pieces | None, name: str, where: str) -> BaseException:
    """The exception that a task raised, with a note that has its node and remote traceback."""
    if failure.cancelled:
        return TaskCancelledError(f"{name} was cancelled on {where}")
    text = _remote_traceback(failure)
    problem: BaseException | None = None
    why = ""
    if failure.unsent:
        why = f" (the exception itself cannot be sent: {failure.unsent})"
    elif failure.type_name == "SystemExit":
        why = " (the function called sys.exit; the worker goes on)"
    if pieces is not None:
        try:
            portable = encoding.decode(*pieces)
            problem = portable.rebuild()
        except Exception as unknown:
            why = (
                " (the exception itself cannot be rebuilt here: "
                f"{type(unknown).__name__}: {unknown})"
            )
    if not isinstance(problem, Exception):
        problem = RemoteError(
            f"{failure.type_name}: {failure.text}{why}",
            type_name=failure.type_name,
            remote_traceback=text,
        )
    add_note(problem, f"raised by {name} on {where}; remote traceback:\n{text}".rstrip())
    if isinstance(problem, ModuleNotFoundError):
        add_note(
            problem,
            f"the module {problem.name!r} is missing on {where}; install it there, for "
            f"example with sky.Image(pip=[{problem.name!r}]), or send it with "
            "sky.Image(includes=[...])",
        )
    return problem


def _remote_traceback(failure: Failure) -> str:
    """The remote frames with source lines; if the worker has no file, from the file here."""
    lines = []
    for file, number, function, source in failure.frames:
        lines.append(f'  File "{file}", line {number}, in {function}')
        source = source or linecache.getline(file, number).strip()
        if source:
            lines.append(f"    {source}")
    lines.append(f"{failure.type_name}: {failure.text}" if failure.text else failure.type_name)
    return "\n".join(lines)
