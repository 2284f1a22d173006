"""The agent of a node on the client's own machine: a child of the client, or one that stays."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import msgspec

from skyward.errors import PoolStartError
from skyward.providers import Equipment, Machine
from skyward.worker import detached
from skyward.worker.config import AgentConfig
from skyward.worker.process import kill_group

START_SECONDS = 60.0
LOOK_SECONDS = 0.02
TERMINATE_SECONDS = 2.0
"""How long an agent may take to end after a SIGTERM before it is killed."""
QUOTED = 2000
"""How many bytes of an agent's output, the last ones, the error of a failed start shows."""


class ChildAgent:
    """An agent that is a child process of the client.

    Its methods run on the providers' loop, unless they say "any thread".
    """

    def __init__(self, machine: Machine, equipment: Equipment) -> None:
        self.pid = 0
        self._machine, self._equipment = machine, equipment
        self._said = b""
        self._news = asyncio.Event()
        self._running: asyncio.Task[int] | None = None

    async def start(self, config: AgentConfig) -> str:
        """Start the process and return the endpoint that it announces."""
        config.folder = self._equipment.folder
        config.client_pid = os.getpid()
        work = self._equipment.working_directory
        if work is None and config.own_directory:
            work = os.path.join(config.folder, "work")
            os.makedirs(work, exist_ok=True)
        if work is not None:
            config.search_path.insert(0, work)
            config.working_directory = work
        command = [self._machine.python or "python3", "-P", "-m", "skyward.worker.agent"]
        told = msgspec.json.encode(config) + b"\n"
        running = self._machine.run(command, input=told, output=self._hear)
        self._running = asyncio.create_task(self._run(running))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_SECONDS):
                while not (self._announcement or self._running.done()):
                    await self._news.wait()
                    self._news.clear()
        if not self._announcement:
            raise self._failure()
        announced = msgspec.json.decode(self._announcement)
        self.pid = int(announced["pid"])
        return str(announced["endpoint"])

    async def _run(self, running: Coroutine[Any, Any, int]) -> int:
        try:
            return await running
        finally:
            self._news.set()

    def _hear(self, data: bytes) -> None:
        if not self._announcement:
            self._said = (self._said + data)[-(1 << 20) :]
            self._news.set()

    @property
    def _announcement(self) -> bytes:
        for line in self._said.splitlines(keepends=True):
            if line.startswith(b'{"endpoint":') and line.endswith(b"\n"):
                return line
        return b""

    def _failure(self) -> PoolStartError:
        assert self._running is not None
        if not self._running.done():
            problem = f"did not start within {START_SECONDS:.0f} s"
        elif (raised := self._running.exception()) is not None:
            problem = f"could not be run: {raised}"
        else:
            problem = f"ended with exit status {self._running.result()}"
        said = self._said.decode(errors="replace").strip()[-QUOTED:]
        return PoolStartError(
            f"node {self._machine.node}: its agent {problem}"
            + (f"; it said:\n{said}" if said else "")
        )

    def looks_dead(self) -> bool:
        """Whether the process has ended or is stopped by a signal; on any thread."""
        if self._running is None or self._running.done():
            return True
        if not self.pid:
            return False
        # Imported here: few pools ask, and it takes a client 20 ms to start.
        import psutil

        with contextlib.suppress(psutil.Error):
            return bool(psutil.Process(self.pid).status() == psutil.STATUS_STOPPED)
        return True

    def terminate(self) -> None:
        """Ask the process to end; on any thread."""
        if self.pid and self._running is not None and not self._running.done():
            # A stopped process handles a SIGTERM only after it is continued.
            for number in (signal.SIGTERM, signal.SIGCONT):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, number)

    async def end(self, seconds: float) -> None:
        """Wait for the process to end by itself, then ask it to end, then kill it."""
        running = self._running
        if running is None:
            return
        await asyncio.wait({running}, timeout=seconds)
        if not running.done():
            self.terminate()
            await asyncio.wait({running}, timeout=TERMINATE_SECONDS if self.pid else 0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


class DetachedAgent:
    """An agent that lives on when the client ends.

    Its methods run on the providers' loop, unless they say "any thread".
    """

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
                    kill_group(pid)

    async def _ended(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self.pid:
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(LOOK_SECONDS)
        return True
