"""Supervision: the agent starts the executors of a node, watches them, and replaces ended ones."""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import functools
import itertools
import os
import queue
import subprocess
import termios
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from skyward import context, kernel
from skyward.wire.messages import ExecutorDown, ExecutorUp, Message, Written
from skyward.worker import process, task_output
from skyward.worker.changes import Changes
from skyward.worker.config import AgentConfig, ExecutorConfig
from skyward.worker.output import PIPE_SIZE, LineCutter
from skyward.worker.process import ChildProcess
from skyward.worker.stacks import StackSource
from skyward.worker.usage import memory_there

STOPPED_SECONDS = 1.0
"""How long an executor may be stopped by a signal before the agent kills it."""
FULL_SECONDS = 0.5
"""How long an output pipe may hold the same bytes before the agent empties it."""
BUSY_SECONDS = 10.0
"""How long, if a thread of the executor runs: its reader may only be waiting for a processor."""
AT_ONCE = 16
"""How many executors start at the same time: more only take the processors from each other, from
those that are up, and from the agent, until somebody takes them for dead."""
OWN_BYTES = 16 << 20
"""How much memory an executor takes at least, before it has imported anything of the user's."""
OWN_FILES = 5
"""How many open files an executor takes of its agent."""
OTHER_FILES = 128
"""How many the agent may need besides."""
STARTS_MAX = 3
"""After so many failed starts in a row, the agent does not start an executor again."""
LEAVE_SECONDS = 3.0
"""How long executors have to leave their plugins' hooks before they are killed."""


@dataclass(slots=True)
class FullPipe:
    """An output pipe with many bytes."""

    waiting: int
    since: float
    """Since when so many bytes wait, unread and with none added."""
    asked: float | None = None
    """When the executor was asked whether its interpreter is free."""


@dataclass(slots=True, eq=False)
class ExecutorProcess:
    """One executor's process, and the read ends of its output."""

    worker: int
    slot: int
    process: ChildProcess
    outputs: dict[str, int]
    stacks: StackSource
    announced: bool = False
    up: ExecutorUp | None = None
    """What the client was told when the process was ready."""
    end_reason: str = ""
    stopped_since: float | None = None
    full: dict[str, FullPipe] = field(default_factory=dict)
    """The output pipes that are not read."""
    number: int = field(default_factory=itertools.count(1).__next__)
    """Counts the executors that the agent has started."""
    is_past: bool = False
    """Whether the history of the node has taken over what the executor's board shows."""


