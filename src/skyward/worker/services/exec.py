"""Exec: runs a command on the node for as long as the client stays, with or without a terminal.

The first question is "run". Then parts go both ways: the command's output, "input", "signal" and
"size" of the terminal. The last reply has the exit code.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pwd
import queue
import select
import struct
import termios
import threading
from typing import Annotated

import msgspec

from skyward.errors import PoolError, ProtocolError
from skyward.wire.channel import PART
from skyward.wire.messages import Reply
from skyward.worker.jobs import environment_of
from skyward.worker.program import ProgramConfig, RunningProgram
from skyward.worker.services import Caller, answers

WINDOW = 1 << 20
"""How many bytes of input a client may send before the command has taken them."""

Side = Annotated[int, msgspec.Meta(ge=0, le=0xFFFF)]


class TerminalSize(msgspec.Struct, forbid_unknown_fields=True):
    """The new size of the client's terminal."""

    rows: Side
    columns: Side


class SignalRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A signal for the command and its process group."""

    number: Annotated[int, msgspec.Meta(ge=1, le=31)]


@answers("exec")
def run(
    caller: Caller,
    command: list[str],
    environment: dict[str, str] | None = None,
    working_directory: str = "",
    like_worker: bool = False,
    terminal: tuple[Side, Side] | None = None,
    takes_input: bool = False,
) -> None:
    """Run a command until it ends or the client leaves; without one, the user's shell.

    The directory is relative to the node's working directory. `like_worker` gives the command the
    environment of a worker. A terminal has rows and columns; without one there are plain pipes.
    """
    config = caller.node.config
    pool = caller.node.tenants.compute_pool[0] if like_worker else ""
    variables = environment_of(config, pool)
    if terminal is not None and not command:
        variables.setdefault("SHELL", _shell())
    variables.update(environment or {})
    program = ProgramConfig(
        command or [variables.get("SHELL") or _shell()],
        os.path.join(config.working_directory, os.path.expanduser(working_directory)),
        variables,
        terminal=terminal is not None,
    )
    try:
        execution = _Execution(caller, program, terminal, takes_input=takes_input)
    except (OSError, ValueError) as problem:
        raise PoolError(f"the command cannot be run: {problem}") from None
    with contextlib.closing(execution):
        execution.serve()


class _Execution:
    """One command, and the threads that carry its input and output."""

    def __init__(
        self,
        caller: Caller,
        config: ProgramConfig,
        terminal: tuple[int, int] | None,
        *,
        takes_input: bool,
    ) -> None:
        self._caller, self._channel = caller, caller.channel
        self._terminal = -1
        self._outputs: dict[int, str] = {}
        self._inputs: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._waiting = 0
        self._input_end = -1
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        theirs = self._open_streams(terminal, takes_input=takes_input)
        try:
            self._program = RunningProgram(config, theirs)
        except BaseException:
            self._close_descriptors()
            if self._input_end >= 0:
                os.close(self._input_end)
            raise
        finally:
            for descriptor in set(theirs):
                os.close(descriptor)

    def _open_streams(
        self, terminal: tuple[int, int] | None, *, takes_input: bool
    ) -> tuple[int, int, int]:
        """Make the pipes or the terminal; returns the command's ends of them."""
        if terminal is not None:
            self._terminal, theirs = os.openpty()
            self._resize(*terminal)
            self._outputs = {self._terminal: "stdout"}
            self._input_end = os.dup(self._terminal)
            return theirs, theirs, theirs
        output, theirs = os.pipe()
        errors, their_errors = os.pipe()
        self._outputs = {output: "stdout", errors: "stderr"}
        if takes_input:
            given, self._input_end = os.pipe()
        else:
            given = os.open(os.devnull, os.O_RDONLY)
        return given, theirs, their_errors

    def serve(self) -> None:
        """Tell whether the command runs; then carry bytes until the client leaves."""
        status = self._program.next_status()
        if status is None or status.problem:
            said = status.problem if status is not None else "its process was killed as it started"
            self._channel.send(Reply(problem=said))
            return
        self._caller.reply({"pid": status.pid})
        for carry in (self._carry_output, self._carry_input):
            thread = threading.Thread(target=carry, name="skyward-exec", daemon=True)
            thread.start()
            self._threads.append(thread)
        while True:
            part, body = self._caller.next_part()
            try:
                self._take(part.what, part.arguments, body)
            except (msgspec.ValidationError, ValueError) as problem:
                raise ProtocolError(f"{part.what!r} to a command: {problem}") from problem

    def _take(self, what: str, arguments: object, body: bytearray) -> None:
        match what:
            case "input" if self._input_end >= 0:
                with self._lock:
                    self._waiting += len(body)
                    if self._waiting > WINDOW:
                        raise ProtocolError("the client sends more input than it may")
                self._inputs.put(bytes(body) or None)
            case "signal":
                self._program.signal(msgspec.convert(arguments, SignalRequest).number)
            case "size":
                size = msgspec.convert(arguments, TerminalSize)
                self._resize(size.rows, size.columns)
            case _:
                raise ProtocolError(f"a client does not send {what!r} to a command")

    def _resize(self, rows: int, columns: int) -> None:
        if self._terminal >= 0:
            packed = struct.pack("HHHH", rows, columns, 0, 0)
            with contextlib.suppress(OSError):
                fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, packed)

    def _carry_output(self) -> None:
        """Send what the command writes, and its exit code when nobody can write any more."""
        poll = select.poll()
        for descriptor in self._outputs:
            poll.register(descriptor, select.POLLIN)
        left = dict(self._outputs)
        # The client has left: the main loop has noticed, too, and ends the command.
        with contextlib.suppress(OSError):
            while left:
                for descriptor, _ in poll.poll():
                    data = _read(descriptor)
                    if data:
                        self._caller.reply(left[descriptor], data)
                    else:
                        poll.unregister(descriptor)
                        del left[descriptor]
            status = self._program.next_status()
            if status is None or status.code is None:
                self._channel.send(Reply(problem="the command was killed, with its supervisor"))
            else:
                self._channel.send(Reply({"code": status.code}))

    def _carry_input(self) -> None:
        """Write what the client sends, and say how much was taken, so that it sends more."""
        closed = False
        while (data := self._inputs.get()) is not None:
            count = len(data)
            try:
                while data and not closed:
                    data = data[os.write(self._input_end, data) :]
            except OSError:
                # The command reads no more, or has ended; the rest goes nowhere.
                closed = True
            with self._lock:
                self._waiting -= count
            with contextlib.suppress(OSError):
                self._caller.reply({"taken": count, "closed": closed})
        if self._input_end >= 0:
            os.close(self._input_end)

    def close(self) -> None:
        """End the command if it still runs, and the threads."""
        self._channel.abort()
        self._inputs.put(None)
        self._program.close()
        for thread in self._threads:
            thread.join()
        if not self._threads and self._input_end >= 0:
            os.close(self._input_end)
        self._program.forget()
        self._close_descriptors()

    def _close_descriptors(self) -> None:
        for descriptor in self._outputs:
            os.close(descriptor)
        self._outputs = {}


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, PART)
    except OSError:
        # On Linux, a terminal that no process has open.
        return b""


def _shell() -> str:
    """The user's shell, as the node's system knows it."""
    with contextlib.suppress(KeyError):
        shell = pwd.getpwuid(os.getuid()).pw_shell
        if shell and os.access(shell, os.X_OK):
            return shell
    return "/bin/sh"
