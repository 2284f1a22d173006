"""Gathering: the pools of all processes of this user, seen through their doors, and kept pools.

A kept pool is shown once, by what its agents tell; its clients here add what only they know.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterable
from typing import Any

from skyward.nodes import keeping
from skyward.page.hub import Viewer
from skyward.page.kept import KeptWatch, key_of_kept
from skyward.page.kept_state import changes_of_client
from skyward.page.sockets import VIEW, addresses, connect

LOOK_SECONDS = 1.0
"""How often new processes are looked for."""
SILENCE_SECONDS = 30.0
"""A process that sends nothing for so long, though it should every 5 s, is given up."""
AGAIN_SECONDS = 5.0
"""How long a kept pool that could not be reached is left alone."""
LINE_MOST = 64 << 20
MEASURE_SECONDS = 3.0


class _Watching:
    """One viewer, and the connections that feed it."""

    def __init__(self, names: frozenset[str]) -> None:
        self.viewer = Viewer()
        self._names = names
        self._lock = threading.Lock()
        self._open: dict[str, socket.socket] = {}
        self._ended = threading.Event()
        self._threads: list[threading.Thread] = []
        self._staying: dict[str, KeptWatch] = {}
        self._tried: dict[str, float] = {}
        """When each kept pool was last begun to be watched."""
        self._shown: set[str] = set()
        """The pools that processes here show."""
        self._clients: dict[str, dict[str, Any]] = {}
        """The last samples of processes here that are clients of pools that stay."""
        hello = [{"type": "hello", "time": time.time(), "pid": 0}]
        self.viewer.put(json.dumps(hello))
        self._start(self._look)

    def _start(self, target: Any, *args: Any) -> None:
        thread = threading.Thread(target=target, args=args, name="skyward-gather", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _look(self) -> None:
        while not self._ended.is_set():
            for address in addresses():
                if address in self._open:
                    continue
                connection = connect(address, VIEW)
                if connection is not None:
                    connection.settimeout(SILENCE_SECONDS)
                    with self._lock:
                        if self._ended.is_set():
                            connection.close()
                            return
                        self._open[address] = connection
                    self._start(self._read, address, connection)
            self._look_at_kept()
            self._ended.wait(LOOK_SECONDS)

    def _look_at_kept(self) -> None:
        """Have a watch for each of the pools that stay."""
        now = time.monotonic()
        for name in keeping.names():
            watch = self._staying.get(name)
            wanted = not self._names or name in self._names
            waits = now - self._tried.get(name, -AGAIN_SECONDS) < AGAIN_SECONDS
            if wanted and not waits and (watch is None or not watch.is_alive):
                self._tried[name] = now
                if not self._ended.is_set():
                    self._staying[name] = KeptWatch(name, self._tell, self._samples_of)

    def _samples_of(self, pool: str) -> list[dict[str, Any]]:
        """The last samples of the clients of a kept pool on this machine."""
        known = list(self._clients.items())
        return [sample for key, sample in known if sample and key.rpartition("-")[0] == pool]

    def _tell(self, messages: list[dict[str, Any]]) -> None:
        replaced = []
        for message in messages:
            if message["type"] == "pool":
                # A client that has made the pool was shown before the pool was one that stays.
                client = message["pool"].rpartition("-")[0]
                # A copy: other threads add to it and take from it.
                for key in list(self._shown):
                    if key.rpartition("-")[0] != client:
                        continue
                    self._clients[key] = {}
                    self._shown.discard(key)
                    replaced.append({"type": "replaced", "pool": key})
        self.viewer.put(json.dumps(replaced + messages))

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
        if message["type"] != "changes":
            return []
        key = key_of_kept(pool.rpartition("-")[0])
        changes = changes_of_client(key, message["notes"])
        return [] if changes is None else [changes]

    def end(self) -> None:
        self._ended.set()
        with self._lock:
            connections = list(self._open.values())
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        for watch in self._staying.values():
            watch.end()


class Gathering:
    """Shows the pools of this user's processes; with names, only pools that are called so."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._names = frozenset(names)
        self._lock = threading.Lock()
        self._watching: dict[Viewer, _Watching] = {}
        self._measuring: tuple[_Watching, threading.Thread] | None = None
        self._snapshots: dict[str, dict[str, Any]] = {}
        self._samples: dict[str, dict[str, Any]] = {}
        self._sampled = threading.Event()

    def join(self) -> Viewer:
        """A new viewer."""
        watching = _Watching(self._names)
        with self._lock:
            self._watching[watching.viewer] = watching
        return watching.viewer

    def leave(self, viewer: Viewer) -> None:
        """End a viewer."""
        with self._lock:
            watching = self._watching.pop(viewer, None)
        if watching is not None:
            viewer.put(None)
            watching.end()

    def measure(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """The snapshot and the last sample of every pool; from the first call on, all are sampled.

        The histogram of calls would begin again if each question made a connection of its own.
        """
        with self._lock:
            first = self._measuring is None
            if self._measuring is None:
                watching = _Watching(self._names)
                thread = threading.Thread(
                    target=self._follow, args=(watching.viewer,), name="skyward-gather", daemon=True
                )
                self._measuring = watching, thread
                thread.start()
        if first and (addresses() or keeping.names()):
            self._sampled.wait(MEASURE_SECONDS)
        known = list(self._snapshots.items())
        return [(each, self._samples[pool]) for pool, each in known if pool in self._samples]

    def _follow(self, viewer: Viewer) -> None:
        while (batch := viewer.next(SILENCE_SECONDS)) is not None:
            for message in json.loads(batch or "[]"):
                self._note(message)
        # If this process was too slow and was dropped, the next question begins anew.
        with self._lock:
            dropped = self._measuring if viewer.dropped else None
            if dropped is not None:
                self._measuring = None
        if dropped is not None:
            dropped[0].end()

    def _note(self, message: dict[str, Any]) -> None:
        pool = message.get("pool", "")
        match message["type"]:
            case "pool":
                self._snapshots[pool] = message
            case "gone" | "replaced":
                self._snapshots.pop(pool, None)
                self._samples.pop(pool, None)
            case "sample":
                # A large pool is sampled in parts.
                before = {row[0]: row for row in self._samples.get(pool, {}).get("usage", ())}
                rows = before | {row[0]: row for row in message["usage"]}
                self._samples[pool] = message | {"usage": list(rows.values())}
                if self._samples.keys() >= self._snapshots.keys():
                    self._sampled.set()
            case "changes":
                known = self._snapshots.get(pool)
                if known is not None:
                    nodes = {row[0]: row for row in known["nodes"]}
                    nodes |= {row[0]: row for row in message["nodes"]}
                    ended = {call[0] for call in message["ended"]}
                    calls = [*known["running"], *message["started"]]
                    self._snapshots[pool] = known | {
                        "nodes": list(nodes.values()),
                        "running": [call for call in calls if call[0] not in ended],
                    }

    def close(self) -> None:
        """End all connections."""
        with self._lock:
            measuring, self._measuring = self._measuring, None
            viewers = list(self._watching)
        for viewer in viewers:
            self.leave(viewer)
        if measuring is not None:
            watching, thread = measuring
            watching.viewer.put(None)
            watching.end()
            thread.join()
