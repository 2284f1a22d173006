"""What a link sends: kept until the other end has it, and sent again on the next connection.

Small writes never wait for a connection: without one they are kept for the next. Nor do they wait
for the one there is, unless they are asked to. Large ones go out straight from the caller's memory;
when such a write returns, what is not counted of it has been copied.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterator, Sequence

from skyward.errors import ProtocolError
from skyward.wire.backlog import Backlog
from skyward.wire.records import ASIDE, IS_COUNT, JOINED, RECORD, RECORD_MAX, WIDE_MIN, Pair
from skyward.wire.ways import Ways

LINK_WINDOW = 8 << 20
"""The most that is kept of what the other end has not counted, once a write has returned."""
QUEUED_MAX = 1 << 20
"""Up to this size a write is kept for later rather than made to wait for a connection."""
WIDE_PART = 1 << 20
"""How much of a large write goes over one of several connections at a time."""
WIDE_HEAD = 1 << 20
"""What is in front of a frame's large body must be small enough to come over the main one."""
PROMPT_MAX = 32 << 10
"""So much fits into a connection that can be written to at all, so that it does not block."""


class Outgoing:
    """The stream from here to the other end. Any thread may write."""

    def __init__(self, ways: Ways) -> None:
        self._ways = ways
        self.patient = False
        """Whether writes wait for the kernel to take them, if there is a connection."""
        self._sending = threading.Lock()
        self._backlog = Backlog(LINK_WINDOW)
        self._acknowledged = 0
        self._counted = 0
        """The latest count to have come; acknowledged by whoever writes next."""
        self._count_due = False
        """Whether the other end is to hear how much has come."""
        self._goal = 0
        self._queue: deque[list[bytes | int]] = deque()
        self._due = False
        """Whether there is something to send that nobody has taken on yet."""
        self._large: list[object] = []
        """Those who have the lock for as long as the network takes, or wait for it."""
        self._draining = False

    def send(self, data: bytes) -> None:
        """Write something small; it may be sent later, in order."""
        self._check()
        self._queue.append([data, -1])
        self._due = True
        self._settle()

    def send_parts(self, views: Sequence[memoryview]) -> None:
        """Write something large; waits for a connection, and raises when there will be none."""
        length = sum(map(len, views))
        delayed = not self._ways.connected or (self._large and not self.patient)
        small = length <= QUEUED_MAX and self._backlog.held <= LINK_WINDOW
        if (delayed and small) or (not self.patient and threading.get_ident() == self._ways.reader):
            self.send(b"".join(views))
            return
        with self._waiting():
            self._check()
            try:
                self._gather()
                self._stream(views, length)
            except BaseException:
                # A part of it may be on its way, and the rest is the caller's again.
                self._ways.end("a write was interrupted")
                raise

    def wait_for_room(self) -> None:
        """Wait while much is kept for a connection that does not come, or takes nothing."""
        if self._backlog.held <= LINK_WINDOW or self._ways.ended:
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
        if self._ways.ended:
            raise BrokenPipeError(self._ways.why)

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
        pair, backlog = self._ways.writing, self._backlog
        if (
            len(self._queue) != 1
            or pair is not self._ways.current
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
        position, pair = base, self._ways.writing
        while position < goal or goal - self._acknowledged > LINK_WINDOW:
            latest = self._await_turn()
            if latest is not pair:
                pair, position = latest, max(self._acknowledged, base)
            try:
                self._push(pair)
                if wide:
                    self._ways.consider_widening(pair)
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
            self._ways.end(str(problem))
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
            pair.sender.sendall(RECORD.pack(self._ways.received | IS_COUNT))
        if self._counted > self._acknowledged:
            self._check_count(self._counted)
            self._acknowledged = self._counted
            self._backlog.acknowledge(min(self._counted, self._backlog.end))

    def _await_count(self, pair: Pair) -> None:
        """Wait until the other end has more of what was sent; our own count goes out meanwhile."""
        with self._ways.changed:
            while self._counted <= self._acknowledged and not self._count_due:
                if self._ways.current is not pair or pair.broken or self._ways.ended:
                    raise ConnectionError("the connection was lost")
                self._ways.changed.wait()
        self._exchange_counts(pair)

    def _turn(self) -> Pair | None:
        """The connection to write to, if there is one; a new one goes on where the old ended."""
        pair = self._ways.current
        if pair is None or pair.broken:
            return None
        if pair is not self._ways.writing:
            with self._ways.lock:
                if self._ways.current is not pair:
                    return None
                before, self._ways.writing = self._ways.writing, pair
            before.close_senders()
            try:
                self._check_count(pair.arrived)
            except ProtocolError as problem:
                self._ways.end(str(problem))
                return None
            self._acknowledged = pair.arrived
            self._backlog.resume(min(pair.arrived, self._backlog.end))
        return pair

    def _await_turn(self) -> Pair:
        while True:
            with self._ways.changed:
                while not self._ways.connected and not self._ways.ended:
                    self._ways.changed.wait()
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

    def go_on(self) -> None:
        """There is a connection again: send what is due."""
        self._due = True
        self._settle()

    def tell_count(self) -> None:
        """Have the other end hear how much has come."""
        self._count_due = self._due = True
        with self._ways.changed:
            self._ways.changed.notify_all()
        self._settle()

    def heard_count(self, count: int) -> None:
        """The other end has so much of what was sent."""
        # A small write is sent before it is kept, and may be counted before that.
        self._check_count(max(count - JOINED, self._acknowledged))
        with self._ways.changed:
            self._counted = max(self._counted, count)
            self._ways.changed.notify_all()


def _from(views: Sequence[memoryview], at: int) -> Iterator[memoryview]:
    """What follows the first `at` bytes, in parts of a bounded size."""
    for view in views:
        for start in range(at, len(view), RECORD_MAX):
            yield view[start : start + RECORD_MAX]
        at = max(0, at - len(view))
