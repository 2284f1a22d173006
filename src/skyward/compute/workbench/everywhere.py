"""A command on several nodes at once: input for all of them, signals, the highest exit code."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

from skyward.compute.workbench import Reachable
from skyward.compute.workbench.commands import NodeCommand
from skyward.errors import SkywardError

Show = Callable[[int, str, bytes], None]
"""Shows what a node's command has written: node, stream, bytes."""
_PIECE = 64 << 10
_LOST = 255


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
    with contextlib.ExitStack() as opened:
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
        readers = [
            threading.Thread(
                target=_read, args=(each, show, problems), name="skyward-exec", daemon=True
            )
            for each in commands
        ]
        for reader in readers:
            reader.start()
        if given is not None:
            opened.enter_context(_feeding(given, commands))
        _wait(readers, commands)
    if problems:
        raise problems[0]
    return {each.node: _LOST if each.code is None else each.code for each in commands}


def _read(command: NodeCommand, show: Show, problems: list[Exception]) -> None:
    try:
        for stream, data in command.output():
            show(command.node, stream, data)
    except (SkywardError, OSError) as problem:
        # Among them: nobody reads the output any more, as if the command ran here.
        problems.append(problem)
        command.close()


def _wait(readers: list[threading.Thread], commands: list[NodeCommand]) -> None:
    """Wait for the end of all commands; interrupts go to them."""
    interrupts = 0
    for reader in readers:
        while reader.is_alive():
            try:
                reader.join(0.5)
            except KeyboardInterrupt:
                interrupts += 1
                if interrupts > 2:
                    raise
                for command in commands:
                    with contextlib.suppress(OSError):
                        command.signal(signal.SIGINT if interrupts == 1 else signal.SIGTERM)


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
                    command.end_input()
                return
            reading = [command for command in reading if command.send_input(data)]
