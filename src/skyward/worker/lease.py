"""The lease: at most one client at a time changes a pool that stays, ends it, or starts a node."""

from __future__ import annotations

import threading
from typing import Any


class PoolLease:
    """The pool's lock, which the head's agent has; each holder is one connection to it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._key: object | None = None
        self._holder: dict[str, Any] = {}
        self._starting: dict[int, object] = {}
        """The connections of the clients that start a node, by node."""
        self._started: dict[int, Any] = {}
        """What clients have told of the nodes that they have started."""

    def take(self, key: object, holder: dict[str, Any], *, force: bool) -> dict[str, Any] | None:
        """Take the lease for a connection; returns who has it if another connection does.

        With `force`, it is taken from the other connection.
        """
        with self._lock:
            if self._key is not None and self._key is not key and not force:
                return self._holder
            self._key, self._holder = key, holder
            return None

    def give_back(self, key: object) -> None:
        """Give the lease back, if this connection has it, and the nodes that it starts."""
        with self._lock:
            if self._key is key:
                self._key = None
            self._starting = {node: by for node, by in self._starting.items() if by is not key}

    def begin_start(self, key: object, node: int) -> tuple[bool, Any]:
        """Whether a connection may start a node now, and what is known of the last start of it."""
        with self._lock:
            mine = self._starting.setdefault(node, key) is key
            return mine, self._started.get(node)

    def end_start(self, key: object, node: int, facts: Any) -> None:
        """Note the facts of a node that a connection has started."""
        with self._lock:
            if self._starting.get(node) is key:
                self._started[node] = facts
                del self._starting[node]
