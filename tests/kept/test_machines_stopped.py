"""A pool whose machines are stopped without `sky stop`: it is kept, and counts as stopped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward.compute import restarting
from skyward.nodes import keeping, reaching
from skyward.nodes.keeping import KeptNode, KeptPool
from skyward.nodes.occupancy import occupancy


@dataclass
class Stopped:
    """A machine that does not run."""

    id: str
    node: int
    ended: bool = True


class Cloud:
    """A provider that can stop machines, and has these of any pool."""

    def __init__(self, *machines: Stopped) -> None:
        self._machines = machines

    async def find(self, pool: str) -> Sequence[Stopped]:
        return self._machines

    async def stop(self, pool: str) -> None:
        """They are stopped."""


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
    keeping.write(made)
    return made


def use(monkeypatch: pytest.MonkeyPatch, *machines: Stopped) -> None:
    cloud: Any = Cloud(*machines)
    for module in (reaching, restarting):
        monkeypatch.setattr(module, "provider_of", lambda record: cloud)


def test_it_is_not_forgotten(record: KeptPool, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, Stopped("i-0", 0), Stopped("i-1", 1))
    with pytest.raises(sky.PoolError) as caught:
        sky.attach("cloud")
    message = str(caught.value)
    assert message.startswith("cloud is stopped: its machines do not run any more (i-0, i-1)")
    assert "`sky start cloud` starts them again, and `sky down cloud` removes them" in message
    assert keeping.read("cloud") == record
    assert occupancy(record).state == "stopped"
    keeping.forget("cloud")


def test_it_is_started_as_a_pool_that_was_stopped(
    record: KeptPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, Stopped("i-1", 1))
    begun = []

    def again(record: KeptPool) -> Any:
        begun.append(record)
        raise sky.PoolError("enough")

    monkeypatch.setattr(restarting.Compute, "_again", again)
    with pytest.raises(sky.PoolError, match="enough"):
        restarting.start_pool("cloud")
    assert begun == [keeping.read("cloud")]
    assert (begun[0].stopped, begun[0].count, begun[0].nodes) == (True, 2, [])
    keeping.forget("cloud")


def test_a_pool_without_any_machine_is_forgotten(
    record: KeptPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch)
    assert occupancy(record).state == "gone"
    with pytest.raises(sky.PoolError, match="its machines are gone, so its record is, too"):
        sky.attach("cloud")
    assert keeping.names() == []
