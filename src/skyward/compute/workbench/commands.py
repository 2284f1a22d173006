"""Commands on nodes: the client's end of one, of one on several nodes, and of a terminal."""

from __future__ import annotations

import contextlib
import fcntl
import os
import queue
import select
import signal
import struct
import sys
import termios
import threading
import tty
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

from skyward.closing import Closing
from skyward.compute.workbench import Reachable
from skyward.errors import ConfigurationError, NodeLostError, SkywardError
from skyward.wire.channel import PART

WINDOW = 1 << 20
"""How many bytes of input the agent holds until the command has taken them."""
Show = Callable[[int, str, bytes], None]
"""Shows what a node's command has written: node, stream, bytes."""
_PIECE = 64 << 10
_LOST = 255
_ENDED, _INTERRUPTED = "ended", "interrupted"
_INPUT, _OUTPUT = 0, 1
_PASSED_ON = ("TERM", "COLORTERM", "LANG", "LC_ALL", "LC_CTYPE")
"""Variables that tell programs what the terminal here can show."""


class NodeCommand(Closing):
    """A command that runs on a node for as long as this object is open.

    One thread reads `output`; any thread may send input and signals meanwhile.

    >>> with NodeCommand(pool, 0, ["nvidia-smi"]) as command:
    ...     for stream, data in command.output(): ...
    ...     command.code
    """

    def __init__(
        self,
        pool: Reachable,
        node: int,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        like_worker: bool = False,
        terminal: tuple[int, int] | None = None,
        takes_input: bool = False,
    ) -> None:
        """Start the command; `PoolError` if the node cannot.

        No command is the user's shell. `terminal` is its rows and columns.
        """
        self.node = node
        self.code: int | None = None
        """The exit code, once `output` has ended; for a signal, 128 and its number."""
        self._room = WINDOW
        self._unread = False
        self._changed = threading.Condition()
        self._connection = pool.service(node, "exec")
        try:
            self._connection.send(
                "run",
                command=list(command),
                environment=dict(environment or {}),
                like_worker=like_worker,
                terminal=terminal,
                takes_input=takes_input,
            )
            self._connection.next_part()
        except (EOFError, OSError) as problem:
            self._connection.close()
            raise self._lost(problem) from problem
        except BaseException:
            self._connection.close()
            raise

    def output(self) -> Iterator[tuple[str, bytes]]:
        """What the command writes, as it comes: the stream's name, and bytes."""
        try:
            while self.code is None:
                try:
                    reply, data = self._connection.next_part()
                except (EOFError, OSError) as problem:
                    raise self._lost(problem) from problem
                if isinstance(reply.value, str):
                    yield reply.value, bytes(data)
                elif isinstance(reply.value, dict):
                    self._note(reply.value)
        finally:
            with self._changed:
                self._unread = True
                self._changed.notify_all()

    def _note(self, told: dict[str, Any]) -> None:
        if "code" in told:
            self.code = int(told["code"])
            return
        with self._changed:
            self._room += int(told.get("taken", 0))
            self._unread = self._unread or bool(told.get("closed"))
            self._changed.notify_all()

    def _lost(self, problem: Exception) -> NodeLostError:
        reason = str(problem) or "no connection"
        return NodeLostError(
            f"node {self.node} is gone, and the command with it: {reason}; "
            "`sky ps` shows the pools that are there"
        )

    def send_input(self, data: bytes) -> bool:
        """Send bytes to the command's input; False if it reads no more.

        Waits while the command has not taken earlier ones.
        """
        while data:
            part, data = data[:PART], data[PART:]
            with self._changed:
                while not self._unread and self._room < len(part):
                    self._changed.wait()
                if self._unread:
                    return False
                self._room -= len(part)
            try:
                self._connection.send("input", part)
            except OSError:
                # The reader of `output` says why.
                return False
        return not self._unread

    def end_input(self) -> None:
        """Tell the command that its input is complete."""
        self._connection.send("input")

    def signal(self, number: int) -> None:
        """Send a signal to the command and its process group."""
        self._connection.send("signal", number=int(number))

    def resize(self, rows: int, columns: int) -> None:
        """Give the command's terminal another size."""
        self._connection.send("size", rows=rows, columns=columns)

    def close(self) -> None:
        """End the command, if it still runs, with everything that it has started."""
        with self._changed:
            self._unread = True
            self._changed.notify_all()
        self._connection.close()


