"""Nodes that do not come up: an error at once, with what they said, and everything taken down."""

from __future__ import annotations

import gc
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import skyward as sky
from skyward.providers import Wish
from skyward.wire.identity import direct
from skyward.worker.config import AgentConfig

QUIET = sky.Options(console=False)
SOON = 15.0
"""Seconds rather than the minute an agent may take to start."""


class Broken:
    """A machine whose provider fails in some way of its own."""

    endpoint = ""
    address = "127.0.0.1"
    hostname = "here"
    accelerators = 0
    accelerator = None

    def __init__(self, problem: Exception) -> None:
        self.problem = problem
        self.stops = 0

    def start(self, config: AgentConfig) -> None:
        raise self.problem

    def looks_dead(self) -> bool:
        return True

    def stop(self, seconds: float) -> None:
        self.stops += 1


@dataclass
class Flaky:
    """A provider whose first node is sound and whose others are not."""

    problem: Exception
    encrypted: bool = False
    last: Any = None

    def check(self, wish: Wish) -> None:
        pass

    def machine(self, node: int, pool: str, wish: Wish) -> Any:
        if node == 0:
            return sky.Local().machine(node, pool, wish)
        self.last = Broken(self.problem)
        return self.last


@pytest.mark.parametrize(
    ("problem", "kind", "words"),
    [
        (RuntimeError("quota exceeded"), sky.PoolStartError, "node 1 did not start: RuntimeError"),
        (
            ConnectionRefusedError("nobody there"),
            sky.PoolStartError,
            "node 1 cannot be reached: nobody there; see that its machine is up",
        ),
        (sky.ImageError("no such package"), sky.ImageError, "no such package"),
    ],
    ids=["unexpected", "network", "named"],
)
def test_whatever_a_provider_raises_ends_the_start_and_the_other_nodes(
    problem: Exception, kind: type[Exception], words: str
) -> None:
    provider = Flaky(problem)
    began = time.monotonic()
    with pytest.raises(kind) as caught:
        sky.Compute(provider, nodes=2, options=QUIET).__enter__()  # type: ignore[arg-type]
    assert time.monotonic() - began < SOON
    assert words in str(caught.value)
    assert str(problem) in str(caught.value)
    assert provider.last.stops


class Slow(Broken):
    """A machine that takes its time, until it is stopped."""

    def __init__(self) -> None:
        super().__init__(sky.PoolStartError("it was stopped"))
        self.stopped = threading.Event()

    def start(self, config: AgentConfig) -> None:
        self.stopped.wait()
        super().start(config)

    def stop(self, seconds: float) -> None:
        super().stop(seconds)
        self.stopped.set()


@dataclass
class Mixed(Flaky):
    """A provider whose first node takes long, and whose second cannot be had."""

    def machine(self, node: int, pool: str, wish: Wish) -> Any:
        return Slow() if node == 0 else Broken(self.problem)


def test_a_failure_is_told_at_once_though_another_node_takes_long() -> None:
    provider = Mixed(sky.PoolStartError("there is no such machine"))
    with pytest.raises(sky.PoolStartError, match="there is no such machine"):
        sky.Compute(provider, nodes=2, options=QUIET).__enter__()  # type: ignore[arg-type]


@dataclass
class Walled:
    """A provider of a machine on which one port can be reached: the agent's."""

    encrypted: bool = True

    def check(self, wish: Wish) -> None:
        pass

    def machine(self, node: int, pool: str, wish: Wish) -> Any:
        machine: Any = sky.Local(transport="tcp").machine(node, pool, wish)

        def dial(endpoint: str, seconds: float) -> Any:
            if endpoint != machine.endpoint:
                raise ConnectionRefusedError("refused by a firewall")
            return direct(endpoint, seconds)

        machine.route, machine.dial = str, dial
        return machine


