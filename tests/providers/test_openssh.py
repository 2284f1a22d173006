"""What is different where the program `ssh` carries the connections to SSH hosts, and where not."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Coroutine, Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import skyward as sky
from skyward.providers import Order
from skyward.providers.hosts import machine as ssh_machine
from skyward.providers.hosts import openssh
from skyward.providers.hosts.machine import SSHHost, SSHMachine
from skyward.testing import plain_request

from .ssh_hosts import MARKERS, Sshd, another, created, hosts_held, made, refusal, said, serving

LEAVES = """
import asyncio, os, sys
import skyward as sky
from skyward.providers import Order
from skyward.testing import plain_request

async def scenario():
    port, key, known = int(sys.argv[1]), *sys.argv[2:]
    provider = sky.SSH(["127.0.0.1"], port=port, key=key, known_hosts=known, config=None)
    machine = await provider.create(Order("t-killed", 0, plain_request()))
    end = await machine.dial(f"tcp:127.0.0.1:{port}")
    print("on", flush=True)
    await machine.run(["sleep", "600"])

asyncio.run(scenario())
"""


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where masters have their folders; short, because sockets are in them."""
    with tempfile.TemporaryDirectory(prefix="sky-", dir="/tmp") as name:
        monkeypatch.setenv("TMPDIR", name)
        monkeypatch.setattr(tempfile, "tempdir", name)
        yield Path(name)


def masters(folders: Path, *names: str) -> list[psutil.Process]:
    """The processes that have one of these folders in their commands."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if str(folders) in " ".join(process.cmdline()) and process.name() in (
                names or ("ssh", "sh")
            ):
                found.append(process)
    return found


def test_nothing_is_left_of_a_master(sshd: Sshd, folders: Path) -> None:
    async def scenario() -> None:
        async with made(sshd.provider("127.0.0.1")) as machine:
            _task, endpoint = await serving(machine, "import time; time.sleep(600)\n")
            _task.add_done_callback(lambda done: done.exception())
            end = await machine.dial(endpoint)
            assert masters(folders)
            # The agent and bulk data have a connection each, and no dialled socket has a name.
            names = [path.name for path in folders.glob("*/*")]
            assert set(names) == {"config", "control"}
            end.close()
        assert hosts_held() == 0

    asyncio.run(scenario())
    assert masters(folders) == []
    assert list(folders.iterdir()) == []


def test_a_refused_login_leaves_nothing(sshd: Sshd, folders: Path, tmp_path: Path) -> None:
    refusal(sshd.provider(known_hosts=str(tmp_path / "none")), sky.errors.HostKeyError)
    assert masters(folders) == []
    assert list(folders.iterdir()) == []


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT])
def test_nothing_is_left_of_a_master_whose_client_is_killed(
    sshd: Sshd, folders: Path, sent: signal.Signals, eventually: Callable[..., None]
) -> None:
    command = [sys.executable, "-c", LEAVES, str(sshd.port), sshd.key, sshd.known_hosts]
    client = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    )
    assert client.stdout is not None
    with client.stdout:
        assert client.stdout.readline() == b"on\n"
        assert masters(folders)
        os.killpg(client.pid, sent)
        client.wait()
    eventually(lambda: not masters(folders), 60, "the end of ssh")
    eventually(lambda: not list(folders.iterdir()), 60, "the end of the folder")
    machine = sshd.provider("127.0.0.1")
    for each in asyncio.run(machine.find("t-killed")):
        asyncio.run(each.destroy())


async def leaves_all_open(machine: SSHMachine, endpoint: str) -> None:
    """The end of a loop whose machine nobody has left."""
    (await machine.dial(endpoint)).close()


async def is_leaving(machine: SSHMachine, endpoint: str) -> None:
    """The end of a loop in the middle of a leave."""
    (await machine.dial(endpoint)).close()
    leaving = asyncio.create_task(machine.leave())
    await asyncio.sleep(0)
    assert not leaving.done()


async def hears_of_an_end_late(machine: SSHMachine, endpoint: str) -> None:
    """The end of a loop whose last channel is freed when all tasks were cancelled already."""
    end = await machine.dial(endpoint)
    await machine._release()

    async def close_late() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            end.close()
            while machine._channels:
                await asyncio.sleep(0)

    closing = asyncio.create_task(close_late())
    await asyncio.sleep(0)
    assert not closing.done()


async def is_logging_in(machine: SSHMachine, endpoint: str) -> None:
    """The end of a loop while a login of its own is given up."""
    (await machine.dial(endpoint)).close()
    # What is not the agent gets a connection of its own.
    dialling = asyncio.create_task(machine.dial("unix:/nowhere"))
    host = ssh_machine.hosts_here().held[machine._destination]
    while len(list(Path(tempfile.gettempdir()).iterdir())) < 2:
        await asyncio.sleep(0)
    host._opening[True].cancel()
    await asyncio.sleep(0)
    assert not dialling.done()


@pytest.mark.parametrize("left", [leaves_all_open, is_leaving, hears_of_an_end_late, is_logging_in])
def test_no_master_outlives_its_event_loop(
    sshd: Sshd,
    folders: Path,
    caplog: pytest.LogCaptureFixture,
    left: Callable[[SSHMachine, str], Coroutine[Any, Any, None]],
) -> None:
    async def scenario() -> Path:
        order = Order(f"t-{left.__name__}", 0, plain_request())
        machine = await sshd.provider("127.0.0.1").create(order)
        with socket.create_server(("127.0.0.1", 0)) as agent:
            await left(machine, f"tcp:127.0.0.1:{agent.getsockname()[1]}")
        return MARKERS / machine._label

    asyncio.run(scenario()).rmdir()
    assert masters(folders) == []
    assert list(folders.iterdir()) == []
    # A process that nobody has waited for is a warning, a task that never ended is logged.
    gc.collect()
    assert [record.message for record in caplog.records] == []


def test_a_channel_that_the_host_does_not_close_keeps_no_master(
    sshd: Sshd, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ssh_machine, "CLOSE_SECONDS", 0.05)

    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as agent:
            async with made(sshd.provider("127.0.0.1")) as machine:
                (await machine.dial(f"tcp:127.0.0.1:{agent.getsockname()[1]}")).close()
            assert masters(folders) == []

    asyncio.run(scenario())


def test_a_master_that_dies_is_started_again(sshd: Sshd, folders: Path) -> None:
    async def scenario() -> None:
        async with made(sshd.provider("127.0.0.1")) as machine:
            out = bytearray()
            task = asyncio.create_task(
                machine.run(["sh", "-c", "echo on; sleep 600"], output=out.extend)
            )
            while not out:
                await asyncio.sleep(0.005)
            (master,) = masters(folders, "ssh")
            master.kill()
            master.wait(60)
            # The loop has not seen its end: nobody hears of it who had asked for nothing.
            assert await said(machine, "echo", "here") == "here"
            with pytest.raises(sky.errors.UnreachableError, match="connection was lost"):
                await task

    asyncio.run(scenario())
    assert list(folders.iterdir()) == []


def test_a_configuration_for_terminals_does_no_harm(
    sshd: Sshd, tmp_path: Path, folders: Path
) -> None:
    """Its own master, forwarded ports, commands and silence are for people."""
    config = tmp_path / "my config"
    config.write_text(
        f"""Host gpu
  HostName 127.0.0.1
  Port {sshd.port}
  ControlMaster auto
  ControlPath {folders}/mine-%C
  ControlPersist yes
  LocalForward {sshd.port} 127.0.0.1:1
  ExitOnForwardFailure yes
  RemoteCommand cat
  RequestTTY force
  PermitLocalCommand yes
  LocalCommand touch {tmp_path}/local
  LogLevel QUIET
  SendEnv SKY_FROM_HERE
