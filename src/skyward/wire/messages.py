"""Messages: the typed meta part of every frame, one struct a kind."""

from __future__ import annotations

from typing import Annotated, ClassVar, TypeVar

import msgspec

from skyward.errors import ProtocolError

INLINE, SEGMENT, STREAMED, KNOWN = range(4)
"""Where a buffer's bytes are: in the body's front, in shared memory, in the body's tail, cached."""


Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 48)]
"""A number of bytes, an offset or a segment's id: refused when negative or absurd."""
Place = Annotated[int, msgspec.Meta(ge=INLINE, le=KNOWN)]


class Message(msgspec.Struct, array_like=True, gc=False, forbid_unknown_fields=True):
    """The root of all messages; `KIND` is the byte that names it on the wire."""

    KIND: ClassVar[int] = 0


class Buffer(msgspec.Struct, array_like=True, gc=False, forbid_unknown_fields=True):
    """One out-of-band buffer of a payload."""

    length: Size
    where: Place = INLINE
    digest: bytes = b""
    segment: Size = 0
    offset: Size = 0


class Payload(msgspec.Struct, array_like=True, gc=False, forbid_unknown_fields=True):
    """An encoded object: how the body and shared memory make up its pickle and buffers."""

    pickle: Size
    """Its length at the front of the body; 0 if the first of the buffers is the pickle."""
    buffers: list[Buffer] = []
    storages: list[tuple[Size, Size]] = []
    """For the last buffers, each a tensor storage: (first byte sent, bytes of the storage)."""
    segments: list[tuple[Size, Size]] = []
    """Shared memory that arrives with this frame, one descriptor each: (id, size)."""
    inline: Size = 0
    """Bytes of the body before the streamed buffers."""


class Hello(Message):
    """The first frame of who connects, the only one read before the connection is accepted."""

    KIND = 1
    pool: str
    role: str
    """What it is for: "control", "data", "device-ops" or "device-bulk"; among executors, "peer"."""
    direction: str = "both"
    """For one connection of an encrypted pair: "send" or "receive", as the client sees it."""
    session: str = ""
    """Joins the two connections of a pair; of a link, those of all its pairs."""
    versions: dict[str, str] = {}
    pid: int = 0
    attempt: Size = 0
    """Which of a link's pairs this belongs to, counted from 1; 0 if it is no link's."""
    received: Size = 0
    """How much of a link's stream the client has."""
    stripe: Size = 0
    """The number of a connection that joins a link's pair for large writes, counted from 1."""


class Welcome(Message):
    """The listener's answer: its versions, or why it refuses."""

    KIND = 2
    versions: dict[str, str] = {}
    pid: int = 0
    refusal: str = ""
    received: Size = 0
    """How much of a link's stream the worker has."""


class Ping(Message):
    """A heartbeat; answered by the same message."""

    KIND = 3
    number: int


class ExecutorUp(Message):
    """An executor process listens and waits for the client's data connection."""

    KIND = 4
    worker: int
    slot: int
    pid: int
    endpoint: str
    port: int = 0
    """On the head's first worker, a port of that machine kept free for the workers to meet at."""


class ExecutorDown(Message):
    """An executor process ended, and why."""

    KIND = 5
    worker: int
    slot: int
    pid: int
    reason: str
    restarting: bool


class Kill(Message):
    """End an executor at once; a new one takes its place."""

    KIND = 6
    worker: int
    slot: int
    pid: int
    reason: str


class Shutdown(Message):
    """End every executor and then yourself."""

    KIND = 7


class Topology(Message):
    """The pool's shape changed: the new COMPUTE_POOL value for one worker."""

    KIND = 8
    worker: int
    compute_pool: str


class OpenDevice(Message):
    """Start a process that serves one torch device to this client alone."""

    KIND = 9
    number: int
    kind: str


class DeviceUp(Message):
    """A device process listens; `kind` is what it really serves."""

    KIND = 10
    number: int
    pid: int
    endpoint: str
    kind: str


class DeviceDown(Message):
    """A device process ended, or could not start, and why."""

    KIND = 11
    number: int
    reason: str


class CloseDevice(Message):
    """End a device process."""

    KIND = 12
    number: int


class Prepare(Message):
    """What plugins do before the first task: for an agent on its node, for an executor in it."""

    KIND = 13
    compute_pool: str
    """Empty to an agent."""
    hooks: bytes
    """The encoded hooks of all plugins, in order."""


class Prepared(Message):
    """The hooks were entered, or one of them failed."""

    KIND = 14
    problem: str
    """Empty if all went well; else plugin, hook and traceback."""