class ExecutorProcesses:
    """Owns the processes that run tasks on one node."""

    def __init__(
        self,
        config: AgentConfig,
        tell: Callable[[Message], None],
        starts: queue.SimpleQueue[Callable[[], None] | None],
        ended: Callable[[ExecutorProcess], None] = lambda executor: None,
        changes: Changes | None = None,
    ) -> None:
        """`starts` is the queue of functions that the agent's main thread calls.

        `ended` is called with every executor that has ended, before its board is closed. `changes`
        is where executors tell of changes.
        """
        self._changes = changes.descriptor if changes is not None else -1
        self._config, self._tell, self._starts, self._ended = config, tell, starts, ended
        self._running: dict[tuple[int, int], ExecutorProcess] = {}
        self._lock = threading.Lock()
        self._failed_starts: dict[tuple[int, int], int] = {}
        self._to_start: deque[tuple[int, int]] = deque()
        self._starting = 0
        """How many executors have been started and have not announced themselves."""
        self._oom_kills = process.oom_kills()
        self._ending = False
        self._announcing = threading.Lock()
        self.compute_pool = list(config.compute_pool)
        """The `COMPUTE_POOL` value of each worker, for executors started from now on."""

    def start_all(self) -> None:
        """Start every executor of the node; only on the agent's main thread."""
        slots = 1 if self._config.threads else self._config.slots
        places = list(itertools.product(range(self._config.workers), range(slots)))
        if len(places) > AT_ONCE and (reason := _too_many(len(places))):
            self._refuse(*places[0], reason)
            return
        self._to_start.extend(places)
        self._start_more()

    def _start_more(self) -> None:
        """Start executors, as many as may start at once; only on the agent's main thread."""
        while self._to_start and self._starting < AT_ONCE:
            place = self._to_start.popleft()
            try:
                self._start(*place)
            except OSError as problem:
                if problem.errno not in (errno.EAGAIN, errno.ENOMEM):
                    raise
                before = len(self.all())
                self._refuse(*place, f"after {before} processes no other can start: {problem}")

    def _refuse(self, worker: int, slot: int, reason: str) -> None:
        """Tell the client that an executor cannot be had, and start no more of them."""
        self._to_start.clear()
        advice = (
            "ask for fewer with sky.Worker(concurrency=...), or for threads of one process with "
            "executor='thread'"
        )
        self._tell(ExecutorDown(worker, slot, 0, f"{reason}; {advice}", restarting=False))

    def _start(self, worker: int, slot: int) -> None:
        if self._ending:
            return
        pipes = {name: os.pipe() for name in ("stdout", "stderr")}
        config = self._config
        stacks = StackSource(config.slots if config.threads else 1)
        output = (pipes["stdout"][0], pipes["stderr"][0])
        changes = (self._changes,) if self._changes >= 0 else ()
        environment = {**os.environ, context.VARIABLE: self.compute_pool[worker]}
        if config.visible[worker]:
            environment["CUDA_VISIBLE_DEVICES"] = nth_card(config.visible[worker])
        where = config.place(f"{worker}.{slot}.{time.monotonic_ns() % 10**9}", for_peers=True)
        try:
            child = ChildProcess(
                "skyward.worker.executor",
                lambda status, lifeline: ExecutorConfig(
                    pool=config.pool,
                    node=config.node,
                    worker=worker,
                    slot=slot,
                    where=where,
                    threads=config.slots if config.threads else 0,
                    search_path=config.search_path,
                    credentials=config.credentials,
                    blob_cap=config.blob_cap,
                    status=status,
                    lifeline=lifeline,
                    output=output,
                    # Only of a kept pool: others' clients show the output, and end with it.
                    kept_output=f"{config.folder}/{task_output.FOLDER}" if config.client else "",
                    stacks=stacks.pipe,
                    board=stacks.board,
                    changes=self._changes,
                ),
                working_directory=config.working_directory,
                environment=environment,
                stdout=pipes["stdout"][1],
                stderr=pipes["stderr"][1],
                inherited=(*output, *stacks.inherited, *changes),
            )
        except OSError:
            for read_end, _ in pipes.values():
                os.close(read_end)
            stacks.close()
            raise
        finally:
            for _, write_end in pipes.values():
                os.close(write_end)
            stacks.handed_over()
        executor = ExecutorProcess(
            worker, slot, child, {name: read_end for name, (read_end, _) in pipes.items()}, stacks
        )
        with self._lock:
            # `close` ends those that it finds: it would not find this one any more.
            late = self._is_ending()
            if not late:
                self._running[worker, slot] = executor
            self._starting += 1
        if late:
            child.end()
        threading.Thread(
            target=self._follow, args=(executor,), name="skyward-child", daemon=True
        ).start()

    def _is_ending(self) -> bool:
        return self._ending

    def _follow(self, executor: ExecutorProcess) -> None:
        """Announce an executor when it is ready, report it when it ends, replace it."""
        said = executor.process.announcement()
        with self._lock:
            self._starting -= 1
        if self._to_start:
            self._starts.put(self._start_more)
        place = (executor.worker, executor.slot)
        pid = executor.process.pid
        if said is not None:
            self._failed_starts.pop(place, None)
            with self._announcing:
                executor.announced = True
                executor.up = ExecutorUp(*place, pid, str(said["endpoint"]), int(said["port"]))
                self._tell(executor.up)
        code = executor.process.follow()
        last_words = self._last_words(executor)
        for end in executor.outputs.values():
            os.close(end)
        self._ended(executor)
        executor.stacks.close()
        if self._ending:
            return
        reason = executor.end_reason or self._ending_of(code)
        if not executor.announced:
            reason = f"it did not start: {reason}\n{last_words}".rstrip()
            self._failed_starts[place] = self._failed_starts.get(place, 0) + 1
        restarting = self._failed_starts.get(place, 0) < STARTS_MAX
        self._tell(ExecutorDown(*place, pid, reason, restarting))
        if restarting:
            self._starts.put(functools.partial(self._start, *place))

    def announce_again(
        self, group: str, members: frozenset[int], ready: Callable[[], None]
    ) -> None:
        """Call `ready`, and then tell another client of every executor that is ready.

        The executors of these process numbers have entered the hooks that `group` names.
        """
        with self._announcing:
            ready()
            for executor in self.all():
                if executor.up is not None and not executor.process.ended:
                    entered = group if executor.process.pid in members else ""
                    self._tell(msgspec.structs.replace(executor.up, group=entered))
        self.try_again()

    def try_again(self) -> None:
        """Start for somebody what failed too often for nobody, or for a client that has left."""
        for place, failures in list(self._failed_starts.items()):
            if failures >= STARTS_MAX:
                del self._failed_starts[place]
                self._starts.put(functools.partial(self._start, *place))

    def _ending_of(self, code: int) -> str:
        if code >= 0:
            return f"{process.ending(code)} (os._exit, or an exit in C code)"
        before, self._oom_kills = self._oom_kills, process.oom_kills()
        return process.ending(code, out_of_memory=self._oom_kills > before)

    def _last_words(self, executor: ExecutorProcess) -> str:
        """The output of a dead process that the process itself has not read and sent."""
        everything = ""
        for name, end in executor.outputs.items():
            cutter, text = LineCutter(), ""
            os.set_blocking(end, False)
            with contextlib.suppress(BlockingIOError):
                while data := os.read(end, PIPE_SIZE):
                    text += cutter.feed(data)[0]
            text += cutter.finish()
            if text and executor.announced:
                self._tell(Written(0, name, text, False))
            everything += text
        return everything

    def kill(self, worker: int, slot: int, pid: int, reason: str) -> None:
        """End an executor, unless another process has taken its place already."""
        with self._lock:
            executor = self._running.get((worker, slot))
            if executor is None or executor.process.pid != pid or executor.process.ended:
                return
            executor.end_reason = executor.end_reason or reason
        executor.process.end()

    def look(self) -> None:
        """Kill executors that a signal has stopped, and empty output pipes that stay full."""
        now = time.monotonic()
        for executor in self.all():
            if executor.process.ended:
                continue
            if _is_stopped(executor.process.pid):
                executor.stopped_since = executor.stopped_since or now
                if now - executor.stopped_since >= STOPPED_SECONDS:
                    reason = "its process was stopped by a signal (SIGSTOP) and did not answer"
                    self.kill(executor.worker, executor.slot, executor.process.pid, reason)
            else:
                executor.stopped_since = None
            self._empty_full_pipes(executor, now)

    def _empty_full_pipes(self, executor: ExecutorProcess, now: float) -> None:
        """Read output in place of an executor whose task holds the lock that its reader needs.

        A reader that waits for its client or a processor keeps its output: lines read here are of
        no task, and come out of order.
        """
        for name, end in executor.outputs.items():
            try:
                waiting = _readable_bytes(end)
            except OSError:
                continue
            if waiting < PIPE_SIZE // 16 or not executor.announced:
                executor.full.pop(name, None)
                continue
            pipe = executor.full.setdefault(name, FullPipe(waiting, now))
            if waiting != pipe.waiting:
                pipe.waiting, pipe.since = waiting, now
            if _is_abandoned(executor, pipe, now):
                with contextlib.suppress(BlockingIOError):
                    text = os.read(end, waiting).decode("utf-8", "replace")
                    self._tell(Written(0, name, text, False))

    def stop_restarting(self) -> None:
        """Neither report nor replace executors that end from now on; safe in a signal handler."""
        self._ending = True

    def close(self) -> None:
        """End all executors, and wait until they have ended."""
        executors = self.all()
        if self._config.plugged:
            _let_leave(executors)
        for executor in executors:
            executor.process.end()
        for executor in executors:
            executor.process.wait()

    def all(self) -> list[ExecutorProcess]:
        """The executors as they are now."""
        with self._lock:
            return list(self._running.values())


