"""The simulated network: sockets within a host and between hosts, which the world may cut."""

from __future__ import annotations

import array
import errno
import os
import select
import socket as real
import struct
from typing import Any

from .kernel import PIPE_SIZE, Bytes, File, Kernel, Process, WaitQueue

SOCKET_SIZE = 212_992
RETRANSMIT_SECONDS = 924.0
"""So long Linux sends again what nobody acknowledges."""
# Plain numbers: to combine members of an enum costs more than the call.
MSG_WAITALL, MSG_PEEK, MSG_DONTWAIT = map(int, (real.MSG_WAITALL, real.MSG_PEEK, real.MSG_DONTWAIT))
MIN_RTT_AT = 148
"""Where Linux puts the shortest round trip, in microseconds, in `struct tcp_info`."""
LOOPBACK = ("127.0.0.1", "localhost", "::1", "")


class Socket(File):
    """An open socket: new, listening, or connected."""

    def __init__(self, kernel: Kernel, family: int, kind: int, host: str) -> None:
        super().__init__(kernel)
        self.family = family
        self.kind = kind
        self.host = host
        self.address: Any = "" if family == real.AF_UNIX else ("0.0.0.0", 0)
        self.peer_address: Any = None
        self.backlog: list[Socket] | None = None
        """The connections that nobody has accepted, if it listens."""
        self.incoming: Bytes | None = None
        self.outgoing: Bytes | None = None
        self.peer: Socket | None = None
        self.wire: Wire | None = None
        self.problem: OSError | None = None
        self.timeouts: dict[int, float] = {}
        """SO_RCVTIMEO and SO_SNDTIMEO."""
        self.options: dict[tuple[int, int], Any] = {}
        self.owner = 0

    def events(self) -> int:
        if self.backlog is not None:
            return 1 if self.backlog else 0
        if self.problem is not None:
            return 1 | 4 | 8 | 16
        if self.incoming is None or self.outgoing is None:
            return 4 | 16
        found = 0
        if self.incoming.data or self.incoming.ended:
            found |= 1
        # Linux reports room only when a third is free, so that a small write never waits then.
        if 3 * self.outgoing.room >= SOCKET_SIZE or self.outgoing.broken:
            found |= 4
        if self.incoming.ended and self.outgoing.ended:
            found |= 16
        return found

    def closed(self) -> None:
        if self.backlog is not None:
            for key in [key for key, each in self.kernel.listeners.items() if each is self]:
                del self.kernel.listeners[key]
            for each in self.backlog:
                each.closed()
            self.backlog = []
            return
        unread = bool(self.incoming and self.incoming.data)
        self.shut(real.SHUT_RDWR, reset=unread and self.family != real.AF_UNIX)

    def shut(self, how: int, *, reset: bool = False) -> None:
        """End one direction or both."""
        if self.outgoing is not None and how in (real.SHUT_WR, real.SHUT_RDWR):
            if self.wire is None:
                self.outgoing.ended = True
            else:
                self.wire.finish(self, reset=reset)
        if self.incoming is not None and how in (real.SHUT_RD, real.SHUT_RDWR):
            self.incoming.ended = True
            if self.wire is None:
                self.incoming.broken = True
            else:
                self.wire.refuse(self)
        self.changed.wake()
        if self.peer is not None and self.wire is None:
            self.peer.changed.wake()

    def fail(self, problem: OSError) -> None:
        """Have everything on it fail from now on; what has arrived can be read before."""
        if self.problem is None and self.references:
            self.problem = problem
            self.changed.wake()

    def check(self) -> None:
        if self.problem is not None:
            problem, self.problem = self.problem, None
            # The error is told once; then the connection has ended.
            if self.incoming is not None and self.outgoing is not None:
                self.incoming.ended = self.outgoing.broken = True
            raise problem

    def read_some(self, size: int, flags: int, until: float | None) -> bytes:
        """Up to `size` bytes as soon as there are some; nothing at the end."""
        incoming = self.incoming
        if incoming is None:
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
        while not incoming.data:
            self.check()
            if incoming.ended:
                return b""
            self.hold(flags, until, real.SO_RCVTIMEO)
        if flags & MSG_PEEK:
            return bytes(incoming.data[:size])
        # A network gives what has arrived, not what was sent at once.
        if self.wire is not None and size > 1 and self.kernel.random.random() < 0.1:
            size = self.kernel.random.randint(1, min(size, len(incoming.data)))
        found = incoming.take(size)
        if self.wire is None:
            if self.peer is not None:
                self.peer.changed.wake()
        else:
            self.wire.taken(self)
        return found

    def write_some(self, data: memoryview, flags: int, until: float | None) -> int:
        """Write as much as there is room for, and wait for some room."""
        outgoing = self.outgoing
        while True:
            self.check()
            if outgoing is None:
                raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
            if outgoing.broken or outgoing.ended or self.shutting:
                raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
            if outgoing.room > 0:
                break
            self.hold(flags, until, real.SO_SNDTIMEO)
        part = data[: outgoing.room]
        if self.wire is None:
            outgoing.put(part)
            if self.peer is not None:
                self.peer.changed.wake()
        else:
            self.wire.send(self, bytes(part))
        return len(part)

    @property
    def probe_seconds(self) -> float:
        """After so long without an answer, probes of the idle connection have failed."""
        first, between, count = (
            self.options.get((real.IPPROTO_TCP, option), default)
            for option, default in (
                (real.TCP_KEEPIDLE, 7200),
                (real.TCP_KEEPINTVL, 75),
                (real.TCP_KEEPCNT, 9),
            )
        )
        return float(first + between * count)

    @property
    def shutting(self) -> bool:
        return self.wire is not None and self in self.wire.finished

    def hold(self, flags: int, until: float | None, limit: int) -> None:
        """Wait for a change; an error if this socket or this call does not wait any longer."""
        if flags & MSG_DONTWAIT or not self.blocking:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        now = self.kernel.now
        if until is not None and now >= until:
            raise TimeoutError("timed out")
        seconds = self.timeouts.get(limit)
        if seconds:
            began = now
            self.kernel.wait((self.changed,), min(until or began + seconds, began + seconds))
            if self.kernel.now >= began + seconds:
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            return
        self.kernel.wait((self.changed,), until)

    def read(self, size: int) -> bytes:
        return self.read_some(size, 0, None)

    def write(self, data: bytes) -> int:
        return self.write_some(memoryview(data).cast("B"), 0, None)


