"""Device processes of a node: the agent starts them for its client, and reports when they end."""

from __future__ import annotations

import functools
import os
import queue
import subprocess
import threading
import time
from collections.abc import Callable

from skyward.wire.messages import DeviceDown, DeviceUp, Message, OpenDevice, Written
from skyward.worker.config import AgentConfig, DeviceConfig
from skyward.worker.process import ChildProcess, ending
from skyward.worker.residents import DeviceChild, DeviceClient, DeviceLine, Residents
from skyward.worker.stacks import StackSource


class DeviceProcesses:
    """Owns the processes that serve torch devices to one client."""

    def __init__(
        self,
        config: AgentConfig,
        tell: Callable[[Message], None],
        starts: queue.SimpleQueue[Callable[[], None] | None],
        residents: Residents,
    ) -> None:
        """`starts` has the functions that the agent's main thread is to call.

        `residents` has the processes that hold values: they stay when the client leaves, and the
        next client gets them.
        """
        self._config = config
        self._tell, self._starts, self._residents = tell, starts, residents
        self._processes: dict[int, tuple[DeviceChild, DeviceClient]] = {}
        self._lock = threading.Lock()

    def open(self, wanted: OpenDevice) -> None:
        """Get a process for one device, or start one; only on the agent's main thread."""
        owner = self._owner(wanted.number, up=False)
        child = self._residents.take(wanted.kind, owner, wanted.pid)
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
        self._residents.give_back(child, owner)
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
        self._residents.add(child)
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
        owner = self._residents.ended(child, reason)
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
            self._residents.give_back(*found)

    def close_all(self) -> None:
        """End all devices of the client, and wait until the processes that end have ended."""
        with self._lock:
            devices, self._processes = list(self._processes.values()), {}
        ending_now = [child for child, owner in devices if self._residents.give_back(child, owner)]
        for child in ending_now:
            child.process.wait()
