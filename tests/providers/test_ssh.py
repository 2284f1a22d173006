"""SSH hosts as machines: their commands, connections and bridges."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

import skyward as sky
from skyward.providers import Order
from skyward.providers.hosts import machine as ssh_machine
from skyward.testing import plain_request

from .. import walks
from .ssh_hosts import LISTENER, Sshd, another, hosts_held, made, said, serving

pytestmark = pytest.mark.usefixtures("carrier")


def test_64_mib_go_in_and_come_out_or_are_not_even_read(sshd: Sshd) -> None:
    data = os.urandom(1 << 20) * 64

    async def scenario() -> None:
        async with made(sshd.provider()) as machine:
            out = bytearray()
            assert await machine.run(["cat"], input=data, output=out.extend) == 0
            assert out == data
            assert await machine.run(["sh", "-c", "exit 3"], input=data) == 3

    asyncio.run(scenario())


async def connections_of(machine: Any, folder: Path, commands: int) -> set[str]:
    """The connections that so many commands have come over, each of which waits for all others."""
    folder.mkdir()
    meet = f"touch {folder}/$$; until [ $(ls {folder} | wc -l) = {commands} ]; do sleep 0.05; done"
    script = f"echo $SSH_CONNECTION; {meet}"
    return set(await asyncio.gather(*(said(machine, "sh", "-c", script) for _ in range(commands))))


def test_more_commands_at_once_than_an_sshd_takes_on_one_connection(
    sshd: Sshd, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with made(sshd.provider()) as machine:
            assert len(await connections_of(machine, tmp_path / "meet", 12)) == 2

    asyncio.run(scenario())


def test_an_sshd_that_takes_few_commands_gets_more_connections(sshd: Sshd, tmp_path: Path) -> None:
    async def scenario(port: int) -> None:
        host = (sshd.folder / "host1.pub").read_text()
        known = tmp_path / "known_hosts"
        known.write_text(f"[127.0.0.1]:{port} {host}")
        provider = sshd.provider("127.0.0.1", port=port, known_hosts=str(known))
        async with made(provider) as machine:
            assert len(await connections_of(machine, tmp_path / "meet", 5)) > 2

    with another(sshd, tmp_path, "MaxSessions 2") as port:
        asyncio.run(scenario(port))


def test_an_output_callback_that_raises_ends_the_command(
    sshd: Sshd, eventually: Callable[..., None]
) -> None:
    async def scenario() -> int:
        seen = bytearray()

        def picky(data: bytes) -> None:
            seen.extend(data)
            raise ZeroDivisionError("not this")

        async with made(sshd.provider()) as machine:
            with pytest.raises(ZeroDivisionError, match="not this"):
                await machine.run(["sh", "-c", "echo $$; sleep 600"], output=picky)
            assert await machine.run(["true"]) == 0
        return int(seen)

    pid = asyncio.run(scenario())
    eventually(lambda: not psutil.pid_exists(pid), 30, "the end of the command")


def test_a_command_that_is_too_long_is_refused(sshd: Sshd) -> None:
    async def scenario() -> None:
        machine = await sshd.provider()._machine("t-long", 0)
        with pytest.raises(ValueError, match="pass what is long as its input"):
            await machine.run(["echo", "x" * 200_000])

    asyncio.run(scenario())


def test_destroying_ends_what_detached_itself(sshd: Sshd, eventually: Callable[..., None]) -> None:
    """A daemon of the pool that stayed in its folder, in a session of its own."""

    async def scenario() -> int:
        async with made(sshd.provider()) as machine:
            script = "setsid sleep 600 >/dev/null 2>&1 </dev/null & echo $!"
            return int(await said(machine, "sh", "-c", script))

    pid = asyncio.run(scenario())
    eventually(lambda: not psutil.pid_exists(pid), 30, "the end of the daemon")


def test_a_lost_node_is_made_again_on_the_same_host(sshd: Sshd) -> None:
    async def scenario() -> None:
        provider = sshd.provider()
        async with made(provider, 1, "t-again") as lost:
            await lost.run(["touch", "left-over"])
            async with made(provider, 1, "t-again") as machine:
                assert machine.id == lost.id
                assert await said(machine, "sh", "-c", "ls left-over || echo clean") != "left-over"

    asyncio.run(scenario())


def test_machines_on_one_host_share_one_connection(sshd: Sshd) -> None:
    async def scenario() -> None:
        provider = sshd.provider("127.0.0.1", "127.0.0.1", "127.0.0.2")
        async with (
            made(provider, 0) as one,
            made(provider, 1) as two,
            made(provider, 2) as other,
        ):
            ways = [await said(each, "sh", "-c", "echo $SSH_CONNECTION") for each in (one, two)]
            assert ways[0] == ways[1] != await said(other, "sh", "-c", "echo $SSH_CONNECTION")
            assert hosts_held() == 2
            await one.destroy()
            assert await two.alive()
        assert hosts_held() == 0

    asyncio.run(scenario())


def test_more_nodes_than_hosts_are_refused() -> None:
    provider = sky.SSH(["gpu1", "gpu2"])

    with pytest.raises(sky.errors.PoolStartError, match=r"SSH has 2 hosts \(gpu1, gpu2\)"):
        asyncio.run(provider.create(Order("t-many", 2, plain_request())))


def test_a_host_that_is_lost_and_comes_back(sshd: Sshd) -> None:
    async def scenario() -> None:
        provider = sshd.provider()
        async with made(provider, 1, "t-lost") as machine, made(provider, 0, "t-lost") as safe:
            out = bytearray()
            task = asyncio.create_task(
                machine.run(["sh", "-c", "echo on; sleep 600"], output=out.extend)
            )
            while not out:
                await asyncio.sleep(0.005)
            sshd.lose(2)
            with pytest.raises(
                sky.errors.UnreachableError, match=r"127\.0\.0\.2.*connection was lost"
            ):
                await task
            with pytest.raises(sky.errors.UnreachableError, match="connection refused"):
                await machine.alive()
            with pytest.raises(sky.errors.UnreachableError, match="connection refused"):
                await machine.run(["true"])
            with pytest.raises(sky.errors.UnreachableError, match="connection refused"):
                await machine.dial("tcp:127.0.0.1:1")
            assert await safe.alive()

            # `sky down` destroys what it can, and hears of the host that it could not reach.
            found = await provider.find("t-lost")
            assert [each.node for each in found] == [0, 1]
            assert await found[0].alive()
            with pytest.raises(sky.errors.UnreachableError, match=r"127\.0\.0\.2"):
                await found[1].destroy()

            sshd.up()
            assert await machine.alive()
        assert hosts_held() == 0

    try:
        asyncio.run(scenario())
    finally:
        sshd.up()


def test_a_host_that_falls_silent_is_noticed_and_connected_to_anew(
    sshd: Sshd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skyward.providers.hosts.machine.ALIVE_SECONDS", 0.5)

    async def scenario() -> None:
        async with made(sshd.provider(timeout=10)) as machine:
            silent = []

            def fall_silent() -> None:
                silent.extend(sshd.daemons(1)[1:])
                for process in silent:
                    process.suspend()

            try:
                fall_silent()
                with pytest.raises(sky.errors.UnreachableError, match="no answer for 10 s"):
                    await machine.dial("tcp:127.0.0.1:1")
                with pytest.raises(ConnectionRefusedError):
                    await machine.dial("tcp:127.0.0.1:1")
                fall_silent()
                with pytest.raises(sky.errors.UnreachableError, match=r"no answer for 0\.5 s"):
                    await machine.alive()
                with pytest.raises(ConnectionRefusedError):
                    await machine.dial("tcp:127.0.0.1:1")
            finally:
                for process in silent:
                    # It may have been told to go, and has gone since another was resumed.
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.resume()
        assert hosts_held() == 0

    asyncio.run(scenario())


def test_a_connection_that_is_lost_refuses_nobody(sshd: Sshd) -> None:
    """Or a node would be given up whose agent listens as ever."""

    async def scenario() -> None:
        async with made(sshd.provider()) as machine:
            silent = sshd.daemons(1)[1:]
            for process in silent:
                process.suspend()
            task = asyncio.create_task(machine.dial("tcp:127.0.0.1:1"))
            await asyncio.wait({task}, timeout=0.3)
            for process in silent:
                process.kill()
            with pytest.raises(sky.errors.UnreachableError, match="the connection was lost"):
                await task

    asyncio.run(scenario())


def test_connecting_goes_on_when_those_who_asked_give_up(
    sshd: Sshd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each waits less than it takes; together they get there."""
    connect, attempts = ssh_machine.connect, []

    async def slowly(destination: Any) -> Any:
        attempts.append(destination)
        await asyncio.sleep(0.5)
        return await connect(destination)

    async def scenario() -> None:
        async with made(sshd.provider()) as machine:
            monkeypatch.setattr(ssh_machine, "connect", slowly)
            assert machine._kept is not None
            machine._kept.retire()
            impatient = 0
            while True:
                try:
                    async with asyncio.timeout(0.2):
                        await machine.dial("tcp:127.0.0.1:1")
                except TimeoutError:
                    impatient += 1
                except ConnectionRefusedError:
                    break
            assert impatient >= 2
            assert len(attempts) == 1
        assert hosts_held() == 0

    asyncio.run(scenario())


