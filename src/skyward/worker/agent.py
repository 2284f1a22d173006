"""The agent: one process a node, which starts and watches executors and ends with its client."""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import psutil

from skyward import context
from skyward.errors import PluginError, ProtocolError
from skyward.wire import messages
from skyward.wire.channel import Channel
from skyward.wire.identity import Credentials
from skyward.wire.listener import Listener
from skyward.wire.messages import (
    CloseDevice,
    ExecutorDown,
    ExecutorUp,
    Hello,
    Kill,
    Message,
    OpenDevice,
    Ping,
    Prepare,
    Prepared,
    Shutdown,
    Topology,
    Written,
)
from skyward.worker import detached, hooks, lifeline
from skyward.worker.config import AgentConfig, ExecutorConfig
from skyward.worker.devices import DeviceProcesses
from skyward.worker.output import PIPE_SIZE, LineCutter

LOOK_SECONDS = 0.25
STOPPED_SECONDS = 1.0
"""How long an executor may be stopped by a signal before it counts as dead."""
HOPELESS_STARTS = 3
LEAVE_SECONDS = 3.0
"""How long executors have to leave their plugins' hooks before they are killed."""


@dataclass(slots=True, eq=False)
class Child:
    """One executor process and the pipes to it."""

    worker: int
    slot: int
    process: subprocess.Popen[bytes]
    outputs: dict[str, int]
    lifeline: int
    announced: bool = False
    end_reason: str = ""
    stopped_since: float | None = None
    full_since: dict[str, float] = field(default_factory=dict)


