"""Nothing is lost on AWS: no money, no instance that nobody knows, no file that is not ours."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

import skyward as sky
from skyward import accelerators
from skyward.providers import Order
from skyward.providers.aws import catalogue, site, tags
from skyward.providers.aws.account import RequestError, shared_account
from skyward.providers.aws.catalogue import MachineImage
from skyward.providers.aws.instances import Instances
from skyward.providers.aws.launches import AWSAllocation, Bought, quota_of
from skyward.providers.aws.session import main as session_main
from skyward.providers.aws.site import Keys

from ..conftest import PATIENCE
from .aws_gateway import Gateway
from .aws_orders import a_request, attempt, making
from .aws_stand_ins import reservation


@pytest.mark.parametrize("name", ["../..", "/tmp/x", "", ".", "a/b", "x" * 41, "a b", "é"])
def test_a_tag_of_others_never_names_a_folder(name: str) -> None:
    assert not tags.is_pool(name)
    with pytest.raises(ValueError, match="no pool can be called"):
        Keys(name)


def test_what_others_have_tagged_with_no_pools_name_is_not_ours(aws: Gateway) -> None:
    account = shared_account(None, None)
    tagged = [{"Key": tags.POOL, "Value": "../../victim"}]
    account.call(
        "ec2",
        "create_key_pair",
        KeyName="hostile",
        TagSpecifications=[{"ResourceType": "key-pair", "Tags": tagged}],
    )
    assert site.remains(account) == []
    account.call("ec2", "delete_key_pair", KeyName="hostile")


def test_another_account_is_never_taken_for_the_pools_own(aws: Gateway) -> None:
    mine = dict(sky.AWS().describe())
    assert mine["account"]
    other = sky.AWS(**mine | {"account": "999999999999"})
    for ask in (other.allocate("p").find(), other.allocate("p").sweep()):
        with pytest.raises(
            sky.errors.ConfigurationError, match=r"are of the account .* needs 999999999999"
        ):
            asyncio.run(ask)


def test_what_was_bought_is_kept_when_a_later_request_fails(aws: Gateway) -> None:
    aws.room = dict.fromkeys([f"us-east-1{letter}" for letter in "bcdef"], 0) | {"us-east-1a": 1}
    aws.fail("RunInstances", "AccessDenied", when=lambda _: bool(aws.account.instances()))
    outcome = attempt(sky.AWS(), nodes=2)
    assert len(outcome.machines) == 1, "and its order did not fail with the other"
    assert len(outcome.problems) == 1


def test_a_quota_for_part_of_the_nodes_gives_that_part(aws: Gateway) -> None:
    aws.fail("RunInstances", "VcpuLimitExceeded", when=lambda call: call.count > 1)
    outcome = attempt(sky.AWS(instance_type="c7i.xlarge"), nodes=2)
    assert len(outcome.machines) == 2


def test_a_quota_that_a_large_type_exceeds_does_not_rule_out_a_small_one() -> None:
    assert quota_of("p5.48xlarge", spot=True)[1] != quota_of("p4d.24xlarge", spot=True)[1]
    assert quota_of("gr6.4xlarge", spot=False) == quota_of("g6.xlarge", spot=False)
    assert quota_of("x2idn.16xlarge", spot=False)[0] == "Running On-Demand X instances"


def test_much_dearer_machines_are_not_bought_without_a_limit(aws: Gateway) -> None:
    l4 = a_request(accelerators.L4())
    found = sky.AWS().offers(l4)
    most = 2 * min(each.hourly_cost or 0 for each in found)
    assert all((each.hourly_cost or 0) <= most for each in found)
    assert len(sky.AWS().offers(replace(l4, max_hourly_cost=1000.0))) >= len(found)


def test_the_quoted_price_is_that_of_the_reservation(aws: Gateway) -> None:
    held = reservation("p5.48xlarge", "us-east-1b", count=2, block=True)
    aws.stand_ins.reservations[held["CapacityReservationId"]] = held
    provider = sky.AWS(reservation=held["CapacityReservationId"])
    (offer,) = provider.offers(a_request())
    assert (offer.instance_type, offer.zone, offer.hourly_cost) == (
        "p5.48xlarge",
        "us-east-1b",
        0.0,
    )


def test_a_placement_group_is_removed_without_the_journal(aws: Gateway) -> None:
    account = shared_account(None, None)
    order = Order("lostpool", 0, a_request())
    account.call(
        "ec2",
        "create_placement_group",
        GroupName=tags.resource_name("lostpool"),
        Strategy="cluster",
        TagSpecifications=[tags.specification("placement-group", order)],
    )
    (found,) = asyncio.run(sky.AWS().remains())
    assert found.resources == ("placement group skyward-lostpool",)
    asyncio.run(sky.AWS().allocate("lostpool").sweep())
    assert aws.leftovers() == []


def test_an_instance_that_aws_still_calls_pending_is_looked_at_again_after_a_pause(
    aws: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def still_pending(*_: object) -> None:
        done.append("looked")
        raise RequestError("it is pending", "Waiter")

    pending = {"InstanceId": "i-0abc", "State": {"Name": "pending"}}
    answers = [[pending], [pending], []]
    account = shared_account(None, None)
    monkeypatch.setattr(account, "wait_for_end", still_pending)
    monkeypatch.setattr(account, "call", lambda *_, **__: {"KeyPairs": [], "PlacementGroups": []})
    monkeypatch.setattr(site, "described", lambda *_: answers.pop(0))
    monkeypatch.setattr(site.time, "sleep", lambda _: done.append("paused"))
    site.sweep(account, "p")
    assert done == ["looked", "paused"] * 2


def test_the_second_wait_for_an_end_has_only_the_rest_of_the_time(
    aws: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, waits = [1000.0], []

    def pending(_: object, seconds: float) -> None:
        waits.append(seconds)
        now[0] += 100
        raise RequestError("it is pending", "Waiter")

    answers = [[{"InstanceId": "i-0abc", "State": {"Name": "pending"}}]] * 2 + [[]]
    account = shared_account(None, None)
    monkeypatch.setattr(account, "wait_for_end", pending)
    monkeypatch.setattr(account, "call", lambda *_, **__: {"KeyPairs": [], "PlacementGroups": []})
    monkeypatch.setattr(site, "described", lambda *_: answers.pop(0))
    monkeypatch.setattr(site, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=id))
    site.sweep(account, "p")
    assert waits == [site.END_SECONDS, site.END_SECONDS - 100]


def test_what_was_being_bought_when_the_pool_was_closed_ends(
    aws: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, closing, ended = threading.Event(), threading.Event(), []

    def launch(self: AWSAllocation, asked: Sequence[Any], made: dict[int, Bought]) -> None:
        begun.set()
        closing.wait(PATIENCE)
        made[0] = Bought("i-0abc", cast(Any, None))

    async def terminate(self: Instances, id: str) -> None:
        ended.append(id)

    async def scenario() -> None:
        allocation = sky.AWS().allocate("p")
        getting = asyncio.ensure_future(allocation.get(Order("p", 0, a_request())))
        await asyncio.to_thread(begun.wait, PATIENCE)
        close = asyncio.ensure_future(allocation.close())
        for _ in range(20):
            await asyncio.sleep(0)
        closing.set()
        await close
        getting.cancel()
        await asyncio.wait({getting})

    monkeypatch.setattr(AWSAllocation, "_launch", launch)
    monkeypatch.setattr(Instances, "terminate", terminate)
    asyncio.run(scenario())
    assert ended == ["i-0abc"]


def test_an_instance_that_ends_for_want_of_capacity_is_bought_elsewhere(
    aws: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, ended = Instances.running, []

    async def first_ends(self: Instances, instance: str) -> Any:
        if not ended:
            ended.append(instance)
            raise RequestError("it ended", "Server.InsufficientInstanceCapacity")
        return await running(self, instance)

    monkeypatch.setattr(Instances, "running", first_ends)
    outcome = attempt(sky.AWS())
    assert len(outcome.machines) == 1
    first, second = aws.made("RunInstances")
    assert first.zone != second.zone


def test_an_instance_that_cannot_be_ended_is_told_beside_why_it_did_not_start(
    aws: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ends(self: Instances, instance: str) -> Any:
        raise RequestError(f"{instance} did not start")

    monkeypatch.setattr(Instances, "running", ends)
    aws.fail("TerminateInstances", "UnauthorizedOperation", times=1)
    (problem,) = attempt(sky.AWS()).problems
    assert isinstance(problem, RequestError)
    assert str(problem).endswith("did not start")
    assert problem.leaves_machine, "so that its node looks for it again"
    assert "may not do ec2:TerminateInstances" in problem.__notes__[0]


def test_every_volume_of_an_ami_is_encrypted_and_ends_with_the_instance(
    aws: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = MachineImage("ami-1e749f67", "mine", "x86_64", "/dev/sda1", 8, ("/dev/sdf",))
    monkeypatch.setattr(catalogue, "given_image", lambda account, ami: image)
    attempt(sky.AWS(ami="ami-1e749f67", user="me"))
    (call,) = aws.made("RunInstances")
    shown = str(call.parameters)
    assert "/dev/sdf" in shown
    assert shown.count("DeleteOnTermination") >= 2
    assert call.tags()[tags.USER] == "me"


@given(st.sets(st.integers(0, 2000)))
def test_the_nodes_of_a_launch_fit_into_a_tag(nodes: set[int]) -> None:
    assert tags.numbers(tags.listed(sorted(nodes))) == sorted(nodes)


def test_a_thousand_nodes_fit_into_a_tag() -> None:
    assert len(tags.listed(range(1000))) < 256
    assert tags.numbers("nonsense 3") == []


def test_the_token_of_a_session_is_in_no_command_line(
    aws: Gateway, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plugin = tmp_path / "session-manager-plugin"
    plugin.write_text("#!/bin/sh\necho 1.2.707.0\n")
    plugin.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    started: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr("os.execvpe", lambda _, line, mine: started.append((line, mine)))
    monkeypatch.setattr("sys.argv", ["session", "i-0abc", "us-east-1", ""])
    session_main()
    ((line, mine),) = started
    assert line[1] == "AWS_SSM_START_SESSION_RESPONSE"
    assert "TokenValue" in mine[line[1]]
    assert not any("TokenValue" in word for word in line)


def test_nothing_is_made_for_a_request_that_nothing_fulfils(aws: Gateway) -> None:
    message = attempt(sky.AWS(), a_request(accelerators.A100(16))).problem
    assert "A100" in message
    assert making(aws) == []
    assert not Keys("t").folder.parent.exists() or not list(Keys("t").folder.parent.iterdir())
