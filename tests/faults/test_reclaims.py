"""Machines that the provider takes back: their tasks go on elsewhere, and the node is replaced."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward.providers import Order

from ..conftest import PATIENCE, Eventually, other_case

MODULE = """
import os, pathlib, time
notice = pathlib.Path(__file__).with_name("NAME.told")
while True:
    try:
        os.rename(notice, notice.with_suffix(".taken"))
        break
    except FileNotFoundError:
        time.sleep(0.01)
print(notice.with_suffix(".taken").read_text())
"""


@dataclass(frozen=True)
class Spot(sky.Local):
    """This machine, which somebody takes back when a test says so."""

    missing: list[str] = field(default_factory=list, compare=False)
    """Why the next machines cannot be had."""

    async def create(self, order: Order) -> Any:
        """Make a machine that names the module for its node."""
        if self.missing:
            raise sky.errors.UnavailableError(self.missing.pop())
        machine: Any = await super().create(order)
        machine.notice = f"notice_{order.node}"
        return machine


Tell = Callable[[int, str], None]


@pytest.fixture
def tell(tmp_path: Path) -> Tell:
    """Tell the machine of a node that it is taken back."""
    for node in range(2):
        code = MODULE.replace("NAME", f"notice_{node}")
        (tmp_path / f"notice_{node}.py").write_text(code)

    def tell(node: int, notice: str) -> None:
        (tmp_path / "new").write_text(notice)
        (tmp_path / "new").rename(tmp_path / f"notice_{node}.told")

    return tell


def a_pool(tmp_path: Path, nodes: int = 1, provider: Spot | None = None) -> sky.Compute:
    image = sky.Image(env={"PYTHONPATH": str(tmp_path)})
    provider = provider or Spot()
    return sky.Compute(provider, nodes=nodes, image=image, options=sky.Options(console=False))


@sky.function
def wait_for(path: str) -> tuple[int, int]:
    while not os.path.exists(path):
        time.sleep(0.01)
    return sky.instance_info().node, os.getpid()


@sky.function(retries=1)
def wait_or_return(path: str, mark: str) -> int:
    """Waits the first time, and returns the second time."""
    if os.path.exists(mark):
        return os.getpid()
    Path(mark).touch()
    while not os.path.exists(path):
        time.sleep(0.01)
    return 0


def test_an_idle_node_is_replaced_at_once(
    tmp_path: Path,
    tell: Tell,
    eventually: Eventually,
    capsys: pytest.CaptureFixture[str],
    nothing_left: None,
) -> None:
    with a_pool(tmp_path) as pool:
        before = wait_for("/") >> pool
        tell(0, "120 spot interruption")
        eventually(lambda: pool.stats().nodes_lost == 1)
        assert (wait_for("/") >> pool)[1] != before[1], "the task waited for the replacement"
        eventually(lambda: pool.nodes[0].state == "ready")
    said = capsys.readouterr().err
    assert (
        "node 0 is taken back in 120 s (spot interruption): it gets no more tasks and is replaced"
    ) in said
    assert "node 0 was lost: its machine was taken back (spot interruption); it is" in said


def test_what_runs_may_finish_and_what_waits_runs_on_the_replacement(
    tmp_path: Path, tell: Tell, eventually: Eventually
) -> None:
    gate = tmp_path / "gate"
    with a_pool(tmp_path) as pool:
        running = wait_for(str(gate)) > pool
        eventually(lambda: pool.nodes[0].running)
        tell(0, "120 spot interruption")
        eventually(lambda: pool.nodes[0].state == "reclaimed")
        waiting = wait_for("/") > pool
        everywhere = pool.submit(wait_for("/"), on=0)
        assert pool.stats().nodes_lost == 0
        gate.touch()
        first, second, third = (each.result(PATIENCE) for each in (running, waiting, everywhere))
        assert first[1] not in (second[1], third[1])
        assert pool.stats().failed == 0


@other_case
def test_other_nodes_take_the_tasks_meanwhile(
    tmp_path: Path, tell: Tell, eventually: Eventually
) -> None:
    gate = tmp_path / "gate"
    with a_pool(tmp_path, nodes=2) as pool:
        slow = pool.submit(wait_for(str(gate)), on=1)
        eventually(lambda: pool.nodes[1].running)
        tell(1, "120 spot interruption")
        eventually(lambda: pool.nodes[1].state == "reclaimed")
        assert {node for node, _ in pool.map(wait_for, ["/"] * 20)} == {0}
        gate.touch()
        assert slow.result(PATIENCE)[0] == 1
        eventually(lambda: pool.nodes[1].state == "ready")
        assert [node for node, _ in wait_for("/") @ pool] == [0, 1]


@other_case
def test_a_task_without_time_left_fails_or_is_retried(
    tmp_path: Path, tell: Tell, eventually: Eventually
) -> None:
    never = str(tmp_path / "never")
    with a_pool(tmp_path, nodes=2) as pool:
        failing = pool.submit(wait_for(never), on=0)
        retried = pool.submit(wait_or_return(never, str(tmp_path / "mark")), on=1)
        eventually(lambda: all(node.running for node in pool.nodes))
        eventually((tmp_path / "mark").exists)
        for node in range(2):
            tell(node, "0 spot interruption")
        with pytest.raises(
            sky.NodeLostError, match=r"lost node 0: its machine was taken back \(spot interruption"
        ):
            failing.result(PATIENCE)
        assert retried.result(PATIENCE) > 0


def test_a_node_with_an_open_device_is_kept_while_there_is_time(
    tmp_path: Path, tell: Tell, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors live there, which the user may want to copy."""
    is_open = True
    monkeypatch.setattr("skyward.nodes.devices.PoolDevices.has_open", lambda *_: is_open)
    with a_pool(tmp_path) as pool:
        tell(0, "120 spot interruption")
        eventually(lambda: pool.nodes[0].state == "reclaimed")
        waiting = wait_for("/") > pool
        with pytest.raises(TimeoutError):
            waiting.result(0.5)
        assert pool.nodes[0].state == "reclaimed"
        is_open = False
        waiting.result(PATIENCE)


@other_case
def test_a_replacement_that_cannot_be_had_yet_is_tried_again(
    tmp_path: Path,
    tell: Tell,
    eventually: Eventually,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Machines are taken back when there are too few of them."""
    monkeypatch.setattr("skyward.nodes.node.RETRY_PAUSES", (0.1, 0.1))
    provider = Spot()
    with a_pool(tmp_path, provider=provider) as pool:
        provider.missing.extend(["there is none"] * 2)
        tell(0, "120 spot interruption")
        eventually(lambda: pool.stats().nodes_lost == 1)
        assert wait_for("/") >> pool
        assert provider.missing == []
    said = capsys.readouterr().err
    assert said.count("did not come back: there is none; it is tried again") == 1


def test_closing_does_not_wait_for_the_replacement(
    tmp_path: Path, tell: Tell, eventually: Eventually, nothing_left: None
) -> None:
    with a_pool(tmp_path) as pool:
        running = wait_for(str(tmp_path / "never")) > pool
        eventually(lambda: pool.nodes[0].running)
        tell(0, "120 spot interruption")
        eventually(lambda: pool.nodes[0].state == "reclaimed")
    with pytest.raises(sky.errors.PoolClosedError):
        running.result(PATIENCE)
