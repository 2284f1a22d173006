"""Held workers: streams that nobody reads keep their workers from the calls that wait for these."""

from __future__ import annotations

import concurrent.futures
import gc
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from types import CodeType, FrameType

from skyward.calls.flow import Crowd, Flow
from skyward.calls.lane import Lanes
from skyward.calls.loop import Borrower
from skyward.calls.task import Task
from skyward.console import Console
from skyward.errors import DeadlockError
from skyward.functions import Future

ENDLESS_SECONDS = 5.0
"""How long nothing has moved before a call that waits fails."""
NAMED_MAX = 8
"""How many streams a message names."""
WHAT_TO_DO = "read one to its end or close it, or use more nodes or sky.Worker(concurrency=...)"

_lanes_of_pools: weakref.WeakSet[Lanes] = weakref.WeakSet()
"""The lanes of every pool of this process."""
_WAITS: frozenset[CodeType] = frozenset(
    wait.__code__ for wait in (Task.wait, Borrower.wait, Crowd.wait, Flow._pop)
)
_WAITS_FOR_FUTURE = concurrent.futures.Future.result.__code__
_IDLE = frozenset(("IPython", "debugpy", "ipykernel", "pydevd", "pytest_timeout", "tqdm", "zmq"))
"""Packages with threads that never run the user's code."""
_IDLE_LOOPS = ("fsspecIO",)
"""Threads with an event loop that never runs the user's code, by name: the store starts one."""


class HeldWorkers:
    """Tells which streams keep calls from running, and which calls would wait for ever."""

    def __init__(self, lanes: Lanes, console: Console) -> None:
        self._lanes, self._console = lanes, console
        _lanes_of_pools.add(lanes)
        self._told: frozenset[int] = frozenset()
        """The streams that were named last."""
        self._seen: list[tuple[int, int]] = []
        """Of each of these streams, its number and how many of its items nobody has read."""
        self._since = 0.0
        """When they were first seen so."""
        self._collected = False
        """Whether garbage was collected since then."""

    def look(self, *, slots: int, may_grow: bool) -> list[tuple[Task, DeadlockError]]:
        """Tell about calls that wait; those that would wait for ever. Called at every beat.

        `slots` is how many calls the pool can run at once; `may_grow` says whether it can get more.
        """
        waiting, streams, alone = self._lanes.held()
        if not waiting:
            self._told = frozenset()
            return []
        numbers = frozenset(task.id for task in streams)
        seen = [(task.id, task.stream.unread) for task in streams if task.stream is not None]
        now = time.monotonic()
        if seen != self._seen:
            self._seen, self._since, self._collected = seen, now, False
        if numbers != self._told:
            self._told = numbers
            self._console.note(f"{_calls(waiting)} for a worker: {_told(streams)}; {WHAT_TO_DO}")
        if not alone or may_grow or len(streams) < slots or now - self._since < ENDLESS_SECONDS:
            return []
        # Such a stream ends by itself; and a thread may wait for a call of another pool.
        others = [lanes for lanes in list(_lanes_of_pools) if lanes is not self._lanes]
        if any(task.timer is not None for task in streams) or any(map(_is_busy, others)):
            return []
        if _somebody_can_read():
            return []
        if not self._collected:
            # A stream that only garbage refers to ends now, and the next look finds it gone.
            self._collected = True
            gc.collect()
            return []
        why = (
            f"would wait for ever for a worker: {_told(streams)}, and all threads that could read "
            f"them wait, too; {WHAT_TO_DO}"
        )
        return [(task, DeadlockError(f"{task.name} {why}")) for task in waiting]


def _calls(waiting: Sequence[Task]) -> str:
    if len(waiting) == 1:
        return f"{waiting[0].name} waits"
    return f"{waiting[0].name} and {len(waiting) - 1} more calls wait"


def _told(streams: Sequence[Task]) -> str:
    named = [f"{task.name} on {task.load.where}" for task in streams if task.load is not None]
    more = f" and {len(named) - NAMED_MAX} more" if len(named) > NAMED_MAX else ""
    held = ", ".join(named[:NAMED_MAX]) + more
    return f"streams that are not read hold all of them ({held})"


def _is_busy(lanes: Lanes) -> bool:
    return any(lane.tasks for lane in lanes)


def _somebody_can_read() -> bool:
    """Whether a thread of this program may still read or close a stream: one that does not wait.

    In doubt, a thread may: only threads of Skyward, and some that are known to be idle, may not.
    """
    main = threading.main_thread().ident
    timers = {
        each.ident
        for each in threading.enumerate()
        if isinstance(each, threading.Timer) and _package(each.function.__module__) not in _IDLE
    }
    idle = {each.ident for each in threading.enumerate() if each.name in _IDLE_LOOPS}
    for thread, frame in sys._current_frames().items():
        if thread in idle or _waits_for_a_call(frame):
            continue
        if thread == main or thread in timers:
            return True
        modules = set(map(_module, _outwards(frame)))
        packages = set(map(_package, modules))
        if packages & _IDLE:
            continue
        # An event loop that is idle now may run code of the user's later.
        is_loop = "asyncio.base_events" in modules and "skyward" not in packages
        if is_loop or packages - sys.stdlib_module_names - {"skyward"}:
            return True
    return False


def _waits_for_a_call(frame: FrameType) -> bool:
    """Whether a thread does nothing until a call is done."""
    for each in _outwards(frame):
        if each.f_code is _WAITS_FOR_FUTURE and isinstance(each.f_locals.get("self"), Future):
            return each.f_locals.get("timeout") is None
        if _package(_module(each)) not in sys.stdlib_module_names:
            return each.f_code in _WAITS
    return False


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _package(module: str) -> str:
    return module.partition(".")[0]
