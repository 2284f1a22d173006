"""Programs of a node: how the agent starts a command and lets it end."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import IO

import msgspec

from skyward import context
from skyward.worker import lifeline
from skyward.worker.config import AgentConfig
from skyward.worker.program import LENGTH, ProgramConfig, ProgramStatus
from skyward.worker.supervision import nth_card

END_SECONDS = 5.0
"""How long a program's process may take to end its command and what that has started."""
SIGNAL_MAX = 64


class RunningProgram:
    """One command on this node, in the care of a process of its own.

    The command ends when `close` is called or the agent ends, with everything that it has started.
    """

    def __init__(self, config: ProgramConfig, streams: Sequence[int]) -> None:
        """Start the command with these descriptors as its standard streams; they stay open here."""
        self._status, status = os.pipe()
        control, self._control = os.pipe()
        self._lock = threading.Lock()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "skyward.worker.program", str(control)],
                stdin=streams[0],
                stdout=streams[1],
                stderr=streams[2],
                pass_fds=(status, control),
                start_new_session=True,
            )
        except BaseException:
            os.close(self._status)
            os.close(self._control)
            raise
        finally:
            os.close(status)
            os.close(control)
        told = msgspec.json.encode(msgspec.structs.replace(config, status=status))
        with contextlib.suppress(BrokenPipeError):
            _write(self._control, LENGTH.pack(len(told)) + told)
        self._lines: IO[bytes] = os.fdopen(self._status, "rb")

    def next_status(self) -> ProgramStatus | None:
        """Wait for what the process says of its command: that it runs, then how it has ended.

        None if the process was killed. One thread calls this.
        """
        line = self._lines.readline()
        return msgspec.json.decode(line, type=ProgramStatus) if line else None

    def signal(self, number: int) -> None:
        """Send a signal to the command and its group; nothing happens if it has ended."""
        if not 0 < number <= SIGNAL_MAX:
            raise ValueError(f"{number} is no signal")
        with self._lock, contextlib.suppress(BrokenPipeError):
            if self._control >= 0:
                os.write(self._control, bytes([number]))

    def end(self) -> None:
        """Have the command and everything below it end; any thread may call this."""
        with self._lock:
            if self._control >= 0:
                os.close(self._control)
                self._control = -1

    def wait(self) -> None:
        """Wait until the program's process has ended by itself."""
        self._process.wait()

    def close(self) -> None:
        """End the command if it runs, and wait until it has ended."""
        self.end()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            lifeline.cut(self._process.pid)
            self._process.wait()

    def forget(self) -> None:
        """Close the status pipe, once nobody reads it."""
        self._lines.close()


def environment_of(config: AgentConfig, compute_pool: str = "") -> dict[str, str]:
    """The environment of programs: the image's, and that of the first worker if its pool is given.

    `compute_pool` is the worker's `COMPUTE_POOL`.
    """
    environment = dict(os.environ)
    programs = os.path.dirname(sys.executable)
    path = environment.get("PATH", os.defpath)
    if programs not in path.split(":"):
        environment["PATH"] = f"{programs}:{path}"
    if compute_pool:
        environment[context.VARIABLE] = compute_pool
        if config.visible[0]:
            environment["CUDA_VISIBLE_DEVICES"] = nth_card(config.visible[0])
        ours = [each for each in config.search_path if each]
        theirs = [each for each in environment.get("PYTHONPATH", "").split(":") if each]
        environment["PYTHONPATH"] = ":".join(dict.fromkeys([*ours, *theirs]))
    return environment


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
