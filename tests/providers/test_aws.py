"""Pools on AWS, with instances that are real machines to log in to."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner

import skyward as sky
from skyward.cli.main import sky as command
from skyward.device import build
from skyward.nodes.records import Journal
from skyward.providers import Request
from skyward.providers.aws import launches, machine, site
from skyward.testing import ProviderSuite, plain_request

from ..conftest import only_in_all, other_case, wait_until
from . import ec2 as testbed_ec2
from .aws_gateway import Gateway, podman_variables
from .aws_orders import Outcome, a_request, attempt, left
from .training import synchronised

QUIET = sky.Options(console=False)
RETRYING = sky.Options(console=False, retries=2)
ROOT = Path(__file__).parents[2]
SSH_PORT = 22


def provider(**arguments: Any) -> sky.AWS:
    """Instances that have this very environment."""
    return sky.AWS(python=sys.executable, **arguments)


def podman(*command: str) -> str:
    """What a command about the machine of an instance says; nothing if there is none."""
    variables = os.environ | podman_variables()
    done = subprocess.run(
        ["podman", *command], capture_output=True, text=True, env=variables, timeout=200
    )
    return done.stdout.strip()


@pytest.fixture
def ec2(ec2: Gateway) -> Iterator[Gateway]:
    """An account in which nothing may be left."""
    yield ec2
    assert left(ec2) == []


@contextlib.contextmanager
def account(gateway: Gateway, folder: Path) -> Iterator[Gateway]:
    """An account for several tests, and a folder for their state; nothing may be left."""
    with pytest.MonkeyPatch.context() as patch:
        for name in testbed_ec2.OTHERS:
            patch.delenv(name, raising=False)
        for name, value in testbed_ec2.variables(gateway, folder).items():
            patch.setenv(name, value)
        patch.setenv("SKYWARD_STATE", str(folder / "state"))
        gateway.reset()
        try:
            yield gateway
            assert left(gateway) == []
        finally:
            gateway.reset()


@pytest.fixture(scope="class")
def folder(aws_gateway: Gateway, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder for the state of the suite's pools, and an account for them."""
    folder = tmp_path_factory.mktemp("suite")
    with account(aws_gateway, folder):
        yield folder
        TestAWS.teardown_class()


class TestAWS(ProviderSuite):
    """What every provider must do."""

    @pytest.fixture
    def provider(
        self, folder: Path, aws_gateway: Gateway, monkeypatch: pytest.MonkeyPatch
    ) -> sky.AWS:
        self.gateway = aws_gateway
        monkeypatch.setenv("SKYWARD_STATE", str(folder / "state"))
        return provider()

    @pytest.fixture
    def machine_request(self) -> Request:
        return plain_request()

    @contextlib.contextmanager
    def out_of_reach(self) -> Iterator[bool]:
        """The instance stands still, and the user must log in again to ask AWS."""
        gateway = self.gateway
        (instance,) = gateway.account.instances("running")
        expired = gateway.fail("*", "RequestExpired")
        podman("pause", instance["InstanceId"])
        try:
            yield True
        finally:
            podman("unpause", instance["InstanceId"])
            gateway.remove(expired)


# Pools.


@sky.function
def hostname() -> str:
    import socket

    return socket.gethostname()


def connections() -> set[tuple[str, int]]:
    """Where this process is connected to."""
    ends = [each.raddr for each in psutil.Process().net_connections("tcp") if each.raddr]
    return {(end.ip, end.port) for end in ends}


@pytest.fixture(scope="class")
def two(
    aws_gateway: Gateway, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, sky.Compute]]:
    """A pool of two instances, and the folder of its state."""
    folder = tmp_path_factory.mktemp("two")
    with account(aws_gateway, folder):
        with sky.Compute(
            provider(),
            nodes=2,
            plugins=[sky.plugins.torch()],
            # The compiled device of this machine: an instance takes 20 s to compile its own.
            image=sky.Image(env={"SKYWARD_CACHE": str(build.library("worker").parents[1])}),
            options=RETRYING,
        ) as compute:
            yield folder / "state", compute