def _too_many(count: int) -> str:
    """Why a node cannot have so many executors, whatever they do; empty if it may."""
    memory = memory_there()
    if count * OWN_BYTES > memory:
        least = count * OWN_BYTES / 1e9
        return f"{count} processes take at least {least:.3g} GB, and it has {memory / 1e9:.3g} GB"
    files = count * OWN_FILES + OTHER_FILES
    allowed = kernel.raise_descriptors(files)
    if files > allowed:
        return (
            f"{count} processes take {files} open files of their agent, which may have {allowed} "
            "(`ulimit -Hn`)"
        )
    return ""


def nth_card(number: str) -> str:
    """The name of a node's card for CUDA, by its number among those that the node was given.

    A scheduler may give it some of the machine's cards, and name them by number or by UUID.
    """
    given = [each for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each]
    return given[int(number)].strip() if int(number) < len(given) else number


def _let_leave(executors: list[ExecutorProcess]) -> None:
    """Give executors time to leave their plugins' hooks."""
    deadline = time.monotonic() + LEAVE_SECONDS
    for executor in executors:
        executor.process.signal(process.LEAVE)
    for executor in executors:
        with contextlib.suppress(subprocess.TimeoutExpired):
            executor.process.wait(max(0.0, deadline - time.monotonic()))


def _is_stopped(pid: int) -> bool:
    if kernel.IS_LINUX:
        # Four times a second for each executor: psutil takes several times as long.
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                stat = file.read()
        except OSError:
            return False
        return stat.rpartition(b")")[2].split(None, 1)[0] == b"T"
    import psutil

    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False


def _is_busy(pid: int) -> bool:
    """Whether a thread of the process runs, or would if it had a processor."""
    if not kernel.IS_LINUX:
        return False
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
        states = [Path(f"/proc/{pid}/task/{task}/stat").read_text() for task in tasks]
    except OSError:
        return False
    return any(state.rpartition(")")[2].split()[0] == "R" for state in states)


def _is_abandoned(executor: ExecutorProcess, pipe: FullPipe, now: float) -> bool:
    """Whether nobody will read a pipe: the executor's interpreter is not free."""
    unread = now - pipe.since
    if pipe.asked is not None and not executor.stacks.is_silent:
        # Its reader could read, and waits for the client.
        pipe.since, pipe.asked = now, None
        return False
    if unread < FULL_SECONDS:
        return False
    if pipe.asked is None:
        executor.stacks.ask(executor.process)
        pipe.asked = now
        return False
    if now - pipe.asked < FULL_SECONDS:
        return False
    return unread >= BUSY_SECONDS or not _is_busy(executor.process.pid)


def _readable_bytes(end: int) -> int:
    count = array.array("i", [0])
    fcntl.ioctl(end, termios.FIONREAD, count)
    return count[0]