"""
    )

    async def scenario() -> None:
        provider = sshd.provider("gpu", port=None, config=str(config))
        async with made(provider) as machine:
            os.environ["SKY_FROM_HERE"] = "sent"
            try:
                told = await said(machine, "sh", "-c", "echo $SKY_FROM_HERE; tty || :")
            finally:
                del os.environ["SKY_FROM_HERE"]
            assert told.split("\n") == ["sent", "not a tty"]

    asyncio.run(scenario())
    assert not (tmp_path / "local").exists()
    assert list(folders.iterdir()) == []


def test_a_mistake_in_the_configuration_is_told_with_its_line(sshd: Sshd, tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text("Host gpu\n  Prot 22\n")

    with pytest.raises(sky.errors.ConfigurationError, match=r"config.*line 2: Bad.*prot") as caught:
        asyncio.run(created(sshd.provider("gpu", config=str(config))))
    assert "'gpu'" in str(caught.value)


def test_a_host_that_forbids_forwarding_is_told_what_to_set(sshd: Sshd, tmp_path: Path) -> None:
    known = tmp_path / "known_hosts"

    async def scenario(port: int) -> None:
        known.write_text(f"[127.0.0.1]:{port} {(sshd.folder / 'host1.pub').read_text()}")
        provider = sshd.provider("127.0.0.1", port=port, known_hosts=str(known))
        async with made(provider) as machine:
            with pytest.raises(ConnectionRefusedError, match="AllowStreamLocalForwarding no"):
                await machine.dial("unix:/nowhere")
            with pytest.raises(
                sky.errors.UnreachableError, match=r"tcp:127\.0\.0\.1:1; set AllowTcpForwarding yes"
            ):
                await machine.dial("tcp:127.0.0.1:1")

    settings = ("AllowStreamLocalForwarding no", "AllowTcpForwarding no")
    with another(sshd, tmp_path, *settings) as port:
        asyncio.run(scenario(port))


def test_a_jump_host_that_drops_a_login_is_asked_again(
    sshd: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All nodes behind it start together, and its sshd takes only so many logins at once."""
    known, was_dropped, dropped = tmp_path / "known_hosts", openssh._was_dropped, []

    async def scenario(port: int) -> None:
        keys = (sshd.folder / "host1.pub").read_text()
        known.write_text(f"{Path(sshd.known_hosts).read_text()}[127.0.0.1]:{port} {keys}")
        greeted = False
        while not greeted:
            # Whoever asked whether it listens may have the only place for a moment.
            other = socket.create_connection(("127.0.0.1", port))
            with contextlib.suppress(ConnectionError):
                greeted = other.recv(4) == b"SSH-"
            if not greeted:
                other.close()
        with other:

            def make_room(said: Iterable[str]) -> bool:
                dropped.append(was_dropped(said))
                other.close()
                return dropped[-1]

            monkeypatch.setattr(openssh, "_was_dropped", make_room)
            jump = f"{sshd.user}@127.0.0.1:{port}"
            provider = sshd.provider("127.0.0.2", jump=jump, known_hosts=str(known))
            async with made(provider) as machine:
                assert await said(machine, "echo", "here") == "here"

    with another(sshd, tmp_path, "MaxStartups 1:100:1") as port:
        asyncio.run(scenario(port))
    assert dropped[0]


