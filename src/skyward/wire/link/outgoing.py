"""What a link sends: bytes are kept until the other end has them, for the next connection.

Small writes never wait for a connection: they are kept until there is one. They wait for the
kernel only if `patient` is set. Large writes are sent straight from the caller's memory; before
such a write returns, it copies the bytes that the other end has not counted.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterator, Sequence

from skyward.errors import ProtocolError
from skyward.wire.link.backlog import Backlog
from skyward.wire.link.connections import Connections
from skyward.wire.link.large import Cursor, Spread, may_be_striped
from skyward.wire.link.pair import IS_COUNT, JOINED, RECORD, Pair

LINK_WINDOW = 8 << 20
"""How many uncounted bytes are kept at most after a write has returned."""
QUEUED_MAX = 1 << 20
"""The largest write that is kept for later; a larger one waits for a connection."""
PROMPT_MAX = 32 << 10
"""How much the kernel takes at once on a connection that it reports as writable."""


class Outgoing:
    """The stream from here to the other end. Any thread may write."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self.patient = False
        """Whether writes wait for the kernel to take them, if there is a connection.

        Small ones behind a write of another thread that waits are sent after that one.
        """
        self._sending = threading.Lock()
        self._backlog = Backlog()
        self._acknowledged = 0
        self._counted = 0
        """The latest count from the other end; the next writer acknowledges it to the backlog."""
        self._count_due = False
        """Whether this end must send a count."""
        self._goal = 0
        self._queue: deque[list[bytes | int]] = deque()
        self._due = False
        """Whether there are bytes that no thread has begun to send."""
        self._large: list[object] = []
        """One entry for each thread that holds the lock, or will, to wait for the network."""
        self._draining = False

    def send(self, data: bytes) -> None:
        """Write a few bytes; they are sent now or later, in order."""
        self._check()
        self._queue.append([data, -1])
        self._due = True
        self._settle()

    def send_parts(self, views: Sequence[memoryview]) -> None:
        """Write many bytes; waits for a connection, and raises when the link has ended."""
        length = sum(map(len, views))
        delayed = not self._connections.connected or (self._large and not self.patient)
        small = length <= QUEUED_MAX and self._backlog.held <= LINK_WINDOW
        reads = threading.get_ident() == self._connections.reader
        if (delayed and small) or (reads and not self.patient):
            self.send(b"".join(views))
            return
        with self._waiting():
            self._check()
            try:
                self._gather()
                self._stream(views)
            except BaseException:
                # Some bytes may have been sent, and the caller may change the others from now on.
                self._connections.end("a write was interrupted")
                raise

    def wait_for_room(self, window: int = LINK_WINDOW) -> None:
        """Wait while more than `window` bytes are kept, until half of them are counted."""
        if self._backlog.held <= window or self._connections.ended:
            return
        with self._waiting():
            self._gather()
            while self._backlog.held > window // 2:
                pair = self._await_turn()
                try:
                    self._push(pair)
                    self._await_count(pair)
                except BaseException as problem:
                    self._failed(pair, problem)

    def _check(self) -> None:
        if self._connections.ended:
            raise BrokenPipeError(self._connections.why)

    def _settle(self) -> None:
        """Send what is due; if another thread has the lock, that thread sends it afterwards.

        Never waits for the lock: its holder may wait for a count that only this thread can read.
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
        """Send the only small write, then keep it; returns whether that was possible."""
        pair, backlog = self._connections.writing, self._backlog
        if (
            len(self._queue) != 1
            or pair is not self._connections.current
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
            # The kernel is asked now, for the next write: the other end is busy meanwhile.
            pair.has_room = self.patient or pair.writable()
            if self._counted > self._acknowledged:
                self._exchange_counts(pair)
        except BaseException as problem:
            # An interrupt may come between any two steps; a new connection tells what has arrived.
            self._gather()
            self._failed(pair, problem)
        return not self._queue

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        """Hold the lock while waiting for the network; other threads queue what they send."""
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
        """Move the queued writes to the backlog."""
        backlog, queue = self._backlog, self._queue
        while queue:
            # A Ctrl-C between any two of these steps neither loses nor repeats a byte.
            entry = queue[0]
            if entry[1] == -1:
                entry[1] = backlog.end
            data, start = entry
            assert isinstance(data, bytes)
            assert isinstance(start, int)
            backlog.add(data[backlog.end - start :])
            queue.popleft()

    def _drain(self) -> None:
        """Send the backlog if there is a connection; on another thread if the kernel may block."""
        pair = self._turn()
        if pair is None or self._draining:
            return
        prompt = self._backlog.waiting <= PROMPT_MAX and pair.writable()
        if not self.patient and not prompt:
            self._draining = True
            threading.Thread(target=self._drain_later, name="skyward-link", daemon=True).start()
            return
        self._push_now()

    def _drain_later(self) -> None:
        with self._waiting():
            self._draining = False
            self._gather()
            self._push_now()

    def _push_now(self) -> None:
        """Send the backlog if there is a connection, and wait for the kernel to take it."""
        pair = self._turn()
        if pair is not None:
            try:
                self._push(pair)
            except BaseException as problem:
                self._failed(pair, problem)

    def _stream(self, views: Sequence[memoryview]) -> None:
        """Send a large write, over as many pairs as it takes until most of it is counted."""
        cursor, base = Cursor(views), self._backlog.end
        self._goal = base + cursor.length
        striped = may_be_striped(views)
        pair = self._connections.writing
        while cursor.left or self._goal - self._acknowledged > LINK_WINDOW:
            latest = self._await_turn()
            if latest is not pair:
                pair = latest
                cursor.seek(max(self._acknowledged - base, 0))
            try:
                self._send_rest(cursor, pair, striped=striped)
            except BaseException as problem:
                self._failed(pair, problem)
        self._keep_rest(cursor, base)

    def _send_rest(self, cursor: Cursor, pair: Pair, *, striped: bool) -> None:
        """Send the bytes after the cursor over one pair, and wait until most are counted."""
        self._push(pair)
        if striped:
            self._connections.consider_stripes(pair)
        spread = Spread(pair, striped=striped)
        while cursor.left:
            self._exchange_counts(pair)
            spread.send(cursor)
        while self._goal - self._acknowledged > LINK_WINDOW:
            self._await_count(pair)

    def _keep_rest(self, cursor: Cursor, base: int) -> None:
        """Copy the bytes that are not counted yet: the caller may now change its memory."""
        known = max(self._acknowledged, base)
        if known > base:
            self._backlog.restart(known)
        cursor.seek(known - base)
        for piece in cursor.take(cursor.left):
            self._backlog.add(piece)
        self._backlog.sent(self._goal - known)

    def _failed(self, pair: Pair, problem: BaseException) -> None:
        """Give up a pair after any problem; the bytes that did not arrive go over the next pair."""
        if isinstance(problem, ProtocolError):
            self._connections.end(str(problem))
            return
        pair.fail()
        if not isinstance(problem, (OSError, EOFError)):
            raise problem

    def _push(self, pair: Pair) -> None:
        """Send the backlog; waits for the kernel to take it."""
        self._exchange_counts(pair)
        while unsent := self._backlog.unsent():
            pair.write(unsent, RECORD.pack(len(unsent)))
            self._backlog.sent(len(unsent))

    def _exchange_counts(self, pair: Pair) -> None:
        if self._count_due:
            self._count_due = False
            pair.sender.sendall(RECORD.pack(self._connections.received | IS_COUNT))
        if self._counted > self._acknowledged:
            self._check_count(self._counted)
            self._acknowledged = self._counted
            self._backlog.acknowledge(min(self._counted, self._backlog.end))

    def _await_count(self, pair: Pair) -> None:
        """Wait for the next count from the other end; sends this end's count meanwhile."""
        with self._connections.changed:
            while self._counted <= self._acknowledged and not self._count_due:
                if self._connections.current is not pair or pair.broken or self._connections.ended:
                    raise ConnectionError("the connection was lost")
                self._connections.changed.wait()
        self._exchange_counts(pair)

    def _turn(self) -> Pair | None:
        """The pair to write to, if any; on a new pair, the other end's count is the beginning."""
        pair = self._connections.current
        if pair is None or pair.broken:
            return None
        if pair is not self._connections.writing:
            with self._connections.lock:
                if self._connections.current is not pair:
                    return None
                before, self._connections.writing = self._connections.writing, pair
            before.close_senders()
            try:
                self._check_count(pair.arrived)
            except ProtocolError as problem:
                self._connections.end(str(problem))
                return None
            self._acknowledged = pair.arrived
            self._backlog.resume(min(pair.arrived, self._backlog.end))
            # The last count may have gone over the pair before, and the other end may wait for it.
            self._count_due = True
        return pair

    def _await_turn(self) -> Pair:
        while True:
            with self._connections.changed:
                while not self._connections.connected and not self._connections.ended:
                    self._connections.changed.wait()
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
        """Send what is due: there is a connection again."""
        self._due = True
        self._settle()

    def tell_count(self) -> None:
        """Send the other end the count of the bytes that have arrived here."""
        self._count_due = self._due = True
        with self._connections.changed:
            self._connections.changed.notify_all()
        self._settle()

    def heard_count(self, count: int) -> None:
        """Note the other end's count of the bytes that have arrived there."""
        # A small write is sent first and kept afterwards; its count may come in between.
        self._check_count(max(count - JOINED, self._acknowledged))
        with self._connections.changed:
            self._counted = max(self._counted, count)
            self._connections.changed.notify_all()