def test_what_carries_a_lot_has_a_connection_of_its_own(sshd: Sshd) -> None:
    """The agent's heartbeats do not wait behind it."""

    async def scenario() -> None:
        with (
            socket.create_server(("127.0.0.1", 0)) as agent,
            socket.create_server(("127.0.0.1", 0)) as executor,
        ):
            async with made(sshd.provider()) as machine:
                before = len(sshd.daemons(1))
                for listener in (agent, agent, executor, executor):
                    end = await machine.dial(f"tcp:127.0.0.1:{listener.getsockname()[1]}")
                    end.close()
                    listener.accept()[0].close()
                    after = len(sshd.daemons(1))
                    assert (after > before) == (listener is executor)

    asyncio.run(scenario())


def test_a_cancelled_dial_leaves_no_channel(sshd: Sshd) -> None:
    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            endpoint = f"tcp:127.0.0.1:{listener.getsockname()[1]}"
            async with made(sshd.provider()) as machine:
                for steps in [*range(8, 16)] * 4:  # from having asked to having been answered
                    task = asyncio.create_task(machine.dial(endpoint))
                    for _ in range(steps):
                        await asyncio.sleep(0)
                    task.cancel()
                    await asyncio.wait({task})
                    if not task.cancelled():
                        task.result().close()
                    with (await asyncio.to_thread(listener.accept))[0] as peer:
                        peer.settimeout(100)
                        assert await asyncio.to_thread(peer.recv, 1) == b""

    asyncio.run(scenario())


