"""The agent: one process on each node; it starts and watches executors and ends with its client."""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
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
    Hello,
    Kill,
    Measure,
    Message,
    OpenDevice,
    Ping,
    Prepare,
    Prepared,
    Shutdown,
    Topology,
)
from skyward.wire.versions import my_versions
from skyward.worker import detached, hooks
from skyward.worker.config import AgentConfig
from skyward.worker.devices import DeviceProcesses
from skyward.worker.notices import Notices
from skyward.worker.services import ServedNode, Services
from skyward.worker.supervision import ExecutorProcesses
from skyward.worker.usage import Gauge

LOOK_SECONDS = 0.25


class Agent:
    """Supervises the executors of one node for one client."""

    def __init__(self, config: AgentConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._channel: Channel | None = None
        self._unsent: list[Message] = []
        self._heard = self._began = time.monotonic()
        self._ending = False
        # Only the main thread starts processes: the kernel ends a child with its parent *thread*.
        self._starts: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._executors = ExecutorProcesses(config, self._tell, self._starts)
        self._hooks = hooks.Entered()
        self._devices = DeviceProcesses(config, self._tell)
        self._gauge = Gauge()
        self._notices = Notices(config.notice, self._tell)
        self._services = Services(
            ServedNode(config, self._executors, self._devices, self._starts.put)
        )
        credentials = Credentials(*config.credentials) if config.credentials else None
        where = config.place("agent.sock", for_peers=True)
        self._listener = Listener(
            where, config.pool, credentials, self._accept, versions=my_versions()
        )

    @property
    def endpoint(self) -> str:
        """Where the client connects."""
        return self._listener.endpoint

    def serve(self) -> None:
        """Start the executors, and watch over them until the node ends."""
        if not self._config.hooks_first:
            self._executors.start_all()
        self._notices.start()
        while not self._ending:
            with contextlib.suppress(queue.Empty):
                start = self._starts.get(timeout=LOOK_SECONDS)
                if start is not None and not self._ending:
                    start()
            self._look_at_client()
            self._executors.look()
        self._close()

    def end(self) -> None:
        """Make `serve` kill the executors and return; safe in a signal handler."""
        self._ending = True
        self._executors.stop_restarting()
        self._starts.put(None)

    # The client.

    def _accept(self, channel: Channel, hello: Hello) -> None:
        if hello.role != "control":
            with contextlib.closing(channel):
                self._services.serve(channel, hello.role)
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
                self._executors.kill(message.worker, message.slot, message.pid, message.reason)
            case Topology():
                if not 0 <= message.worker < self._config.workers:
                    raise ProtocolError(f"worker {message.worker} is not on this node")
                self._executors.compute_pool[message.worker] = message.compute_pool
            case Prepare():
                # On a thread of its own: commands may take minutes, and the client sends pings.
                threading.Thread(target=self._prepare, args=(message,), daemon=True).start()
            case Measure():
                # Likewise: a GPU's driver may take seconds to wake up.
                threading.Thread(target=self._measure, args=(message.number,), daemon=True).start()
            case OpenDevice():
                self._starts.put(functools.partial(self._devices.open, message))
            case CloseDevice():
                self._devices.close(message.number)
            case Shutdown():
                self.end()
            case _:
                raise ProtocolError(f"a client does not send {type(message).__name__} here")

    def _prepare(self, prepare: Prepare) -> None:
        """Enter the plugins' hooks, then start the executors with the environment of the hooks."""
        info = context.InstanceInfo.from_json(self._executors.compute_pool[0])
        problem = ""
        try:
            self._hooks.enter(prepare.hooks, info)
        except PluginError as failure:
            problem = str(failure)
        self._tell(Prepared(problem))
        if not problem and self._config.hooks_first:
            self._starts.put(self._executors.start_all)

    def _measure(self, number: int) -> None:
        self._tell(self._gauge.read(number))

    def _tell(self, message: Message) -> None:
        with self._lock:
            if self._channel is None:
                self._unsent.append(message)
                return
            channel = self._channel
        with contextlib.suppress(OSError):
            channel.send(message)

    def _look_at_client(self) -> None:
        """End the node when the client is silent for too long, or its process has ended.

        Also when the node's time to live is over, whatever the client says.
        """
        now, ttl = time.monotonic(), self._config.ttl
        if now - self._heard > self._config.orphan_timeout:
            self.end()
        if ttl is not None and now - self._began > ttl:
            self.end()
        pid = self._config.client_pid
        away = self._channel is None or not self._channel.connected
        if pid and away and not _is_alive(pid):
            self.end()

    def _close(self) -> None:
        self._listener.close()
        self._services.close()
        self._notices.close()
        self._devices.close_all()
        self._executors.close()
        try:
            self._hooks.leave()
        except Exception:
            traceback.print_exc()
        with self._lock:
            channel = self._channel
        if channel is not None:
            channel.close()


def _is_alive(pid: int) -> bool:
    """Whether the process runs; a zombie has ended, and waits for its parent to notice."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def main() -> None:
    """Read the configuration, announce the endpoint, and serve.

    With `--detached`, the agent lives on when the process that started it ends.
    """
    apart = sys.argv[1:] == ["--detached"]
    told = sys.stdin.buffer.read() if apart else sys.stdin.buffer.readline()
    config = msgspec.json.decode(told, type=AgentConfig)
    if apart:
        detached.leave(Path(config.folder))
    os.chdir(config.working_directory)
    if apart:
        # Programs of the environment, such as compilers, are found by name.
        os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}"
        config.search_path += sys.path
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # The agent has the image's environment too: plugins' hooks see it and may change it.
    os.environ.update(config.env)
    agent = Agent(config)
    signal.signal(signal.SIGTERM, lambda *_: agent.end())
    announcement = msgspec.json.encode({"endpoint": agent.endpoint, "pid": os.getpid()})
    print(announcement.decode(), flush=True)
    if not apart:
        # The client reads the pipe only until the announcement.
        os.dup2(os.open(f"{config.folder}/agent.log", os.O_WRONLY | os.O_CREAT, 0o600), 2)
    os.dup2(2, 1)
    agent.serve()
    # The client deletes the folder, too, unless it was killed.
    shutil.rmtree(config.folder, ignore_errors=True)


if __name__ == "__main__":
    main()
