"""A terminal on a node, shown in the terminal of this process."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import struct
import sys
import termios
import threading
import tty
from collections.abc import Iterator, Sequence
from types import FrameType

from skyward.compute.workbench import Reachable
from skyward.compute.workbench.commands import NodeCommand
from skyward.errors import ConfigurationError, SkywardError

_INPUT, _OUTPUT = 0, 1
_PIECE = 64 << 10
_PASSED_ON = ("TERM", "COLORTERM", "LANG", "LC_ALL", "LC_CTYPE")
"""Variables that tell programs what the terminal here can show."""


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