# A command on several nodes at once: input for all of them, signals, the exit codes.


def run_everywhere(
    pool: Reachable,
    nodes: Sequence[int],
    command: Sequence[str],
    show: Show,
    *,
    environment: Mapping[str, str] | None = None,
    like_worker: bool = False,
    given: int | None = None,
) -> dict[int, int]:
    """Run a command on nodes and wait; returns the exit codes by node.

    `given` is a descriptor whose bytes all commands get as their input. The first Ctrl-C goes to
    the commands; the third ends them. A node that is lost meanwhile raises after the others ended.
    """
    commands: list[NodeCommand] = []
    problems: list[Exception] = []
    events: queue.SimpleQueue[str] = queue.SimpleQueue()
    with _interrupts(events), contextlib.ExitStack() as opened:
        for node in nodes:
            made = NodeCommand(
                pool,
                node,
                command,
                environment=environment,
                like_worker=like_worker,
                takes_input=given is not None,
            )
            commands.append(opened.enter_context(made))
        for each in commands:
            threading.Thread(
                target=_read, args=(each, show, problems, events), name="skyward-exec", daemon=True
            ).start()
        if given is not None:
            opened.enter_context(_feeding(given, commands))
        _wait(events, commands)
    if problems:
        raise problems[0]
    return {each.node: _LOST if each.code is None else each.code for each in commands}


def _read(
    command: NodeCommand,
    show: Show,
    problems: list[Exception],
    events: queue.SimpleQueue[str],
) -> None:
    try:
        for stream, data in command.output():
            show(command.node, stream, data)
    except (SkywardError, OSError) as problem:
        # Among them: nobody reads the output any more, as if the command ran here.
        problems.append(problem)
        command.close()
    finally:
        events.put(_ENDED)


