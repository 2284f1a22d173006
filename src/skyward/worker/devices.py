"""Device processes of a node: started for a client that asks, reported when they end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import msgspec

from skyward.wire.messages import DeviceDown, DeviceUp, Message, OpenDevice
from skyward.worker import lifeline
from skyward.worker.config import AgentConfig, DeviceConfig


class DeviceProcesses:
    """Owns the processes that serve torch devices to the agent's client."""

    def __init__(self, config: AgentConfig, tell: Callable[[Message], None]) -> None:
        self._config = config
        self._tell = tell
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._lock = threading.Lock()

    def open(self, wanted: OpenDevice) -> None:
        """Start a process for one device; only on the agent's main thread."""
        status_read, status_write = os.pipe()
        lifeline_read, lifeline_write = os.pipe()
        config = self._config
        told = DeviceConfig(
            pool=config.pool,
            where=config.place(f"d{wanted.number}.{time.monotonic_ns() % 10**9}"),
            kind=wanted.kind,
            credentials=config.credentials,
            search_path=config.search_path,
            orphan_timeout=config.orphan_timeout,
            status=status_write,
            lifeline=lifeline_read,
        )
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "skyward.device.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=(status_write, lifeline_read),
                env={**os.environ, **config.env},
                cwd=config.working_directory,
                start_new_session=True,
            )
        finally:
            os.close(status_write)
            os.close(lifeline_read)
        with self._lock:
            self._processes[wanted.number] = process
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(msgspec.json.encode(told))
            process.stdin.close()
        threading.Thread(
            target=self._follow,
            args=(wanted.number, process, status_read, lifeline_write),
            name="skyward-device",
            daemon=True,
        ).start()

    def _follow(
        self, number: int, process: subprocess.Popen[bytes], status: int, held: int
    ) -> None:
        with os.fdopen(status, "rb") as announcements:
            line = announcements.readline()
        said = msgspec.json.decode(line) if line else {}
        if "endpoint" in said:
            self._tell(DeviceUp(number, process.pid, said["endpoint"], said["kind"]))
        assert process.stderr is not None
        words = process.stderr.read().decode(errors="replace").strip()
        code = process.wait()
        os.close(held)
        with self._lock:
            self._processes.pop(number, None)
        reason = said.get("problem") or words[-2000:]
        if not reason and code:
            reason = (
                f"its process was killed by {signal.Signals(-code).name}"
                if code < 0
                else (f"its process ended with exit status {code}")
            )
        self._tell(DeviceDown(number, reason or "its process ended"))

    def close(self, number: int) -> None:
        """End one device's process."""
        with self._lock:
            process = self._processes.get(number)
        if process is not None:
            lifeline.cut(process.pid)

    def close_all(self) -> None:
        """End them all."""
        with self._lock:
            processes = list(self._processes.values())
        for process in processes:
            lifeline.cut(process.pid)
        for process in processes:
            process.wait()
