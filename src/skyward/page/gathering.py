"""Gathering: the pools of all processes of this user, seen through their doors, and kept pools.

A kept pool is shown once, by what its agents tell; its clients here add what only they know.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from typing import Any

from skyward.nodes import keeping
from skyward.page.hub import Viewer
from skyward.page.looking import SILENCE_SECONDS, LookAround, Watching
from skyward.page.sockets import addresses

MEASURE_SECONDS = 3.0


class Gathering:
    """Shows the pools of this user's processes; with names, only pools that are called so."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._names = frozenset(names)
        self._lock = threading.Lock()
        self._watching: dict[Viewer, Watching] = {}
        self._looking: LookAround | None = None
        self._measuring: tuple[Watching, threading.Thread] | None = None
        self._snapshots: dict[str, dict[str, Any]] = {}
        self._samples: dict[str, dict[str, Any]] = {}
        self._sampled = threading.Event()

    def join(self) -> Viewer:
        """A new viewer."""
        watching = Watching(self._names)
        with self._lock:
            self._watching[watching.viewer] = watching
            self._begin(watching)
        return watching.viewer

    def leave(self, viewer: Viewer) -> None:
        """End a viewer."""
        with self._lock:
            watching = self._watching.pop(viewer, None)
        if watching is not None:
            viewer.put(None)
            self._end(watching)

    def _begin(self, watching: Watching) -> None:
        if self._looking is None:
            self._looking = LookAround(self._names)
        self._looking.add(watching)

    def _end(self, watching: Watching) -> None:
        """End one who looks; after the last one, nobody looks around."""
        last = None
        with self._lock:
            if self._looking is not None and self._looking.remove(watching):
                last, self._looking = self._looking, None
        if last is not None:
            last.end()
        watching.end()

    def measure(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """The snapshot and the last sample of every pool; from the first call on, all are sampled.

        The histogram of calls would begin again if each question made a connection of its own.
        """
        with self._lock:
            first = self._measuring is None
            if self._measuring is None:
                watching = Watching(self._names)
                self._begin(watching)
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
            self._end(dropped[0])

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
            self._end(watching)
            thread.join()
