"""What SSH hosts are called, and how the ssh configuration leads to them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward.providers.hosts import HostAddress, openssh
from skyward.testing import plain_request

from .ssh_hosts import Sshd, hosts_held, made, refusal, said, serving

PACKAGE = Path(sky.__file__).parent
"""Compared as a whole: a clone's own folder is called `skyward` as well."""


@pytest.fixture
def config(sshd: Sshd, tmp_path: Path, carrier: str) -> str:
    """An ssh configuration file that knows the hosts by other names."""
    more = tmp_path / "more"
    more.write_text(f"Host gpu-b\n  HostName 127.0.0.2\n  Port {sshd.port}\n")
    path = tmp_path / "config"
    path.write_text(
        f"Include {more}\n"
        f"Host gpu-a spare-a\n  HostName 127.0.0.1\n  Port {sshd.port}\n"
        f"Host behind\n  HostName 127.0.0.1\n  Port {sshd.port}\n  ProxyJump gpu-b\n"
        f'Host "gpu-*" !gpu-x\n  User {sshd.user}\n'
        f"Host *\n  IdentityFile {sshd.key}\n  UserKnownHostsFile {sshd.known_hosts}\n"
    )
    return str(path)


def test_hosts_come_from_the_ssh_configuration(config: str, sshd: Sshd) -> None:
    provider = sky.SSH.from_config("gpu-*", config=config)
    assert provider.hosts == ("gpu-b", "gpu-a")

    async def scenario() -> None:
        async with made(provider, 0) as b, made(provider, 1) as a:
            assert (b.address, b.direct) == ("127.0.0.2", "127.0.0.2")
            assert (a.address, a.direct) == ("127.0.0.1", "127.0.0.1")
            assert (await said(b, "sh", "-c", "echo $SSH_CONNECTION")).split()[2] == "127.0.0.2"

    asyncio.run(scenario())


def test_a_pattern_that_matches_nothing_lists_what_there_is(config: str) -> None:
    with pytest.raises(
        sky.errors.ConfigurationError, match="there are: gpu-b, gpu-a, spare-a, behind"
    ):
        sky.SSH.from_config("tpu-*", config=config)


def test_a_jump_host_of_the_configuration_is_used(config: str, sshd: Sshd) -> None:
    async def scenario() -> None:
        async with made(sky.SSH(["behind"], config=config)) as machine:
            came_from = (await said(machine, "sh", "-c", "echo $SSH_CONNECTION")).split()
            assert came_from[2] == "127.0.0.1"
            assert machine.direct is None
        assert hosts_held() == 0

    asyncio.run(scenario())


@pytest.mark.usefixtures("carrier")
def test_a_jump_host_carries_commands_and_sockets(sshd: Sshd) -> None:
    jump = f"{sshd.user}@127.0.0.2:{sshd.port}"

    async def scenario() -> None:
        async with made(sshd.provider("127.0.0.1", jump=jump)) as machine:
            task, endpoint = await serving(machine, "end.sendall(end.recv(9)[::-1])\n")
            with await machine.dial(endpoint) as end:
                end.sendall(b"jump")
                assert await asyncio.to_thread(end.recv, 9) == b"pmuj"
            assert await task == 0
        assert hosts_held() == 0

    asyncio.run(scenario())