class Agent:
    """Supervises the executors of one node for one client."""

    def __init__(self, config: AgentConfig) -> None:
        self._config = config
        self._children: dict[tuple[int, int], Child] = {}
        self._lock = threading.RLock()
        self._channel: Channel | None = None
        self._connected = threading.Event()
        self._unsent: list[Message] = []
        self._heard = time.monotonic()
        self._ending = False
        # Only the main thread starts executors: the kernel ends them with the *thread* that did.
        self._starts: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._compute_pool = list(config.compute_pool)
        self._failed_starts: dict[tuple[int, int], int] = {}
        self._oom_kills = _oom_kills()
        self._hooks = hooks.Entered()
        self._devices = DeviceProcesses(config, self._tell)
        credentials = Credentials(*config.credentials) if config.credentials else None
        where = config.place("agent.sock")
        self._listener = Listener(where, config.pool, credentials, self._accept)

    @property
    def endpoint(self) -> str:
        """Where the client connects."""
        return self._listener.endpoint

    def serve(self) -> None:
        """Start the executors and watch over them until it is time to end."""
        for worker in range(self._config.workers):
            for slot in range(1 if self._config.threads else self._config.slots):
                self._start(worker, slot)
        while not self._ending:
            with contextlib.suppress(queue.Empty):
                start = self._starts.get(timeout=LOOK_SECONDS)
                if start is not None and not self._ending:
                    start()
            self._look_at_client()
            self._look_at_children()
        self._close()

    def end(self) -> None:
        """Make `serve` kill the executors and return; safe in a signal handler."""
        self._ending = True
        self._starts.put(None)

    # The client.

    def _accept(self, channel: Channel, hello: Hello) -> None:
        if hello.role != "control":
            channel.close()
            return
        channel.on_change(self._client_changed)
        with self._lock:
            old, self._channel = self._channel, channel
            self._heard = time.monotonic()
            waiting, self._unsent = self._unsent, []
            for message in waiting:
                channel.send(message)
        if old is not None:
            old.close()
        try:
            while True:
                frame = channel.receive()
                self._heard = time.monotonic()
                self._handle(messages.decode(frame.kind, frame.meta))
        except (EOFError, OSError, ProtocolError):
            channel.close()
            with self._lock:
                if self._channel is channel:
                    self._channel = None

    def _client_changed(self, connected: bool) -> None:
        if connected:
            self._heard = time.monotonic()

    def _handle(self, message: Message) -> None:
        match message:
            case Ping():
                self._tell(message)
            case Kill():
                self._kill(message.worker, message.slot, message.pid, message.reason)
            case Topology():
                if not 0 <= message.worker < len(self._compute_pool):
                    raise ProtocolError(f"worker {message.worker} is not on this node")
                self._compute_pool[message.worker] = message.compute_pool
            case Prepare():
                # On a thread of its own: what it runs may take minutes, and the rest goes on.
                threading.Thread(target=self._prepare, args=(message,), daemon=True).start()
            case OpenDevice():
                self._starts.put(functools.partial(self._devices.open, message))
            case CloseDevice():
                self._devices.close(message.number)
            case Shutdown():
                self.end()
            case _:
                raise ProtocolError(f"a client does not send {type(message).__name__} here")

    def _prepare(self, prepare: Prepare) -> None:
        problem = ""
        try:
            self._hooks.enter(prepare.hooks, context.InstanceInfo.from_json(self._compute_pool[0]))
        except PluginError as failure:
            problem = str(failure)
        self._tell(Prepared(problem))

    def _tell(self, message: Message) -> None:
        with self._lock:
            if self._channel is None:
                self._unsent.append(message)
                return
            channel = self._channel
        with contextlib.suppress(OSError):
            channel.send(message)

    def _look_at_client(self) -> None:
        """The dead-man's switch."""
        silent = time.monotonic() - self._heard
        if silent > self._config.orphan_timeout:
            self.end()
        pid = self._config.client_pid
        away = self._channel is None or not self._channel.connected
        if pid and away and not _is_alive(pid):
            self.end()

    # The executors.

    def _start(self, worker: int, slot: int) -> None:
        status_read, status_write = os.pipe()
        lifeline_read, lifeline_write = os.pipe()
        pipes = {name: os.pipe() for name in ("stdout", "stderr")}
        config = self._config
        told = ExecutorConfig(
            pool=config.pool,
            node=config.node,
            worker=worker,
            slot=slot,
            where=config.place(f"{worker}.{slot}.{time.monotonic_ns() % 10**9}", for_peers=True),
            threads=config.slots if config.threads else 0,
            search_path=config.search_path,
            credentials=config.credentials,
            blob_cap=config.blob_cap,
            status=status_write,
            lifeline=lifeline_read,
            output=(pipes["stdout"][0], pipes["stderr"][0]),
        )
        environment = {**os.environ, **config.env, context.VARIABLE: self._compute_pool[worker]}
        if config.visible[worker]:
            environment["CUDA_VISIBLE_DEVICES"] = config.visible[worker]
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "skyward.worker.executor"],
                stdin=subprocess.PIPE,
                stdout=pipes["stdout"][1],
                stderr=pipes["stderr"][1],
                pass_fds=(status_write, lifeline_read, *told.output),
                env=environment,
                cwd=config.working_directory,
                start_new_session=True,
            )
        finally:
            for end in (status_write, lifeline_read, pipes["stdout"][1], pipes["stderr"][1]):
                os.close(end)
        outputs = {name: ends[0] for name, ends in pipes.items()}
        child = Child(worker, slot, process, outputs, lifeline_write)
        with self._lock:
            self._children[worker, slot] = child
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(msgspec.json.encode(told))
            process.stdin.close()
        threading.Thread(
            target=self._follow, args=(child, status_read), name="skyward-child", daemon=True
        ).start()

    def _follow(self, child: Child, status: int) -> None:
        """Announce an executor when it is ready, report it when it ends, replace it."""
        with os.fdopen(status, "rb") as announcements:
            line = announcements.readline()
        if line:
            child.announced = True
            self._failed_starts.pop((child.worker, child.slot), None)
            said = msgspec.json.decode(line)
            pid, endpoint, port = child.process.pid, str(said["endpoint"]), int(said["port"])
            self._tell(ExecutorUp(child.worker, child.slot, pid, endpoint, port))
        code = child.process.wait()
        lifeline.cut(child.process.pid)
        last_words = self._last_words(child)
        os.close(child.lifeline)
        for end in child.outputs.values():
            os.close(end)
        if self._ending:
            return
        reason = child.end_reason or self._why(code)
        place = (child.worker, child.slot)
        if not child.announced:
            reason = f"it did not start: {reason}\n{last_words}".rstrip()
            self._failed_starts[place] = self._failed_starts.get(place, 0) + 1
        restarting = self._failed_starts.get(place, 0) < HOPELESS_STARTS
        self._tell(ExecutorDown(child.worker, child.slot, child.process.pid, reason, restarting))
        if restarting:
            self._starts.put(functools.partial(self._start, *place))

    def _why(self, code: int) -> str:
        if code >= 0:
            return f"its process ended with exit status {code} (os._exit, or an exit in C code)"
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        hints: dict[int, str] = {
            signal.SIGSEGV: "a segmentation fault in C code",
            signal.SIGABRT: "an abort in C code",
            signal.SIGBUS: "a bus error: memory behind a file was gone",
            signal.SIGKILL: "killed from outside",
        }
        hint = hints.get(-code, "")
        if -code == signal.SIGKILL and _oom_kills() > self._oom_kills:
            self._oom_kills = _oom_kills()
            hint = "the machine ran out of memory; use less, or ask for more with memory_gb"
        return f"its process was killed by {name}" + (f" ({hint})" if hint else "")

    def _last_words(self, child: Child) -> str:
        """What the dead process wrote and nobody read."""
        everything = ""
        for name, end in child.outputs.items():
            cutter, text = LineCutter(), ""
            os.set_blocking(end, False)
            with contextlib.suppress(BlockingIOError):
                while data := os.read(end, PIPE_SIZE):
                    text += cutter.feed(data)[0]
            text += cutter.finish()
            if text and child.announced:
                self._tell(Written(0, name, text, False))
            everything += text
        return everything

    def _kill(self, worker: int, slot: int, pid: int, reason: str) -> None:
        with self._lock:
            child = self._children.get((worker, slot))
            if child is None or child.process.pid != pid or child.process.poll() is not None:
                return
            child.end_reason = child.end_reason or reason
        lifeline.cut(pid)

    def _look_at_children(self) -> None:
        now = time.monotonic()
        with self._lock:
            children = list(self._children.values())
        for child in children:
            if child.process.poll() is not None:
                continue
            if _is_stopped(child.process.pid):
                child.stopped_since = child.stopped_since or now
                if now - child.stopped_since >= STOPPED_SECONDS:
                    reason = "its process was stopped by a signal (SIGSTOP) and did not answer"
                    self._kill(child.worker, child.slot, child.process.pid, reason)
            else:
                child.stopped_since = None
            self._relieve(child, now)

    def _relieve(self, child: Child, now: float) -> None:
        """Empty an output pipe that stays full: its process may hold the lock its reader needs."""
        for name, end in child.outputs.items():
            try:
                waiting = _readable_bytes(end)
            except OSError:
                continue
            if waiting < PIPE_SIZE // 16 or not child.announced:
                child.full_since.pop(name, None)
                continue
            since = child.full_since.setdefault(name, now)
            if now - since >= 2 * LOOK_SECONDS:
                with contextlib.suppress(BlockingIOError):
                    text = os.read(end, waiting).decode("utf-8", "replace")
                    self._tell(Written(0, name, text, False))

    def _close(self) -> None:
        self._listener.close()
        self._devices.close_all()
        with self._lock:
            children = list(self._children.values())
        if self._config.plugged:
            self._let_leave(children)
        for child in children:
            lifeline.cut(child.process.pid)
        for child in children:
            child.process.wait()
        try:
            self._hooks.leave()
        except Exception:
            traceback.print_exc()
        with self._lock:
            channel = self._channel
        if channel is not None:
            channel.close()

    @staticmethod
    def _let_leave(children: list[Child]) -> None:
        deadline = time.monotonic() + LEAVE_SECONDS
        for child in children:
            child.process.send_signal(lifeline.LEAVE)
        for child in children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(max(0.0, deadline - time.monotonic()))


