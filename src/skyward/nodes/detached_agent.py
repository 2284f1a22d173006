"""An agent on the client's own machine that lives on when the client ends: of a pool that stays."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path

import msgspec

from skyward.errors import PoolStartError
from skyward.providers import Equipment, Machine
from skyward.worker import detached, lifeline
from skyward.worker.config import AgentConfig

LOOK_SECONDS = 0.02
TERMINATE_SECONDS = 2.0
"""How long an agent may take to end after a SIGTERM before it is killed."""
QUOTED = 2000


class DetachedAgent:
    """One agent process; its methods run on the providers' loop, unless they say "any thread"."""

    def __init__(self, machine: Machine, equipment: Equipment) -> None:
        self._machine, self._equipment = machine, equipment

    @property
    def pid(self) -> int:
        """The process number; 0 if the agent does not run."""
        return detached.running(Path(self._equipment.folder))

    async def start(self, config: AgentConfig) -> str:
        """Start the process and return the endpoint that it announces."""
        config.folder = self._equipment.folder
        config.client_pid = os.getpid()
        work = self._equipment.working_directory
        if work is not None:
            config.search_path.insert(0, work)
            config.working_directory = work
        command = [
            self._machine.python or "python3",
            "-P",
            "-m",
            "skyward.worker.agent",
            "--detached",
        ]
        said: list[bytes] = []
        told = msgspec.json.encode(config)
        code = await self._machine.run(command, input=told, output=said.append)
        words = b"".join(said)
        for line in reversed(words.splitlines()):
            if code == 0 and line.startswith(b'{"endpoint":'):
                return str(msgspec.json.decode(line)["endpoint"])
        raise PoolStartError(
            f"node {self._machine.node}: its agent did not start (exit status {code}); it said:\n"
            + words.decode(errors="replace").strip()[-QUOTED:]
        )

    def looks_dead(self) -> bool:
        """Whether the process has ended or is stopped by a signal; on any thread."""
        pid = self.pid
        if not pid:
            return True
        import psutil

        with contextlib.suppress(psutil.Error):
            return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
        return True

    def terminate(self) -> None:
        """Ask the process to end; on any thread."""
        pid = self.pid
        if pid:
            # A stopped process handles a SIGTERM only after it is continued.
            for number in (signal.SIGTERM, signal.SIGCONT):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    async def end(self, seconds: float) -> None:
        """Wait for the process to end by itself, then ask it to end, then kill it."""
        if not await self._ended(seconds):
            self.terminate()
            if not await self._ended(TERMINATE_SECONDS):
                pid = self.pid
                if pid:
                    lifeline.cut(pid)

    async def _ended(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self.pid:
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(LOOK_SECONDS)
        return True
