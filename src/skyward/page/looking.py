"""Looking: what viewers in this process see of other processes' pools, and of kept pools.

A process shows its pools to each viewer. A kept pool is watched once for all viewers.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import threading
import time
import traceback
from typing import Any

from skyward.nodes import keeping
from skyward.page.hub import Viewer
from skyward.page.kept import KeptWatch, encoded, key_of_kept
from skyward.page.kept_state import changes_of_client
from skyward.page.sockets import VIEW, addresses, connect

LOOK_SECONDS = 1.0
"""How often new processes are looked for."""
SILENCE_SECONDS = 30.0
"""A process that sends nothing for so long, though it should every 5 s, is given up."""
AGAIN_SECONDS = 5.0
"""How long a kept pool that could not be reached is left alone."""
LINE_MOST = 64 << 20


class Watching:
    """One viewer, and the connections that feed it."""

    def __init__(self, names: frozenset[str]) -> None:
        self.viewer = Viewer()
        self._names = names
        self._lock = threading.Lock()
        self._open: dict[str, socket.socket] = {}
        self._ended = False
        self._threads: list[threading.Thread] = []
        self._shown: set[str] = set()
        """The pools that processes here show."""
        self._clients: dict[str, dict[str, Any]] = {}
        """The last samples of processes here that are clients of pools that stay."""
        self._numbers: dict[str, dict[tuple[Any, ...], list[Any]]] = {}
        """What such processes have logged, by curve, as rows that begin with the first point."""
        self.viewer.put(encoded([{"type": "hello", "time": time.time(), "pid": 0}]))

    def connect_to(self, found: list[str]) -> None:
        """Have a connection to each of the processes at these addresses."""
        for address in found:
            if address in self._open:
                continue
            connection = connect(address, VIEW)
            if connection is None:
                continue
            connection.settimeout(SILENCE_SECONDS)
            thread = threading.Thread(
                target=self._read, args=(address, connection), name="skyward-gather", daemon=True
            )
            with self._lock:
                if self._ended:
                    connection.close()
                    return
                self._open[address] = connection
                self._threads = [each for each in self._threads if each.is_alive()] + [thread]
                thread.start()

    def samples_of(self, pool: str) -> list[dict[str, Any]]:
        """The last samples of the clients of a kept pool on this machine."""
        known = list(self._clients.items())
        return [sample for key, sample in known if sample and key.rpartition("-")[0] == pool]

    # Kept pools.

    def show(self, pool: dict[str, Any], samples: list[dict[str, Any]]) -> None:
        """Show a kept pool in place of those that were shown for it."""
        messages = [pool, *samples]
        # A client that has made the pool was shown before the pool was one that stays.
        client = pool["pool"].rpartition("-")[0]
        replaced = []
        # A copy: other threads add to it and take from it.
        for key in list(self._shown):
            if key.rpartition("-")[0] == client:
                self._clients[key] = {}
                self._shown.discard(key)
                replaced.append({"type": "replaced", "pool": key})
        rows = [
            row
            for key, known in list(self._numbers.items())
            if key.rpartition("-")[0] == client
            for row in list(known.values())
        ]
        logged = changes_of_client(pool["pool"], [], rows)
        self.put(encoded(replaced + messages + ([] if logged is None else [logged])))

    def put(self, batch: str) -> None:
        """Tell the viewer what has changed in a kept pool."""
        self.viewer.put(batch)

    # Other processes.

    def _read(self, address: str, connection: socket.socket) -> None:
        pools: set[str] = set()
        try:
            with connection.makefile("r", encoding="utf-8") as lines:
                while line := lines.readline(LINE_MOST):
                    kept = self._kept(line, pools)
                    if kept and not self.viewer.put(kept):
                        return
        except (OSError, ValueError):
            pass
        finally:
            connection.close()
            with self._lock:
                self._open.pop(address, None)
            self._shown -= pools
            for pool in pools:
                self._numbers.pop(pool, None)
            now = time.time()
            gone = [
                {"type": "gone", "pool": pool, "time": now}
                for pool in pools
                if self._clients.pop(pool, None) is None
            ]
            if gone:
                self.viewer.put(json.dumps(gone))

    def _kept(self, line: str, pools: set[str]) -> str:
        """The messages of a line that are of the wanted pools; also notes which pools there are."""
        if not line.strip():
            return ""
        kept = []
        for message in json.loads(line):
            pool = message.get("pool")
            if message["type"] == "pool" and (not self._names or message["name"] in self._names):
                pools.add(pool)
                if keeping.find(pool.rpartition("-")[0]) is not None:
                    self._clients[pool] = {}
                else:
                    self._shown.add(pool)
            if pool in self._clients:
                kept += self._of_client(pool, message)
            elif pool in pools:
                kept.append(message)
            if message["type"] == "gone":
                pools.discard(pool)
                self._shown.discard(pool)
                self._clients.pop(pool, None)
        return json.dumps(kept) if kept else ""

    def _of_client(self, pool: str, message: dict[str, Any]) -> list[dict[str, Any]]:
        """What a client of a kept pool adds to what the pool's agents tell."""
        if message["type"] == "sample":
            self._clients[pool] = message
        if message["type"] not in ("pool", "changes"):
            return []
        identity, _, process = pool.rpartition("-")
        rows = [[*row, process] for row in message.get("numbers", ())]
        self._keep_numbers(pool, rows)
        notes = message["notes"] if message["type"] == "changes" else []
        changes = changes_of_client(key_of_kept(identity), notes, rows)
        return [] if changes is None else [changes]

    def _keep_numbers(self, pool: str, rows: list[list[Any]]) -> None:
        """Keep what a client has logged for when its pool is shown."""
        known = self._numbers.setdefault(pool, {})
        for name, node, worker, start, points, last, process in rows:
            before = known.get((name, node, worker))
            kept = [*before[4][:start], *points] if before is not None and start else points
            known[name, node, worker] = [name, node, worker, 0, kept, last, process]

    def end(self) -> None:
        """End the connections to processes."""
        with self._lock:
            self._ended = True
            connections, threads = list(self._open.values()), self._threads
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join()


