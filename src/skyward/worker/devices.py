"""Device processes of a node: the agent starts them for its clients, and reports when they end.

A process that holds tensors of kept values outlives its client, and the next client gets it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import queue
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from skyward.errors import PoolError
from skyward.wire.messages import DeviceDown, DeviceUp, Message, OpenDevice, Written
from skyward.worker.config import AgentConfig, DeviceConfig
from skyward.worker.process import ChildProcess, ending
from skyward.worker.stacks import StackSource

ANSWER_SECONDS = 30.0
"""How long a device process may take to say that it holds a value."""
FREE_SECONDS = 20.0
"""How long a process may go on with what its client had begun, before a new client gets another."""


class DeviceLine:
    """The agent's end of the socket to a device process (`device/agent_line.py`)."""

    def __init__(self) -> None:
        self._socket, self._other = socket.socketpair()
        self.inherited = self._other.fileno()
        """The descriptor that the process inherits."""
        self._changed, self._saying = threading.Condition(), threading.Lock()
        self._questions = itertools.count(1)
        self._free = self._ended = False
        self._answers: dict[int, dict[str, Any]] = {}

    def handed_over(self) -> None:
        """Close the process's end: the process has it, or did not start."""
        self._other.close()

    def follow(self, freed: Callable[[], None]) -> None:
        """Listen until the process ends; `freed` is called when it has no client any more."""
        with contextlib.suppress(OSError), self._socket.makefile("rb") as lines:
            for line in lines:
                said = msgspec.json.decode(line, type=dict[str, Any])
                with self._changed:
                    if "free" in said:
                        self._free = True
                    else:
                        self._answers[said["question"]] = said
                    self._changed.notify_all()
                if "free" in said:
                    freed()
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        self._socket.close()

    def hold(self, numbers: list[int]) -> bool:
        """Have storages stay in the process; False if they are not there."""
        return bool(self._ask({"do": "hold", "numbers": numbers}).get("held"))

    def drop(self, numbers: list[int]) -> None:
        """Undo a `hold`."""
        self._say({"do": "drop", "numbers": numbers})

    def leave(self) -> None:
        """Have the process end what it does for its client."""
        self._say({"do": "leave"})

    def serve(self, where: str) -> str | None:
        """Have a process listen for its next client; returns its endpoint, None if it cannot."""
        with self._changed:
            self._changed.wait_for(lambda: self._free or self._ended, FREE_SECONDS)
            if not self._free or self._ended:
                return None
            self._free = False
        return self._ask({"do": "serve", "where": where}).get("endpoint")

    def _ask(self, what: dict[str, Any]) -> dict[str, Any]:
        """The answer to a question; empty if none comes."""
        number = next(self._questions)
        self._say({**what, "question": number})
        with self._changed:
            self._changed.wait_for(lambda: number in self._answers or self._ended, ANSWER_SECONDS)
            return self._answers.pop(number, {})

    def _say(self, what: dict[str, Any]) -> None:
        # A process that has ended is told of by whoever follows it.
        with contextlib.suppress(OSError), self._saying:
            self._socket.sendall(msgspec.json.encode(what) + b"\n")


@dataclass(slots=True)
class DeviceClient:
    """The client that a device process serves."""

    number: int
    """The client's number for the device."""
    tell: Callable[[Message], None]
    gone: Callable[[int], None]
    """Called when the process does not serve this client any more."""
    up: bool = True
    """Whether the process is the client's: not before it has said where it listens."""


@dataclass(slots=True)
class DeviceChild:
    """The process of one torch device."""

    kind: str
    """The device that the client asked for, such as "cuda:1" or "auto"."""
    process: ChildProcess
    stacks: StackSource
    line: DeviceLine
    owner: DeviceClient | None
    announced: bool = False
    real: str = ""
    """The device that it is, never "auto"."""
    properties: dict[str, Any] = field(default_factory=dict)
    values: int = 0
    """How many values it holds."""
    wanted: int = 0
    """How many values were asked for before the last one of this process was."""
    lost: str = ""
    """How the process has ended; empty as long as it lives."""

    def serves(self, kind: str) -> bool:
        """Whether it is what a client gets that asks for this kind."""
        if kind == "auto":
            # The same process would be started for it: GPUs come first.
            return self.kind == "auto" or self.real in ("cuda:0", "mps:0")
        named = kind if ":" in kind or kind == "cpu" else f"{kind}:0"
        return self.real == named


