"""The door: a socket through which `sky ui` of the same user sees the pools of this process.

It is open while the process has pools. Who connects says a wish, and gets lines of JSON: a viewer
of the hub all that changes, `sky stacks` one line with the stacks of the pools' workers.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec

from skyward.nodes.stacks import PoolStacks
from skyward.page.hub import Viewer, hub
from skyward.page.sockets import STACKS, VIEW, forget, is_own, listen, own_address

SEND_SECONDS = 10.0
POOLS_AT_ONCE = 16
AGAIN_SECONDS = 0.1
"""How long to wait after somebody could not be let in."""
LOOK_SECONDS = 5.0
"""How often an idle connection gets an empty line, which shows whether the other end is there."""


class Door:
    """Listens on a socket that only this user may use; opened and shut as pools come and go."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._pools = 0
        self._listener: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._connections: dict[socket.socket, Viewer | None] = {}

    def _forked(self) -> None:
        """Leave the parent's sockets to the parent: a copy would keep its address in use."""
        for inherited in [self._listener, *self._connections]:
            if inherited is not None and inherited.fileno() >= 0:
                # Also if a file of the connection is open, which would put `close` off.
                os.close(inherited.detach())
        self._reset()

    def enter(self) -> None:
        """Count a pool; the door is open from the first one on."""
        with self._lock:
            self._pools += 1
            if self._listener is None:
                # Where no socket can be made, the pool works, and `sky ui` does not see it.
                with contextlib.suppress(OSError):
                    self._open()

    def leave(self) -> None:
        """Count a pool that was closed; after the last one, the door is shut."""
        with self._lock:
            self._pools -= 1
            if self._pools == 0:
                self._shut()

    def _open(self) -> None:
        self._listener = listener = listen(own_address())
        self._thread = threading.Thread(
            target=self._serve, args=(listener,), name="skyward-door", daemon=True
        )
        self._thread.start()

    def _shut(self) -> None:
        listener, self._listener = self._listener, None
        if listener is None:
            return
        forget(own_address())
        # `shutdown` ends an `accept` of another thread, which `close` alone does not.
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        listener.close()
        for connection, viewer in list(self._connections.items()):
            if viewer is not None:
                hub.leave(viewer)
                continue
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _serve(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                if self._listener is not listener:
                    return
                # Such as too many open files: the next one may be let in.
                time.sleep(AGAIN_SECONDS)
                continue
            if not is_own(connection):
                connection.close()
                continue
            self._connections[connection] = None
            threading.Thread(
                target=self._answer, args=(connection,), name="skyward-door-visit", daemon=True
            ).start()

    def _answer(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(SEND_SECONDS)
            with connection.makefile("rb") as lines:
                wish = lines.readline(64)
            if wish == VIEW:
                self._feed(connection)
            elif wish == STACKS:
                connection.sendall(msgspec.json.encode(_all_stacks()) + b"\n")
        except OSError:
            pass  # the other end has left, or is too slow
        finally:
            self._connections.pop(connection, None)
            connection.close()

    def _feed(self, connection: socket.socket) -> None:
        viewer = self._connections[connection] = hub.join()
        try:
            while (batch := viewer.next(LOOK_SECONDS)) is not None:
                connection.sendall(batch.encode() + b"\n")
        finally:
            hub.leave(viewer)


def _all_stacks() -> list[PoolStacks]:
    """The stacks of all pools of this process, which are asked at once."""
    pools = hub.fleets
    try:
        with ThreadPoolExecutor(min(POOLS_AT_ONCE, len(pools)) or 1, "skyward-door-stacks") as asks:
            return list(
                asks.map(lambda each: PoolStacks.of(each.id, each.spec.name, each.stacks), pools)
            )
    except RuntimeError:
        # The interpreter ends, and starts no thread any more.
        return []


door = Door()
"""The door of this process."""

os.register_at_fork(after_in_child=door._forked)