class TestTwoInstances:
    """One pool for all of these tests; the last one replaces an instance."""

    @pytest.fixture
    def compute(
        self, two: tuple[Path, sky.Compute], monkeypatch: pytest.MonkeyPatch
    ) -> sky.Compute:
        monkeypatch.setenv("SKYWARD_STATE", str(two[0]))
        return two[1]

    @only_in_all
    def test_train_together_over_their_private_addresses(
        self, compute: sky.Compute, aws_gateway: Gateway
    ) -> None:
        first, second = synchronised() @ compute

        there = {each["InstanceId"]: each for each in aws_gateway.account.instances("running")}
        addresses = tuple(there[each[0]]["PrivateIpAddress"] for each in (first, second))
        assert first[1] == second[1] == addresses
        assert [node.address for node in compute.nodes] == list(addresses)
        assert first[2] == second[2]

    def test_are_spoken_to_directly(self, compute: sky.Compute) -> None:
        """With TLS, beside the connection over which they were set up."""
        for node in compute.nodes:
            ports = {port for address, port in connections() if address == node.address}
            assert ports - {SSH_PORT}

    @only_in_all
    def test_have_a_torch_device(self, compute: sky.Compute) -> None:
        import torch

        device = compute.device("cpu")
        x = torch.arange(6.0, device=device).reshape(2, 3)
        assert (x @ x.T).sum().item() == 83.0

    def test_are_listed_when_the_credentials_have_expired(
        self, compute: sky.Compute, aws_gateway: Gateway
    ) -> None:
        expired = aws_gateway.fail("*", "RequestExpired")
        try:
            shown = json.loads(CliRunner().invoke(command, ["ps", "--json"]).output)
        finally:
            aws_gateway.remove(expired)
        (pool,) = shown
        assert [each["address"] for each in pool["machines"]] == [
            node.address for node in compute.nodes
        ]
        assert expired.hits == 0

    def test_are_proven_by_the_key_that_they_were_given(
        self, compute: sky.Compute, aws_gateway: Gateway
    ) -> None:
        folder = Path(os.environ["SKYWARD_STATE"], "aws")
        (known,) = folder.rglob("known_hosts")
        assert known.read_text().startswith("* ssh-ed25519 ")
        assert len(known.read_text().splitlines()) == 1
        assert aws_gateway.made("GetConsoleOutput") == []
        modes = {each.name: each.stat().st_mode & 0o777 for each in known.parent.iterdir()}
        assert modes == dict.fromkeys(("key", "host_key", "known_hosts"), 0o600)

    @other_case
    def test_one_that_was_taken_away_is_replaced(
        self, compute: sky.Compute, aws_gateway: Gateway, eventually: Callable[..., None]
    ) -> None:
        lost, kept = hostname() @ compute
        aws_gateway.account.terminate(lost)
        eventually(lambda: compute.stats().nodes_lost == 1, 60, "the loss")
        eventually(
            lambda: [node.state for node in compute.nodes] == ["ready", "ready"], 90, "another"
        )
        again, same = hostname() @ compute
        assert again not in (lost, kept)
        assert same == kept