class LookAround:
    """What all viewers share: one look around, and one watch of each kept pool."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._lock = threading.Lock()
        self._audience: list[Watching] = []
        self._kept: dict[str, KeptWatch] = {}
        self._tried: dict[str, float] = {}
        """When each kept pool was last begun to be watched."""
        self._ended = False
        self._failures: set[str] = set()
        """What looks around have failed with, of which each was reported once."""
        self._woken = threading.Event()
        self._thread = threading.Thread(target=self._look, name="skyward-look", daemon=True)
        self._thread.start()

    def add(self, watching: Watching) -> None:
        """Let one more see."""
        with self._lock:
            self._audience.append(watching)
            for watch in self._kept.values():
                watch.add(watching)
        self._woken.set()

    def remove(self, watching: Watching) -> bool:
        """Show this one no more; whether it was the last."""
        with self._lock:
            self._audience = [each for each in self._audience if each is not watching]
            for watch in self._kept.values():
                watch.remove(watching)
            return not self._audience

    def end(self) -> None:
        """Look no more."""
        with self._lock:
            self._ended = True
        self._woken.set()
        self._thread.join()
        for watch in self._kept.values():
            watch.end()

    def _look(self) -> None:
        while not self._ended:
            self._woken.clear()
            try:
                self._look_once()
            except Exception as problem:
                self._report(problem)
            self._woken.wait(LOOK_SECONDS)

    def _look_once(self) -> None:
        with self._lock:
            audience = list(self._audience)
        found = addresses()
        for watching in audience:
            watching.connect_to(found)
        self._look_at_kept()

    def _report(self, problem: Exception) -> None:
        """Show a failed look around on stderr, once; the next one may succeed."""
        if repr(problem) not in self._failures:
            self._failures.add(repr(problem))
            traceback.print_exception(problem, file=sys.stderr)

    def _look_at_kept(self) -> None:
        """Have a watch for each of the pools that stay."""
        now = time.monotonic()
        for name in keeping.names():
            watch = self._kept.get(name)
            wanted = not self._names or name in self._names
            waits = now - self._tried.get(name, -AGAIN_SECONDS) < AGAIN_SECONDS
            if not wanted or waits or (watch is not None and watch.is_alive):
                continue
            self._tried[name] = now
            with self._lock:
                if self._ended:
                    return
                watch = self._kept[name] = KeptWatch(name, self._samples_of)
                for watching in self._audience:
                    watch.add(watching)

    def _samples_of(self, pool: str) -> list[dict[str, Any]]:
        """The last samples of the clients of a kept pool; each viewer has the same."""
        with self._lock:
            audience = list(self._audience)
        return next(filter(None, (each.samples_of(pool) for each in audience)), [])
