"""Kept pools on AWS: used by another process, stopped with their disks, and ended."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward.nodes import records
from skyward.providers import Order
from skyward.providers.aws import instances, machine, site

from ..conftest import only_in_all, other_case
from . import kept_pools
from .aws_gateway import Gateway
from .aws_orders import a_request, left, remove


@pytest.fixture
def ec2(ec2: Gateway) -> Iterator[Gateway]:
    """An account in which nothing may be left."""
    yield ec2
    assert left(ec2) == []


def provider(**arguments: Any) -> sky.AWS:
    """Instances that have this very environment."""
    return sky.AWS(python=sys.executable, **arguments)


@only_in_all
def test_a_pool_stays_on_aws_is_stopped_and_starts_again_with_its_disk(ec2: Gateway) -> None:
    workers = kept_pools.start(provider(), "cloud")
    kept_pools.use_elsewhere("cloud", workers)
    with sky.attach("cloud") as compute:
        assert kept_pools.marked("/var/tmp/mark", "mine") >> compute == "mine"
    running = kept_pools.shown("cloud")
    assert running["hourly_cost"] > 0
    (instance,) = ec2.account.instances("running")

    said = kept_pools.says("stop", "cloud")

    assert said.startswith("cloud: stopped; its disks cost about $0.")
    assert [each["InstanceId"] for each in ec2.account.instances("stopped")] == [
        instance["InstanceId"]
    ]
    stopped = kept_pools.shown("cloud")
    assert stopped["state"] == "stopped"
    assert 0 < stopped["hourly_cost"] < running["hourly_cost"]
    assert stopped["cost"] > running["cost"]

    assert "cloud: 1 node started\n" in kept_pools.says("start", "cloud")

    assert [each["InstanceId"] for each in ec2.account.instances("running")] == [
        instance["InstanceId"]
    ]
    assert kept_pools.shown("cloud")["hourly_cost"] == running["hourly_cost"]
    with sky.attach("cloud") as compute:
        assert kept_pools.marked("/var/tmp/mark") >> compute == "mine"
    kept_pools.end("cloud")


@only_in_all
def test_a_client_that_attached_replaces_an_instance_that_was_taken_away(
    ec2: Gateway, eventually: Callable[..., None]
) -> None:
    kept_pools.start(provider(), "cloud")
    with sky.attach("cloud") as compute:
        before = records.read("cloud").nodes[0].machine
        ec2.account.terminate(before)
        eventually(lambda: records.read("cloud").nodes[0].machine != before, 90, "another")
        assert kept_pools.pid() >> compute
    kept_pools.end("cloud")


@other_case
def test_spot_instances_are_not_stopped(aws: Gateway) -> None:
    async def attempt() -> str:
        seller = sky.AWS()
        allocation = seller.allocate("p1")
        await allocation.get(Order("p1", 0, a_request(allocation="spot", keep=True)))
        try:
            with pytest.raises(sky.errors.PoolError) as caught:
                await seller.check_stop("p1")
            return str(caught.value)
        finally:
            await remove(allocation)

    assert "AWS does not stop spot instances of this kind (i-" in asyncio.run(attempt())


def test_an_instance_that_is_out_of_room_stays_stopped(aws: Gateway) -> None:
    async def attempt() -> str:
        seller = sky.AWS()
        allocation = seller.allocate("p1")
        order = Order("p1", 0, a_request(keep=True))
        bought = await allocation.get(order)
        try:
            unpriced = aws.fail("DescribeVolumes", "UnauthorizedOperation")
            assert await seller.stop("p1") is None
            aws.remove(unpriced)
            full = aws.fail("StartInstances", "InsufficientInstanceCapacity")
            with pytest.raises(sky.errors.UnavailableError) as caught:
                await allocation.get(order)
            aws.remove(full)
            (found,) = await allocation.find()
            assert (found.id, found.ended) == (bought.id, True)
            with pytest.raises(sky.errors.UnreachableError, match=f"{bought.id} is stopped"):
                await found.run(["true"])
            again = await allocation.get(order)
            assert (again.id, again.offer) == (bought.id, bought.offer)
            return str(caught.value)
        finally:
            await remove(allocation)

    assert "no room now to start the instance i-" in asyncio.run(attempt())
    assert len(aws.made("RunInstances")) == 1


def test_no_disk_is_lost_while_a_pool_is_stopped_and_started(aws: Gateway) -> None:
    """An instance whose client was killed shuts itself down, whenever that was."""
    seen: list[str] = []

    async def attempt() -> None:
        seller, order = sky.AWS(), Order("p1", 0, a_request(keep=True))
        allocation = seller.allocate("p1")
        bought = await allocation.get(order)

        def note() -> None:
            told = aws.account.ec2().describe_instance_attribute(
                InstanceId=bought.id, Attribute="instanceInitiatedShutdownBehavior"
            )
            seen.append(told["InstanceInitiatedShutdownBehavior"]["Value"])

        try:
            await bought.after_start()
            note()
            await seller.spare("p1", True)
            note()
            await seller.spare("p1", False)
            note()
            await seller.spare("p1", True)
            await seller.stop("p1")
            again = await allocation.get(order)
            note()
            await again.after_start()
            note()
            # It was stopped in the console of AWS.
            await seller.stop("p1")
            await allocation.get(order)
            note()
        finally:
            await remove(allocation)

    asyncio.run(attempt())
    assert seen == ["terminate", "stop", "terminate", "stop", "terminate", "stop"]
    assert len(aws.made("ModifyInstanceAttribute")) == 6


def test_an_instance_watches_itself_after_every_boot(tmp_path: Path) -> None:
    """Without a login: the client may be gone before the instance that it starts has booted."""
    document = json.loads(machine.user_data("a", "b", idle=300, ttl=None).partition("\n")[2])
    (script,) = document["write_files"]
    assert script["path"].startswith("/var/lib/cloud/scripts/per-boot/")
    assert script["permissions"] == "0755"
    assert script["content"].startswith("#!/bin/sh\n")
    # Run with a stand-in for the command that starts a process on its own.
    stand_in = tmp_path / "setsid"
    stand_in.write_text(f'#!/bin/sh\nprintf "%s" "$3" >{tmp_path}/started\n')
    stand_in.chmod(0o755)
    search = f"{tmp_path}:{os.environ['PATH']}"
    subprocess.run(
        ["sh", "-c", script["content"] + "wait"], env={"PATH": search}, timeout=200, check=True
    )
    assert "-ge 300 ]" in (tmp_path / "started").read_text()


class StoppedAgain:
    """An account with an instance that does not start, though AWS agrees to start it."""

    looks = 0
    instance: dict[str, Any] = {  # noqa: RUF012
        "InstanceId": "i-1",
        "State": {"Name": "stopped"},
        "StateReason": {"Code": "Client.InvalidKMSKey.InvalidState", "Message": "key is disabled"},
    }

    def call(self, *_: str, **__: Any) -> None:
        """AWS agrees."""

    def pages(self, *_: str, **__: Any) -> list[dict[str, Any]]:
        self.looks += 1
        assert self.looks < 1000, "nobody gives up"
        return [self.instance]


def test_an_instance_that_does_not_start_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instances, "PAUSES", (0.0, 0.0))
    monkeypatch.setattr(instances, "START_SECONDS", 0.0)
    account: Any = StoppedAgain()
    with pytest.raises(
        sky.errors.UnavailableError, match=r"i-1 is still stopped .*: key is disabled"
    ):
        asyncio.run(instances.Instances(account, "p1").start(StoppedAgain.instance))


async def nobody_answers(_: str) -> bool:
    return False


def test_a_client_with_another_address_is_let_in(
    aws: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a laptop has moved since the pool was made."""

    async def attempt() -> None:
        seller = sky.AWS()
        allocation = seller.allocate("p1")
        await allocation.get(Order("p1", 0, a_request(keep=True)))
        try:
            monkeypatch.setattr(site, "client_networks", lambda *_: ["203.0.113.7/32"])
            monkeypatch.setattr(machine, "ANSWER_SECONDS", 0.1)
            monkeypatch.setattr(machine, "PROBE_SECONDS", 0.1)
            monkeypatch.setattr(machine, "_answers", nobody_answers)
            (found,) = await allocation.find()
            with pytest.raises(sky.errors.UnreachableError, match="was not reached"):
                await found.reach()
        finally:
            await remove(allocation)

    asyncio.run(attempt())
    admitted = [call.parameters for call in aws.made("AuthorizeSecurityGroupIngress")]
    assert any("203.0.113.7/32" in str(each) for each in admitted)


def test_another_machine_gets_the_keys_to_the_instances(
    aws: Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.Keys("p1").make()
    here = site.Keys("p1")
    record = records.KeptPool(
        *("p1", "cloud", "aws", dict(sky.AWS().describe()), 0.0, 0.0, None, None, None, None, ""),
        nodes=[],
    )
    records.write(record)
    file = str(tmp_path / "file")
    kept_pools.says("attach", "cloud", "--export", file)
    monkeypatch.setenv("SKYWARD_STATE", str(tmp_path / "elsewhere"))
    kept_pools.says("attach", "--import", file)
    there = site.Keys("p1")
    assert there.folder != here.folder
    assert Path(there.private).read_text() == Path(here.private).read_text()
    assert Path(there.private).stat().st_mode & 0o077 == 0
    assert (there.host_key, there.known_hosts.read_text()) == (
        here.host_key,
        here.known_hosts.read_text(),
    )
    assert records.read("cloud") == record
    site.Keys("p1").forget()
    said = kept_pools.says("attach", "cloud", "--export", file, code=1)
    assert "export its record on the machine that made it" in said