def pair(kernel: Kernel, family: int, kind: int, host: str) -> tuple[Socket, Socket]:
    """Two connected sockets of one host."""
    one, other = Socket(kernel, family, kind, host), Socket(kernel, family, kind, host)
    there, back = Bytes(kernel, SOCKET_SIZE), Bytes(kernel, SOCKET_SIZE)
    one.outgoing = other.incoming = there
    one.incoming = other.outgoing = back
    one.peer, other.peer = other, one
    return one, other


class Wire:
    """A connection between two hosts: what is sent arrives later, in order, or never."""

    def __init__(self, network: Network, ends: tuple[Socket, Socket]) -> None:
        self.network = network
        self.kernel = network.kernel
        self.ends = ends
        self.arrives = dict.fromkeys(ends, 0.0)
        """When the last of what each end has sent arrives."""
        self.flying = dict.fromkeys(ends, 0)
        self.finished: set[Socket] = set()
        self.refused: set[Socket] = set()
        self.silent = False
        """Nothing arrives any more, and nobody is told; see `silence`."""
        self.is_cut = False
        self.is_broken = False
        self.tears = False
        """Whether it is cut when more arrives, of which a part still does."""

    @property
    def is_far(self) -> bool:
        """Whether it is between two hosts."""
        return self.ends[0].host != self.ends[1].host

    def other(self, end: Socket) -> Socket:
        return self.ends[1] if end is self.ends[0] else self.ends[0]

    def breaks(self) -> None:
        """Note that it carries no more, at least not for both ends."""
        self.network.broken += not self.is_broken
        self.network.broken_at = self.kernel.now
        self.is_broken = True

    def later(self, end: Socket, action: Any) -> None:
        """Do something when what this end has sent so far has arrived."""
        due = max(self.arrives[end], self.kernel.now + self.network.delay(self))
        self.arrives[end] = due
        self.kernel.at(due, action)

    def send(self, end: Socket, data: bytes) -> None:
        other = self.other(end)
        self.kernel.moment("send")
        assert end.outgoing is not None
        # The room of a sender is what the other end has not read yet.
        end.outgoing.size -= len(data)
        self.flying[end] += len(data)

        def arrive() -> None:
            if self.silent or self.is_cut:
                return
            self.flying[end] -= len(data)
            if other in self.refused:
                if other.references == 0:
                    self.network.reset(end)
                return
            assert other.incoming is not None
            if self.tears:
                other.incoming.put(data[: self.kernel.random.randrange(len(data))])
                self.kernel.at(self.kernel.now + self.network.seconds, self.cut)
                self.silent = True
            else:
                other.incoming.put(data)
            other.changed.wake()

        self.later(end, arrive)
        if self.silent:
            self.give_up(end, RETRANSMIT_SECONDS)

    def silence(self) -> None:
        """Let nothing arrive any more; the ends notice as kernels do."""
        self.breaks()
        self.silent = True
        for end in self.ends:
            if self.flying[end]:
                self.give_up(end, RETRANSMIT_SECONDS)
            elif end.options.get((real.SOL_SOCKET, real.SO_KEEPALIVE)):
                self.give_up(end, end.probe_seconds, idle=True)

    def hold_up(self, end: Socket, seconds: float) -> None:
        """Have what an end sends arrive later: a packet is lost, and sent again after a while."""
        self.arrives[end] = max(self.arrives[end], self.kernel.now + seconds)
        self.network.late_until = max(self.network.late_until, self.arrives[end])

    def give_up(self, end: Socket, seconds: float, *, idle: bool = False) -> None:
        """Fail an end whose peer has acknowledged nothing for so long."""
        problem = TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))

        def fail() -> None:
            # A probe is sent only while nothing else is under way.
            if not self.is_cut and not (idle and self.flying[end]):
                end.fail(problem)

        self.kernel.at(self.kernel.now + seconds, fail)

    def taken(self, end: Socket) -> None:
        """An end has read: the other one may send more."""
        other = self.other(end)
        assert end.incoming is not None
        assert other.outgoing is not None
        free = SOCKET_SIZE - len(end.incoming.data) - self.flying[other]
        if free > other.outgoing.size:
            other.outgoing.size = free
            if not self.silent:
                other.changed.wake()

    def finish(self, end: Socket, *, reset: bool) -> None:
        """An end writes no more."""
        if end in self.finished:
            return
        self.finished.add(end)
        other = self.other(end)

        def arrive() -> None:
            if self.silent or self.is_cut:
                return
            if reset:
                self.network.reset(other)
                return
            assert other.incoming is not None
            other.incoming.ended = True
            other.changed.wake()

        self.later(end, arrive)

    def refuse(self, end: Socket) -> None:
        """An end reads no more."""
        self.refused.add(end)

    def cut(self) -> None:
        """Break it: what is under way is lost, perhaps in the middle of a frame."""
        self.breaks()
        self.is_cut = True
        for end in self.ends:
            self.network.reset(end)

    def cut_at(self, end: Socket, seconds: float) -> None:
        """Break it for one end now, and later for the other, which gets what is under way."""
        self.breaks()
        self.finished.add(end)
        self.refused.add(end)
        self.network.reset(end)
        self.kernel.at(self.kernel.now + seconds, self.cut)


