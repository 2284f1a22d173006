"""The native core of links: TLS, records and counts in C++, without the interpreter's lock.

Python opens connections, shakes hands and dials again. The bytes of a device's link pass it
nowhere; of a call's link it has the frames, whose large bodies go straight from and to memory.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import functools
import hashlib
import itertools
import math
import os
import platform
import select
import socket
import ssl
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyward.errors import SkywardError
from skyward.wire.link.connections import LinkLost
from skyward.wire.link.incoming import NotConnected
from skyward.wire.link.link import redialing
from skyward.wire.link.outgoing import LINK_WINDOW, QUEUED_MAX
from skyward.wire.link.pair import FAR_SECONDS, STRIPED_MIN, Pair, round_trip

SOURCES = Path(__file__).parent / "csrc"
SHIPPED = Path(__file__).parents[1] / "device" / "cores"
"""Where a wheel for one platform has its cores; the wheel for all platforms has none."""

TEXT_SIZE = 1024
BEAT_SECONDS, SILENCE_SECONDS = 1.0, 5.0
"""How often an end sends its count, and after how long without a record a connection is broken; as
in link.cpp."""
LOST, ENDED = 1, 2
"""What `sky_links_run` tells of a link."""
RELAY_SIZE = 64 << 10
NOT_CONNECTED = -2
STRIPING_PROCESSORS = 2
"""With no more processors, one connection carries all that they can encrypt."""
SLICE_MILLISECONDS = 250
"""How long the core waits at a time for a thread of Python's, which then looks for signals."""
_DONT_WAIT = int(socket.MSG_DONTWAIT)


class NativeUnavailable(SkywardError):
    """The native core cannot be used here; the message says why."""


class LinkCore:
    """The loaded core, and the OpenSSL that it uses: the first candidate that will do.

    Without one, Python's `ssl` encrypts, on threads of its own.
    """

    def __init__(self, path: Path, candidates: Iterable[str] | None = None) -> None:
        self.library = ctypes.CDLL(str(path))
        pointers = ("openssl", "context_new", "connection_new", "link_new", "link_table")
        for name in pointers:
            getattr(self.library, f"sky_{name}").restype = ctypes.c_void_p
        numbers = ("connection_read", "connection_write", "connection_write_all", "link_suspend")
        of_calls = ("begin_large", "await_large", "await_room", "receive_large")
        for name in (*numbers, *(f"link_{each}" for each in of_calls)):
            getattr(self.library, f"sky_{name}").restype = ctypes.c_int64
        self.library.sky_python(_of_python())
        method = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_int, ctypes.py_object)
        self.method = method(("sky_link_method", self.library))
        """A function of the core for the link of an address, which Python calls as it calls its
        own: ctypes takes longer with the arguments than the core with a small message."""
        self.table = ctypes.c_void_p(self.library.sky_link_table())
        """The functions that the device's cores call."""
        self.openssl: ctypes.c_void_p | None = None
        self.openssl_name = ""
        """Its version, and the file that it is in; why there is none, if there is none."""
        problems = []
        for candidate in openssl_libraries() if candidates is None else candidates:
            try:
                self.openssl = self.open(candidate)
            except NativeUnavailable as problem:
                problems.append(f"{candidate or 'this program'}: {problem}")
            else:
                text = ctypes.create_string_buffer(TEXT_SIZE)
                self.library.sky_openssl_name(self.openssl, text, TEXT_SIZE)
                self.openssl_name = text.value.decode(errors="replace")
                return
        self.openssl_name = "; ".join(problems) or "there is no candidate"

    def open(self, path: str) -> ctypes.c_void_p:
        """An OpenSSL 3 of that path; of this program if it is empty."""
        text = ctypes.create_string_buffer(TEXT_SIZE)
        found = self.library.sky_openssl(path.encode() or None, text, TEXT_SIZE)
        if not found:
            raise NativeUnavailable(text.value.decode(errors="replace"))
        return ctypes.c_void_p(found)


def _of_python() -> ctypes.Array[ctypes.c_void_p]:
    """Functions of Python's own, in the order of `Python` in api.cpp."""
    names = (
        *("PyObject_GetBuffer", "PyBuffer_Release", "PyLong_AsVoidPtr", "PyLong_AsLongLong"),
        *("PyLong_FromLongLong", "PyErr_Occurred", "PyEval_SaveThread", "PyEval_RestoreThread"),
        "PyCFunction_NewEx",
    )
    try:
        found = [ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p) for name in names]
    except AttributeError as problem:
        raise OSError(f"this Python does not show its functions: {problem}") from None
    return (ctypes.c_void_p * len(names))(*found)


