"""Bootstrap commands of plugins: a process runs them, and ends the daemons that they leave behind.

A command may start a daemon, for the tasks of its node to use. The daemon lives as long as the
node. The process that runs the commands ends all that is below it when the agent closes the
process's standard input or dies, also by SIGKILL.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass

import msgspec

from skyward.worker import descendants

COMMAND_SECONDS = 1800.0
"""How long one command may take."""
OUTPUT_MAX = 4000
"""How many bytes, the last ones, of a failed command's output go into the error."""


class CommandDone(msgspec.Struct):
    """How one command has ended."""

    code: int
    output: str


class Commands:
    """The agent's end: has commands run one after the other, by a process that it starts."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._closed = False
        self.running = False
        """Whether a command runs now."""

    def run(self, command: str) -> None:
        """Run a shell command; `RuntimeError` if it fails, `InterruptedError` after `close`."""
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(COMMAND_SECONDS, self.close)
        timer.daemon = True
        timer.start()
        self.running = True
        try:
            process.stdin.write(msgspec.json.encode(command) + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except (BrokenPipeError, ValueError):
            line = b""
        finally:
            self.running = False
            timer.cancel()
        if not line:
            raise InterruptedError(
                f"`{command}` was ended: its node ends, or it ran longer than {COMMAND_SECONDS:g} s"
            )
        done = msgspec.json.decode(line, type=CommandDone)
        if done.code:
            raise RuntimeError(f"`{command}` ended with exit status {done.code}:\n{done.output}")

    def _started(self) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._closed:
                raise InterruptedError("the node is ending")
            if self._process is None:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "skyward.worker.commands"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    # A signal to the agent's group must not end this process before the daemons.
                    start_new_session=True,
                )
            return self._process

    def close(self) -> None:
        """End the command that runs, and every daemon, and wait until they have ended."""
        with self._lock:
            self._closed = True
            process = self._process
        if process is None:
            return
        # stdin.close() would wait for a thread that writes to it.
        process.send_signal(signal.SIGTERM)
        process.wait()


@dataclass(slots=True, eq=False)
class _Output:
    """The output of one command and of the daemons that it leaves; only the end of it is kept."""

    descriptor: int
    tail: bytes = b""
    open: bool = True

    def drain(self) -> None:
        """Read all bytes that are there; `open` becomes False once no process can write."""
        with contextlib.suppress(BlockingIOError):
            while self.open:
                data = os.read(self.descriptor, 65536)
                self.tail = (self.tail + data)[-OUTPUT_MAX:]
                self.open = bool(data)


class _Runner:
    """The end in the process itself: starts commands, reaps children and drains output."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._poll.register(0, select.POLLIN)
        woken, waking = os.pipe()
        for end in (woken, waking):
            os.set_blocking(end, False)
        os.set_blocking(0, False)
        self._woken = woken
        self._poll.register(woken, select.POLLIN)
        signal.set_wakeup_fd(waking, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
        self._asked = b""
        self._command: int | None = None
        """The process number of the command that runs."""
        self._outputs: dict[int, _Output] = {}
        """The outputs that some process can still write to, by descriptor."""
        self._output = _Output(-1, open=False)
        """The output of the command that runs."""

    def serve(self) -> None:
        """Run commands until the agent is gone or closes the standard input."""
        while True:
            for descriptor, _ in self._poll.poll():
                if descriptor == 0:
                    if not self._read():
                        return
                elif descriptor == self._woken:
                    if signal.SIGTERM in os.read(descriptor, 4096):
                        return
                    self._reap()
                elif descriptor in self._outputs:
                    self._drain(self._outputs[descriptor])

    def _read(self) -> bool:
        data = os.read(0, 65536)
        self._asked += data
        *lines, self._asked = self._asked.split(b"\n")
        for line in lines:
            self._start(msgspec.json.decode(line, type=str))
        return bool(data)

    def _start(self, command: str) -> None:
        output, write_end = os.pipe()
        os.set_blocking(output, False)
        self._output = self._outputs[output] = _Output(output)
        self._poll.register(output, select.POLLIN)
        nothing = os.open(os.devnull, os.O_RDONLY)
        self._command = os.posix_spawn(
            "/bin/sh",
            ["/bin/sh", "-c", command],
            os.environ,
            file_actions=[
                (os.POSIX_SPAWN_DUP2, nothing, 0),
                (os.POSIX_SPAWN_DUP2, write_end, 1),
                (os.POSIX_SPAWN_DUP2, write_end, 2),
            ],
            setpgroup=0,
            setsigdef=[signal.SIGINT, signal.SIGHUP, signal.SIGPIPE],
        )
        os.close(nothing)
        os.close(write_end)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return
                if pid == self._command:
                    self._done(os.waitstatus_to_exitcode(status))

    def _done(self, code: int) -> None:
        """Tell the agent the result, with the output so far: a daemon may hold the output open."""
        self._command = None
        self._drain(self._output)
        said = self._output.tail.decode("utf-8", "replace")
        line = msgspec.json.encode(CommandDone(code, said)) + b"\n"
        with contextlib.suppress(BrokenPipeError):
            while line:
                line = line[os.write(1, line) :]

    def _drain(self, output: _Output) -> None:
        """Read the output as long as a process can write to it, so that daemons never block."""
        output.drain()
        if not output.open and self._outputs.pop(output.descriptor, None) is not None:
            self._poll.unregister(output.descriptor)
            os.close(output.descriptor)


def main() -> None:
    """Run commands until the agent closes the standard input, is gone, or sends SIGTERM."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    descendants.adopt_orphans()
    runner = _Runner()
    try:
        runner.serve()
    finally:
        descendants.end_all()


if __name__ == "__main__":
    main()
