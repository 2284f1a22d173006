"""A piped machine: what comes and goes through the streams of a program."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

import skyward as sky
from skyward.providers.container.machine import ContainerMachine
from skyward.providers.piped import Kept, Piped, program


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


# Below a keeper.


class BelowKeeper(Kept):
    """This machine, through a keeper that ends when the pipe to it is closed."""

    def __init__(self, name: str) -> None:
        config = {"name": name, "pool": "p", "node": 0, "end": 0, "dropped": ["SECRET_"]}
        code = f"{program('keeper')}\nkeep_for_actor(json.loads(sys.argv[1]))"
        code = code.replace('if __name__ == "__main__":', "if False:")
        self.owner = subprocess.Popen(
            [sys.executable, "-I", "-c", code, json.dumps(config)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self.owner.stdout is not None
        self.folder = Path(self.owner.stdout.readline().decode().strip())
        self.owner.wait(30)

    async def dial(self, endpoint: str) -> socket.socket:
        assert endpoint == "keeper"
        end = socket.socket(socket.AF_UNIX)
        end.connect(str(self.folder / "s"))
        return end

    async def why_lost(self) -> str:
        return "its keeper has ended"

    def close(self) -> None:
        """End the owner's pipe, and wait for the keeper."""
        assert self.owner.stdin is not None
        assert self.owner.stdout is not None
        self.owner.stdin.close()
        with self.owner.stdout as told:
            told.read()


def test_a_keeper_ends_with_its_owner_and_takes_all_that_it_started_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "x")
    machine = BelowKeeper(f"sky.test.{uuid.uuid4().hex[:8]}")
    try:
        # It leaves its group and its parent, and forgets what it is below.
        stays = "setsid env -i sleep 1000 </dev/null >/dev/null 2>&1 & echo $!"
        status, said = ran(machine, "sh", "-c", stays)
        assert status == 0
        told = ran(machine, "printenv", "SKYWARD_KEEPER", "SECRET_TOKEN")
        assert told == (1, f"{machine.folder}\n".encode())
        sleeping = psutil.Process(int(said))
    finally:
        machine.close()
    assert not sleeping.is_running()
    assert not machine.folder.exists()


def test_a_relay_in_a_container_that_takes_nothing_leaves_no_socket_open() -> None:
    ours, theirs = socket.socketpair()
    theirs.close()

    class Ended(ContainerMachine):
        python = None

        def __init__(self) -> None: ...

        async def pipe(self, command: Sequence[str]) -> socket.socket:
            return ours

    with pytest.raises(BrokenPipeError):
        asyncio.run(Ended().dial("unix:/nowhere"))
    assert ours.fileno() == -1
