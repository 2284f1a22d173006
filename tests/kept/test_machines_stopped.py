"""A pool whose machines are stopped without `sky stop`: it is kept, and counts as stopped."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

import skyward as sky
from skyward import compute
from skyward.closing import Closing
from skyward.nodes import kept, occupancy, records
from skyward.nodes.records import KeptNode, KeptPool, NoJournal
from skyward.providers import Allocation, Capabilities


@dataclass
class Stopped:
    """A machine that does not run."""

    id: str
    node: int
    ended: bool = True
    address: str = ""


class Cloud:
    """A provider that can stop machines, and has these of any pool."""

    capabilities = Capabilities(stops=True)

    def __init__(self, *machines: Stopped) -> None:
        self._machines = machines
        self.steps: list[str] = []

    def allocate(self, pool: str) -> Allocation[Any]:
        return Allocation(cast(Any, self), pool)

    async def find(self, pool: str) -> Sequence[Stopped]:
        return self._machines

    async def spare(self, pool: str, spared: bool) -> None:
        self.steps.append("spare" if spared else "undo")

    async def stop(self, pool: str) -> float | None:
        self.steps.append("stop")
        return None


@pytest.fixture
def record(home: Path) -> KeptPool:
    nodes = [KeptNode(node, "tcp:h:1", 1, "h", "10.0.0.1", 0, None, f"i-{node}") for node in (0, 1)]
    made = KeptPool(
        id="p1",
        name="cloud",
        provider="aws",
        arguments={},
        created=0.0,
        idle=0.0,
        ends=None,
        hourly_cost=None,
        authority=None,
        credentials=None,
        spec="",
        nodes=nodes,
    )
    records.write(made)
    return made


def use(monkeypatch: pytest.MonkeyPatch, *machines: Stopped) -> Cloud:
    cloud: Any = Cloud(*machines)
    for module in (kept, compute, occupancy):
        monkeypatch.setattr(module, "provider_of", lambda record: cloud)
    return cast(Cloud, cloud)


class Reached(Closing):
    """A pool whose agents answer."""

    nodes = (0,)

    def __init__(self, steps: list[str]) -> None:
        self._steps = steps

    def head(self) -> Reached:
        return self

    def close(self) -> None: ...

    def lock(self, *, force: bool) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()

    def service(self, node: int, name: str) -> Reached:
        return self

    def tell_end(self) -> None:
        self._steps.append("end")


class Interrupted(Reached):
    """A pool of which somebody interrupts the end."""

    def tell_end(self) -> None:
        raise KeyboardInterrupt


class Half(Interrupted):
    """Such a pool, of which an agent has ended."""

    def service(self, node: int, name: str) -> Reached:
        raise sky.NodeLostError("node 0 does not answer")


def answer(monkeypatch: pytest.MonkeyPatch, reached: Any) -> None:
    monkeypatch.setattr(occupancy, "ReachedPool", lambda record: reached)
    for name in ("check_jobs", "_write_back", "_bring_back"):
        monkeypatch.setattr(occupancy, name, lambda *_: [])


def test_what_must_not_be_lost_is_safe_before_an_agent_ends(
    record: KeptPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever kills `sky stop` then, the machines end without their agents."""
    cloud = use(monkeypatch, Stopped("i-0", 0))
    answer(monkeypatch, Reached(cloud.steps))
    journalled = occupancy.journalled(record)
    occupancy.end(NoJournal(), journalled, record, force=False, stop=True)
    assert cloud.steps == ["spare", "end", "stop"]
    assert records.read("cloud").stopped
    records.forget("cloud")


@pytest.mark.parametrize("kind", [Interrupted, Half])
def test_machines_of_a_pool_that_was_not_stopped_go_with_it_again(
    record: KeptPool, monkeypatch: pytest.MonkeyPatch, kind: type[Reached]
) -> None:
    """Unless an agent has ended: its machine may end at any time, and must lose nothing."""
    cloud = use(monkeypatch, Stopped("i-0", 0))
    answer(monkeypatch, kind(cloud.steps))
    with pytest.raises(KeyboardInterrupt) as caught:
        occupancy.end(NoJournal(), occupancy.journalled(record), record, force=False, stop=True)
    assert records.read("cloud") == record
    notes = getattr(caught.value, "__notes__", [])
    if kind is Interrupted:
        assert (cloud.steps, notes) == (["spare", "undo"], [])
    else:
        assert cloud.steps == ["spare"]
        assert "may stay, and cost: node 0 does not answer; `sky stop cloud` tries" in notes[0]
    records.forget("cloud")


def test_it_is_not_forgotten(record: KeptPool, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, Stopped("i-0", 0), Stopped("i-1", 1))
    with pytest.raises(sky.errors.PoolError) as caught:
        sky.attach("cloud")
    message = str(caught.value)
    assert message.startswith("cloud is stopped: its machines do not run any more (i-0, i-1)")
    assert "`sky start cloud` starts them again, and `sky down cloud` removes them" in message
    assert records.read("cloud") == record
    assert occupancy.occupancy(record).state == "stopped"
    records.forget("cloud")


def test_it_is_started_as_a_pool_that_was_stopped(
    record: KeptPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, Stopped("i-1", 1))
    begun = []

    def again(record: KeptPool) -> Any:
        begun.append(record)
        raise sky.errors.PoolError("enough")

    monkeypatch.setattr(compute.Compute, "_again", again)
    with pytest.raises(sky.errors.PoolError, match="enough"):
        compute.start_pool("cloud")
    assert begun == [records.read("cloud")]
    assert (begun[0].stopped, begun[0].count, begun[0].nodes) == (True, 2, [])
    records.forget("cloud")


def test_a_pool_without_any_machine_is_forgotten(
    record: KeptPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch)
    assert occupancy.occupancy(record).state == "gone"
    with pytest.raises(sky.errors.PoolError, match="its machines are gone, so its record is, too"):
        sky.attach("cloud")
    assert records.names() == []
