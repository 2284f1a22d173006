"""Messages: the typed meta part of every frame, one struct for each kind."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, TypeVar

import msgspec

from skyward.errors import ProtocolError

INLINE, SEGMENT, STREAMED, KNOWN = range(4)
"""Where a buffer's bytes are.

At the front of the body, in shared memory, at the end of the body, or in the receiver's cache.
"""


NEVER, AT_BREAKPOINTS, KEEPING_FRAMES, AT_FAILURES, POST_MORTEM = range(5)
"""When a task opens a debugger on the client's terminal.

Never; at `breakpoint()`; there, and a failure's frames are kept; also when the task fails; or at
once, in the frames of the failure before.
"""

OBJECT_CALLS = 1 << 62
"""From here, tasks are numbered that call objects of other executors; below are a client's."""

CODE_KEPT = 64
"""How many functions a client keeps of those that an executor has defined, for `Start`."""

Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 48)]
"""A number of bytes, an offset or a segment's id; the decoder refuses numbers out of range."""
Place = Annotated[int, msgspec.Meta(ge=INLINE, le=KNOWN)]
DebugMode = Annotated[int, msgspec.Meta(ge=NEVER, le=POST_MORTEM, title="mode")]


class Message(msgspec.Struct, array_like=True, gc=False, forbid_unknown_fields=True):
    """The root of all messages; `KIND` is the byte that names the message on the wire."""

    KIND: ClassVar[int] = 0


class Buffer(msgspec.Struct, array_like=True, gc=False, forbid_unknown_fields=True):
    """One out-of-band buffer of a payload."""

    length: Size
    where: Place = INLINE
    digest: bytes = b""
    segment: Size = 0
    offset: Size = 0


class Payload(msgspec.Struct, array_like=True, gc=False, forbid_unknown_fields=True):
    """An encoded object: where its pickle and its buffers are, in the body and in shared memory."""

    pickle: Size
    """The pickle's length at the front of the body; 0 if the first buffer is the pickle."""
    buffers: list[Buffer] = []
    storages: list[tuple[Size, Size]] = []
    """For the last buffers, each a tensor storage: (first byte sent, bytes of the storage)."""
    segments: list[tuple[Size, Size]] = []
    """Shared memory that arrives with this frame, one descriptor each: (id, size)."""
    inline: Size = 0
    """Bytes of the body before the streamed buffers."""


class Hello(Message):
    """The connecting end's first frame; the listener reads no other before it accepts."""

    KIND = 1
    pool: str
    role: str
    """The connection's purpose: "control", "data", "device-ops" or "device-bulk".

    Between executors it is "peer", or "peer-objects" to call objects of the other one; further bulk
    connections of a device have a number. Between the processes of two devices it is
    "peer-LINK-NUMBER". To a service of an agent it is "service-NAME" for clients alone, or
    "peer-service-NAME" if processes of the pool's nodes may ask, too.
    """
    direction: str = "both"
    """For one connection of an encrypted pair: "send" or "receive", as the client sees it."""
    session: str = ""
    """The same for the two connections of a pair, and for all pairs of a link."""
    versions: dict[str, str] = {}
    pid: int = 0
    attempt: Size = 0
    """The number of the connection's pair in its link, counted from 1; 0 if there is no link."""
    received: Size = 0
    """How many bytes of a link's stream the client has received."""
    stripe: Size = 0
    """The number of the stripe, a further connection for large writes, counted from 1; else 0."""
    client: str = ""
    """For a control connection to the agent of a kept pool: the tenant that the client is."""


class Welcome(Message):
    """The listener's answer: its versions, or why it refuses."""

    KIND = 2
    versions: dict[str, str] = {}
    pid: int = 0
    refusal: str = ""
    received: Size = 0
    """How many bytes of a link's stream the worker has received."""


class Ping(Message):
    """A heartbeat; the receiver answers with the same message."""

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
    """From the head's first worker: a port that it keeps free for the workers to meet at."""
    group: str = ""
    """The hooks that the executor has entered for an earlier client, as `Detach` named them."""


class ExecutorDown(Message):
    """An executor process ended; `reason` says why."""

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
    """The agent ends every executor, and then itself."""

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
    pid: int = 0
    """The process that holds kept values and is wanted, and no other; 0 if any will do."""
    ticket: str = ""
    """What a process of another node shows to use the device for the client: the rank above it in a
    mesh. Empty if none may."""


class DeviceUp(Message):
    """A device process listens; `kind` is the device that it serves, never "auto"."""

    KIND = 10
    number: int
    pid: int
    endpoint: str
    kind: str
    properties: dict[str, str | bool | int | float]
    """What the device is: its name, memory, version; on a GPU all that torch knows of it."""


class DeviceDown(Message):
    """A device process ended or could not start; `reason` says why."""

    KIND = 11
    number: int
    reason: str