def test_a_slow_reader_gets_every_byte_after_the_host_has_closed(sshd: Sshd) -> None:
    size = 48 << 20
    script = f"""
block = bytes(range(256)) * 4096
for _ in range({size >> 20}):
    end.sendall(block)
end.close()
"""

    def read(end: socket.socket) -> str:
        digest = hashlib.sha256()
        time.sleep(0.5)  # the host fills every buffer on the way, and is held up
        while data := end.recv(1 << 16):
            digest.update(data)
        return digest.hexdigest()

    async def scenario() -> None:
        async with made(sshd.provider()) as machine:
            task, endpoint = await serving(machine, script)
            with await machine.dial(endpoint) as end:
                expected = hashlib.sha256(bytes(range(256)) * (size >> 8)).hexdigest()
                assert await asyncio.to_thread(read, end) == expected
            assert await task == 0

    asyncio.run(scenario())


def test_closing_a_socket_right_after_writing_loses_nothing(sshd: Sshd) -> None:
    script = """
digest = hashlib.sha256()
while data := end.recv(1 << 20):
    digest.update(data)
print(digest.hexdigest(), flush=True)
"""
    data = os.urandom(8 << 20)

    async def scenario() -> None:
        out = bytearray()
        async with made(sshd.provider()) as machine:
            command = [sys.executable, "-c", LISTENER + script]
            task = asyncio.create_task(machine.run(command, output=out.extend))
            while b"\n" not in out:
                await asyncio.sleep(0.005)
            end = await machine.dial("unix:" + out.decode().strip())

            def send() -> None:
                with end:
                    end.sendall(data)

            await asyncio.to_thread(send)
            assert await asyncio.wait_for(task, 30) == 0
            assert out.decode().split()[1] == hashlib.sha256(data).hexdigest()

    asyncio.run(scenario())