def openssl_libraries() -> Iterator[str]:
    """Where OpenSSL may be: the library that Python's own `ssl` uses, then the system's.

    `_ssl` has its library among those that it needs, or in itself. If it is a part of the program,
    so is OpenSSL; its functions may be visible.
    """
    import _ssl

    yield getattr(_ssl, "__file__", None) or ""
    yield from ("libssl.so.3", "libssl.3.dylib")


def digest(files: Iterable[Path], words: Iterable[str]) -> str:
    """A name for the content of some files and words."""
    made = hashlib.sha256()
    for file in sorted(files):
        content = file.read_bytes()
        made.update(f"{file.parent.name}/{file.name} {len(content)}\n".encode() + content)
    made.update("\0".join(words).encode())
    return made.hexdigest()[:16]


def core_name(system: str, machine: str) -> str:
    """The file of the core; the digest is that of its sources, so that no other core is taken."""
    return f"link-{system}-{machine}-{digest(SOURCES.iterdir(), ())}.so"


def cache() -> Path:
    """The folder of cores that were compiled here."""
    # Imported here: a process that has no link is started sooner.
    import platformdirs

    return (
        Path(os.environ.get("SKYWARD_CACHE") or platformdirs.user_cache_dir("skyward")) / "device"
    )


def place() -> Path:
    """Where the core is, or would be once it is compiled."""
    name = core_name(platform.system().lower(), platform.machine())
    return SHIPPED / name if (SHIPPED / name).exists() else cache() / name


_core: LinkCore | None = None


def load(path: Path) -> None:
    """Load the core, once for the process."""
    global _core
    if _core is None:
        _core = LinkCore(path)


@functools.cache
def _why_not_loaded() -> str:
    try:
        path = place()
        if not path.exists():
            return "it is neither in the wheel nor compiled yet"
        load(path)
    except OSError as problem:
        return str(problem)
    return ""


def why_not() -> str:
    """Why calls do not use the core here; empty if they do. Nothing is compiled for them."""
    if os.environ.get("SKYWARD_LINKS") == "python":
        return "SKYWARD_LINKS=python"
    if _core is None and (problem := _why_not_loaded()):
        return problem
    found = core()
    return "" if found.openssl else f"no OpenSSL 3 can be used ({found.openssl_name})"


def carries_calls() -> bool:
    """Whether the bytes of calls go through the core."""
    return not why_not()


def core() -> LinkCore:
    """The core that was loaded."""
    if _core is None:
        raise NativeUnavailable("the core of links was not loaded")
    return _core


def wants_kernel_tls() -> bool:
    """Whether the user has asked for it; OpenSSL goes on without where the kernel has none."""
    return os.environ.get("SKYWARD_KERNEL_TLS", "") == "1"


class Context:
    """A TLS 1.3 context that accepts only peers of the same pool; as `ssl.SSLContext` is used."""

    def __init__(self, authority: str, certificate: str, key: str, *, server: bool) -> None:
        library = core().library
        text = ctypes.create_string_buffer(TEXT_SIZE)
        made = library.sky_context_new(
            core().openssl,
            authority.encode(),
            certificate.encode(),
            key.encode(),
            int(server),
            int(wants_kernel_tls()),
            text,
            TEXT_SIZE,
        )
        if not made:
            raise ssl.SSLError(text.value.decode(errors="replace"))
        self.handle = ctypes.c_void_p(made)
        # Not at the process's exit: a thread may be about to connect.
        weakref.finalize(self, library.sky_context_free, self.handle).atexit = False

    def wrap_socket(
        self,
        end: socket.socket,
        server_hostname: str = "",
        server_side: bool = False,
        do_handshake_on_connect: bool = True,
    ) -> NativeSocket:
        """A connection that takes the socket over."""
        if not server_side and not server_hostname:
            # The core would take any process of the pool for the one that is wanted.
            raise ValueError("a client has to name the server, as its certificate does")
        made = NativeSocket(end, self, server_hostname)
        if do_handshake_on_connect:
            try:
                made.do_handshake()
            except BaseException:
                made.close()
                raise
        return made


