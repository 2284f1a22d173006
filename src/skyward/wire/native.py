"""The native core of links: TLS, records and counts in C++, without the interpreter's lock.

Python opens connections, shakes hands and dials again; the bytes of a link pass it nowhere.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import itertools
import math
import os
import select
import socket
import ssl
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyward.errors import SkywardError
from skyward.wire.link.connections import LinkLost
from skyward.wire.link.link import redialing
from skyward.wire.link.pair import Pair

TEXT_SIZE = 1024
BEAT_SECONDS, SILENCE_SECONDS = 1.0, 5.0
"""How often an end sends its count, and after how long without a record a connection is broken; as
in link.cpp."""
LOST, ENDED = 1, 2
"""What `sky_links_run` tells of a link."""
SIGNAL_MILLISECONDS = 100
"""How long a call of the core may wait at a time: Python sees Ctrl-C between two of them."""
RELAY_SIZE = 64 << 10


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
        for name in ("connection_read", "connection_write", "link_suspend"):
            getattr(self.library, f"sky_{name}").restype = ctypes.c_int64
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


def openssl_libraries() -> Iterator[str]:
    """Where OpenSSL may be: the library that Python's own `ssl` uses, then the system's.

    `_ssl` has its library among those that it needs, or in itself. If it is a part of the program,
    so is OpenSSL; its functions may be visible.
    """
    import _ssl

    yield getattr(_ssl, "__file__", None) or ""
    yield from ("libssl.so.3", "libssl.3.dylib")


_core: LinkCore | None = None


def load(path: Path) -> None:
    """Load the core, once for the process."""
    global _core
    if _core is None:
        _core = LinkCore(path)


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
        weakref.finalize(self, library.sky_context_free, self.handle)

    def wrap_socket(
        self,
        end: socket.socket,
        server_hostname: str = "",
        server_side: bool = False,
        do_handshake_on_connect: bool = True,
    ) -> NativeSocket:
        """A connection that takes the socket over."""
        made = NativeSocket(end, self, server_hostname)
        if do_handshake_on_connect:
            try:
                made.do_handshake()
            except BaseException:
                made.close()
                raise
        return made


class NativeSocket:
    """A connection of the core; it has what the handshake uses of a socket."""

    def __init__(self, end: socket.socket, context: Context | None = None, name: str = "") -> None:
        self._core = core()
        self.family = end.family
        self._seconds = end.gettimeout()
        text = ctypes.create_string_buffer(TEXT_SIZE)
        self._fd = end.detach()
        made = self._core.library.sky_connection_new(
            self._fd,
            context and context.handle,
            name.encode() if name else None,
            text,
            TEXT_SIZE,
        )
        if not made:
            raise ssl.SSLError(text.value.decode(errors="replace"))
        self._handle: ctypes.c_void_p | None = ctypes.c_void_p(made)
        self._lock = threading.Lock()

    def _call(self, name: str, *arguments: Any) -> Any:
        if self._handle is None:
            raise OSError(errno.EBADF, "the connection is closed")
        return getattr(self._core.library, f"sky_connection_{name}")(self._handle, *arguments)

    def _wait(self, name: str, *arguments: Any) -> int:
        """What the core says; 0 if it has nothing to say in time.

        A signal, and a part of a record of TLS, end a wait of the core's.
        """
        until = math.inf if self._seconds is None else time.monotonic() + self._seconds
        while True:
            left = until - time.monotonic()
            slice_ = max(0, min(SIGNAL_MILLISECONDS, math.ceil(min(left, 1.0) * 1000)))
            result = int(self._call(name, *arguments, slice_))
            if result or time.monotonic() >= until:
                return result

    def _why(self) -> str:
        text = ctypes.create_string_buffer(TEXT_SIZE)
        self._call("why", text, TEXT_SIZE)
        return text.value.decode(errors="replace")

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

    def recv(self, count: int) -> bytes:
        """At least a byte; none at the end."""
        room = ctypes.create_string_buffer(count)
        got = self._wait("read", room, ctypes.c_size_t(count))
        if got == 0:
            raise TimeoutError("nothing came in time")
        return room.raw[:got] if got > 0 else b""

    def sendall(self, data: bytes) -> None:
        """Send a few bytes."""
        done = 0
        while done < len(data):
            sent = self._wait("write", data[done:], ctypes.c_size_t(len(data) - done))
            if sent == 0:
                raise TimeoutError("nothing could be sent in time")
            if sent < 0:
                raise ConnectionError(self._why())
            done += sent

    def peer(self) -> str:
        """The name in the other end's certificate."""
        text = ctypes.create_string_buffer(TEXT_SIZE)
        self._call("peer", text, TEXT_SIZE)
        return text.value.decode(errors="replace")

    def fileno(self) -> int:
        """The socket's number."""
        return self._fd

    def setsockopt(self, level: int, option: int, value: int) -> None:
        """As of a socket."""
        with self._lock:
            if self._handle is None:
                raise OSError(errno.EBADF, "the connection is closed")
            with socket.socket(fileno=socket.dup(self._fd)) as same:
                same.setsockopt(level, option, value)

    def shutdown(self, how: int = socket.SHUT_RDWR) -> None:
        """Make reads and writes of other threads end."""
        with self._lock:
            if self._handle is not None:
                self._core.library.sky_connection_shut(self._handle)

    def close(self) -> None:
        """Close it, unless a link has it."""
        handle = self.give()
        if handle is not None:
            self._core.library.sky_connection_free(handle)

    def give(self) -> ctypes.c_void_p | None:
        """Leave it to the caller; None if it is not there any more."""
        with self._lock:
            handle, self._handle = self._handle, None
        return handle


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
    ) -> None:
        self.first = pair
        self.connections = self
        self._library, self._dial = core().library, dial
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
                text,
                TEXT_SIZE,
            )
        )
        if self.handle.value is None:
            pair.close()
            raise OSError(f"no link can be made: {text.value.decode(errors='replace')}")
        self.address = self.handle.value or 0
        """What the device's cores know the link by."""
        _links[self.number] = self
        _start_keeper()
        self.install(pair, attempt)

    def _facts(self) -> tuple[int, int, int, int]:
        facts = (ctypes.c_uint64 * 4)()
        self._library.sky_link_facts(self.handle, facts)
        received, on_wire, kept, is_connected = facts
        return received, on_wire, kept, is_connected

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

    def install(self, pair: Pair, attempt: int) -> None:
        """Use this pair from now on."""
        self.attempt = attempt
        self._library.sky_link_install(
            self.handle,
            *(
                _of_core(end, to_send=end is pair.sender).give()
                for end in (pair.sender, pair.receiver)
            ),
            ctypes.c_uint64(pair.arrived),
            ctypes.c_uint32(attempt),
        )

    def suspend(self, attempt: int) -> int | None:
        """Stop reading, because the client makes a new pair: how many bytes have arrived."""
        received = self._library.sky_link_suspend(self.handle, ctypes.c_uint32(attempt))
        return None if received < 0 else int(received)

    def takes_stripes(self, attempt: int) -> bool:
        """Whether stripes may join: the bytes of such a link go over several links instead."""
        return False

    def add_stripe(self, attempt: int, number: int, end: socket.socket, *, to_send: bool) -> None:
        """Refuse a stripe."""
        end.close()

    def reconnect(self) -> None:
        """Break a connection that seems dead, so that the client makes a new one."""
        self._library.sky_link_reconnect(self.handle)

    def on_end(self, told: Callable[[str], None]) -> None:
        """Call `told` with the reason, on the keeper's thread, when the link ends by itself."""
        self._told.append(told)

    def end(self, why: str) -> None:
        """End the link for good, without a call of `told`."""
        self._told.clear()
        self._library.sky_link_end(self.handle, why.encode())

    def close(self) -> None:
        """End the link, and free it."""
        self._told.clear()
        self.ended, self.why = True, self.why or "the link was closed"
        _links.pop(self.number, None)
        self._library.sky_link_free(self.handle, ctypes.c_uint64(self.number))

    # Told by the keeper.

    def was_lost(self) -> None:
        """Make new connections, if this end makes them."""
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
        text = ctypes.create_string_buffer(TEXT_SIZE)
        self._library.sky_link_why(self.handle, text, TEXT_SIZE)
        self.ended, self.why = True, text.value.decode(errors="replace")
        told, self._told = self._told, []
        for each in told:
            each(self.why)


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
