"""The ways of a link: the pair of connections it goes over, and how it comes to the next."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

from skyward.wire.records import Pair


class LinkLost(Exception):
    """No connection can be had any more; the message says why."""


class Ways:
    """Shared by what a link sends and what it receives; each goes on to the next in its own time.

    Who has begun to use a pair stays with it until it fails, and closes its half of it then.
    """

    def __init__(
        self,
        pair: Pair,
        dial: Callable[[int, threading.Event], Pair] | None,
        attempt: int,
        widen: Callable[[Pair], None] | None,
    ) -> None:
        """`dial` makes the next pair, given how much was received; the worker has none.

        `widen` adds connections to a pair.
        """
        self._dial = dial
        self._widen = widen
        self.on_change: Callable[[bool], None] = lambda connected: None
        """Told on any thread when the connection is lost and when there is one again."""
        self.on_new: Callable[[], None] = lambda: None
        """Called when there is a new pair to write to."""
        self.current: Pair | None = pair
        """The pair to use, unless all that came over it has been read and it is lost."""
        self.writing = self.reading = pair
        """The pairs that are being used, which may be older ones."""
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)
        self.received = 0
        """How much of the other end's stream has come: told to whoever makes the next pair."""
        self.reader = 0
        """The thread that read last. A client's must not wait for what only it can read."""
        self.again: Callable[[], None] | None = None
        """Called once when there is something to read from again."""
        self.why = ""
        """Why it is over, once it is."""
        self._ended = threading.Event()
        self._attempt = attempt

    @property
    def connected(self) -> bool:
        """Whether there is a connection, as far as anybody knows."""
        pair = self.current
        return pair is not None and not pair.broken

    @property
    def ended(self) -> bool:
        """Whether it is over for good."""
        return self._ended.is_set()

    def took(self, pair: Pair, count: int) -> bool:
        """Whether these bytes count: the other end may have been told that they did not come."""
        with self.lock:
            if self.current is not pair:
                return False
            self.received += count
            return True

    def retire(self, pair: Pair) -> None:
        """The reader has taken all that came over a connection that is lost."""
        with self.changed:
            if self.current is not pair or self.ended:
                return
            self.current = None
            self._let_go(pair)
            self.changed.notify_all()
        self.on_change(False)
        if self._dial is not None:
            threading.Thread(target=self._redial, name="skyward-redial", daemon=True).start()

    def _redial(self) -> None:
        assert self._dial is not None
        try:
            pair = self._dial(self.received, self._ended)
        except LinkLost as problem:
            self.end(str(problem))
        else:
            self.install(pair, self._attempt)

    def suspend(self, attempt: int) -> int | None:
        """The client makes a new connection: what came so far, and nothing more on the old one.

        None for an attempt that a later one has overtaken, and when the link is over.
        """
        with self.changed:
            if attempt < self._attempt or self.ended:
                return None
            pair = None
            if attempt > self._attempt:
                self._attempt = attempt
                pair, self.current = self.current, None
            if pair is not None:
                self._let_go(pair)
                self.changed.notify_all()
            received = self.received
        if pair is not None:
            self.on_change(False)
        return received

    def _let_go(self, pair: Pair) -> None:
        """Who has begun to use a connection closes it when done; else it is done with now."""
        pair.cut()
        if pair is not self.writing:
            pair.close_senders()
        if pair is not self.reading:
            pair.close_receivers()

    def install(self, pair: Pair, attempt: int) -> None:
        """Go on over this connection."""
        with self.changed:
            if attempt != self._attempt or self.ended:
                pair.close()
                return
            self.current = pair
            again, self.again = self.again, None
            self.changed.notify_all()
        self.on_change(True)
        if again is not None:
            again()
        self.on_new()

    def consider_widening(self, pair: Pair) -> None:
        """A large write has begun: have more connections made, once, if that may help."""
        if self._widen is not None and not pair.widened and not pair.broken:
            pair.widened = True
            if pair.is_far:
                threading.Thread(
                    target=self._widen, args=(pair,), name="skyward-widen", daemon=True
                ).start()

    def can_be_widened(self, attempt: int) -> bool:
        """Whether its connections of that attempt are the ones it goes over."""
        pair = self.current
        return attempt == self._attempt and pair is not None and not pair.broken

    def widen(self, attempt: int, number: int, end: socket.socket, *, to_send: bool) -> None:
        """The client has made one more connection."""
        with self.lock:
            pair = self.current if attempt == self._attempt else None
        if pair is None:
            end.close()
        else:
            pair.add(number, end, to_send=to_send)

    def doubt(self) -> None:
        """Break the connection, which seems dead, so that a new one is made."""
        pair = self.current
        if pair is not None:
            pair.cut()

    def end(self, why: str) -> None:
        """Wake everybody: there will be no more connections."""
        with self.changed:
            if self.ended:
                return
            self.why = why
            self._ended.set()
            again, self.again = self.again, None
            self.changed.notify_all()
        self.writing.cut()
        self.doubt()
        if again is not None:
            again()

    def close(self) -> None:
        """End it and give the sockets back; who waits to read is not told, it is their doing."""
        with self.lock:
            self.again = None
        self.end("the link was closed")
        for pair in {self.writing, self.reading, self.current}:
            if pair is not None:
                pair.close()