class NodeDevices:
    """All device processes of a node, by their process numbers: some have values and no client."""

    def __init__(self) -> None:
        self._children: dict[int, DeviceChild] = {}
        self._asked = 0
        self._lock = threading.Lock()

    def all(self) -> list[DeviceChild]:
        """The device processes as they are now, those without a client as well."""
        with self._lock:
            return list(self._children.values())

    def add(self, child: DeviceChild) -> None:
        """Note a process that has been started, and listen to it."""
        with self._lock:
            self._children[child.process.pid] = child
        threading.Thread(
            target=child.line.follow,
            args=(lambda: self._freed(child),),
            name="skyward-device-line",
            daemon=True,
        ).start()

    def ended(self, child: DeviceChild, reason: str) -> DeviceClient | None:
        """Note that a process has ended, and with it its values; returns whom to tell."""
        with self._lock:
            self._children.pop(child.process.pid, None)
            child.lost = reason
            owner, child.owner = child.owner, None
        return owner if owner is not None and owner.up else None

    def _freed(self, child: DeviceChild) -> None:
        with self._lock:
            owner = child.owner
            if owner is None or not owner.up:
                return
            child.owner = None
        # Nobody has closed the device: its client may live, and must know.
        owner.gone(owner.number)
        owner.tell(DeviceDown(owner.number, "its connection to the client has ended"))

    # Values.

    def hold(self, pid: int, numbers: list[int]) -> DeviceChild:
        """Have a process hold the storages of a value, until `drop`."""
        with self._lock:
            child = self._children.get(pid)
            if child is not None:
                child.values += 1
        if child is None:
            raise PoolError("the device's process has ended, and its tensors with it")
        if not child.line.hold(numbers):
            with self._lock:
                child.values -= 1
            raise PoolError(
                "the device's process does not have these tensors: "
                + (child.lost or "it did not answer")
            )
        return child

    def drop(self, child: DeviceChild, numbers: list[int]) -> None:
        """Discard the storages of a value."""
        with self._lock:
            child.values -= 1
        child.line.drop(numbers)

    def want(self, child: DeviceChild) -> None:
        """Note that a client asks for a value of this process: it should get this process."""
        with self._lock:
            self._asked += 1
            child.wanted = self._asked

    # Clients.

    def take(self, kind: str, owner: DeviceClient, pid: int = 0) -> DeviceChild | None:
        """A process of that kind that holds values and has no client, for a new one.

        With `pid`, that process or none.
        """
        with self._lock:
            waiting = [
                each
                for each in self._children.values()
                if each.owner is None and each.values and each.serves(kind)
                if pid in (0, each.process.pid)
            ]
            found = max(waiting, key=lambda each: (each.wanted, each.values), default=None)
            if found is not None:
                found.owner = owner
        return found

    def give_back(self, child: DeviceChild, owner: DeviceClient) -> bool:
        """End what a process does for a client; whether the process ends: it holds no value."""
        with self._lock:
            if child.owner is not owner:
                return False
            child.owner = None
            stays = bool(child.values)
        if stays:
            child.line.leave()
        else:
            child.process.end()
        return not stays

    def close(self) -> None:
        """End all processes, and wait until they have ended."""
        for child in self.all():
            child.process.end()
            child.process.wait()