class Network:
    """What is between hosts."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.wires: list[Wire] = []
        self.seconds = 0.0002
        self.unreachable: set[str] = set()
        """Hosts that nobody reaches, and that reach nobody."""
        self.ports = iter(range(20_000, 60_000))
        self.broken = 0
        """How many connections were cut or fell silent."""
        self.broken_at = 0.0
        """When the last of them did."""
        self.late_until = 0.0
        """Until when something arrives late."""

    def delay(self, wire: Wire) -> float:
        """How long the next bytes take."""
        random = self.kernel.random
        slow = 50.0 if random.random() < 0.01 else 1.0
        return self.seconds * (0.5 + random.random()) * slow

    def reset(self, end: Socket) -> None:
        end.fail(ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET)))

    def live(self) -> list[Wire]:
        """The connections between hosts that both ends have; nothing is cut within a host."""
        self.wires = [
            wire
            for wire in self.wires
            if not wire.is_cut and wire.is_far and any(end.references for end in wire.ends)
        ]
        return self.wires

    def bind(self, end: Socket, address: Any) -> None:
        """Give a socket its address."""
        if end.family == real.AF_UNIX:
            path = os.fsdecode(address)
            end.address = path
            if path.startswith("\0"):
                return
            if os.path.lexists(path):
                raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o755))
            return
        host, port = address[:2]
        end.address = (host or "0.0.0.0", port or next(self.ports))
        if ("tcp", end.host, end.address[1]) in self.kernel.listeners:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))

    def listen(self, end: Socket) -> None:
        if end.backlog is None:
            end.backlog = []
        if end.family == real.AF_UNIX:
            self.kernel.listeners["unix", end.address] = end
        else:
            if not end.address[1]:
                self.bind(end, ("", 0))
            self.kernel.listeners["tcp", end.host, end.address[1]] = end

    def connect(self, end: Socket, address: Any, until: float | None) -> None:
        """Connect to a listener, which need not have accepted when this returns."""
        if end.incoming is not None:
            raise OSError(errno.EISCONN, os.strerror(errno.EISCONN))
        if end.family == real.AF_UNIX:
            path = os.fsdecode(address)
            there = self.kernel.listeners.get(("unix", path))
            if not path.startswith("\0") and not os.path.exists(path):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            self._check(there)
            self._join(end, there, None)
            end.peer_address = path
            return
        host, port = address[:2]
        target = end.host if host in LOOPBACK else host
        if target != end.host:
            if not end.blocking:
                self._join_later(end, target, port)
                raise BlockingIOError(errno.EINPROGRESS, os.strerror(errno.EINPROGRESS))
            self.kernel.sleep(2 * self.seconds)
            if {target, end.host} & self.unreachable:
                if until is not None:
                    self.kernel.wait((), until)
                    raise TimeoutError("timed out")
                self.kernel.sleep(127)
                raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
        self._reach(end, target, port)

    def _reach(self, end: Socket, target: str, port: int) -> None:
        there = self.kernel.listeners.get(("tcp", target, port))
        self._check(there)
        assert there is not None
        end.address = (end.host, next(self.ports))
        end.peer_address = (target, port)
        wire = self._join(end, there, Wire)
        self.wires.append(wire)
        if target != end.host:
            self.kernel.moment("connect")

    def _join_later(self, end: Socket, target: str, port: int) -> None:
        def arrive() -> None:
            try:
                self._reach(end, target, port)
            except OSError as problem:
                end.problem = problem
            end.changed.wake()

        self.kernel.at(self.kernel.now + 2 * self.seconds, arrive)

    def _check(self, there: Socket | None) -> None:
        if there is None or there.backlog is None:
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))

    def _join(self, end: Socket, there: Socket, kind: Any) -> Any:
        kernel = self.kernel
        other = Socket(kernel, end.family, end.kind, there.host)
        other.address, other.peer_address = there.address, end.address
        end.outgoing, end.incoming = Bytes(kernel, SOCKET_SIZE), Bytes(kernel, SOCKET_SIZE)
        if kind is None:
            other.incoming, other.outgoing = end.outgoing, end.incoming
        else:
            other.incoming, other.outgoing = Bytes(kernel, SOCKET_SIZE), Bytes(kernel, SOCKET_SIZE)
        end.peer, other.peer = other, end
        wire = None
        if kind is not None:
            wire = end.wire = other.wire = kind(self, (end, other))
        assert there.backlog is not None
        there.backlog.append(other)
        there.changed.wake()
        end.changed.wake()
        return wire


# Waiting for many.


class Poll:
    """`select.poll`."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.watched: dict[int, int] = {}

    def register(
        self, file: Any, mask: int = select.POLLIN | select.POLLPRI | select.POLLOUT
    ) -> None:
        self.watched[number_of(file)] = mask

    def modify(self, file: Any, mask: int) -> None:
        if number_of(file) not in self.watched:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        self.watched[number_of(file)] = mask

    def unregister(self, file: Any) -> None:
        del self.watched[number_of(file)]

    def poll(self, timeout: float | None = None) -> list[tuple[int, int]]:
        seconds = None if timeout is None or timeout < 0 else timeout / 1000
        return wait_for(self.kernel, self.watched, seconds)