def test_a_closed_socket_ends_the_channel_though_the_host_says_nothing(sshd: Sshd) -> None:
    script = "print(end.recv(1), flush=True)\n"

    async def scenario() -> None:
        async with made(sshd.provider()) as machine:
            task, endpoint = await serving(machine, script)
            (await machine.dial(endpoint)).close()
            assert await asyncio.wait_for(task, 30) == 0
            async with asyncio.timeout(60):
                while machine._channels:
                    await asyncio.sleep(0.005)

    asyncio.run(scenario())


@pytest.mark.parametrize("last_words", [b"", b"no room"])
def test_a_host_that_hangs_up_at_once_does_no_harm(sshd: Sshd, last_words: bytes) -> None:
    def hang_up(listener: socket.socket) -> None:
        for _ in range(20):
            with listener.accept()[0] as peer:
                peer.sendall(last_words)

    def read(end: socket.socket) -> bytes:
        end.settimeout(100)
        with end:
            return b"".join(iter(lambda: end.recv(99), b""))

    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            threading.Thread(target=hang_up, args=(listener,), daemon=True).start()
            endpoint = f"tcp:127.0.0.1:{listener.getsockname()[1]}"
            async with made(sshd.provider()) as machine:
                ends = await asyncio.gather(*(machine.dial(endpoint) for _ in range(20)))
                heard = [await asyncio.to_thread(read, end) for end in ends]
                assert heard == [last_words] * 20
                assert await machine.run(["true"]) == 0

    asyncio.run(scenario())


def test_destroying_a_machine_ends_its_bridges(sshd: Sshd) -> None:
    async def scenario() -> None:
        async with made(sshd.provider()) as machine:
            _task, endpoint = await serving(machine, "import time; time.sleep(600)\n")
            end = await machine.dial(endpoint)
            _task.add_done_callback(lambda done: done.exception())
            await machine.destroy()
            end.settimeout(100)
            with end, contextlib.suppress(ConnectionError):
                assert await asyncio.to_thread(end.recv, 1) == b""
            assert hosts_held() == 0

    asyncio.run(scenario())


def test_dialling_nobody_is_refused_by_name(sshd: Sshd) -> None:
    async def scenario() -> None:
        async with made(sshd.provider()) as machine:
            for endpoint in ("unix:/nowhere", "tcp:127.0.0.1:1"):
                with pytest.raises(ConnectionRefusedError, match=endpoint):
                    await machine.dial(endpoint)

    asyncio.run(scenario())


def test_sockets_leave_no_descriptor_open(sshd: Sshd) -> None:
    async def scenario() -> None:
        async with made(sshd.provider()) as machine:
            listener = socket.create_server(("127.0.0.1", 0))
            endpoint = f"tcp:127.0.0.1:{listener.getsockname()[1]}"
            with listener:
                before = psutil.Process().num_fds()
                for _ in range(20):
                    end = await machine.dial(endpoint)
                    peer = (await asyncio.to_thread(listener.accept))[0]
                    end.close()
                    peer.close()
                async with asyncio.timeout(60):
                    while machine._channels or psutil.Process().num_fds() > before:
                        await asyncio.sleep(0.005)

    asyncio.run(scenario())


def test_a_start_enters_no_file_that_is_not_listed(sshd: Sshd) -> None:
    walks.check(walks.SSH, sshd.provider())
