"""The connections of a link: the pair that it uses now, and the change to the next one."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

from skyward.wire.link.pair import Pair


class LinkLost(Exception):
    """No further connection can be made; the message says why."""


class Connections:
    """The pairs of a link, one after the other.

    The writer and the reader change to the next pair independently of each other. Each uses its
    pair until that pair fails, and then closes its own half of the pair.
    """

    def __init__(
        self,
        pair: Pair,
        attempt: int,
        add_stripes: Callable[[Connections, int], None] | None = None,
    ) -> None:
        """`add_stripes` connects stripes for the pair of an attempt; only the client has it."""
        self._add_stripes = add_stripes
        self._on_change: Callable[[bool], None] = lambda connected: None
        self.current: Pair | None = pair
        """The newest pair; None once it is lost and everything that it brought has been read."""
        self.writing = self.reading = pair
        """The pairs that the writer and the reader use; they may be older than `current`."""
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)
        self.received = 0
        """How many bytes of the other end's stream have arrived, over all pairs."""
        self.reader = 0
        """The thread that read last; on a client, it must not wait for a count: only it reads."""
        self.again: Callable[[], None] | None = None
        """Called once: when there is a connection to read from, or when the link ends."""
        self.ending = False
        """Whether the process at the other end was told to end."""
        self.why = ""
        """Why the link has ended; empty until then."""
        self.over = threading.Event()
        self._attempt = attempt

    @property
    def connected(self) -> bool:
        """Whether there is a pair that is not known to be broken."""
        pair = self.current
        return pair is not None and not pair.broken

    @property
    def ended(self) -> bool:
        """Whether the link has ended for good."""
        return self.over.is_set()

    @property
    def attempt(self) -> int:
        """The number of the newest pair."""
        return self._attempt

    def watch(self, told: Callable[[bool], None]) -> None:
        """Call `told`, on any thread, when the connection is lost (False) and made again (True)."""
        self._on_change = told

    def took(self, pair: Pair, count: int) -> bool:
        """Count received bytes, unless the other end was told that they had not arrived."""
        with self.lock:
            if self.current is not pair:
                return False
            self.received += count
            return True

    def retire(self, pair: Pair) -> bool:
        """Give up a pair that is lost and read to its end; returns whether a new one is needed."""
        with self.changed:
            if self.current is not pair or self.ended:
                return False
            self.current = None
            self._let_go(pair)
            self.changed.notify_all()
        self._on_change(False)
        return True

    def suspend(self, attempt: int) -> int | None:
        """Stop reading the pair, because the client makes a new one.

        Returns how many bytes have arrived; None if a later attempt has come already, or if the
        link has ended.
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
            self._on_change(False)
        return received

    def _let_go(self, pair: Pair) -> None:
        """Close the halves of the pair that are not in use; writer and reader close the others."""
        pair.cut()
        if pair is not self.writing:
            pair.close_senders()
        if pair is not self.reading:
            pair.close_receivers()

    def install(self, pair: Pair, attempt: int) -> bool:
        """Use this pair from now on, unless a later attempt has come or the link has ended."""
        with self.changed:
            if attempt != self._attempt or self.ended:
                pair.close()
                return False
            self.current = pair
            again, self.again = self.again, None
            self.changed.notify_all()
        self._on_change(True)
        if again is not None:
            again()
        return True

    def consider_stripes(self, pair: Pair) -> None:
        """Ask once for stripes for a pair, before a large write, if the other end is far away."""
        if self._add_stripes is not None and not pair.stripes_asked and not pair.broken:
            pair.stripes_asked = True
            if pair.is_far:
                threading.Thread(
                    target=self._add_stripes,
                    args=(self, pair.attempt),
                    name="skyward-stripes",
                    daemon=True,
                ).start()

    def takes_stripes(self, attempt: int) -> bool:
        """Whether the pair of that attempt is in use, so that stripes can join it."""
        pair = self.current
        return attempt == self._attempt and pair is not None and not pair.broken

    def add_stripe(self, attempt: int, number: int, end: socket.socket, *, to_send: bool) -> None:
        """Add a stripe that the client has connected."""
        with self.lock:
            pair = self.current if attempt == self._attempt else None
        if pair is None:
            end.close()
        else:
            pair.add_stripe(number, end, to_send=to_send)

    def reconnect(self) -> None:
        """Break a connection that seems dead, so that the client makes a new one."""
        pair = self.current
        if pair is not None:
            pair.cut()

    def end(self, why: str) -> None:
        """End the link for good, and wake every thread that waits for it."""
        with self.changed:
            if self.ended:
                return
            self.why = why
            self.over.set()
            again, self.again = self.again, None
            self.changed.notify_all()
        self.writing.cut()
        self.reconnect()
        if again is not None:
            again()

    def close(self) -> None:
        """End the link and close its sockets, without a call of `again`."""
        with self.lock:
            self.again = None
        self.end("the link was closed")
        for pair in {self.writing, self.reading, self.current}:
            if pair is not None:
                pair.close()