@pytest.mark.usefixtures("carrier")
def test_a_jump_host_is_verified_too(sshd: Sshd, tmp_path: Path) -> None:
    known = tmp_path / "known_hosts"
    lines = Path(sshd.known_hosts).read_text().splitlines()
    known.write_text("".join(f"{line}\n" for line in lines if "127.0.0.2" not in line))
    jump = f"{sshd.user}@127.0.0.2:{sshd.port}"

    message = refusal(
        sshd.provider("127.0.0.1", jump=jump, known_hosts=str(known)), sky.errors.HostKeyError
    )

    assert message.startswith(f"SSH host 127.0.0.2:{sshd.port}: its host key is not known")


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("gpu1", HostAddress("gpu1")),
        ("me@gpu1", HostAddress("gpu1", "me")),
        ("gpu1.example.org:2222", HostAddress("gpu1.example.org", None, 2222)),
        ("me@10.0.0.1:22", HostAddress("10.0.0.1", "me", 22)),
        ("[::1]", HostAddress("::1")),
        ("me@[fe80::1%eth0]:2222", HostAddress("fe80::1%eth0", "me", 2222)),
    ],
)
def test_a_host_is_read_as_ssh_reads_it(text: str, address: HostAddress) -> None:
    assert HostAddress.of(text) == address


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        ({"hosts": []}, "SSH.from_config"),
        ({"hosts": "gpu1"}, "read letter by letter"),
        ({"hosts": ["::1"]}, r"write '\[::1\]'"),
        ({"hosts": ["gpu1:99999"]}, "no port 99999"),
        ({"hosts": ["-oProxyCommand=id"]}, "not a host"),
        ({"hosts": ["a b"]}, "not a host"),
        ({"hosts": ["gpu1"], "port": 0}, "at least 1"),
        ({"hosts": ["gpu1"], "jump": "a,,b"}, "not a host"),
        ({"hosts": ["gpu1"], "addresses": {"gpu2": "10.0.0.1"}}, "'gpu2' is not one of the hosts"),
        ({"hosts": ["gpu1"], "direct": "maybe"}, "True, False or 'auto'"),
        ({"hosts": ["gpu1"], "timeout": 0}, "positive"),
    ],
)
def test_arguments_that_cannot_work_are_refused(given: dict[str, Any], advice: str) -> None:
    with pytest.raises(sky.errors.ConfigurationError, match=advice):
        sky.SSH(**given)


def test_it_is_a_value_that_its_description_makes_anew() -> None:
    provider = sky.SSH(
        ["gpu1", "me@gpu2:2222"],
        key="~/.ssh/id",
        jump="bastion",
        addresses={"gpu1": "10.0.0.1"},
        direct=False,
        timeout=5,
    )

    again = sky.SSH(**json.loads(json.dumps(provider.describe())))

    assert again == provider
    assert hash(again) == hash(provider)
    assert provider.price(plain_request()) is None


def test_addresses_say_how_the_nodes_reach_each_other(sshd: Sshd) -> None:
    provider = sshd.provider(addresses={"127.0.0.1": "10.0.0.1"}, direct=False)

    async def scenario() -> None:
        machine = await provider._machine("t-addresses", 0)
        assert machine.address == "10.0.0.1"
        assert machine.direct is None

    asyncio.run(scenario())


@pytest.mark.parametrize("nodes", [3, (1, 3)])
def test_more_nodes_than_hosts_are_refused_before_anything_starts(nodes: Any) -> None:
    with pytest.raises(sky.errors.ConfigurationError, match=r"up to 3 nodes: SSH has 2 hosts"):
        sky.Compute(sky.SSH(["gpu1", "gpu2"]), nodes=nodes)


def test_a_start_that_fails_shows_where_it_was_asked_for_and_nothing_of_the_inside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKYWARD_STATE", str(tmp_path / "state"))
    provider = sky.SSH(["127.0.0.1:1"], config=None)

    async def enter() -> None:
        async with sky.Compute(provider):
            pass

    with (
        pytest.raises(sky.errors.UnreachableError, match="refused") as caught,
        sky.Compute(provider),
    ):
        pass
    with pytest.raises(sky.errors.UnreachableError, match="refused") as caught_async:
        asyncio.run(enter())

    for each in (caught, caught_async):
        inside = [entry for entry in each.traceback if PACKAGE in Path(entry.path).parents]
        assert len(inside) == 1
        assert each.value.__cause__ is None
        assert each.value.__suppress_context__


def test_without_ssh_and_asyncssh_the_message_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    sky.SSH(["gpu1"])
    monkeypatch.setattr(openssh, "program", lambda: None)

    with pytest.raises(sky.errors.ConfigurationError, match=r"pip install 'skyward-torch\[ssh\]'"):
        sky.SSH(["gpu1"])
