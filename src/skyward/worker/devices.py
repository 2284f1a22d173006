"""Device processes of a node: the agent starts them for its client, and reports when they end."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from skyward.wire.messages import DeviceDown, DeviceUp, Message, OpenDevice
from skyward.worker.config import AgentConfig, DeviceConfig
from skyward.worker.process import ChildProcess, ending
from skyward.worker.stacks import StackSource


@dataclass(slots=True)
class DeviceChild:
    """The process of one torch device."""

    kind: str
    """The device that the client asked for, such as "cuda:1" or "auto"."""
    process: ChildProcess
    stacks: StackSource
    announced: bool = False


class DeviceProcesses:
    """Owns the processes that serve torch devices to the agent's client."""

    def __init__(self, config: AgentConfig, tell: Callable[[Message], None]) -> None:
        self._config = config
        self._tell = tell
        self._processes: dict[int, DeviceChild] = {}
        self._lock = threading.Lock()

    def open(self, wanted: OpenDevice) -> None:
        """Start a process for one device; only on the agent's main thread."""
        config = self._config
        stacks = StackSource()
        try:
            process = ChildProcess(
                "skyward.device.worker",
                lambda status, lifeline: DeviceConfig(
                    pool=config.pool,
                    where=config.place(
                        f"d{wanted.number}.{time.monotonic_ns() % 10**9}", for_peers=True
                    ),
                    kind=wanted.kind,
                    credentials=config.credentials,
                    search_path=config.search_path,
                    orphan_timeout=config.orphan_timeout,
                    status=status,
                    lifeline=lifeline,
                    stacks=stacks.pipe,
                ),
                working_directory=config.working_directory,
                environment=os.environ,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                inherited=stacks.inherited,
            )
        finally:
            stacks.handed_over()
        device = DeviceChild(wanted.kind, process, stacks)
        with self._lock:
            self._processes[wanted.number] = device
        threading.Thread(
            target=self._follow, args=(wanted.number, device), name="skyward-device", daemon=True
        ).start()

    def _follow(self, number: int, device: DeviceChild) -> None:
        """Announce a device's process when it is ready, and report it when it ends."""
        process = device.process
        said = process.announcement() or {}
        if "endpoint" in said:
            device.announced = True
            self._tell(
                DeviceUp(number, process.pid, said["endpoint"], said["kind"], said["properties"])
            )
        with process.stderr as lines:
            words = lines.read().decode(errors="replace").strip()
        code = process.follow()
        device.stacks.close()
        with self._lock:
            self._processes.pop(number, None)
        reason = said.get("problem") or words[-2000:] or (ending(code) if code else "")
        self._tell(DeviceDown(number, reason or "its process ended"))

    def close(self, number: int) -> None:
        """End one device's process."""
        with self._lock:
            device = self._processes.get(number)
        if device is not None:
            device.process.end()

    def all(self) -> list[DeviceChild]:
        """The device processes as they are now."""
        with self._lock:
            return list(self._processes.values())

    def close_all(self) -> None:
        """End all device processes, and wait until they have ended."""
        devices = self.all()
        for device in devices:
            device.process.end()
        for device in devices:
            device.process.wait()
