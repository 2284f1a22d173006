"""Pools that shrink to no nodes: a call makes one start, and waits for it."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import pytest

import skyward as sky
from skyward.calls.dispatch import Dispatcher
from skyward.providers import Order

from ..conftest import PATIENCE, Eventually, only_in_all, other_case

QUIET = sky.Options(console=False)
HASTY = sky.Options(console=False, idle_timeout=0.3)


@dataclass(frozen=True)
class SoldOut(sky.Local):
    """A provider that has no machines until a test says so."""

    missing: set[int] = field(default_factory=set, compare=False)
    asked: list[int] = field(default_factory=list, compare=False)

    async def create(self, order: Order) -> Any:
        """Make a machine, if there is one for the node."""
        self.asked.append(order.node)
        if order.node in self.missing:
            raise sky.errors.UnavailableError(f"there is no machine for node {order.node}")
        return await super().create(order)


@sky.function
def rank() -> tuple[int, int]:
    return sky.instance_info().node, sky.instance_info().total_nodes


def test_a_pool_starts_without_nodes_and_a_call_starts_one(
    capsys: pytest.CaptureFixture[str], nothing_left: None
) -> None:
    provider = SoldOut()
    options = sky.Options(console=True)
    with sky.Compute(provider, nodes=(0, 2), options=options, name="p") as pool:
        assert (pool.nodes, provider.asked, pool.devices("cpu")) == ([], [], [])
        assert rank() >> pool == (0, 1)
        assert provider.asked == [0]
    said = capsys.readouterr().err
    assert "p: starting with no nodes (soldout)" in said
    assert "p: no nodes yet, up to 2 when calls come\n" in said


@only_in_all
def test_it_shrinks_to_none_and_grows_again(eventually: Eventually, nothing_left: None) -> None:
    with sky.Compute(nodes=sky.Nodes(2, min=0), options=HASTY) as pool:
        first = sky.function(os.getpid)() >> pool
        eventually(lambda: pool.nodes == [])
        assert sky.function(os.getpid)() >> pool != first
        eventually(lambda: pool.nodes == [])
        assert pool.run(rank(), on="head")[0] == 0
        eventually(lambda: pool.nodes == [])
        assert pool.run(rank(), on=0)[0] == 0


@other_case
def test_many_calls_start_as_many_nodes_as_they_need(eventually: Eventually) -> None:
    worker = sky.Worker(concurrency=2, executor="thread")
    with sky.Compute(nodes=(0, 4), worker=worker, options=QUIET) as pool:
        futures = [rank() > pool for _ in range(4)]
        eventually(lambda: len(pool.nodes) == 2)
        assert {future.result(PATIENCE)[0] for future in futures} <= {0, 1}


def test_a_broadcast_starts_a_node_and_runs_on_those_that_are_there() -> None:
    with sky.Compute(nodes=(0, 2), options=QUIET) as pool:
        assert rank() @ pool == [(0, 1)]


def test_a_broadcast_that_gets_no_node_says_why() -> None:
    with sky.Compute(SoldOut(missing={0}), nodes=(0, 1), options=QUIET) as pool:
        with pytest.raises(sky.errors.UnavailableError, match="there is no machine for node 0"):
            rank() @ pool


@only_in_all
def test_a_call_waits_for_a_machine_however_long_that_takes(
    monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    monkeypatch.setattr("skyward.nodes.node.RETRY_PAUSES", (0.1, 0.1))
    provider = SoldOut(missing={0})
    with sky.Compute(provider, nodes=(0, 1), options=QUIET) as pool:
        future = rank() > pool
        eventually(lambda: provider.asked.count(0) >= 3)
        assert not future.done()
        provider.missing.clear()
        assert future.result(PATIENCE) == (0, 1)


def test_a_device_needs_a_node() -> None:
    with sky.Compute(nodes=(0, 2), options=QUIET) as pool:
        with pytest.raises(sky.errors.ConfigurationError) as refused:
            pool._open_fleet.devices._tell(0, None)  # type: ignore[arg-type]
        assert "device(node=0): the pool has no nodes now" in str(refused.value)
        assert "compute.resize(1)" in str(refused.value)
        pool.resize(1)
        assert rank() @ pool == [(0, 1)]


def test_it_can_be_resized_to_none(eventually: Eventually) -> None:
    with sky.Compute(options=QUIET) as pool:
        pool.resize((0, 1))
        assert pool.nodes == []
        assert rank() >> pool == (0, 1)


def test_it_says_which_shared_state_ends_with_its_last_node(
    capsys: pytest.CaptureFixture[str],
) -> None:
    @sky.function
    def share() -> None:
        sky.dict("scores")["tiny"] = 0.4

    with sky.Compute(options=sky.Options(console=True)) as pool:
        share() >> pool
        pool.resize((0, 1))
        assert "1 shared object (sky.dict and others) ended with" in capsys.readouterr().err
        rank() >> pool
        pool.resize((0, 1))
        assert "shared object" not in capsys.readouterr().err
        assert dict(sky.dict("scores")) == {}


@pytest.mark.parametrize("how", ["closing", "ttl"])
def test_a_call_that_waits_for_a_node_fails_when_the_pool_ends(how: str) -> None:
    with sky.Compute(SoldOut(missing={0}), nodes=(0, 1), options=QUIET) as pool:
        future = rank() > pool
        if how == "ttl":
            pool._open_fleet._expire(60)
            with pytest.raises(sky.errors.PoolClosedError, match="time to live of 60 s is over"):
                future.result(PATIENCE)
    with pytest.raises(sky.errors.PoolClosedError):
        future.result(PATIENCE)


def test_without_calls_nothing_is_started_and_nothing_costs() -> None:
    with sky.Compute(nodes=(0, 2), options=QUIET) as pool:
        assert (pool.stats().cost, pool.stats().hourly_cost) == (0, 0)
        with pytest.raises(sky.errors.ConfigurationError, match="from 0 to 0"):
            pool.run(rank(), on=1)


class ForbiddenError(sky.errors.UnavailableError):
    """A refusal that no waiting helps against."""

    passing = False


@dataclass(frozen=True)
class Refusing(sky.Local):
    """A provider that refuses machines with the errors that a test gives."""

    refusals: list[Exception] = field(default_factory=list, compare=False)

    async def create(self, order: Order) -> Any:
        """Make a machine, once there are no refusals left."""
        if self.refusals:
            raise self.refusals.pop(0)
        return await super().create(order)


@pytest.mark.parametrize(
    "refusal",
    [
        pytest.param(kind("you may not do this"), id=kind.__name__, marks=marks)
        for kind, marks in {
            ForbiddenError: [],
            KeyError: [],
            sky.errors.ConfigurationError: other_case,
            sky.errors.ImageError: other_case,
            sky.errors.LoginError: other_case,
            sky.errors.HostKeyError: other_case,
        }.items()
    ],
)
def test_a_call_does_not_wait_for_what_only_the_user_can_mend(
    refusal: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    options = sky.Options(console=True)
    with sky.Compute(Refusing(refusals=[refusal]), nodes=(0, 1), options=options) as pool:
        with pytest.raises(sky.NodeLostError) as failed:
            (rank() > pool).result(PATIENCE)
        assert "rank has no node to run on: " in str(failed.value)
        assert "you may not do this" in str(failed.value)
        assert str(failed.value).endswith("; the next call has one started again")
        assert [node.state for node in pool.nodes] == ["failed"]

        assert (rank() > pool).result(PATIENCE) == (0, 1), "the cause is gone by now"
    said = capsys.readouterr().err
    assert said.count("; the next call tries again") == 1
    assert "less and less often" not in said


def test_a_node_that_waits_for_the_next_call_is_not_tried_for_one_that_has_failed(
    eventually: Eventually,
) -> None:
    refusals: list[Exception] = [ForbiddenError("you may not do this")] * 30
    with sky.Compute(Refusing(refusals=refusals), nodes=(0, 1), options=QUIET) as pool:
        futures = [rank() > pool for _ in range(3)]
        for future in futures:
            with pytest.raises(sky.NodeLostError, match="the next call has one started again"):
                future.result(PATIENCE)
        tried = 30 - len(refusals)
        assert tried <= len(futures)
        fleet = pool._open_fleet
        beats = fleet._beats
        eventually(lambda: fleet._beats > beats + 5)
        assert 30 - len(refusals) == tried


@other_case
def test_a_call_waits_as_long_as_another_node_may_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyward.nodes.node.RETRY_PAUSES", (0.1, 0.1))
    refusals = [sky.errors.UnavailableError("sold out"), *[ForbiddenError("no")] * 30]
    provider = Refusing(refusals=[*refusals])
    with sky.Compute(provider, nodes=(0, 2), options=QUIET) as pool:
        for future in (rank() > pool, rank() > pool):
            with pytest.raises(sky.NodeLostError, match="has no node to run on: no;"):
                future.result(PATIENCE)
        assert len(provider.refusals) <= 28, "both nodes were tried, and one of them twice"
        provider.refusals.clear()
        assert (rank() > pool).result(PATIENCE)[1] in (1, 2)


def test_a_broadcast_after_a_refusal_tries_again() -> None:
    with sky.Compute(
        Refusing(refusals=[ForbiddenError("no")] * 2), nodes=(0, 1), options=QUIET
    ) as pool:
        with pytest.raises(sky.NodeLostError):
            (rank() > pool).result(PATIENCE)
        with pytest.raises(ForbiddenError):
            rank() @ pool
        assert rank() @ pool == [(0, 1)]


def test_a_lost_node_that_only_the_user_can_bring_back_is_tried_at_the_next_call(
    eventually: Eventually,
) -> None:
    provider = Refusing()
    with sky.Compute(provider, options=QUIET) as pool:
        pid = sky.function(os.getpid)() >> pool
        provider.refusals.append(ForbiddenError("your login has expired"))
        fleet = pool._open_fleet
        fleet.nodes[0].handle_loss("pulled out")
        eventually(lambda: pool.nodes[0].state == "failed")
        assert sky.function(os.getpid)() >> pool != pid


def test_a_call_that_comes_while_a_failure_is_told_is_none_of_those_that_fail(
    monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    provider, pid = Refusing(), sky.function(os.getpid)
    fail_waiting, late = Dispatcher.fail_waiting, []

    def while_it_is_told(*args: Any) -> None:
        late.append(pid() > pool)
        fail_waiting(*args)

    monkeypatch.setattr(Dispatcher, "fail_waiting", while_it_is_told)
    with sky.Compute(provider, options=QUIET) as pool:
        before = pid() >> pool
        provider.refusals.append(ForbiddenError("your login has expired"))
        pool._open_fleet.nodes[0].handle_loss("pulled out")
        eventually(lambda: late)
        assert late[0].result(PATIENCE) != before


def test_a_refusal_that_may_pass_is_told_once_and_the_caller_may_stop_waiting(
    monkeypatch: pytest.MonkeyPatch, eventually: Eventually, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("skyward.nodes.node.RETRY_PAUSES", (0.1, 0.1))
    provider = SoldOut(missing={0})
    options = sky.Options(console=True)
    with sky.Compute(provider, nodes=(0, 1), options=options) as pool:
        future = rank() > pool
        eventually(lambda: provider.asked.count(0) >= 3)
        with pytest.raises(TimeoutError):
            future.result(0)
        future.cancel()
    said = capsys.readouterr().err
    assert said.count("node 0 could not be started: there is no machine for node 0; it is") == 1