class NativeSocket:
    """A connection of the core; it has what is used of a socket."""

    def __init__(self, end: socket.socket, context: Context | None = None, name: str = "") -> None:
        library = self._library = core().library
        self.family = end.family
        self._seconds = end.gettimeout()
        text = ctypes.create_string_buffer(TEXT_SIZE)
        self._fd = end.detach()
        made = library.sky_connection_new(
            self._fd,
            context and context.handle,
            name.encode() if name else None,
            text,
            TEXT_SIZE,
        )
        if not made:
            raise ssl.SSLError(text.value.decode(errors="replace"))
        self.handle = ctypes.c_void_p(made)
        self._free = weakref.finalize(self, library.sky_connection_free, self.handle)
        self._free.atexit = False
        self._closed = False

    def _call(self, name: str, *arguments: Any) -> Any:
        if self._closed:
            raise OSError(errno.EBADF, "the connection is closed")
        return getattr(self._library, f"sky_connection_{name}")(self.handle, *arguments)

    def _wait(self, name: str, *arguments: Any, flags: int = 0) -> int:
        """What the core says, if it is not 0 or time has passed.

        A signal, and a part of a record of TLS, end a wait of the core's.
        """
        seconds = 0.0 if flags & _DONT_WAIT else self._seconds
        until = math.inf if seconds is None else time.monotonic() + seconds
        while True:
            left = math.ceil(min(until - time.monotonic(), 1.0) * 1000)
            result = int(self._call(name, *arguments, max(0, min(SLICE_MILLISECONDS, left))))
            if result or time.monotonic() >= until:
                return result

    def _why(self) -> str:
        text = ctypes.create_string_buffer(TEXT_SIZE)
        self._call("why", text, TEXT_SIZE)
        return text.value.decode(errors="replace")

    def _late(self, what: str, flags: int = 0) -> OSError:
        waits = self._seconds != 0 and not flags & _DONT_WAIT
        return TimeoutError(what) if waits else BlockingIOError(what)

    def do_handshake(self) -> None:
        """Prove who both ends are."""
        done = self._wait("shake")
        if done == 0:
            raise TimeoutError("the handshake of TLS took too long")
        if done < 0:
            why = self._why()
            refused = "certificate" in why
            raise (ssl.SSLCertVerificationError if refused else ssl.SSLError)(why)

    def settimeout(self, seconds: float | None) -> None:
        """How long the next reads and writes wait."""
        self._seconds = seconds

    def gettimeout(self) -> float | None:
        """How long reads and writes wait."""
        return self._seconds

    def setblocking(self, blocking: bool) -> None:
        """Whether the next reads and writes wait."""
        self._seconds = None if blocking else 0.0

    def recv(self, count: int) -> bytes:
        """At least a byte; none at the end."""
        room = bytearray(count)
        return bytes(room[: self.recv_into(memoryview(room))])

    def recv_into(self, room: memoryview, count: int = 0, flags: int = 0) -> int:
        """How many bytes were read, at least one; 0 at the end."""
        place = ctypes.byref(ctypes.c_char.from_buffer(room))
        got = self._wait("read", place, ctypes.c_size_t(count or len(room)), flags=flags)
        if not got:
            raise self._late("nothing came in time", flags)
        return max(got, 0)

    def send(self, data: bytes | bytearray | memoryview, flags: int = 0) -> int:
        """Send what the kernel takes, at least a byte."""
        with reading_of(data) as (address, size):
            place = ctypes.c_void_p(address)
            sent = self._wait("write", place, ctypes.c_size_t(size), flags=flags)
        if sent < 0:
            raise ConnectionError(self._why())
        if sent == 0:
            raise self._late("nothing could be sent in time", flags)
        return sent

    def sendall(self, data: bytes | bytearray | memoryview) -> None:
        """Send all of it, straight from its memory."""
        with reading_of(data) as (address, size):
            done = 0
            while done < size:
                place = ctypes.c_void_p(address + done)
                sent = self._wait("write_all", place, ctypes.c_size_t(size - done))
                if sent < 0:
                    raise ConnectionError(self._why())
                if sent == 0:
                    raise self._late("nothing could be sent in time")
                done += sent

    def pending(self) -> int:
        """Whether bytes may be read although the socket has none."""
        return int(self._call("pending"))

    def peer(self) -> str:
        """The name in the other end's certificate."""
        text = ctypes.create_string_buffer(TEXT_SIZE)
        self._call("peer", text, TEXT_SIZE)
        return text.value.decode(errors="replace")

    def fileno(self) -> int:
        """The socket's number."""
        return self._fd

    def getpeername(self) -> Any:
        """As of a socket."""
        with socket.socket(fileno=os.dup(self._fd)) as same:
            return same.getpeername()

    def setsockopt(self, level: int, option: int, value: int | bytes) -> None:
        """As of a socket."""
        with socket.socket(fileno=os.dup(self._fd)) as same:
            same.setsockopt(level, option, value)

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        """As of a socket."""
        with socket.socket(fileno=os.dup(self._fd)) as same:
            return same.getsockopt(level, option, size)

    def shutdown(self, how: int = socket.SHUT_RDWR) -> None:
        """Make reads and writes of other threads end."""
        self._library.sky_connection_shut(self.handle)

    def close(self) -> None:
        """Close it, once no thread uses it; does nothing to one that a link has."""
        self._closed, self._fd = True, -1
        self._library.sky_connection_close(self.handle)