class Define(Message):
    """An object to keep under a key: a function's code, or data from `put`."""

    KIND = 16
    key: bytes
    payload: Payload
    frozen: bool


class Forget(Message):
    """Definitions and shared memory the client no longer refers to."""

    KIND = 17
    keys: list[bytes]
    segments: list[int]
    digests: list[bytes]


class Run(Message):
    """One task."""

    KIND = 18
    task: int
    name: str
    code: bytes
    payload: Payload
    handles: list[bytes]
    inputs: list[str]
    """Names of the argument streams, in the order the payload refers to them."""


class Cancel(Message):
    """Stop a task: unstarted ones are dropped, a running one is interrupted."""

    KIND = 19
    task: int


class Recall(Message):
    """Give back tasks that have not started, so that another worker can have them."""

    KIND = 20


class Recalled(Message):
    """The tasks given back."""

    KIND = 21
    tasks: list[int]


class Credit(Message):
    """Permission to send so many more items of a stream; `-1` closes it."""

    KIND = 22
    task: int
    stream: int
    """-1 for the task's own output, else the index of an argument stream."""
    count: int


class Item(Message):
    """One item of a stream."""

    KIND = 23
    task: int
    stream: int
    payload: Payload


class End(Message):
    """The end of a stream; with a payload, the exception it ended with."""

    KIND = 24
    task: int
    stream: int
    payload: Payload | None


class Result(Message):
    """A task returned."""

    KIND = 25
    task: int
    ran: float
    """Seconds the function itself ran."""
    payload: Payload | None
    """None: the task returned an iterator, whose items follow on its output stream."""


class Failure(Message):
    """A task raised, or could not be run."""

    KIND = 26
    task: int
    ran: float
    type_name: str
    text: str
    frames: list[tuple[str, int, str, str]]
    """The remote traceback: file, line, function, source line where the worker had it."""
    payload: Payload | None
    cancelled: bool


class Written(Message):
    """Output of a task: whole lines, or one state of a progress bar."""

    KIND = 27
    task: int
    stream: str
    text: str
    transient: bool


class Missing(Message):
    """A task was set aside: it names something this worker does not have, or cannot reach."""

    KIND = 28
    task: int
    digests: list[bytes]
    keys: list[bytes]
    unreachable: bool
    """It refers to a device's memory that this process cannot open."""


class Released(Message):
    """Shared memory nobody on this side maps any more; its owner may write to it again."""

    KIND = 30
    segments: list[int]


class Evicted(Message):
    """Blobs this worker dropped to stay within its cap."""

    KIND = 31
    digests: list[bytes]


class Fetch(Message):
    """Blobs that the next messages name and a peer has, or is about to have: ask for them there."""

    KIND = 32
    blobs: list[tuple[bytes, Size]]
    """(digest, length) each."""
    endpoint: str
    name: str
    """The name in the peer's certificate."""
    number: Size
    """Counts up: an executor only waits for executors whose fetches have lower numbers, so that
    executors never wait for each other in a circle."""


class Want(Message):
    """To a peer: send these blobs, one after the other."""

    KIND = 33
    blobs: list[tuple[bytes, Size, Size]]
    """(digest, length, first byte wanted) each."""
    number: Size
    """That of the `Fetch`."""


class Part(Message):
    """From a peer: the next bytes of the blob it is at, as its body; none yet if that is empty."""

    KIND = 34
    known: bool
    """False: it does not have that blob, and will not have it in time."""


KINDS: dict[int, type[Message]] = {kind.KIND: kind for kind in Message.__subclasses__()}

_encoder = msgspec.msgpack.Encoder()
_decoders = {kind: msgspec.msgpack.Decoder(message) for kind, message in KINDS.items()}

M = TypeVar("M", bound=Message)


def encode(message: Message) -> bytes:
    """The meta bytes of a message."""
    return _encoder.encode(message)


def decode(kind: int, meta: bytes) -> Message:
    """The message a frame carries; raises `ProtocolError` for anything else."""
    decoder = _decoders.get(kind)
    if decoder is None:
        raise ProtocolError(f"a frame of unknown kind {kind}")
    try:
        return decoder.decode(meta)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as problem:
        raise ProtocolError(f"a malformed {KINDS[kind].__name__} message: {problem}") from None


def decode_as(wanted: type[M], kind: int, meta: bytes) -> M:
    """The message, which must be of the wanted kind."""
    message = decode(kind, meta)
    if not isinstance(message, wanted):
        raise ProtocolError(f"expected {wanted.__name__}, got {type(message).__name__}")
    return message