@other_case
def test_an_instance_that_is_reached_at_its_public_address_alone(
    ec2: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only SSH is open there, and everything goes through it."""
    answers = machine._answers

    async def answering(address: str) -> bool:
        return address.startswith("127.") and await answers(address)

    monkeypatch.setattr(machine, "_answers", answering)
    with sky.Compute(provider(), options=QUIET) as compute:
        (instance,) = ec2.account.instances("running")
        assert hostname() >> compute == instance["InstanceId"]
        public, private = instance["PublicIpAddress"], instance["PrivateIpAddress"]
        assert compute.nodes[0].address == private
        there = connections()
        assert {port for address, port in there if address == public} == {SSH_PORT}
        assert private not in {address for address, _ in there}


@only_in_all
def test_an_instance_that_was_taken_away_is_known_to_be_gone(ec2: Gateway) -> None:
    """And what is asked of it does not wait for an answer."""

    async def then(outcome: Outcome) -> None:
        (taken,) = outcome.machines
        await asyncio.to_thread(ec2.account.terminate, taken.id)
        assert not await taken.alive()
        with pytest.raises(sky.errors.UnreachableError, match=f"the instance {taken.id} has ended"):
            await taken.run(["true"])
        await taken.destroy()

    attempt(provider(), then=then)


# Host keys.


async def says_its_name(outcome: Outcome) -> None:
    said = bytearray()
    assert await outcome.machines[0].run(["hostname"], output=said.extend) == 0
    assert said.decode().strip() == outcome.machines[0].id


def ignoring_user_data(*_: str, **__: Any) -> str:
    return "#cloud-config\n{}"


@only_in_all
def test_an_instance_that_takes_no_key_is_known_by_its_console(
    ec2: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launches, "user_data", ignoring_user_data)

    async def then(outcome: Outcome) -> None:
        await says_its_name(outcome)
        known = site.Keys(outcome.pool).known_hosts.read_text().splitlines()
        assert len(known) == 2
        assert outcome.machines[0].address in known[1].split()[0].split(",")
        # As `sky down` does in another process.
        (found,) = await provider().allocate(outcome.pool).find()
        assert await found.run(["true"]) == 0

    attempt(provider(), then=then)
    assert len(ec2.made("GetConsoleOutput")) == 1


def test_an_instance_with_any_other_key_is_refused_and_ended(
    ec2: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launches, "user_data", ignoring_user_data)
    monkeypatch.setattr(machine, "_host_keys", lambda answer: [site._new_key()[1]])

    problem = attempt(provider()).problem

    (ended,) = ec2.made("TerminateInstances")
    (instance,) = ended.listed("InstanceId")
    assert problem.startswith(f"HostKeyError: AWS: the instance {instance} was refused")
    assert "neither the one that it was given nor one that its console shows" in problem
    assert "Nothing was sent" in problem


# Without open ports.

_PLUGIN = """#!{python}
import json, os, re, socket, sys, threading, urllib.request

response, region, operation, profile, parameters, endpoint = sys.argv[1:]
with open({log!r}, "a") as log:
    print(json.dumps(sys.argv[1:]), file=log)
target = json.loads(parameters)["Target"]
asked = f"Action=DescribeInstances&Version=2016-11-15&InstanceId.1={{target}}"
credential = f"AWS4-HMAC-SHA256 Credential=testing/20260101/{{region}}/ec2/aws4_request"
headers = {{
    "Authorization": credential,
    "Content-Type": "application/x-www-form-urlencoded",
}}
request = urllib.request.Request(endpoint, asked.encode(), headers)
with urllib.request.urlopen(request) as answer:
    address = re.search("<privateIpAddress>(.*?)<", answer.read().decode())[1]
port = int(json.loads(parameters)["Parameters"]["portNumber"][0])
there = socket.create_connection((address, port))

def send():
    while data := os.read(0, 1 << 16):
        there.sendall(data)
    there.shutdown(socket.SHUT_WR)

threading.Thread(target=send, daemon=True).start()
while data := there.recv(1 << 16):
    os.write(1, data)
"""


@only_in_all
def test_everything_goes_through_systems_manager(
    ec2: Gateway, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plugin, log = tmp_path / "bin" / "session-manager-plugin", tmp_path / "log"
    plugin.parent.mkdir()
    plugin.write_text(_PLUGIN.format(python=sys.executable, log=str(log)))
    plugin.chmod(0o755)
    monkeypatch.setenv("PATH", f"{plugin.parent}:{os.environ['PATH']}")

    with sky.Compute(provider(access="ssm"), options=QUIET) as compute:
        (instance,) = ec2.account.instances("running")
        assert hostname() >> compute == instance["InstanceId"]
        there = {instance["PublicIpAddress"], instance["PrivateIpAddress"]}
        assert not there & {address for address, _ in connections()}
        groups = ec2.account.ec2().describe_security_groups()["SecurityGroups"]
        (group,) = (each for each in groups if each["GroupName"] != "default")
        (rule,) = group["IpPermissions"]
        assert rule["IpRanges"] == []
        assert [each["GroupId"] for each in rule["UserIdGroupPairs"]] == [group["GroupId"]]

    for line in log.read_text().splitlines():
        response, region, operation, profile, parameters, endpoint = json.loads(line)
        session = json.loads(response)
        assert session == ec2.stand_ins.sessions[session["SessionId"]]
        assert json.loads(parameters) == {
            "Target": instance["InstanceId"],
            "DocumentName": "AWS-StartSSHSession",
            "Parameters": {"portNumber": ["22"]},
        }
        assert (region, operation, profile, endpoint) == ("us-east-1", "StartSession", "", ec2.url)


# Clients that are killed.

_CLIENT = """
import sys, time
import skyward as sky
with sky.Compute(sky.AWS(python=sys.executable), options=sky.Options(console=False)) as compute:
    print("ready", flush=True)
    time.sleep(100)
"""


@contextlib.contextmanager
def client() -> Iterator[subprocess.Popen[str]]:
    """A pool in a process of its own, which is killed at the end."""
    process = subprocess.Popen([sys.executable, "-c", _CLIENT], stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def kill_while_held(ec2: Gateway, action: str, *, done_first: bool) -> None:
    with ec2.holding(action, done_first=done_first) as hold:
        with client():
            assert hold.reached.wait(60)


def kill_while_it_boots(ec2: Gateway) -> None:
    ec2.slow_boot(600)
    with client():
        wait_until(lambda: ec2.made("DescribeInstances"), 60, "a look at what boots")
    ec2.slow_boot(0)


def kill_when_ready(ec2: Gateway) -> None:
    with client() as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"


@pytest.mark.parametrize(
    ("phase", "instances"),
    [
        pytest.param(
            lambda ec2: kill_while_held(ec2, "CreateSecurityGroup", done_first=True), 0, id="group"
        ),
        pytest.param(
            lambda ec2: kill_while_held(ec2, "ImportKeyPair", done_first=False),
            0,
            id="key",
            marks=only_in_all,
        ),
        pytest.param(
            lambda ec2: kill_while_held(ec2, "RunInstances", done_first=True),
            1,
            id="bought",
            marks=only_in_all,
        ),
        pytest.param(
            lambda ec2: kill_while_held(ec2, "RunInstances", done_first=False),
            1,
            id="buying",
            marks=only_in_all,
        ),
        pytest.param(kill_while_it_boots, 1, id="booting", marks=only_in_all),
        pytest.param(kill_when_ready, 1, id="ready", marks=only_in_all),
    ],
)
def test_down_removes_what_a_killed_client_left(
    ec2: Gateway,
    state: Journal,
    monkeypatch: pytest.MonkeyPatch,
    phase: Callable[[Gateway], None],
    instances: int,
) -> None:
    phase(ec2)
    (pool,) = state.pools()
    assert pool.provider == "aws"
    if not instances:
        # One that was asked for might appear; here none was.
        monkeypatch.setattr("skyward.nodes.cleanup._APPEARING_SECONDS", 0.0)

    done = CliRunner().invoke(command, ["down"])

    assert done.exit_code == 0, done.output
    assert state.pools() == []
    assert ec2.account.instances() == []
    ended = [each for call in ec2.made("TerminateInstances") for each in call.listed("InstanceId")]
    assert len(set(ended)) == instances


@only_in_all
def test_without_the_journal_everything_is_found_by_its_tags(ec2: Gateway) -> None:
    kill_while_held(ec2, "RunInstances", done_first=True)
    shutil.rmtree(os.environ["SKYWARD_STATE"])
    (instance,) = ec2.account.instances("running")

    async def collect() -> None:
        (remains,) = await sky.AWS().remains()
        kinds = [each.rpartition(" ")[0] for each in remains.resources]
        assert kinds == ["instance", "key pair", "security group"]
        assert f"instance {instance['InstanceId']}" in remains.resources
        allocation = sky.AWS().allocate(remains.pool)
        for each in await allocation.find():
            await each.destroy()
        await allocation.sweep()
        assert list(await sky.AWS().remains()) == []

    asyncio.run(collect())


def without_commands(text: str) -> str:
    head, _, document = text.partition("\n")
    return f"{head}\n{json.dumps({'ssh_keys': json.loads(document)['ssh_keys']})}"


@only_in_all
def test_an_instance_ends_itself_when_the_client_is_gone(
    ec2: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not while a command runs, unless its time to live is over."""
    monkeypatch.setattr(machine, "LEAST_IDLE_SECONDS", 1)
    monkeypatch.setattr(machine, "_WATCH", machine._WATCH.replace("sleep 5", "sleep 1"))
    in_full = machine.user_data

    def for_short_lives(*keys: str, **times: Any) -> str:
        """As for an AMI whose cloud-init runs nothing, unless there is a time to live."""
        return (
            in_full(*keys, **times) if times["ttl"] else without_commands(in_full(*keys, **times))
        )

    monkeypatch.setattr(launches, "user_data", for_short_lives)
    idle = a_request(idle_timeout=12)
    short = a_request(idle_timeout=100, ttl=6)

    async def runs(each: machine.AWSMachine) -> bool:
        asked = "inspect", "--format", "{{.State.Running}}", each.id
        return await asyncio.to_thread(podman, *asked) == "true"

    async def left_alone(outcome: Outcome) -> None:
        (each,) = outcome.machines
        assert await each.run(["sleep", "14"]) == 0
        assert await runs(each), "a command is a reason to stay"
        await ended(each)

    async def short_lived(outcome: Outcome) -> None:
        (each,) = outcome.machines
        with pytest.raises((sky.errors.UnreachableError, AssertionError)):
            assert await each.run(["sleep", "60"]) == 0
        await ended(each)

    async def ended(each: machine.AWSMachine) -> None:
        async with asyncio.timeout(40):
            while await runs(each):
                await asyncio.sleep(0.2)
            while await each.alive():
                await asyncio.sleep(0.2)

    async def both() -> None:
        await asyncio.gather(
            asyncio.to_thread(attempt, provider(), idle, then=left_alone),
            asyncio.to_thread(attempt, provider(), short, then=short_lived),
        )

    asyncio.run(both())


def test_a_pool_that_cannot_start_leaves_nothing(ec2: Gateway) -> None:
    ec2.fail("RunInstances", "UnauthorizedOperation")
    with pytest.raises(sky.errors.PoolStartError, match="may not do ec2:RunInstances"):
        with sky.Compute(provider(), nodes=2, options=QUIET):
            pass