def number_of(file: Any) -> int:
    return file if isinstance(file, int) else int(file.fileno())


def wait_for(
    kernel: Kernel, watched: dict[int, int], seconds: float | None
) -> list[tuple[int, int]]:
    """The descriptors of which something is true that is asked for, as soon as there are any."""
    kernel.pause()
    assert kernel.current is not None
    process = kernel.current.process
    until = None if seconds is None else kernel.now + seconds
    while True:
        found, queues = [], []
        for number, mask in list(watched.items()):
            file = process.descriptors.get(number)
            if file is None:
                if number not in process.files:
                    found.append((number, 32))
                elif mask & 5:
                    found.append((number, mask & 5))
                continue
            if happened := file.events() & (mask | 8 | 16):
                found.append((number, happened))
            queues.append(file.changed)
        if found:
            kernel.random.shuffle(found)
            return found
        if until is not None and kernel.now >= until:
            return []
        kernel.wait(queues, until)


class Epoll(File):
    """`select.epoll`, as an open file."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        self.watched: dict[int, tuple[File, int]] = {}

    def control(self, process: Process, kind: str, number: int, mask: int = 0) -> None:
        file = process.get(number)
        there = self.watched.get(number)
        if there is not None and there[0] is not file:
            # It was closed, and with it went what was asked of it.
            del self.watched[number]
            there = None
        if kind == "add":
            if there is not None:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
            self.watched[number] = (file, mask)
        elif there is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        elif kind == "modify":
            self.watched[number] = (file, mask)
        else:
            del self.watched[number]
        # A thread that waits looks again.
        self.changed.wake()

    def look(self) -> list[tuple[int, int]]:
        found = []
        for number, (file, mask) in list(self.watched.items()):
            if not file.references:
                del self.watched[number]
            elif happened := file.events() & (mask | 8 | 16):
                found.append((number, happened))
                if mask & select.EPOLLONESHOT:
                    self.watched[number] = (file, 0)
        return found

    def events(self) -> int:
        return 1 if self.look() else 0

    def poll(self, seconds: float | None, most: int) -> list[tuple[int, int]]:
        self.kernel.pause()
        until = None if seconds is None or seconds < 0 else self.kernel.now + seconds
        while True:
            if found := self.look():
                self.kernel.random.shuffle(found)
                return found[:most] if most > 0 else found
            if until is not None and self.kernel.now >= until:
                return []
            queues: list[WaitQueue] = [file.changed for file, _ in self.watched.values()]
            self.kernel.wait([self.changed, *queues], until)


# The class that `socket.py` builds on.


def socket_class(kernel: Kernel, network: Network) -> type:
    """The `socket` of the module `_socket`, over this network."""

    class BaseSocket:
        __slots__ = ("_family", "_kind", "_number", "_proto", "_timeout")

        def __init__(
            self, family: int = -1, type: int = -1, proto: int = -1, fileno: int | None = None
        ) -> None:
            process = _process(kernel)
            if fileno is not None:
                file = process.get(fileno)
                if not isinstance(file, Socket):
                    raise OSError(errno.ENOTSOCK, os.strerror(errno.ENOTSOCK))
                self._number = fileno
                self._family, self._kind = file.family, file.kind
                self._timeout = None if file.blocking else 0.0
            else:
                self._family = real.AF_INET if family == -1 else int(family)
                given = real.SOCK_STREAM if type == -1 else int(type)
                self._kind = given & ~(real.SOCK_NONBLOCK | real.SOCK_CLOEXEC)
                file = Socket(kernel, self._family, self._kind, process.host)
                file.owner = process.pid
                self._number = process.add(file)
                self._timeout = None
                if given & real.SOCK_NONBLOCK:
                    self.setblocking(False)
            self._proto = 0 if proto == -1 else proto

        family = property(lambda self: self._family)
        type = property(lambda self: self._kind)
        proto = property(lambda self: self._proto)
        timeout = property(lambda self: self._timeout)

        def __del__(self) -> None:
            # As CPython's: a socket that nobody holds is closed.
            number = getattr(self, "_number", -1)
            if number >= 0 and kernel.current is not None:
                process = kernel.current.process
                if number in process.descriptors:
                    self._number = -1
                    process.close(number)

        def _file(self) -> Socket:
            kernel.pause()
            found = _process(kernel).get(self._number)
            assert isinstance(found, Socket)
            return found

        def _until(self) -> float | None:
            return kernel.now + self._timeout if self._timeout else None

        def fileno(self) -> int:
            return self._number

        def detach(self) -> int:
            number, self._number = self._number, -1
            return number

        def close(self) -> None:
            number, self._number = self._number, -1
            if number >= 0:
                kernel.pause()
                _process(kernel).close(number)

        def settimeout(self, seconds: float | None) -> None:
            self._timeout = None if seconds is None else float(seconds)
            _process(kernel).get(self._number).blocking = self._timeout != 0.0

        def gettimeout(self) -> float | None:
            return self._timeout

        def setblocking(self, flag: bool) -> None:
            self.settimeout(None if flag else 0.0)

        def getblocking(self) -> bool:
            return self._timeout != 0.0

        def bind(self, address: Any) -> None:
            network.bind(self._file(), address)

        def listen(self, backlog: int = 128) -> None:
            network.listen(self._file())

        def _accept(self) -> tuple[int, Any]:
            file, until = self._file(), self._until()
            if file.backlog is None:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            while not file.backlog:
                if file.problem is not None:
                    raise file.problem
                file.hold(0, until, 0)
            accepted = file.backlog.pop(0)
            return _process(kernel).add(accepted), accepted.peer_address or ""

        def connect(self, address: Any) -> None:
            network.connect(self._file(), address, self._until())

        def connect_ex(self, address: Any) -> int:
            try:
                self.connect(address)
            except OSError as problem:
                return problem.errno or errno.EIO
            return 0

        def getsockname(self) -> Any:
            return self._file().address

        def getpeername(self) -> Any:
            file = self._file()
            if file.incoming is None:
                raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
            return file.peer_address if file.peer_address is not None else ""

        def shutdown(self, how: int) -> None:
            file = self._file()
            if file.incoming is None and file.backlog is None:
                raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
            if file.backlog is not None:
                file.problem = OSError(errno.EINVAL, os.strerror(errno.EINVAL))
                file.changed.wake()
                return
            file.shut(how)

        def setsockopt(self, level: int, option: int, *value: Any) -> None:
            file = self._file()
            if level == real.SOL_SOCKET and option in (real.SO_RCVTIMEO, real.SO_SNDTIMEO):
                seconds, micros = struct.unpack("ll", value[0])
                file.timeouts[option] = seconds + micros / 1e6
            file.options[level, option] = value[0]
            if file.wire is not None and file.wire.silent and level == real.IPPROTO_TCP:
                # The kernel probes at the new times.
                file.wire.silence()

        def getsockopt(self, level: int, option: int, size: int = 0) -> Any:
            file = self._file()
            if level == real.SOL_SOCKET and option == real.SO_ERROR:
                problem, file.problem = file.problem, None
                return 0 if problem is None else problem.errno
            if level == real.SOL_SOCKET and option == real.SO_PEERCRED:
                return struct.pack(
                    "3i", file.peer.owner if file.peer else 0, os.getuid(), os.getgid()
                )
            if level == real.SOL_SOCKET and option in (real.SO_SNDBUF, real.SO_RCVBUF):
                return PIPE_SIZE
            if (level, option) == (real.IPPROTO_TCP, real.TCP_INFO) and file.wire is not None:
                information = bytearray(max(size, MIN_RTT_AT + 4))
                trip = 2e6 * network.seconds if file.wire.is_far else 30.0
                struct.pack_into("I", information, MIN_RTT_AT, int(trip))
                return bytes(information[:size])
            if size:
                return bytes(size)
            return file.options.get((level, option), 0)

        def recv(self, size: int, flags: int = 0) -> bytes:
            file, until = self._file(), self._until()
            if not flags & MSG_WAITALL:
                found = file.read_some(size, flags, until)
                kernel.give_way()
                return found
            found = b""
            while len(found) < size:
                part = file.read_some(size - len(found), flags, until)
                if not part:
                    break
                found += part
            return found

        def recv_into(self, buffer: Any, size: int = 0, flags: int = 0) -> int:
            view = memoryview(buffer).cast("B")
            found = self.recv(size or len(view), flags)
            view[: len(found)] = found
            return len(found)

        def recvfrom(self, size: int, flags: int = 0) -> tuple[bytes, Any]:
            return self.recv(size, flags), self._file().peer_address

        def recvmsg(
            self, size: int, room: int = 0, flags: int = 0
        ) -> tuple[bytes, list[Any], int, Any]:
            file, until = self._file(), self._until()
            data = file.read_some(size, flags, until)
            return data, self._received(file), 0, None

        def recvmsg_into(
            self, buffers: Any, room: int = 0, flags: int = 0
        ) -> tuple[int, list[Any], int, Any]:
            views = [memoryview(each).cast("B") for each in buffers]
            file, until = self._file(), self._until()
            data = file.read_some(sum(map(len, views)), flags, until)
            at = 0
            for view in views:
                part = data[at : at + len(view)]
                view[: len(part)] = part
                at += len(part)
            return len(data), self._received(file), 0, None

        def _received(self, file: Socket) -> list[Any]:
            """The open files that have come with the last bytes."""
            incoming, process = file.incoming, _process(kernel)
            assert incoming is not None
            numbers: list[int] = []
            while incoming.attached and incoming.attached[0][0] < incoming.taken:
                for each in incoming.attached.pop(0)[1]:
                    if isinstance(each, File):
                        each.references -= 1
                        numbers.append(process.add(each))
                    else:
                        process.files.add(each)
                        numbers.append(each)
            if not numbers:
                return []
            return [(real.SOL_SOCKET, real.SCM_RIGHTS, array.array("i", numbers).tobytes())]

        def send(self, data: Any, flags: int = 0) -> int:
            done = self._file().write_some(memoryview(data).cast("B"), flags, self._until())
            kernel.give_way()
            return done

        def sendall(self, data: Any, flags: int = 0) -> None:
            view, until = memoryview(data).cast("B"), self._until()
            while view:
                done = self._file().write_some(view, flags, until)
                view = view[done:]
            kernel.give_way()

        def sendmsg(
            self, buffers: Any, ancillary: Any = (), flags: int = 0, address: Any = None
        ) -> int:
            data = b"".join(bytes(memoryview(each).cast("B")) for each in buffers)
            file, process = self._file(), _process(kernel)
            given: list[Any] = []
            for _, kind, numbers in ancillary:
                assert kind == real.SCM_RIGHTS
                packed = array.array("i")
                packed.frombytes(bytes(numbers))
                for number in packed:
                    if number in process.descriptors:
                        each = process.descriptors[number]
                        each.references += 1
                        given.append(each)
                    else:
                        given.append(os.dup(number))
            if given:
                assert file.outgoing is not None
                mark = (file.outgoing.given, given)
                file.outgoing.attached.append(mark)
            done = file.write_some(memoryview(data), flags, self._until())
            kernel.give_way()
            return done

    BaseSocket.__name__ = "socket"
    return BaseSocket


def _process(kernel: Kernel) -> Process:
    assert kernel.current is not None
    return kernel.current.process
