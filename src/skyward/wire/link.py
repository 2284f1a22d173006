"""A link: a byte stream each way between two processes that outlives its connections.

Under it lie two connections at a time, one a direction: of TLS, or plain ones through a way that is
private already. Each carries records: a part of its
stream, or how many bytes of the other stream have arrived. What has not been counted is kept and,
when a connection breaks, sent again on the next, which begins where the other end stopped
receiving. Only the client connects; the worker is told on the new connection that the old one is
over. Nothing ever travels against a connection's direction: bytes that a dying process has not read
would make its kernel reset the connection, and with it the results that are still to come.

Between machines that are far apart, others join the pair for large writes: see `Pair`.

Small writes never wait for a connection: without one they are kept for the next. Nor do they wait
for the one there is, unless they are asked to. Large ones go out straight from the caller's memory;
when such a write returns, what is not counted of it has been copied.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from skyward.errors import ProtocolError
from skyward.wire.backlog import Backlog
from skyward.wire.records import ASIDE, IS_COUNT, JOINED, RECORD, RECORD_MAX, Pair

LINK_WINDOW = 8 << 20
"""The most that is kept of what the other end has not counted, once a write has returned."""
COUNT_EVERY = 1 << 20
"""Bytes received after which the other end hears of them."""
QUEUED_MAX = 1 << 20
"""Up to this size a write is kept for later rather than made to wait for a connection."""
WIDE_MIN = 8 << 20
"""Larger writes go over several connections, between machines that are far apart."""
WIDE_PART = 1 << 20
"""How much of it goes over one connection at a time."""
WIDE_HEAD = 1 << 20
"""What is in front of a frame's large body must be small enough to come over the main one."""
PROMPT_MAX = 32 << 10
"""So much fits into a connection that can be written to at all, so that it does not block."""


class LinkLost(Exception):
    """No connection can be had any more; the message says why."""


class Disconnected(Exception):
    """There is no connection to read from now, and the reader does not wait for one."""