@contextlib.contextmanager
def _interrupts(events: queue.SimpleQueue[str]) -> Iterator[None]:
    """Make events of Ctrl-C, so that none is lost, and the third ends the block."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    count = 0

    def interrupted(number: int, frame: FrameType | None) -> None:
        nonlocal count
        count += 1
        if count > 2:
            raise KeyboardInterrupt
        events.put(_INTERRUPTED)

    before = signal.signal(signal.SIGINT, interrupted)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _wait(events: queue.SimpleQueue[str], commands: list[NodeCommand]) -> None:
    """Wait for the end of all commands; the first interrupt goes to them, the second ends them."""
    left, number = len(commands), signal.SIGINT
    while left:
        if events.get() == _ENDED:
            left -= 1
            continue
        for command in commands:
            with contextlib.suppress(OSError):
                command.signal(number)
        number = signal.SIGTERM


@contextlib.contextmanager
def _feeding(given: int, commands: list[NodeCommand]) -> Iterator[None]:
    """Send what can be read from a descriptor to all commands, until the block ends."""
    woken, waking = os.pipe()
    thread = threading.Thread(
        target=_feed, args=(given, commands, woken), name="skyward-input", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        os.write(waking, b".")
        for command in commands:
            # A thread that waits until a command takes more wakes up.
            command.close()
        thread.join()
        os.close(woken)
        os.close(waking)


def _feed(given: int, commands: list[NodeCommand], woken: int) -> None:
    poll = select.poll()
    poll.register(woken, select.POLLIN)
    poll.register(given, select.POLLIN)
    reading = list(commands)
    with contextlib.suppress(OSError):
        while reading:
            ready = {descriptor for descriptor, _ in poll.poll()}
            if woken in ready:
                return
            data = os.read(given, _PIECE)
            if not data:
                for command in reading:
                    with contextlib.suppress(OSError):
                        command.end_input()
                return
            reading = [command for command in reading if command.send_input(data)]


# On a terminal.


def open_terminal(
    pool: Reachable, node: int, command: Sequence[str] = (), *, like_worker: bool = False
) -> int:
    """Run the user's shell, or a command, on a terminal of the node; returns its exit code.

    Every key goes to the node, also Ctrl-C, Ctrl-D and Ctrl-Z. The terminal here is restored
    whatever happens.
    """
    if not (os.isatty(_INPUT) and os.isatty(_OUTPUT)):
        raise ConfigurationError(
            "a shell needs a terminal here, and the input or the output is none; run one command "
            "with `sky exec NAME -- COMMAND`"
        )
    passed = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    passed.setdefault("LANG", "C.UTF-8")
    with NodeCommand(
        pool, node, command, environment=passed, like_worker=like_worker, terminal=_size()
    ) as running:
        return _Session(running).run()


class _Session:
    """Keys go there and output comes here, until the program on the node ends."""

    def __init__(self, running: NodeCommand) -> None:
        self._running = running
        self._problem: Exception | None = None
        self._ended = threading.Event()
        self._woken, self._waking = os.pipe()
        os.set_blocking(self._waking, False)

    def run(self) -> int:
        sys.stdout.flush()
        reader = threading.Thread(target=self._show, name="skyward-terminal", daemon=True)
        try:
            with _raw(), self._signals():
                reader.start()
                self._send_keys()
        finally:
            self._running.close()
            if reader.ident is not None:
                reader.join()
            os.close(self._woken)
            os.close(self._waking)
        if self._problem is not None:
            raise self._problem
        return self._running.code if self._running.code is not None else 255

    def _show(self) -> None:
        try:
            for _, data in self._running.output():
                while data:
                    data = data[os.write(_OUTPUT, data) :]
        except (SkywardError, OSError) as problem:
            self._problem = problem
        finally:
            self._ended.set()
            self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._waking, b".")

    def _send_keys(self) -> None:
        size = _size()
        poll = select.poll()
        poll.register(self._woken, select.POLLIN)
        poll.register(_INPUT, select.POLLIN)
        while not self._ended.is_set():
            for descriptor, _ in poll.poll():
                if descriptor == self._woken:
                    os.read(self._woken, _PIECE)
                    if (now := _size()) != size:
                        size = now
                        with contextlib.suppress(OSError):
                            self._running.resize(*size)
                elif keys := _read_keys():
                    self._running.send_input(keys)
                else:
                    # The terminal here is gone; the program on the node learns that, too.
                    return

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Follow the size of the window; leave in order when this process is asked to end."""

        def resized(number: int, frame: FrameType | None) -> None:
            self._wake()

        def leave(number: int, frame: FrameType | None) -> None:
            raise SystemExit(128 + number)

        handlers = {signal.SIGWINCH: resized, signal.SIGTERM: leave, signal.SIGHUP: leave}
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@contextlib.contextmanager
def _raw() -> Iterator[None]:
    """Have the terminal pass on every key as it is."""
    before = termios.tcgetattr(_INPUT)
    try:
        tty.setraw(_INPUT)
        yield
    finally:
        # It may be gone by now.
        with contextlib.suppress(termios.error):
            termios.tcsetattr(_INPUT, termios.TCSADRAIN, before)


def _read_keys() -> bytes:
    try:
        return os.read(_INPUT, _PIECE)
    except OSError:
        return b""


def _size() -> tuple[int, int]:
    """Rows and columns of the terminal here."""
    try:
        packed = fcntl.ioctl(_OUTPUT, termios.TIOCGWINSZ, b"\0" * 8)
    except OSError:
        return 24, 80
    rows, columns, _, _ = struct.unpack("HHHH", packed)
    return rows or 24, columns or 80
