"""A command on several nodes at once: input for all of them, signals, the highest exit code."""

from __future__ import annotations

import contextlib
import os
import queue
import select
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType

from skyward.compute.workbench import Reachable
from skyward.compute.workbench.commands import NodeCommand
from skyward.errors import SkywardError

Show = Callable[[int, str, bytes], None]
"""Shows what a node's command has written: node, stream, bytes."""
_PIECE = 64 << 10
_LOST = 255
_ENDED, _INTERRUPTED = "ended", "interrupted"


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
