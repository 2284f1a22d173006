"""The lease: at most one client at a time changes a pool that stays, or ends it."""

from __future__ import annotations

import threading
from typing import Any


class PoolLease:
    """The pool's lock, which the head's agent has; each holder is one connection to it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._key: object | None = None
        self._holder: dict[str, Any] = {}

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
        """Give the lease back, if this connection has it."""
        with self._lock:
            if self._key is key:
                self._key = None