class CloseDevice(Message):
    """End a device process."""

    KIND = 12
    number: int


class Prepare(Message):
    """The hooks that plugins have for a node, sent to its agent, or for an executor."""

    KIND = 13
    compute_pool: str
    """Empty in the message to an agent."""
    hooks: bytes
    """The encoded hooks of all plugins, in order."""


class Prepared(Message):
    """The hooks were entered, or one of them failed."""

    KIND = 14
    problem: str
    """Empty after success; otherwise the plugin, the hook and the traceback."""


class Measure(Message):
    """Say how busy the node is."""

    KIND = 15
    number: int


class Define(Message):
    """An object to keep under a key: a function's code, or data from `put`."""

    KIND = 16
    key: bytes
    payload: Payload
    frozen: bool
    fresh: bool = False
    """Whether each task that names the object gets one of its own: the result of another task."""


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
    kept: bool = False
    """Whether the tensors of the result are kept on the node's device."""
    trace: dict[str, str] = {}
    """The headers of the call's trace, as OpenTelemetry writes them; empty if there is none."""
    debugged: DebugMode = NEVER
    apart: str = ""
    """The object with a place of its own that the task belongs to; empty if there is none."""
    pending: bool = False
    """Whether it is sent again, to an executor that has reported it as `Missing`."""


class Cancel(Message):
    """Stop a task: the executor drops it before its start, and interrupts it later.

    Said again of a task that does not end: others may have its place.
    """

    KIND = 19
    task: int


class Recall(Message):
    """Give back the tasks that have not started, so that another worker can run them."""

    KIND = 20


class Recalled(Message):
    """The tasks given back."""

    KIND = 21
    tasks: list[int]


class Credit(Message):
    """Permission to send `count` more items of a stream; -1 closes the stream.

    From an executor, about its own output: it has used `count` permissions, and waits for more.
    """

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
    """None if the task returned an iterator: the items follow on the task's output stream."""


class Failure(Message):
    """A task raised, or could not be run."""

    KIND = 26
    task: int
    ran: float
    type_name: str
    text: str
    frames: list[tuple[str, int, str, str]]
    """The remote traceback: file, line, function, and the source line if the worker has it."""
    payload: Payload | None
    cancelled: bool
    unsent: str = ""
    """Why an exception that could arrive as what it was has no payload."""


class Written(Message):
    """Output of a task: lines, or one state of a progress bar.

    If lines do not end with a newline, the task's next lines of the same stream continue them.
    """

    KIND = 27
    task: int
    stream: str
    text: str
    transient: bool
    name: str = ""
    """The task's name, if it is no task of the client: a method that another task has called."""


class Missing(Message):
    """The worker keeps a task pending: it lacks a thing that the task names."""

    KIND = 28
    task: int
    digests: list[bytes]
    keys: list[bytes]
    unreachable: bool
    """Whether the task refers to a device's memory that this process cannot open."""


class Logged(Message):
    """Numbers that tasks have logged."""

    KIND = 29
    rows: list[tuple[int, int | None, dict[str, float]]]
    """Task, step and values by name, in the order in which they were logged."""
    left_out: Size = 0
    """How many rows there were too many of to send."""


class Released(Message):
    """Shared memory that this end no longer maps; the owner may write to it again."""

    KIND = 30
    segments: list[int]


class Evicted(Message):
    """Blobs that this worker dropped to stay within its cache's limit."""

    KIND = 31
    digests: list[bytes]


class Fetch(Message):
    """Blobs that the next messages name: fetch them from a peer, which has them or soon will."""

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
    """The number of the `Fetch`."""


class Part(Message):
    """From a peer: the body is the next bytes of the blob; empty if none have arrived there yet."""

    KIND = 34
    known: bool
    """False if the peer does not have the blob, and will not have it in time."""


class Usage(Message):
    """How busy a node is: the answer to the `Measure` of that number."""

    KIND = 35
    number: int
    cpu_percent: float
    """Of all processors that the node may use, since the measurement before."""
    memory_used: Size
    memory_total: Size
    gpus: list[tuple[str, float | None, Size, Size]]
    """The name, the load in percent if it is known, and memory used and there, of each."""
    network_received: Size = 0
    """Bytes that the node has received since it was started, but for those from itself."""
    network_sent: Size = 0


class Reclaim(Message):
    """The provider takes a node's machine back in so many seconds."""

    KIND = 36
    seconds: float
    reason: str


class Question(Message):
    """A question to a service of an agent, or a further part of it; the body may hold bytes."""

    KIND = 37
    what: str
    arguments: dict[str, Any] = {}
    number: Size = 0
    """Where several questions may be open at once: which one this is."""