def _is_alive(pid: int) -> bool:
    """Whether the process runs; one that ended keeps its number until its parent looks."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _is_stopped(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False


def _readable_bytes(end: int) -> int:
    import array
    import fcntl
    import termios

    count = array.array("i", [0])
    fcntl.ioctl(end, termios.FIONREAD, count)
    return count[0]


def _oom_kills() -> int:
    """How often the kernel's memory killer has struck on this machine."""
    with contextlib.suppress(OSError), open("/proc/vmstat", encoding="ascii") as lines:
        for line in lines:
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return 0


def main() -> None:
    """Read the configuration, announce the endpoint, serve; `--detached` outlives its starter."""
    apart = sys.argv[1:] == ["--detached"]
    told = sys.stdin.buffer.read() if apart else sys.stdin.buffer.readline()
    config = msgspec.json.decode(told, type=AgentConfig)
    if apart:
        detached.leave(Path(config.folder))
        os.chdir(config.working_directory)
        # Programs of the environment, such as compilers, are found by name.
        os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}"
        config.search_path += sys.path
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    agent = Agent(config)
    signal.signal(signal.SIGTERM, lambda *_: agent.end())
    announcement = msgspec.json.encode({"endpoint": agent.endpoint, "pid": os.getpid()})
    print(announcement.decode(), flush=True)
    # Detached, what is printed from now on goes to the log; else nobody reads it.
    os.dup2(2 if apart else os.open(os.devnull, os.O_WRONLY), 1)
    agent.serve()
    # The client does this too, unless it was killed.
    shutil.rmtree(config.folder, ignore_errors=True)


if __name__ == "__main__":
    main()
