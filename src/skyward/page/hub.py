"""The hub: shows pools to those who look, each with all that is known, and then what changes.

It hears the pools of all processes of this user through their doors, and kept pools by their
records; or the pools of its own process alone. However many look, a process and an agent have one
connection each. While nobody is there, a hub has no connection and no thread, the pools make no
events, and no node is measured.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from functools import partial

from skyward.nodes import records
from skyward.page.door import (
    SETTLE_SECONDS,
    TICK_SECONDS,
    VIEW,
    Guest,
    addresses,
    connect,
    door,
    encode,
)
from skyward.page.pool import KEPT, Message, ShownPool
from skyward.page.watch import END_SECONDS, SAMPLE_SECONDS, UNHURRIED, UNREADABLE, KeptWatch

IDLE_SAMPLE_SECONDS = 10.0
"""How often there is a sample for a page that nobody looks at, but that is served."""
IDLE_SECONDS = 2.0
"""How often news is taken for such a page."""
VIEWERS_MOST = 32
BATCHES_WAITING = 100
"""So many batches may wait for a viewer, which is 10 s; one that is slower is dropped."""
LOOK_SECONDS = 1.0
"""How often new processes and pools are looked for."""
SILENCE_SECONDS = 30.0
"""A process that sends nothing for so long, though it should every 2 s, is given up."""
AGAIN_SECONDS = 5.0
"""How long a kept pool that could not be reached is left alone."""
ANSWER_SECONDS = 1.0
"""How long a pool waits for its agents before it is shown."""
MEASURE_SECONDS = 3.0
LINE_MOST = 64 << 20


class Viewer:
    """One who looks: a queue of batches, each a line of JSON; None ends it."""

    def __init__(self) -> None:
        self._batches: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self.dropped = False
        """Whether the viewer was too slow, or the hub has ended."""

    def put(self, batch: str | None) -> bool:
        """Give the viewer a batch; False if too many wait already."""
        if batch is not None and self._batches.qsize() >= BATCHES_WAITING:
            self.dropped, batch = True, None
        self._batches.put(batch)
        return batch is not None

    def next(self, seconds: float) -> str | None:
        """Wait for the next batch; "" after so many seconds without one, None at the end."""
        if self.dropped:
            return None
        try:
            return self._batches.get(timeout=seconds)
        except queue.Empty:
            return ""


class Hub:
    """Some pools, and those who look at them; any thread may call the methods."""

    def __init__(self, names: Iterable[str] = (), *, own: bool = False) -> None:
        """With names, only pools that are called so; with `own`, only those of this process."""
        self._names, self._own = frozenset(names), own
        self._pid = os.getpid() if own else 0
        self._lock = threading.RLock()
        """Guards the pools."""
        self.pools: dict[str, ShownPool] = {}
        """The pools that are known, by their ids."""
        self._past: dict[str, list[Message]] = {}
        """The last samples of pools: a page that is opened again has its curves again."""
        self._viewers: list[Viewer] = []
        self._held = False
        self._closed = False
        self._turns = threading.Lock()
        """Held while the hub begins or ends."""
        self._thread: threading.Thread | None = None
        self._began = 0.0
        """When the hub began last."""
        self._woken = threading.Event()
        self._doors: dict[str, socket.socket] = {}
        self._readers: list[threading.Thread] = []
        self._kept: dict[str, KeptWatch] = {}
        self._failures: set[str] = set()
        """What looks around have failed with, of which each was reported once."""
        self._guest: Guest | None = None
        """What tells of the pools of this process."""
        self._ended = threading.Event()
        self._looker: threading.Thread | None = None

    # Those who look.

    def join(self) -> Viewer | None:
        """A new viewer, whose first batch has everything that is known; `leave` ends it.

        None if there are too many, or if the hub is closed.
        """
        viewer = Viewer()
        with self._turns:
            if self._closed or len(self._viewers) >= VIEWERS_MOST:
                return None
            self._begin()
            with self._lock:
                self._tell_news()
                self._viewers.append(viewer)
                every: list[Message] = [{"type": "hello", "time": time.time(), "pid": self._pid}]
                for pool in self._shown():
                    every += pool.everything()
                    pool.sample_due = 0.0
                viewer.put(encode(every).decode())
        self._woken.set()
        return viewer

    def leave(self, viewer: Viewer) -> None:
        """Give a viewer nothing more; after the last one, the hub hears nothing more."""
        with self._turns:
            with self._lock:
                self._viewers = [each for each in self._viewers if each is not viewer]
            viewer.put(None)
            self._end_if_alone()

    def hold(self) -> None:
        """Remember from now on what happens, for viewers that come later."""
        with self._turns:
            if not self._closed:
                self._held = True
                self._begin()

    def close(self) -> None:
        """Tell the viewers that the pools are gone, and end all."""
        with self._turns:
            self._closed, self._held = True, False
            if self._thread is not None:
                self._end()
            viewers, self._viewers = self._viewers, []
            for viewer in viewers:
                viewer.put(None)

    def measure(self) -> list[tuple[Message, Message]]:
        """The snapshot and a sample of every pool, for metrics.

        From the first call on, the pools are watched all the time: else, each question would have
        to make connections of its own.
        """
        self.hold()
        deadline = time.monotonic() + MEASURE_SECONDS
        while not self._closed and (now := time.monotonic()) < deadline:
            with self._lock:
                pools = list(self.pools.values())
            # The hub may have begun with this question, or a pool have come just now.
            news = [pool for pool in pools if now < pool.show_by + MEASURE_SECONDS - ANSWER_SECONDS]
            is_known = all(pool.shown and pool.samples for pool in news)
            may_come = now < self._began + MEASURE_SECONDS and self._has_pools()
            if is_known if pools else not may_come:
                break
            time.sleep(TICK_SECONDS)
        with self._lock:
            for pool in self._shown():
                pool.sample()
            self._tell_news()
            found = [(pool.snapshot(), pool.latest()) for pool in self._shown()]
        return [(snapshot, sample) for snapshot, sample in found if sample is not None]

    def _has_pools(self) -> bool:
        """Whether there are pools to hear of."""
        return bool(self._own or addresses() or records.names())

    # Beginning and ending.

    def _begin(self) -> None:
        if self._thread is not None:
            return
        self._woken.clear()
        self._ended.clear()
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="skyward-page", daemon=True)
        self._thread.start()
        if self._own:
            self._guest, connection = door.look()
            self._hear_process(str(os.getpid()), connection)
        else:
            self._looker = threading.Thread(target=self._look, name="skyward-look", daemon=True)
            self._looker.start()

    def _end_if_alone(self) -> None:
        if self._thread is not None and not (self._viewers or self._held):
            self._end()

    def _end(self) -> None:
        """Hear nothing more; waits for the threads that do, but for those that wait for others."""
        thread, self._thread = self._thread, None
        self._ended.set()
        self._woken.set()
        if self._looker is not None:
            self._looker.join()
        with self._lock:
            kept, self._kept = list(self._kept.values()), {}
            doors, readers = list(self._doors.values()), self._readers
        if self._guest is not None:
            # It tells the last news first.
            self._guest.end()
        else:
            for connection in doors:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        for watch in kept:
            watch.end()
        deadline = time.monotonic() + END_SECONDS
        for watch in kept:
            watch.join(max(0.0, deadline - time.monotonic()))
        for each in (*readers, thread):
            if each is not None:
                each.join()
        with self._lock:
            self._past = {pool.key: list(pool.samples) for pool in self.pools.values()}
            for pool in list(self.pools.values()):
                self._hide(pool)

    # What is heard.

    def _look(self) -> None:
        while not self._ended.is_set():
            try:
                self._look_at_doors()
                self._look_at_kept()
            except Exception as problem:
                # Once; the next look may succeed.
                if repr(problem) not in self._failures:
                    self._failures.add(repr(problem))
                    traceback.print_exception(problem, file=sys.stderr)
            self._ended.wait(LOOK_SECONDS)

    def _look_at_doors(self) -> None:
        """Have a connection to each of the user's processes with pools."""
        for address in addresses():
            process = address.removesuffix(".sock").rpartition("-")[2]
            if process not in self._doors and (connection := connect(address, VIEW)) is not None:
                connection.settimeout(SILENCE_SECONDS)
                self._hear_process(process, connection)

    def _hear_process(self, process: str, connection: socket.socket) -> None:
        thread = threading.Thread(
            target=self._read, args=(process, connection), name="skyward-reader", daemon=True
        )
        with self._lock:
            self._doors[process] = connection
            self._readers = [each for each in self._readers if each.is_alive()] + [thread]
        thread.start()

    def _read(self, process: str, connection: socket.socket) -> None:
        try:
            with connection.makefile("r", encoding="utf-8") as lines:
                while line := lines.readline(LINE_MOST):
                    for message in json.loads(line):
                        self.hear(process, message)
        except UNREADABLE:
            pass
        finally:
            connection.close()
            with self._lock:
                self._doors.pop(process, None)
                told = [key for key, pool in self.pools.items() if process in pool.sources]
            for key in told:
                self.hear(process, {"type": "gone", "pool": key})

    def _look_at_kept(self) -> None:
        """Have a watch for each of the kept pools."""
        now, names = time.monotonic(), records.names()
        for watch in self._kept.values():
            watch.look_at_record()
        there = {name: each for name, each in self._kept.items() if each.is_alive or name in names}
        for name in names:
            known = there.get(name)
            wanted = not self._names or name in self._names
            waits = known is not None and (known.is_alive or now - known.began < AGAIN_SECONDS)
            if wanted and not waits:
                there[name] = KeptWatch(name, partial(self.hear, KEPT))
        with self._lock:
            self._kept = there

    def hear(self, source: str, message: Message) -> None:
        """Take what a watch of a source tells: of a process, or of a record."""
        key, kind = message["pool"], message["type"]
        with self._lock:
            pool = self.pools.get(key)
            if kind == "pool":
                if self._names and message["name"] not in self._names:
                    return
                if pool is None:
                    about = message["name"], message["provider"]
                    pool = self.pools[key] = ShownPool(key, *about, kept=message["kept"])
                    pool.keep_samples(self._past.pop(key, ()))
                    pool.show_by = time.monotonic() + ANSWER_SECONDS
                pool.join(source)
            elif pool is None or source not in pool.sources:
                return
            elif kind == "gone":
                pool.leave(source)
                if not pool.sources:
                    self._hide(pool)
            else:
                pool.take(source, message)
        if kind == "pool" or (self._viewers and (kind != "node" or message.keys() - UNHURRIED)):
            self._woken.set()

    # What is told.

    def _shown(self) -> list[ShownPool]:
        return [pool for pool in self.pools.values() if pool.shown]

    def _show(self, pool: ShownPool) -> None:
        pool.news()
        pool.shown = True
        self._tell(pool.everything())

    def _hide(self, pool: ShownPool) -> None:
        """Show a pool no longer; its news is told first."""
        del self.pools[pool.key]
        if pool.shown:
            self._tell([*pool.news(), {"type": "gone", "pool": pool.key, "time": time.time()}])

    def _run(self) -> None:
        me = threading.current_thread()
        while self._thread is me:
            began = time.monotonic()
            with self._lock:
                pause = SAMPLE_SECONDS if self._viewers else IDLE_SAMPLE_SECONDS
                due = [self._look_after(pool, began, pause) for pool in self.pools.values()]
                self._tell_news()
            left = min(due, default=began + pause) - time.monotonic()
            if self._woken.wait(max(0.0, left if self._viewers else min(left, IDLE_SECONDS))):
                self._woken.clear()
                time.sleep(max(SETTLE_SECONDS, began + TICK_SECONDS - time.monotonic()))

    def _look_after(self, pool: ShownPool, now: float, pause: float) -> float:
        """Show a pool and take its sample when it is time, and return when it is time again."""
        if not pool.shown:
            if not pool.all_answered and now < pool.show_by:
                return now + TICK_SECONDS
            self._show(pool)
        if now >= pool.sample_due:
            # Until the load is known for the first time, there is more to come soon.
            ready = bool(pool.samples) or pool.is_measured
            pool.sample_due = now + (pause if ready else TICK_SECONDS)
            if ready:
                pool.sample()
        return pool.sample_due

    def _tell_news(self) -> None:
        self._tell([message for pool in self._shown() for message in pool.news()])

    def _tell(self, messages: list[Message]) -> None:
        if messages and self._viewers:
            batch = encode(messages).decode()
            # Whoever has a viewer that is dropped has it leave.
            self._viewers = [viewer for viewer in self._viewers if viewer.put(batch)]
