"""A piped machine: what comes and goes through the streams of a program."""

from __future__ import annotations

import asyncio
import json
import os
import select
import socket
import struct
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

import skyward as sky
from skyward.providers.container.machine import ContainerMachine
from skyward.providers.piped import Kept, Piped, program, relay_command


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
        each.wait(100)


def test_a_greeting_is_not_the_commands_output(machine: Here) -> None:
    assert ran(machine, "echo", "hello") == (0, b"hello\n")


def test_the_status_is_that_of_the_command(machine: Here) -> None:
    assert ran(machine, "sh", "-c", "kill -9 $$") == (137, b"")
    assert ran(machine, "no-such-command-here")[0] == 127


def test_input_and_output_may_hold_the_mark_of_a_line(machine: Here) -> None:
    data = b"\1" * 99 + b"\n\1x 1\n" * 9 + b"\1"
    assert ran(machine, "cat", input=data) == (0, data)


class InPieces(Piped):
    """A machine that says what the test says, in pieces of one size."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.said = b""

    async def pipe(self, command: Sequence[str]) -> socket.socket:
        # Of such a socket, one piece is read at a time.
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        mark = b"\1" + command[3].encode()
        self.said = b"\1" + mark + b" 7" + mark[:9] + b"\n" + mark[:-1] + b" 7\n"
        whole = mark + b" 42\n" + self.said + mark + b" 3\n"
        with theirs:
            for at in range(0, len(whole), self.size):
                theirs.send(whole[at : at + self.size])
        return ours

    async def why_lost(self) -> str:
        return "its last line was not seen"


@pytest.mark.parametrize("size", [1, 2, 7, 36, 1 << 10])
def test_output_is_whole_however_it_comes_in_pieces(size: int) -> None:
    machine = InPieces(size)
    assert ran(machine, "anything") == (3, machine.said)


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


def test_a_command_of_whose_shell_nothing_was_heard_is_begun_once_more(machine: Here) -> None:
    pipe, lost = machine.pipe, [True, False, True, True]

    async def losing(command: Sequence[str]) -> socket.socket:
        if not lost.pop(0):
            return await pipe(command)
        ours, theirs = socket.socketpair()
        theirs.close()
        return ours

    machine.pipe = losing  # type: ignore[method-assign]
    machine.begins_again = True
    assert ran(machine, "echo", "hello") == (0, b"hello\n")
    with pytest.raises(sky.errors.UnreachableError, match="its shell was killed"):
        ran(machine, "echo", "hello")
    assert not lost


def test_a_command_whose_shell_is_gone_is_lost(machine: Here) -> None:
    with pytest.raises(sky.errors.UnreachableError, match="its shell was killed"):
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
    """This machine, through a keeper that ends with its owner: an actor, or a job of Slurm's."""

    def __init__(self, owner: str) -> None:
        self.owner, name = owner, uuid.uuid4().hex[:8]
        config = {"pool": "p", "node": 0, "nodes": [0], "end": 0, "dropped": ["SLURM_"]}
        config["name"] = f"sky.test.{name}"
        code = program("keeper")
        if owner == "actor":
            code += "\nkeep_for_actor(json.loads(sys.argv[1]))"
            code = code.replace('if __name__ == "__main__":', "if False:")
        self.started = subprocess.Popen(
            [sys.executable, "-I", "-c", code, json.dumps(config)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "SLURM_JOB_ID": name, "SLURMD_NODENAME": "n", "SLURM_PROCID": "0"},
        )
        self.folder = Path(f"/tmp/sky.slurm.{name}.n")
        if owner == "actor":
            assert self.started.stdout is not None
            self.folder = Path(self.started.stdout.readline().decode().strip())
            self.started.wait(100)

    async def dial(self, endpoint: str) -> socket.socket:
        assert endpoint == "keeper"
        end = socket.socket(socket.AF_UNIX)
        end.connect(str(self.folder / "s"))
        return end

    async def why_lost(self) -> str:
        return "its keeper has ended"

    def close(self) -> None:
        """End the owner's pipe, or signal what Slurm signals, and wait for the keeper."""
        assert self.started.stdin is not None
        assert self.started.stdout is not None
        if self.owner == "job":
            self.started.terminate()
        self.started.stdin.close()
        with self.started.stdout as held:
            assert select.select([held], [], [], 60)[0], "the keeper has outlived its owner"
        self.started.wait(100)


@pytest.mark.parametrize("owner", ["actor", "job"])
def test_a_keeper_ends_with_its_owner_and_takes_all_that_it_started_with_it(
    owner: str, eventually: Callable[..., None]
) -> None:
    machine = BelowKeeper(owner)
    try:
        eventually((machine.folder / "s").exists, 30, "the keeper")
        # It leaves its group and its parent, and forgets what it is below. When the number is
        # there, it has: until then, it ends with its command.
        begun = "echo $$; exec env -i sleep 1000 </dev/null >/dev/null 2>&1"
        stays = f"pid=$(setsid sh -c '{begun}' &); echo $pid"
        status, said = ran(machine, "sh", "-c", stays)
        assert status == 0
        told = ran(machine, "printenv", "SKYWARD_KEEPER", "SLURM_PROCID")
        assert told == (1, f"{machine.folder}\n".encode())
        sleeping = psutil.Process(int(said))
    finally:
        machine.close()
    assert not sleeping.is_running()
    assert not machine.folder.exists()


# Through a relay.


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


def relayed(data: bytes, *, framed: bool) -> tuple[bytes, bytes]:
    """What a process that listens gets through a relay, and what comes back when that has ended."""
    listener = socket.create_server(("127.0.0.1", 0))
    endpoint = f"tcp:127.0.0.1:{listener.getsockname()[1]}"
    command, text = relay_command(sys.executable, endpoint, *(["framed"] if framed else []))
    relay = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    got = bytearray()

    def answer() -> None:
        with listener, listener.accept()[0] as end:
            while piece := end.recv(1 << 20):
                got.extend(piece)
            end.sendall(got[::-1])

    answering = threading.Thread(target=answer, daemon=True)
    answering.start()
    sent = struct.pack(">I", len(data)) + data + struct.pack(">I", 0) if framed else data
    with relay:
        try:
            back, _ = relay.communicate(text + sent, timeout=200)
        finally:
            relay.kill()
    answering.join(100)
    return bytes(got), back


def unframed(data: bytes) -> bytes:
    """The pieces up to the empty one, which must be the last."""
    whole, at = b"", 0
    while size := struct.unpack_from(">I", data, at)[0]:
        whole += data[at + 4 : at + 4 + size]
        at += 4 + size
    assert at + 4 == len(data)
    return whole


@pytest.mark.parametrize("framed", [False, True])
def test_a_relay_passes_every_byte_on_and_the_end_of_each_direction(framed: bool) -> None:
    data = os.urandom(1 << 20)
    got, back = relayed(data, framed=framed)
    assert got == data
    assert (unframed(back) if framed else back) == data[::-1]
