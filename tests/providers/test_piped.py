"""A piped machine: what comes and goes through the streams of a program."""

from __future__ import annotations

import asyncio
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence

import pytest

import skyward as sky
from skyward.providers.piped import Piped


class Here(Piped):
    """This machine, through a shell that may print a greeting."""

    def __init__(self, greeting: str = "", *, ends_input: bool = True) -> None:
        self.greeting, self.ends_input = greeting, ends_input
        self.started: list[subprocess.Popen[bytes]] = []

    async def pipe(self, command: Sequence[str]) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs:
            script = 'printf %s "$0"; exec "$@"'
            whole = ["sh", "-c", script, self.greeting, *command]
            self.started.append(subprocess.Popen(whole, stdin=theirs, stdout=theirs))
        return ours

    async def why_lost(self) -> str:
        return "its shell was killed"


def ran(machine: Piped, *command: str, input: bytes = b"") -> tuple[int, bytes]:
    """The status and the output of a command."""
    said = bytearray()
    status = asyncio.run(machine.run(command, input=input, output=said.extend))
    return status, bytes(said)


@pytest.fixture(params=[True, False], ids=["input ends", "input is counted"])
def machine(request: pytest.FixtureRequest) -> Iterator[Here]:
    here = Here("Welcome!\n\1 back", ends_input=request.param)
    yield here
    for each in here.started:
        each.wait(30)


def test_a_greeting_is_not_the_commands_output(machine: Here) -> None:
    assert ran(machine, "echo", "hello") == (0, b"hello\n")


def test_the_status_is_that_of_the_command(machine: Here) -> None:
    assert ran(machine, "sh", "-c", "kill -9 $$") == (137, b"")
    assert ran(machine, "no-such-command-here")[0] == 127


def test_input_and_output_may_hold_the_mark_of_a_line(machine: Here) -> None:
    data = b"\1" * 99 + b"\n\1x 1\n" * 9 + b"\1"
    assert ran(machine, "cat", input=data) == (0, data)


def test_a_command_need_not_read_its_input(machine: Here) -> None:
    assert ran(machine, "true", input=bytes(1 << 22)) == (0, b"")


def test_output_comes_at_once_and_not_with_the_end(machine: Here) -> None:
    async def scenario() -> None:
        came = asyncio.Event()
        script = "echo first; exec sleep 600"
        running = asyncio.create_task(
            machine.run(["sh", "-c", script], output=lambda _: came.set())
        )
        await came.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(scenario())


def test_a_command_whose_shell_is_gone_is_lost(machine: Here) -> None:
    with pytest.raises(sky.UnreachableError, match="its shell was killed"):
        ran(machine, "sh", "-c", "kill -9 $PPID")


def test_a_cancelled_command_ends_with_its_children(
    machine: Here, eventually: Callable[..., None]
) -> None:
    async def scenario() -> list[int]:
        said = bytearray()
        script = "sleep 600 & setsid sleep 600 & echo $! $$; wait"
        running = asyncio.create_task(machine.run(["sh", "-c", script], output=said.extend))
        while b"\n" not in said:
            await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        return [int(each) for each in said.split()]

    for pid in asyncio.run(scenario()):
        eventually(lambda pid=pid: _ended(pid), 30, f"the end of {pid}")


def _ended(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b") ")[2].startswith(b"Z")
    except FileNotFoundError:
        return True
