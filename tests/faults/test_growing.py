"""Nodes that cannot be had yet: the pool works with the others, and goes on trying."""

from __future__ import annotations

import asyncio
import os
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward.nodes.fleet import Scaler
from skyward.nodes.host import Host
from skyward.nodes.records import NoJournal
from skyward.providers import Order
from skyward.testing import plain_request

from ..conftest import ALL, PATIENCE, Eventually, only_in_all, other_case

QUIET = sky.Options(console=False)


@dataclass(frozen=True)
class Scarce(sky.Local):
    """A provider that has no machine for some nodes."""

    missing: set[int] = field(default_factory=set, compare=False)
    asked: list[int] = field(default_factory=list, compare=False)

    async def create(self, order: Order) -> Any:
        """Make a machine, if there is one for the node."""
        self.asked.append(order.node)
        if order.node in self.missing:
            raise sky.errors.PoolStartError(f"there is no machine for node {order.node}")
        return await super().create(order)


@sky.function
def rank() -> tuple[int, int, int]:
    info = sky.instance_info()
    return info.node, info.global_worker_index, info.total_workers


@sky.function
def wait_for(path: str) -> bool:
    while not os.path.exists(path):
        time.sleep(0.01)
    return True


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes are tried again soon."""
    monkeypatch.setattr("skyward.nodes.node.RETRY_PAUSES", (0.3, 0.6))


def states(pool: sky.Compute) -> list[str]:
    return [node.state for node in pool.nodes]


@only_in_all
def test_a_pool_starts_with_the_nodes_it_needs_and_goes_on_for_the_others(
    hasty: None, eventually: Eventually, nothing_left: None
) -> None:
    provider = Scarce(missing={1, 3})
    with sky.Compute(provider, nodes=sky.Nodes(4, min=2), options=QUIET) as pool:
        eventually(lambda: states(pool)[0::2] == ["ready", "ready"])
        assert rank() @ pool == [(0, 0, 2), (2, 1, 2)], "the ranks of those that are there"
        if ALL:
            assert len(pool.devices("cpu")) == 2, "which imports torch, as nothing else here does"

        provider.missing.clear()

        eventually(lambda: states(pool) == ["ready"] * 4)
        assert rank() @ pool == [(number, number, 4) for number in range(4)]


@only_in_all
def test_a_call_for_a_node_that_is_missing_waits_for_it(
    hasty: None, eventually: Eventually
) -> None:
    provider = Scarce(missing={1})
    with sky.Compute(provider, nodes=sky.Nodes(2, min=1), options=QUIET) as pool:
        future = pool.submit(rank(), on=1)
        eventually(lambda: provider.asked.count(1) >= 2)
        assert not future.done()

        provider.missing.clear()

        assert future.result(PATIENCE)[0] == 1


def test_a_pool_that_cannot_have_the_nodes_it_needs_does_not_start(nothing_left: None) -> None:
    provider = Scarce(missing={1, 2, 3})
    with pytest.raises(sky.errors.PoolStartError, match="there is no machine for node"):
        sky.Compute(provider, nodes=sky.Nodes(4, min=2), options=QUIET).__enter__()


def test_the_console_says_how_many_are_there_and_once_that_a_node_is_missing(
    hasty: None, eventually: Eventually, capsys: pytest.CaptureFixture[str]
) -> None:
    provider = Scarce(missing={1})
    options = sky.Options(console=True)
    with sky.Compute(provider, nodes=sky.Nodes(2, min=1), options=options, name="p"):
        eventually(lambda: provider.asked.count(1) >= 4)
    said = capsys.readouterr().err
    assert "p: 1 of 2 nodes ready" in said
    assert said.count("there is no machine for node 1") == 1
    assert "node 1 could not be started: there is no machine for node 1; it is tried again" in said


@only_in_all
def test_growth_that_fails_is_tried_again_after_longer_and_longer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, eventually: Eventually
) -> None:
    """The pauses double, from one second: the third is one of four."""
    monkeypatch.setattr("skyward.nodes.node.RETRY_PAUSES", (1.0, 300.0))
    provider = Scarce(missing={1})
    with sky.Compute(provider, nodes=(1, 2), options=QUIET) as pool:
        gate = tmp_path / "gate"
        calls = [wait_for(str(gate)) > pool for _ in range(3)]
        eventually(lambda: provider.asked.count(1) == 3)
        with pytest.raises(TimeoutError):
            calls[0].result(2.5)
        assert provider.asked.count(1) == 3
        gate.touch()
        assert all(future.result(100) for future in calls)


@dataclass(frozen=True)
class AllAtOnce(sky.Local):
    """A provider whose nodes but the first are made only when all of them were asked for."""

    asked: list[int] = field(default_factory=list, compare=False)
    count: int = 4

    async def create(self, order: Order) -> Any:
        """Wait for the others, and make the machine."""
        self.asked.append(order.node)
        while order.node and len(self.asked) < self.count:
            await asyncio.sleep(0.01)
        return await super().create(order)


@only_in_all
def test_growth_starts_all_the_nodes_it_needs_together(
    tmp_path: Path, eventually: Eventually
) -> None:
    with sky.Compute(AllAtOnce(), nodes=(1, 4), options=QUIET) as pool:
        gate = tmp_path / "gate"
        calls = [wait_for(str(gate)) > pool for _ in range(8)]
        eventually(lambda: states(pool) == ["ready"] * 4)
        gate.touch()
        assert all(future.result(100) for future in calls)


def test_resize_takes_what_nodes_takes(hasty: None, eventually: Eventually) -> None:
    provider = Scarce(missing={2})
    with sky.Compute(provider, options=QUIET) as pool:
        pool.resize(sky.Nodes(3, min=2))
        assert len(rank() @ pool) == 2
        provider.missing.clear()
        eventually(lambda: states(pool) == ["ready"] * 3)
        pool.resize((1, 2))
        assert states(pool) == ["ready"]
        with pytest.raises(sky.errors.ConfigurationError, match="min exceeds max"):
            pool.resize((2, 1))
        for wrong in (0, True, 1.5, "2"):
            with pytest.raises(sky.errors.ConfigurationError, match="give a whole number of nodes"):
                pool.resize(wrong)  # type: ignore[arg-type]


@other_case
def test_resize_starts_failed_nodes_again_and_returns_when_all_are_ready(
    monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    monkeypatch.setattr("skyward.nodes.node.RETRY_PAUSES", (300.0, 300.0))
    provider = Scarce(missing={1, 3})
    with sky.Compute(provider, nodes=sky.Nodes(3, min=2), options=QUIET) as pool:
        eventually(lambda: states(pool) == ["ready", "failed", "ready"])
        provider.missing.remove(1)
        with pytest.raises(sky.errors.PoolStartError, match="there is no machine for node 3"):
            pool.resize(4)
        eventually(lambda: states(pool) == ["ready"] * 3)
        provider.missing.clear()
        pool.resize(4)
        assert states(pool) == ["ready"] * 4


class Idle:
    """A dispatcher without tasks."""

    backlog = 0
    lanes = ()


@pytest.mark.parametrize("change", ["none", "bounds", "number"])
def test_a_pool_does_not_shrink_below_what_a_resize_has_just_asked_for(change: str) -> None:
    now, idle = 0.0, sky.Options(idle_timeout=60)
    scaler = Scaler(sky.Nodes(1, max=3), idle, Idle(), lambda: now)  # type: ignore[arg-type]
    now = 61.0
    assert scaler.look(3, coming=0, slots=1) == 2
    if change == "bounds":
        scaler.bound(sky.Nodes(3, max=4))
    if change == "number":
        scaler.keep()
    # The user's resize had the lock until now.
    assert scaler.target(3) == (2 if change == "none" else 3)


def test_a_node_that_has_just_come_gets_its_tasks_before_another_is_started() -> None:
    now = 0.0
    waiting: Any = type("Waiting", (), {"backlog": 1, "lanes": ()})()
    scaler = Scaler(sky.Nodes(0, max=4), sky.Options(), waiting, lambda: now)
    assert scaler.look(0, coming=0, slots=1) == 1
    now = 60.0
    assert scaler.look(1, coming=1, slots=1) == 1
    now = 61.0
    assert scaler.look(1, coming=0, slots=1) == 1
    now += 1.1
    assert scaler.look(1, coming=0, slots=1) == 2, "the task waits in spite of the node"


def test_a_node_that_is_started_again_has_the_workers_it_had() -> None:
    """Its machine says how many GPUs it has when it is up; broadcasts ask before that."""
    provider: Any = sky.Local()
    order = Order("pool", 0, plain_request())
    allocation = provider.allocate("pool")
    first = Host(provider, allocation, order, NoJournal())
    first.accelerators, first.accelerator = 8, "H100"
    again = Host(provider, allocation, order, NoJournal(), lost=first)
    assert (again.accelerators, again.accelerator) == (8, "H100")


@other_case
def test_resize_sets_the_bounds_within_which_a_pool_grows(
    tmp_path: Path, eventually: Eventually
) -> None:
    with sky.Compute(options=QUIET) as pool:
        pool.resize((1, 2))
        gate = tmp_path / "gate"
        calls = [wait_for(str(gate)) > pool for _ in range(4)]
        eventually(lambda: states(pool) == ["ready"] * 2)
        gate.touch()
        assert all(future.result(100) for future in calls)


def test_a_group_is_formed_of_the_nodes_that_are_there_and_anew_when_one_comes(
    hasty: None, eventually: Eventually, nothing_left: None
) -> None:
    """A distributed plugin's workers are told of each other, and of nobody who is missing."""

    def around(info: sky.InstanceInfo) -> Iterator[None]:
        os.environ["GROUP"] = f"{info.global_worker_index} of {info.total_workers}"
        yield

    @sky.function
    def group() -> str:
        return os.environ["GROUP"]

    plugin = sky.Plugin.create("group").with_around_process(around).with_distributed()
    provider = Scarce(missing={1})
    nodes = sky.Nodes(3, min=2)
    with sky.Compute(provider, nodes=nodes, plugins=[plugin], options=QUIET) as pool:
        assert group() @ pool == ["0 of 2", "1 of 2"]

        provider.missing.clear()

        eventually(lambda: states(pool) == ["ready"] * 3)
        eventually(lambda: group() @ pool == ["0 of 3", "1 of 3", "2 of 3"])


@dataclass(frozen=True)
class Unfit(sky.Local):
    """A provider that fails in a way of its own."""

    problem: Exception = field(default_factory=Exception)

    async def create(self, order: Order) -> Any:
        """Fail as a provider does that was told no."""
        try:
            raise ConnectionError("401 Unauthorized")
        except ConnectionError as cause:
            raise self.problem from cause


@pytest.mark.parametrize("problem", [sky.errors.PoolStartError("no quota"), KeyError("region")])
def test_a_start_error_shows_no_frames_of_ours(problem: Exception) -> None:
    with pytest.raises(sky.errors.PoolStartError) as caught:
        sky.Compute(Unfit(problem=problem), options=QUIET).__enter__()
    shown = "".join(traceback.format_exception(caught.value))
    assert "401 Unauthorized" in shown
    assert "skyward/nodes/" not in shown
    assert "asyncio" not in shown
    assert len(shown.splitlines()) < 35, shown
    if isinstance(problem, KeyError):
        assert "raise self.problem from cause" in shown, "whoever wrote the provider needs it"