class Link:
    """One end of a link. Any thread may write; one thread at a time reads."""

    def __init__(
        self,
        pair: Pair,
        dial: Callable[[int, threading.Event], Pair] | None = None,
        attempt: int = 1,
        widen: Callable[[Pair], None] | None = None,
    ) -> None:
        """`dial` makes the next connection, given how much was received; the worker has none.

        `widen` adds connections to a pair.
        """
        self.first = pair
        self._dial = dial
        self._widen = widen
        self.on_change: Callable[[bool], None] = lambda connected: None
        """Told on any thread when the connection is lost and when there is one again."""
        self.patient = False
        """Whether writes wait for the kernel to take them, if there is a connection."""
        self._pair: Pair | None = pair
        self._writing = self._reading = pair
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._ended = threading.Event()
        self._why = ""
        self._attempt = attempt
        self._again: Callable[[], None] | None = None
        # Writing.
        self._sending = threading.Lock()
        self._backlog = Backlog(LINK_WINDOW)
        self._acknowledged = 0
        self._counted = 0
        """The latest count to have come; acknowledged by whoever writes next."""
        self._goal = 0
        self._queue: deque[list[bytes | int]] = deque()
        self._due = False
        """Whether there is something to send that nobody has taken on yet."""
        self._large: list[object] = []
        """Those who have the lock for as long as the network takes, or wait for it."""
        self._draining = False
        # Reading.
        self._blocking = True
        self._received = 0
        self._told = 0
        self._count_due = False
        self._reader = 0
        """The thread that read last. A client's must not wait for what only it can read."""

    @property
    def connected(self) -> bool:
        """Whether there is a connection, as far as anybody knows."""
        pair = self._pair
        return pair is not None and not pair.broken

    @property
    def exhausted(self) -> bool:
        """Whether all that came before the connection was lost has been read."""
        return self._pair is None

    @property
    def ended(self) -> bool:
        """Whether it is over for good."""
        return self._ended.is_set()

    # Writing.

    def send(self, data: bytes) -> None:
        """Write something small; it may be sent later, in order."""
        self._check()
        self._queue.append([data, -1])
        self._due = True
        self._settle()

    def send_parts(self, views: Sequence[memoryview]) -> None:
        """Write something large; waits for a connection, and raises when there will be none."""
        length = sum(map(len, views))
        delayed = not self.connected or (self._large and not self.patient)
        small = length <= QUEUED_MAX and self._backlog.held <= LINK_WINDOW
        if (delayed and small) or (not self.patient and threading.get_ident() == self._reader):
            self.send(b"".join(views))
            return
        with self._waiting():
            self._check()
            try:
                self._gather()
                self._stream(views, length)
            except BaseException:
                # A part of it may be on its way, and the rest is the caller's again.
                self.end("a write was interrupted")
                raise

    def wait_for_room(self) -> None:
        """Wait while much is kept for a connection that does not come, or takes nothing."""
        if self._backlog.held <= LINK_WINDOW or self._ended.is_set():
            return
        with self._waiting():
            self._gather()
            while self._backlog.held > LINK_WINDOW // 2:
                pair = self._await_turn()
                try:
                    self._push(pair)
                    self._await_count(pair)
                except BaseException as problem:
                    self._failed(pair, problem)

    def _check(self) -> None:
        if self._ended.is_set():
            raise BrokenPipeError(self._why)

    def _settle(self) -> None:
        """Send what is due, or leave it to the one who has the lock and looks again after that.

        Never waits for the lock: its holder may wait for a count that only we can read.
        """
        held: list[bool] = []
        while self._due:
            try:
                # One step for the interpreter: no Ctrl-C between taking the lock and noting it.
                held.extend(map(self._sending.acquire, (False,)))
                if not held[-1]:
                    return
                self._due = False
                if not self._send_one():
                    self._gather()
                    self._drain()
            finally:
                if held and held.pop():
                    self._sending.release()

    def _send_one(self) -> bool:
        """The usual case, a small write with nothing before it: sent first, then kept."""
        pair, backlog = self._writing, self._backlog
        if (
            len(self._queue) != 1
            or pair is not self._pair
            or pair.broken
            or self._count_due
            or backlog.waiting
        ):
            return False
        data = self._queue[0][0]
        assert isinstance(data, bytes)
        if len(data) > JOINED or not (pair.has_room or self.patient or pair.writable()):
            return False
        try:
            pair.send(b"".join((RECORD.pack(len(data)), data)))
            self._gather()
            backlog.sent(len(data))
            # Asked now, while the other end is at work; for the next time.
            pair.has_room = self.patient or pair.writable()
            if self._counted > self._acknowledged:
                self._exchange_counts(pair)
        except BaseException as problem:
            # Interrupted between any two steps, a new connection tells how far it came.
            self._gather()
            self._failed(pair, problem)
        return not self._queue

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        """Hold the lock for as long as it takes; others queue what they send meanwhile."""
        me = object()
        try:
            self._large.append(me)
            with self._sending:
                yield
        finally:
            with contextlib.suppress(ValueError):
                self._large.remove(me)
            self._settle()

    def _gather(self) -> None:
        """Move what is queued to the backlog."""
        backlog, queue = self._backlog, self._queue
        while queue:
            # In steps such that a Ctrl-C between any two neither loses nor repeats a byte.
            entry = queue[0]
            if entry[1] == -1:
                entry[1] = backlog.end
            data, start = entry
            assert isinstance(data, bytes)
            assert isinstance(start, int)
            backlog.add(data[backlog.end - start :])
            queue.popleft()

    def _drain(self) -> None:
        """Send what is in the backlog if there is a connection; on a thread if that may take."""
        pair = self._turn()
        if pair is None or self._draining:
            return
        prompt = self._backlog.waiting <= PROMPT_MAX and pair.writable()
        if not self.patient and not prompt:
            self._draining = True
            threading.Thread(target=self._drain_later, name="skyward-link", daemon=True).start()
            return
        try:
            self._push(pair)
        except BaseException as problem:
            self._failed(pair, problem)

    def _drain_later(self) -> None:
        with self._waiting():
            self._draining = False
            self._gather()
            pair = self._turn()
            if pair is not None:
                try:
                    self._push(pair)
                except BaseException as problem:
                    self._failed(pair, problem)

    def _stream(self, views: Sequence[memoryview], length: int) -> None:
        wide = length >= WIDE_MIN and len(views[0]) <= WIDE_HEAD
        base = self._backlog.end
        self._goal = goal = base + length
        position, pair = base, self._writing
        while position < goal or goal - self._acknowledged > LINK_WINDOW:
            latest = self._await_turn()
            if latest is not pair:
                pair, position = latest, max(self._acknowledged, base)
            try:
                self._push(pair)
                if wide:
                    self._consider_widening(pair)
                start = end = position
                for part in _from(views, position - base):
                    while part:
                        head, aside, size = b"", 0, RECORD_MAX
                        if position == end:
                            self._exchange_counts(pair)
                            # The first on the main one: frames are looked for on no other.
                            if wide and pair.is_wide and position > start:
                                (aside, target), size = pair.roomiest(), WIDE_PART
                            else:
                                target = pair.sender
                            end = min(goal, position + size)
                            head = RECORD.pack(end - position | aside << ASIDE)
                        piece = part[: end - position]
                        if target is pair.sender:
                            pair.write(piece, head)
                        else:
                            pair.sender.sendall(head)
                            target.sendall(piece)
                        position += len(piece)
                        part = part[len(piece) :]
                while goal - self._acknowledged > LINK_WINDOW:
                    self._await_count(pair)
            except BaseException as problem:
                self._failed(pair, problem)
        known = max(self._acknowledged, base)
        if known > base:
            self._backlog.restart(known)
        for part in _from(views, known - base):
            self._backlog.add(part)
        self._backlog.sent(goal - known)

    def _failed(self, pair: Pair, problem: BaseException) -> None:
        """A connection that fails, or about which there is doubt, is broken: nothing is lost."""
        if isinstance(problem, ProtocolError):
            self.end(str(problem))
            return
        pair.fail()
        if not isinstance(problem, (OSError, EOFError)):
            raise problem

    def _push(self, pair: Pair) -> None:
        """Send all that is to be sent now."""
        self._exchange_counts(pair)
        while unsent := self._backlog.unsent():
            pair.write(unsent, RECORD.pack(len(unsent)))
            self._backlog.sent(len(unsent))

    def _exchange_counts(self, pair: Pair) -> None:
        if self._count_due:
            self._count_due = False
            pair.sender.sendall(RECORD.pack(self._received | IS_COUNT))
        if self._counted > self._acknowledged:
            self._check_count(self._counted)
            self._acknowledged = self._counted
            self._backlog.acknowledge(min(self._counted, self._backlog.end))

    def _await_count(self, pair: Pair) -> None:
        """Wait until the other end has more of what was sent; our own count goes out meanwhile."""
        with self._changed:
            while self._counted <= self._acknowledged and not self._count_due:
                if self._pair is not pair or pair.broken or self._ended.is_set():
                    raise ConnectionError("the connection was lost")
                self._changed.wait()
        self._exchange_counts(pair)

    def _turn(self) -> Pair | None:
        """The connection to write to, if there is one; a new one goes on where the old ended."""
        pair = self._pair
        if pair is None or pair.broken:
            return None
        if pair is not self._writing:
            with self._lock:
                if self._pair is not pair:
                    return None
                before, self._writing = self._writing, pair
            before.close_senders()
            try:
                self._check_count(pair.arrived)
            except ProtocolError as problem:
                self.end(str(problem))
                return None
            self._acknowledged = pair.arrived
            self._backlog.resume(min(pair.arrived, self._backlog.end))
        return pair

    def _await_turn(self) -> Pair:
        while True:
            with self._changed:
                while not self.connected and not self._ended.is_set():
                    self._changed.wait()
            self._check()
            pair = self._turn()
            if pair is not None:
                return pair

    def _check_count(self, count: int) -> None:
        end = max(self._goal, self._backlog.end)
        if not self._acknowledged <= count <= end:
            raise ProtocolError(
                f"the other end has {count} bytes of a stream that is between "
                f"{self._acknowledged} and {end}"
            )

    # Reading.

    def fileno(self) -> int:
        """The descriptor to wait on, until the connection is lost."""
        return self._reading.receiver.fileno()

    def set_blocking(self, blocking: bool) -> None:
        """Whether reads wait: for bytes, and for the next connection."""
        self._blocking = blocking
        self._reading.receiver.setblocking(blocking)

    def pending(self) -> int:
        """Bytes that can be read although no selector sees them."""
        receiver = self._reading.receiver
        return receiver.pending() if isinstance(receiver, ssl.SSLSocket) else 0

    def receive(self, buffer: memoryview) -> memoryview:
        """Read some bytes, and where in the buffer they are.

        `EOFError` when the link is over. Without waiting, `BlockingIOError` when nothing is there,
        and `Disconnected` when nothing can be.
        """
        self._reader = threading.get_ident()
        while True:
            pair, part = self._reading, buffer[:0]
            try:
                if pair.left:
                    part = buffer[: pair.receiver.recv_into(buffer, min(pair.left, len(buffer)))]
                    pair.left -= len(part)
                    ended = not part
                elif pair.head:
                    ended = not self._next_record(pair, aside=False)
                else:
                    # With one call for both, as a small record comes in one piece.
                    part = buffer[: pair.receiver.recv_into(buffer)]
                    ended = not part
                    part = self._without_heads(pair, part)
            except (BlockingIOError, ssl.SSLWantReadError):
                raise BlockingIOError from None
            except ProtocolError as problem:
                self.end(str(problem))
                ended = True
            except OSError:
                ended = True
            if part and self._took(pair, len(part)):
                return part
            if ended or part:
                self._next(pair)

    def _without_heads(self, pair: Pair, data: memoryview) -> memoryview:
        """The parts of the stream in what was read from the beginning of a record on."""
        if len(data) > RECORD.size:
            (value,) = RECORD.unpack_from(data)
            after = len(data) - RECORD.size
            if after <= value <= RECORD_MAX:
                pair.left, pair.source = value - after, pair.receiver
                return data[RECORD.size :]
        parts = b""
        while data:
            wanted = RECORD.size - len(pair.head)
            pair.head += bytes(data[:wanted])
            data = data[wanted:]
            if len(pair.head) == RECORD.size:
                self._begin_record(pair, aside=False)
                parts += bytes(data[: pair.left])
                taken = min(pair.left, len(data))
                data = data[taken:]
                pair.left -= taken
        return memoryview(parts)

    def fill(self, view: memoryview, told: Callable[[int], None] = lambda done: None) -> None:
        """Read until the view is full; says now and then how much of it is."""
        done = 0
        if len(view) >= WIDE_MIN:
            self._consider_widening(self._reading)
        while done < len(view):
            pair, at, goal = self._reading, done, min(done + COUNT_EVERY, len(view))
            try:
                while at < goal and (pair.left or self._next_record(pair, aside=True)):
                    count = pair.source.recv_into(view[at : at + pair.left])
                    if not count:
                        break
                    at += count
                    pair.left -= count
            except ProtocolError as problem:
                self.end(str(problem))
            except OSError:
                pass
            taken = at > done and self._took(pair, at - done)
            if taken:
                done = at
                told(done)
            if not taken or at < goal:
                self._next(pair)

    def _next_record(self, pair: Pair, *, aside: bool) -> bool:
        """Read on to the next part of the stream; False when the connection has ended.

        With `aside`, that part may come over another connection.
        """
        while not pair.left:
            data = pair.receiver.recv(RECORD.size - len(pair.head))
            if not data:
                return False
            pair.head += data
            if len(pair.head) == RECORD.size:
                self._begin_record(pair, aside=aside)
        return True

    def _begin_record(self, pair: Pair, *, aside: bool) -> None:
        (value,) = RECORD.unpack(pair.head)
        pair.head = b""
        if value & IS_COUNT:
            count = value & ~IS_COUNT
            # A small write is sent before it is kept, and may be counted before that.
            self._check_count(max(count - JOINED, self._acknowledged))
            with self._changed:
                self._counted = max(self._counted, count)
                self._changed.notify_all()
            return
        number, length = value >> ASIDE, value & ((1 << ASIDE) - 1)
        if not 0 < length <= RECORD_MAX:
            raise ProtocolError(f"a record of {length} bytes; the limit is {RECORD_MAX}")
        if number and not aside:
            raise ProtocolError(f"a frame begins on connection {number}")
        pair.receive_from(number)
        pair.left = length

    def _took(self, pair: Pair, count: int) -> bool:
        """Whether these bytes count: the other end may have been told that they did not come."""
        with self._lock:
            if self._pair is not pair:
                return False
            self._received += count
        if self._received - self._told >= COUNT_EVERY:
            self._told = self._received
            self._count_due = self._due = True
            with self._changed:
                self._changed.notify_all()
            self._settle()
        return True

    def _next(self, pair: Pair) -> None:
        """Nothing more comes on this connection: on to the next one."""
        self._retire(pair)
        if not self._blocking:
            if self._ended.is_set():
                raise EOFError(self._why)
            raise Disconnected
        with self._changed:
            while self._pair is None and not self._ended.is_set():
                self._changed.wait()
        if self._ended.is_set():
            raise EOFError(self._why)
        self._adopt()

    def ready(self, again: Callable[[], None]) -> bool:
        """Whether there is something to read from; else `again` is called, once, when there is."""
        with self._changed:
            if self._pair is None and not self._ended.is_set():
                self._again = again
                return False
        self._adopt()
        return True

    def _adopt(self) -> None:
        with self._lock:
            pair, before = self._pair, self._reading
            if pair is None or pair is before:
                return
            self._reading = pair
        before.close_receivers()
        pair.receiver.setblocking(self._blocking)
        self._told = self._received

    # Connections come and go.

    def _retire(self, pair: Pair) -> None:
        """The reader has taken all that came over a connection that is lost."""
        with self._changed:
            if self._pair is not pair or self._ended.is_set():
                return
            self._pair = None
            self._let_go(pair)
            self._changed.notify_all()
        self.on_change(False)
        if self._dial is not None:
            threading.Thread(target=self._redial, name="skyward-redial", daemon=True).start()

    def _redial(self) -> None:
        assert self._dial is not None
        try:
            pair = self._dial(self._received, self._ended)
        except LinkLost as problem:
            self.end(str(problem))
        else:
            self.install(pair, self._attempt)

    def suspend(self, attempt: int) -> int | None:
        """The client makes a new connection: what came so far, and nothing more on the old one.

        None for an attempt that a later one has overtaken, and when the link is over.
        """
        with self._changed:
            if attempt < self._attempt or self._ended.is_set():
                return None
            pair = None
            if attempt > self._attempt:
                self._attempt = attempt
                pair, self._pair = self._pair, None
            if pair is not None:
                self._let_go(pair)
                self._changed.notify_all()
            received = self._received
        if pair is not None:
            self.on_change(False)
        return received

    def _let_go(self, pair: Pair) -> None:
        """Who has begun to use a connection closes it when done; else it is done with now."""
        pair.cut()
        if pair is not self._writing:
            pair.close_senders()
        if pair is not self._reading:
            pair.close_receivers()

    def install(self, pair: Pair, attempt: int) -> None:
        """Go on over this connection."""
        with self._changed:
            if attempt != self._attempt or self._ended.is_set():
                pair.close()
                return
            self._pair = pair
            again, self._again = self._again, None
            self._changed.notify_all()
        self.on_change(True)
        if again is not None:
            again()
        self._due = True
        self._settle()

    def _consider_widening(self, pair: Pair) -> None:
        """A large write has begun: have more connections made, once, if that may help."""
        if self._widen is not None and not pair.widened and not pair.broken:
            pair.widened = True
            if pair.is_far:
                threading.Thread(
                    target=self._widen, args=(pair,), name="skyward-widen", daemon=True
                ).start()

    def can_be_widened(self, attempt: int) -> bool:
        """Whether its connections of that attempt are the ones it goes over."""
        pair = self._pair
        return attempt == self._attempt and pair is not None and not pair.broken

    def widen(self, attempt: int, number: int, end: socket.socket, *, to_send: bool) -> None:
        """The client has made one more connection."""
        with self._lock:
            pair = self._pair if attempt == self._attempt else None
        if pair is None:
            end.close()
        else:
            pair.add(number, end, to_send=to_send)

    def doubt(self) -> None:
        """Break the connection, which seems dead, so that a new one is made."""
        pair = self._pair
        if pair is not None:
            pair.cut()

    def end(self, why: str) -> None:
        """Wake everybody: there will be no more connections."""
        with self._changed:
            if self._ended.is_set():
                return
            self._why = why
            self._ended.set()
            again, self._again = self._again, None
            self._changed.notify_all()
        self._writing.cut()
        self.doubt()
        if again is not None:
            again()

    def close(self) -> None:
        """End it and give the sockets back; who waits to read is not told, it is their doing."""
        with self._lock:
            self._again = None
        self.end("the link was closed")
        for pair in {self._writing, self._reading, self._pair}:
            if pair is not None:
                pair.close()


def _from(views: Sequence[memoryview], at: int) -> Iterator[memoryview]:
    """What follows the first `at` bytes, in parts of a bounded size."""
    for view in views:
        for start in range(at, len(view), RECORD_MAX):
            yield view[start : start + RECORD_MAX]
        at = max(0, at - len(view))