class DeviceProcesses:
    """Owns the processes that serve torch devices to one client."""

    def __init__(
        self,
        config: AgentConfig,
        tell: Callable[[Message], None],
        starts: queue.SimpleQueue[Callable[[], None] | None],
        kept: NodeDevices,
    ) -> None:
        """`starts` has the functions that the agent's main thread is to call.

        `kept` has the processes of all clients, and those that hold values and have no client.
        """
        self._config = config
        self._tell, self._starts, self._kept = tell, starts, kept
        self._processes: dict[int, tuple[DeviceChild, DeviceClient]] = {}
        self._lock = threading.Lock()

    def open(self, wanted: OpenDevice) -> None:
        """Get a process for one device, or start one; only on the agent's main thread."""
        owner = self._owner(wanted.number, up=False)
        # A rank of a mesh is a process of its own.
        child = None if wanted.ticket else self._kept.take(wanted.kind, owner, wanted.pid)
        if child is None:
            self._start_for(wanted)
            return
        with self._lock:
            self._processes[wanted.number] = child, owner
        threading.Thread(
            target=self._take_over,
            args=(wanted, child, owner),
            name="skyward-device-taken",
            daemon=True,
        ).start()

    def _owner(self, number: int, *, up: bool) -> DeviceClient:
        return DeviceClient(number, self._tell, self._gone, up)

    def _gone(self, number: int) -> None:
        with self._lock:
            self._processes.pop(number, None)

    def _place(self, number: int) -> str:
        """Where a process listens for a client: nobody else has had this place."""
        return self._config.place(f"d{number}.{time.monotonic_ns() % 10**9}", for_peers=True)

    def _take_over(self, wanted: OpenDevice, child: DeviceChild, owner: DeviceClient) -> None:
        """Have a process that another client has left serve this one."""
        number = wanted.number
        endpoint = child.line.serve(self._place(number))
        if endpoint is not None:
            owner.up = True
            self._tell(DeviceUp(number, child.process.pid, endpoint, child.real, child.properties))
            return
        # It has ended, or is busy with what its last client had begun.
        with self._lock:
            closed = self._processes.pop(number, None) is None
        self._kept.give_back(child, owner)
        if not closed:
            self._starts.put(functools.partial(self._start_for, wanted))

    def _start_for(self, wanted: OpenDevice) -> None:
        """Start a process, unless the client wants one that is not to be had."""
        if wanted.pid:
            reason = f"its process {wanted.pid} serves another client, or has ended"
            self._tell(DeviceDown(wanted.number, reason))
        else:
            self._start(wanted)

    def _start(self, wanted: OpenDevice) -> None:
        config = self._config
        stacks, line = StackSource(), DeviceLine()
        try:
            process = ChildProcess(
                "skyward.device.worker",
                lambda status, lifeline: DeviceConfig(
                    pool=config.pool,
                    where=self._place(wanted.number),
                    kind=wanted.kind,
                    credentials=config.credentials,
                    search_path=config.search_path,
                    orphan_timeout=config.orphan_timeout,
                    ticket=wanted.ticket,
                    status=status,
                    lifeline=lifeline,
                    stacks=stacks.pipe,
                    line=line.inherited,
                ),
                working_directory=config.working_directory,
                environment=os.environ,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                inherited=(*stacks.inherited, line.inherited),
            )
        finally:
            stacks.handed_over()
            line.handed_over()
        owner = self._owner(wanted.number, up=True)
        child = DeviceChild(wanted.kind, process, stacks, line, owner)
        with self._lock:
            self._processes[wanted.number] = child, owner
        self._kept.add(child)
        threading.Thread(
            target=self._follow, args=(child,), name="skyward-device", daemon=True
        ).start()

    def _follow(self, child: DeviceChild) -> None:
        """Announce a device's process when it is ready, and report it when it ends."""
        process, first = child.process, child.owner
        said = process.announcement(self._show) or {}
        if "endpoint" in said:
            child.real, child.properties = said["kind"], said["properties"]
            child.announced = True
            if first is not None:
                up = DeviceUp(
                    first.number, process.pid, said["endpoint"], child.real, child.properties
                )
                self._tell(up)
        with process.stderr as lines:
            words = lines.read().decode(errors="replace").strip()
        code = process.follow()
        child.stacks.close()
        reason = said.get("problem") or words[-2000:] or (ending(code) if code else "")
        reason = reason or "its process ended"
        owner = self._kept.ended(child, reason)
        if owner is not None:
            owner.gone(owner.number)
            owner.tell(DeviceDown(owner.number, reason))

    def _show(self, text: str, transient: bool) -> None:
        """Have the client show what a process does before it serves."""
        self._tell(Written(0, "stderr", text if transient else text + "\n", transient))

    def close(self, number: int) -> None:
        """End one device for the client: its process ends too, unless it holds values."""
        with self._lock:
            found = self._processes.pop(number, None)
        if found is not None:
            self._kept.give_back(*found)

    def close_all(self) -> None:
        """End all devices of the client, and wait until the processes that end have ended."""
        with self._lock:
            devices, self._processes = list(self._processes.values()), {}
        ending_now = [child for child, owner in devices if self._kept.give_back(child, owner)]
        for child in ending_now:
            child.process.wait()