class _Buffer(ctypes.Structure):
    """Python's `Py_buffer`."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


@contextlib.contextmanager
def reading_of(data: bytes | bytearray | memoryview) -> Iterator[tuple[int, int]]:
    """The address and the length of memory that is only read: ctypes has no way for `bytes`."""
    buffer = _Buffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(data), ctypes.byref(buffer), 0)
    try:
        yield buffer.buf or 0, buffer.len
    finally:
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(buffer))


def _of_core(end: Any, *, to_send: bool) -> NativeSocket:
    """A connection of one direction, for the core."""
    if isinstance(end, ssl.SSLSocket):
        near, far = socket.socketpair()
        relay = threading.Thread(
            target=_relay,
            args=(end, far),
            kwargs={"to_send": to_send},
            name="skyward-tls",
            daemon=True,
        )
        relay.start()
        return NativeSocket(near)
    return end if isinstance(end, NativeSocket) else NativeSocket(end)


def _relay(end: ssl.SSLSocket, far: socket.socket, *, to_send: bool) -> None:
    """Encrypt or decrypt for a core without OpenSSL, until either end closes the connection."""
    source: socket.socket = far if to_send else end
    target: socket.socket = end if to_send else far
    unsent = memoryview(b"")
    with contextlib.suppress(OSError), end, far:
        end.setblocking(False)
        far.setblocking(False)
        while True:
            try:
                if unsent:
                    unsent = unsent[target.send(unsent) :]
                elif data := source.recv(RELAY_SIZE):
                    unsent = memoryview(data)
                else:
                    return
                continue
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                poll = select.poll()
            # Nothing comes from the target but its end; what of TLS comes is no byte.
            poll.register(target, select.POLLIN | (select.POLLOUT if unsent else 0))
            if not unsent:
                poll.register(source, select.POLLIN)
            elif source is far:
                poll.register(source, 0)
            ready = dict(poll.poll())
            if ready.get(target.fileno(), 0) & ~select.POLLOUT:
                with contextlib.suppress(BlockingIOError, ssl.SSLWantReadError):
                    target.recv(1)
                    return
            elif unsent and source.fileno() in ready:
                return


@dataclass(frozen=True)
class Terms:
    """How a link is kept."""

    window: int
    """How many bytes it keeps at most that the other end has not counted."""
    patience: float = -1.0
    """After how many seconds without a connection it ends; negative: never."""
    other: str = "the client"
    """Who should have come back by then."""
    of_calls: bool = False
    """Whether it carries frames: one thread reads all the time, and others look after silence."""


CALLS = Terms(LINK_WINDOW, of_calls=True)


_links: weakref.WeakValueDictionary[int, NativeLink] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)
_keeper_lock = threading.Lock()
_keepers: list[threading.Thread] = []


class NativeLink:
    """One end of a link whose bytes the core moves; it is used as a `Link` is."""

    def __init__(
        self,
        pair: Pair,
        terms: Terms,
        dial: Callable[[NativeLink], Iterator[Pair | float]] | None = None,
        attempt: int = 1,
        add_stripes: Callable[[NativeLink, int], None] | None = None,
    ) -> None:
        """`dial` and `add_stripes` are those of a `Link`."""
        self.first = pair
        self.connections = self.outgoing = self.incoming = self
        self._library, self._dial = core().library, dial
        self._add_stripes = add_stripes
        self.attempt = attempt
        self.ending = self.ended = False
        self.why = ""
        self.number = next(_numbers)
        self._told: list[Callable[[str], None]] = []
        text = ctypes.create_string_buffer(TEXT_SIZE)
        self.handle = ctypes.c_void_p(
            self._library.sky_link_new(
                ctypes.c_uint64(self.number),
                ctypes.c_uint64(terms.window),
                ctypes.c_double(terms.patience),
                terms.other.encode(),
                int(terms.of_calls),
                text,
                TEXT_SIZE,
            )
        )
        if self.handle.value is None:
            pair.close()
            raise OSError(f"no link can be made: {text.value.decode(errors='replace')}")
        self.address = self.handle.value or 0
        """What the device's cores know the link by."""
        methods = (core().method(which, self.address) for which in range(4))
        self._send, self._receive, self.peek, self.skip = methods
        """`peek` copies what has come into a buffer, so many bytes at most, and leaves it: how
        many. `skip` takes so many of them."""
        self.is_of_calls = terms.of_calls
        self.patient = False
        """Whether writes wait for the kernel to take them, if there is a connection."""
        self._window = terms.window
        self._is_far = self._is_encrypted = False
        self.reader = 0
        """The thread that read last; on a client, it must not wait for a count: only it reads."""
        self._blocking, self._may_have_more = True, False
        self._changing = threading.Lock()
        self._again: Callable[[], None] | None = None
        self._on_change: Callable[[bool], None] = lambda connected: None
        self._was_connected = True
        self._striped_attempt = 0
        _links[self.number] = self
        _start_keeper()
        self.install(pair, attempt)

    def _facts(self) -> list[int]:
        """Bytes received, on the wire, and kept; whether connected; whether not read to its end;
        bytes that went over stripes."""
        facts = (ctypes.c_uint64 * 6)()
        self._library.sky_link_facts(self.handle, facts)
        return list(facts)

    @property
    def received(self) -> int:
        """How many bytes of the other end's stream have arrived."""
        return self._facts()[0]

    @property
    def sent(self) -> int:
        """How many bytes have gone over the network from here, with what the link and TLS add."""
        return self._facts()[1]

    @property
    def kept(self) -> int:
        """How many bytes are kept that the other end has not counted."""
        return self._facts()[2]

    @property
    def connected(self) -> bool:
        """Whether there is a pair that is not known to be broken."""
        return bool(self._facts()[3])

    @property
    def striped(self) -> int:
        """How many bytes have gone over stripes from here."""
        return self._facts()[5]

    @property
    def current(self) -> NativeLink | None:
        """None once the pair is lost and everything that it brought has been read."""
        return self if self._facts()[4] else None

    def install(self, pair: Pair, attempt: int) -> None:
        """Use this pair from now on."""
        self.attempt = attempt
        self._is_far = round_trip(pair.sender) >= FAR_SECONDS
        self._is_encrypted = isinstance(pair.sender, NativeSocket)
        ends = (_of_core(pair.sender, to_send=True), _of_core(pair.receiver, to_send=False))
        self._library.sky_link_install(
            self.handle,
            *(end.handle for end in ends),
            ctypes.c_uint64(pair.arrived),
            ctypes.c_uint32(attempt),
        )
        self._tell_change()

    def suspend(self, attempt: int) -> int | None:
        """Stop reading, because the client makes a new pair: how many bytes have arrived."""
        received = self._library.sky_link_suspend(self.handle, ctypes.c_uint32(attempt))
        self._tell_change()
        return None if received < 0 else int(received)

    def watch(self, told: Callable[[bool], None]) -> None:
        """Call `told`, on any thread, when the connection is lost (False) and made again (True)."""
        self._on_change = told

    def _tell_change(self) -> None:
        """Tell whoever wants to know that there is a connection, or none any more."""
        with self._changing:
            connected = self.current is not None
            is_news = connected != self._was_connected and not self.ended
            self._was_connected = connected
            again = None
            if connected or self.ended:
                again, self._again = self._again, None
        if is_news:
            self._on_change(connected)
        if again is not None:
            again()

    def reconnect(self) -> None:
        """Break a connection that seems dead, so that the client makes a new one."""
        self._library.sky_link_reconnect(self.handle)

    def on_end(self, told: Callable[[str], None]) -> None:
        """Call `told` with the reason, on the keeper's thread, when the link ends by itself."""
        self._told.append(told)

    def end(self, why: str) -> None:
        """End the link for good, without a call of `told`."""
        self._told.clear()
        self._note_end(why)
        self._library.sky_link_end(self.handle, why.encode())
        self._tell_change()

    def _note_end(self, why: str) -> None:
        if not self.ended:
            self.ended, self.why = True, why

    def close(self) -> None:
        """End the link, and free it."""
        self._told.clear()
        with self._changing:
            self._again = None
        self._note_end("the link was closed")
        _links.pop(self.number, None)
        self._library.sky_link_free(self.handle, ctypes.c_uint64(self.number))

    # Stripes.

    def takes_stripes(self, attempt: int) -> bool:
        """Whether the pair of that attempt is in use, so that stripes can join it."""
        return bool(self._library.sky_link_takes_stripes(self.handle, ctypes.c_uint32(attempt)))

    def add_stripe(self, attempt: int, number: int, end: Any, *, to_send: bool) -> None:
        """Add a stripe."""
        given = _of_core(end, to_send=to_send)
        self._library.sky_link_add_stripe(
            self.handle,
            ctypes.c_uint32(attempt),
            ctypes.c_uint32(number),
            given.handle,
            int(to_send),
        )

    def _consider_stripes(self, size: int) -> None:
        """Ask once for stripes for a pair, before a large write, if they make it faster."""
        attempt = self.attempt
        if size < STRIPED_MIN or self._add_stripes is None or self._striped_attempt == attempt:
            return
        self._striped_attempt = attempt
        # Several threads encrypt what one could not: if there are processors for them.
        if self._is_far or (self._is_encrypted and (os.cpu_count() or 1) > STRIPING_PROCESSORS):
            threading.Thread(
                target=self._add_stripes, args=(self, attempt), name="skyward-stripes", daemon=True
            ).start()

    # Out. Small writes never wait for a connection; large ones go straight from their memory.

    def send(self, data: bytes) -> None:
        """Write a few bytes; they are sent now or later, in order."""
        if self._send(data, self.patient) < 0:
            raise BrokenPipeError(self._reason())

    def send_parts(self, views: Sequence[memoryview]) -> None:
        """Write many bytes; waits for a connection, and raises when the link has ended."""
        length = sum(map(len, views))
        is_reader = threading.get_ident() == self.reader
        waits = length <= QUEUED_MAX and not self.connected and self.kept <= self._window
        if (is_reader and not self.patient) or waits:
            self.send(b"".join(views))
            return
        self._consider_stripes(length)
        # Beyond the stream, until the write has begun.
        first, last = ctypes.c_uint64(2**64 - 1), ctypes.c_uint64()
        library = self._library
        with contextlib.ExitStack() as held:
            memory = [held.enter_context(reading_of(view)) for view in views]
            addresses = (ctypes.c_void_p * len(memory))(*(address for address, _ in memory))
            sizes = (ctypes.c_uint64 * len(memory))(*(size for _, size in memory))
            try:
                outcome = library.sky_link_begin_large(
                    self.handle,
                    addresses,
                    sizes,
                    len(memory),
                    ctypes.byref(first),
                    ctypes.byref(last),
                )
                while outcome == 0:
                    outcome = library.sky_link_await_large(self.handle, last, SLICE_MILLISECONDS)
            except BaseException:
                # Some bytes may have been sent, and the caller may change the others from now on.
                self.end("a write was interrupted")
                raise
            finally:
                library.sky_link_finish_large(self.handle, first, last)
        if outcome < 0:
            raise BrokenPipeError(self._reason())

    def wait_for_room(self, window: int = LINK_WINDOW) -> None:
        """Wait while more than `window` bytes are kept, until half of them are counted."""
        if self.kept <= window:
            return
        half = ctypes.c_uint64(window // 2)
        while self._library.sky_link_await_room(self.handle, half, SLICE_MILLISECONDS) == 0:
            pass

    def _reason(self) -> str:
        text = ctypes.create_string_buffer(TEXT_SIZE)
        self._library.sky_link_why(self.handle, text, TEXT_SIZE)
        return text.value.decode(errors="replace")

    # In. One thread at a time reads.

    def fileno(self) -> int:
        """The descriptor to wait on; it is good until the connection is lost."""
        return int(self._library.sky_link_adopt(self.handle))

    def set_blocking(self, blocking: bool) -> None:
        """Choose whether reads wait for bytes and for the next connection."""
        self._blocking = blocking

    def pending(self) -> int:
        """Whether there may be bytes that no selector sees."""
        return int(self._may_have_more)

    def receive(self, buffer: memoryview) -> memoryview:
        """Read some bytes; as `Incoming.receive`."""
        self.reader = threading.get_ident()
        wait = SLICE_MILLISECONDS if self._blocking else 0
        while True:
            got = self._receive(buffer, wait)
            if got > 0:
                self._may_have_more = got == len(buffer)
                return buffer[:got]
            self._may_have_more = False
            if got == NOT_CONNECTED:
                raise NotConnected
            if got < 0:
                self._note_end(self._reason())
                raise EOFError(self.why)
            if not self._blocking:
                raise BlockingIOError

    def fill(
        self, views: Sequence[memoryview], told: Callable[[int], None] = lambda done: None
    ) -> None:
        """Read until the views are full; calls `told` now and then with the bytes read."""
        self.reader = threading.get_ident()
        views = [view for view in views if len(view)]
        total = sum(map(len, views))
        self._consider_stripes(total)
        memory = [ctypes.c_char.from_buffer(view) for view in views]
        addresses = (ctypes.c_void_p * len(memory))(*map(ctypes.addressof, memory))
        sizes = (ctypes.c_uint64 * len(memory))(*map(len, views))
        done = ctypes.c_uint64()
        while done.value < total:
            outcome = self._library.sky_link_receive_large(
                self.handle,
                addresses,
                sizes,
                len(memory),
                ctypes.byref(done),
                SLICE_MILLISECONDS,
            )
            if outcome < 0:
                self._note_end(self._reason())
                raise EOFError(self.why)
            told(done.value)

    def ready(self, again: Callable[[], None]) -> bool:
        """Whether there is a connection to read from; if not, `again` is called when there is."""
        with self._changing:
            if self.current is None and not self.ended:
                self._again = again
                return False
        self.fileno()
        return True

    # Told by the keeper.

    def was_lost(self) -> None:
        """Make new connections, if this end makes them."""
        self._tell_change()
        if self._dial is not None:
            attempts = self._dial(self)
            redialing.run(lambda: self._redial(attempts))

    def _redial(self, attempts: Iterator[Pair | float]) -> None:
        try:
            found = next(attempts)
        except LinkLost as problem:
            self._library.sky_link_end(self.handle, str(problem).encode())
            return
        if isinstance(found, Pair):
            self.install(found, found.attempt)
        else:
            redialing.later(found, lambda: self._redial(attempts))

    def has_ended(self) -> None:
        """Tell whoever wants to know."""
        self._note_end(self._reason())
        told, self._told = self._told, []
        for each in told:
            each(self.why)
        self._tell_change()


def living() -> list[int]:
    """The numbers of the links of this process."""
    return list(_links)


def _start_keeper() -> None:
    """Start the thread that looks after all links of this process."""
    with _keeper_lock:
        if not _keepers:
            thread = threading.Thread(target=_keep, name="skyward-links", daemon=True)
            _keepers.append(thread)
            thread.start()


def _keep() -> None:
    number, library = ctypes.c_uint64(), core().library
    while True:
        event = library.sky_links_run(ctypes.byref(number))
        link = _links.get(number.value)
        try:
            if link is not None and event == LOST:
                link.was_lost()
            elif link is not None and event == ENDED:
                link.has_ended()
        except Exception as problem:
            # No more threads, perhaps. The other links need the keeper.
            traceback.print_exc(file=sys.stderr)
            if link is not None:
                link.end(f"it cannot go on: {problem}")
        del link


def _forked() -> None:
    """Leave the parent's links alone in a child, and start another keeper for its own."""
    global _keeper_lock
    _keeper_lock = threading.Lock()
    _keepers.clear()
    _links.clear()


os.register_at_fork(after_in_child=_forked)


@atexit.register
def _end_all() -> None:
    """Let no thread use OpenSSL when its own end comes; pools have been closed by now."""
    for link in list(_links.values()):
        link.end("the process ends")