def test_the_answer_of_a_command_has_its_status_and_both_streams(sshd: Sshd) -> None:
    async def scenario() -> None:
        async with made(sshd.provider("127.0.0.1")) as machine:
            host = SSHHost(machine._destination)
            line = "cat; echo wrong >&2; exit 7"
            assert await host.answer(line, b"input") == (7, b"input", b"wrong\n")
            status, _, _ = await host.answer("kill -KILL $$")
            assert status not in (0, None)
            await host.leave()

    asyncio.run(scenario())


def test_a_key_that_is_none_is_told(sshd: Sshd, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("nothing\n")
    key.chmod(0o600)

    with pytest.raises(sky.errors.ConfigurationError, match=r"key.*not a private key"):
        asyncio.run(created(sshd.provider("127.0.0.1", key=str(key))))


def test_a_key_that_others_may_read_is_told(sshd: Sshd, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_bytes(Path(sshd.key).read_bytes())
    key.chmod(0o644)

    with pytest.raises(sky.errors.ConfigurationError, match="chmod 600"):
        asyncio.run(created(sshd.provider("127.0.0.1", key=str(key))))


@pytest.mark.usefixtures("without_ssh")
def test_where_ssh_cannot_asyncssh_carries_and_the_console_says_so(sshd: Sshd) -> None:
    notes: list[str] = []

    async def scenario() -> None:
        order = Order("t-library", 0, plain_request(), note=notes.append)
        machine = await sshd.provider("127.0.0.1").create(order)
        try:
            assert await said(machine, "echo", "here") == "here"
            task, endpoint = await serving(machine, "end.sendall(end.recv(9)[::-1])\n")
            with await machine.dial(endpoint) as end:
                end.sendall(b"dial")
                assert await asyncio.to_thread(end.recv, 9) == b"laid"
            assert await task == 0
            with pytest.raises(ConnectionRefusedError):
                await machine.dial("unix:/nowhere")
        finally:
            await machine.destroy()

    asyncio.run(scenario())
    assert len(notes) == 1
    assert "asyncssh" in notes[0]
    assert "OpenSSH" in notes[0]


def test_an_ssh_that_is_too_old_or_another_one_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "ssh"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    for version, counts in (
        ("OpenSSH_8.4p1, OpenSSL 1.1.1", False),
        ("Dropbear v2022.83", False),
        ("OpenSSH_8.5p1 Debian-1, OpenSSL 3", True),
        ("OpenSSH_10.2p1, LibreSSL 3.3.6", True),
    ):
        fake.write_text(f"#!/bin/sh\necho '{version}' >&2\n")
        fake.chmod(0o755)
        openssh._version.cache_clear()
        assert (openssh.program() == str(fake)) is counts
        assert (openssh.why_not() == "") is counts
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert openssh.program() is None
    assert openssh.why_not() == "there is no program `ssh` here"
    openssh._version.cache_clear()