def test_workers_that_cannot_be_reached_are_told_from_a_node_that_cannot() -> None:
    words = (
        "node 0: its worker cannot be reached, though its agent can: refused by a firewall; "
        "if a firewall is in between"
    )
    with pytest.raises(sky.PoolStartError, match=words):
        sky.Compute(Walled(), options=QUIET).__enter__()  # type: ignore[arg-type]


def test_a_failing_new_node_leaves_the_pool_as_it_was() -> None:
    provider = Flaky(RuntimeError("quota exceeded"))
    with sky.Compute(provider, options=QUIET) as compute:  # type: ignore[arg-type]
        with pytest.raises(sky.PoolStartError, match="quota exceeded"):
            compute.resize(2)
        assert [node.state for node in compute.nodes] == ["ready"]
        assert sky.function(abs)(-1) @ compute == [1]


def test_a_task_on_a_node_that_is_lost_while_it_first_starts_hears_of_no_other_loss() -> None:
    """Its workers take tasks one by one, as they come up."""
    with sky.Compute(options=QUIET) as compute:
        future = sky.function(time.sleep)(60) > compute
        fleet = compute._open_pool._fleet
        node = fleet.nodes[0]
        node.state = "starting"
        fleet._loop.soon(lambda: fleet._node_lost(node, "its agent is gone"))
        with pytest.raises(sky.NodeLostError) as caught:
            future.result(SOON)
    assert str(caught.value).endswith(
        "lost node 0: its agent is gone; call again, or have `retries` do that"
    )


def test_an_agent_that_ends_at_once_is_quoted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\necho 'this python is broken' >&2\nexit 3\n")
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))
    began = time.monotonic()
    with pytest.raises(sky.PoolStartError) as caught:
        sky.Compute(options=QUIET).__enter__()
    assert time.monotonic() - began < SOON
    message = str(caught.value)
    assert "node 0: its agent ended with exit status 3" in message
    assert "it said:\nthis python is broken" in message


def test_workers_that_cannot_start_are_quoted_after_a_few_tries() -> None:
    """The agent starts, but its executors find no standard library."""
    image = sky.Image(env={"PYTHONHOME": "/nowhere"})
    began = time.monotonic()
    with pytest.raises(sky.PoolStartError) as caught:
        sky.Compute(image=image, options=QUIET).__enter__()
    assert time.monotonic() - began < SOON
    message = str(caught.value)
    assert "node 0 worker 0 cannot run: it did not start" in message
    assert "exit status 1" in message
    assert "No module named 'encodings'" in message


def test_a_pool_that_did_not_start_can_be_made_anew() -> None:
    failing = sky.Compute(image=sky.Image(env={"PYTHONHOME": "/nowhere"}), options=QUIET)
    with pytest.raises(sky.PoolStartError):
        failing.__enter__()
    with sky.Compute(options=QUIET) as compute:
        assert sky.function(abs)(-1) >> compute == 1


def test_pools_that_come_and_go_leave_no_thread_and_no_descriptor(eventually: Any) -> None:
    def used() -> tuple[set[str], int]:
        return {thread.name for thread in threading.enumerate()}, psutil.Process().num_fds()

    def come_and_go(transport: str) -> None:
        provider = sky.Local(transport=transport)  # type: ignore[arg-type]
        with sky.Compute(provider, nodes=2, options=QUIET) as compute:
            array = np.zeros(1 << 20, np.uint8)
            assert sky.function(len)(array) @ compute == [1 << 20] * 2
            assert (sky.function(abs)(-1) > compute).result() == 1
            assert len(sky.function(bytes)(1 << 20) >> compute) == 1 << 20

    come_and_go("unix")
    come_and_go("tcp")
    before = used()
    for transport in ("unix", "tcp", "unix"):
        come_and_go(transport)
    gc.collect()
    eventually(lambda: used()[0] <= before[0], 10, "the end of all threads")
    eventually(lambda: used()[1] <= before[1], 10, f"{before[1]} descriptors, not {used()[1]}")