class Reply(Message):
    """A service's answer, or a part of it; the body may hold bytes."""

    KIND = 38
    value: Any = None
    problem: str = ""
    """Why the service refuses or fails; empty if it does not."""
    more: bool = False
    """Whether further replies follow to the same question."""
    number: Size = 0
    """The number of the question."""


class Keep(Message):
    """The node stays when its clients leave."""

    KIND = 50
    idle: float
    """After how many seconds without a client the node ends by itself; 0 if it does not."""


class Detach(Message):
    """The client leaves a kept pool; sent to each idle executor, and then to the agent."""

    KIND = 51
    group: str = ""
    """To an agent: names the hooks that all executors have entered; empty if some have not."""


class NodeEnded(Message):
    """Somebody ends the node of a kept pool: its clients do not start it again."""

    KIND = 52
    by: str
    """Who, for people."""


class Members(Message):
    """Nodes have come to a kept pool, or left it; told to the head, for those who look."""

    KIND = 53
    came: list[dict[str, Any]]
    """What a client needs to know of each, as in the pool's record."""
    left: list[int]


class Room(Message):
    """Tensors of a task's result are kept on the node's device: make memory for their storages."""

    KIND = 41
    task: int
    spans: list[tuple[Size, Size]]
    """For each storage, the first byte and the end of the part that is kept."""


class Places(Message):
    """Where the storages of a task's result go; without pieces, their bytes are sent instead."""

    KIND = 42
    task: int
    pieces: list[bytes]
    """How the executor opens each piece of memory."""
    places: list[tuple[Size, Size]]
    """For each storage, the number of a piece and an offset in it."""


class DebuggerSays(Message):
    """A task's debugger wants the client's terminal or a file's source, or asks for a line."""

    KIND = 43
    task: int
    event: str
    """"opened", "asks", "closed" or "source"."""
    text: str
    """What the client shows first; with "source", the file."""


class DebuggerHears(Message):
    """What the client says to a task's debugger."""

    KIND = 44
    task: int
    event: str
    """"line", "interrupt" for Ctrl-C, "end" for the end of the input, "refused", or "source"."""
    text: str
    """The line, why there is no terminal, or the source; that is empty if it is not there."""
    file: str = ""
    """With "source", the file that the source is of."""


class Start(Message):
    """A task starts another: on any worker, or on all of them.

    The call has a number below 0, and so have the messages about it: `Result`, `Failure`, `Item`
    and `End` from the client, `Cancel` and `Credit` from the executor.
    """

    KIND = 45
    number: int
    task: int
    """The task that asks; 0 if it is not known."""
    name: str
    code: bytes
    """A function that the executor has defined before."""
    payload: Payload
    handles: list[bytes] = []
    """The values that the payload refers to; the executor has defined them, for this call alone."""
    everywhere: bool = False
    timeout: float = 0.0
    """In seconds; 0 if the function has none of its own."""
    retries: Size = 0
    fail_fast: bool = False
    object: str = ""
    """The key of an object that the task does not reach, and whose method is called: the last word
    of the name. Then there is no code."""


class Waits(Message):
    """A task waits for tasks that it has started, and gives its place up; or it goes on."""

    KIND = 46
    task: int
    waits: bool


class Share(Message):
    """Tasks of all nodes may call objects of this executor: from now on, they connect to it."""

    KIND = 47


class Closed(Message):
    """A task has closed an object."""

    KIND = 48
    key: str


class Called(Message):
    """How calls of objects have ended that tasks have made straight, since this was said before."""

    KIND = 49
    succeeded: Size
    failed: Size
    cancelled: Size


KINDS: dict[int, type[Message]] = {kind.KIND: kind for kind in Message.__subclasses__()}

ENCODER = msgspec.msgpack.Encoder()
"""Makes the meta bytes of a message; for those who hurry, since `encode` is one function more."""
MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What is raised for bytes that are no message."""
_decoders = {kind: msgspec.msgpack.Decoder(message) for kind, message in KINDS.items()}

M = TypeVar("M", bound=Message)


def encode(message: Message) -> bytes:
    """The meta bytes of a message."""
    return ENCODER.encode(message)


def decode(kind: int, meta: bytes) -> Message:
    """The message that a frame carries; `ProtocolError` if the frame carries none."""
    decoder = _decoders.get(kind)
    if decoder is None:
        raise ProtocolError(f"a frame of unknown kind {kind}")
    try:
        return decoder.decode(meta)
    except MALFORMED as problem:
        raise ProtocolError(f"a malformed {KINDS[kind].__name__} message: {problem}") from None


def decode_as(wanted: type[M], kind: int, meta: bytes) -> M:
    """The message that a frame carries; `ProtocolError` unless it is of the wanted kind."""
    message = decode(kind, meta)
    if not isinstance(message, wanted):
        raise ProtocolError(f"expected {wanted.__name__}, got {type(message).__name__}")
    return message
