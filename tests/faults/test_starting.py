"""Nodes that do not come up: an error at once, with what they said, and everything taken down."""

from __future__ import annotations

import asyncio
import gc
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import psutil
import pytest

import skyward as sky
from skyward import providers
from skyward.events import EventStream
from skyward.nodes import host as hosts
from skyward.nodes import node
from skyward.nodes.fleet import Fleet
from skyward.nodes.host import Host
from skyward.nodes.node import Node, Roster
from skyward.nodes.records import NoJournal
from skyward.providers import Machine, Order
from skyward.testing import plain_request
from skyward.wire import handshake
from skyward.wire.messages import ExecutorUp, Hello

from ..conftest import Eventually, only_in_all

QUIET = sky.Options(console=False)
SOON = 50.0
"""Seconds rather than the minute an agent may take to start."""


@dataclass(frozen=True)
class Flaky(sky.Local):
    """A provider whose first node is sound, and whose others cannot be made."""

    problem: Exception = field(default_factory=Exception)
    machines: list[Machine] = field(default_factory=list, compare=False)
    asked: list[int] = field(default_factory=list, compare=False)

    async def create(self, order: Order) -> Any:
        """Make a machine, or fail."""
        self.asked.append(order.node)
        if order.node:
            raise self.problem
        self.machines.append(await super().create(order))
        return self.machines[-1]


@pytest.mark.parametrize(
    ("problem", "kind", "words"),
    [
        (
            RuntimeError("quota exceeded"),
            sky.errors.PoolStartError,
            "node 1 did not start: RuntimeError",
        ),
        (
            ConnectionRefusedError("nobody there"),
            sky.errors.PoolStartError,
            "node 1 cannot be reached: nobody there; see that its machine is up",
        ),
        (sky.errors.ImageError("no such package"), sky.errors.ImageError, "no such package"),
    ],
    ids=["unexpected", "network", "named"],
)
def test_whatever_a_provider_raises_ends_the_start_and_the_other_nodes(
    problem: Exception, kind: type[Exception], words: str
) -> None:
    provider = Flaky(problem=problem)
    began = time.monotonic()
    with pytest.raises(kind) as caught:
        sky.Compute(provider, nodes=2, options=QUIET).__enter__()
    assert time.monotonic() - began < SOON
    assert words in str(caught.value)
    assert str(problem) in str(caught.value)
    assert not any(asyncio.run(machine.alive()) for machine in provider.machines)


def test_a_worker_without_a_processor_has_time_to_greet(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be killed otherwise, with all that it keeps for the next client."""
    allowed: dict[str, float] = {}

    def connect(endpoint: str, hello: Hello, credentials: None, name: str, seconds: float) -> Any:
        allowed[hello.role] = seconds
        return handshake.connect(endpoint, hello, credentials, name, seconds)

    monkeypatch.setattr(hosts, "connect", connect)
    with sky.Compute(options=QUIET):
        pass
    assert allowed["data"] >= 60 > allowed["control"]


@dataclass(frozen=True)
class Mixed(sky.Local):
    """A provider whose first node takes for ever, and whose second cannot be had."""

    async def create(self, order: Order) -> Any:
        """Wait until it is cancelled, or fail."""
        if order.node == 0:
            await asyncio.Event().wait()
        raise sky.errors.PoolStartError("there is no such machine")


def test_a_failure_is_told_at_once_though_another_node_takes_long() -> None:
    began = time.monotonic()
    with pytest.raises(sky.errors.PoolStartError, match="there is no such machine"):
        sky.Compute(Mixed(), nodes=2, options=QUIET).__enter__()
    assert time.monotonic() - began < SOON


def fleet_that_waits(seconds: float) -> Any:
    """A fleet that waits so long for nodes whose machines are there."""
    fleet: Any = object.__new__(Fleet)
    fleet.roster, fleet.events, fleet._ready_seconds = Roster(), EventStream(), seconds
    return fleet


def test_a_start_is_late_only_if_no_more_executors_come_and_says_how_many_are_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr("skyward.nodes.fleet.time", clock)
    slow: Any = SimpleNamespace(
        index=0, serves=False, failure=None, lanes={}, control=object(), settled=threading.Event()
    )
    slow.host = SimpleNamespace(made_at=now)

    def wait(_: float) -> None:
        nonlocal now
        now += 0.9
        if len(slow.lanes) < 5:
            slow.lanes[len(slow.lanes)] = object()

    slow.settled.wait = wait
    fleet = fleet_that_waits(1.0)
    fleet.executors_on = lambda _: 250
    words = r"node 0: 5 of 250 worker processes are connected, and in 1 s no other came; .*'thread'"
    with pytest.raises(sky.errors.PoolStartError, match=words):
        fleet._await_ready([slow], 1)


@dataclass(frozen=True)
class Queued(sky.Local):
    """A provider whose machines wait in a queue first."""

    made: list[Machine] = field(default_factory=list, compare=False)

    async def create(self, order: Order) -> Any:
        """Wait, and make a machine."""
        await asyncio.sleep(0.4)
        self.made.append(await super().create(order))
        return self.made[-1]


def test_the_time_in_a_providers_queue_does_not_count() -> None:
    provider: Any = Queued()
    order = Order("pool", 3, plain_request())
    host = Host(provider, provider.allocate("pool"), order, NoJournal())
    fleet = fleet_that_waits(0.05)
    preparing = providers.submit(host.prepare())
    try:
        with pytest.raises(
            sky.errors.PoolStartError, match="node 3 was not ready 0 s after its machine"
        ):
            fleet._await_ready([Node(3, host, fleet)], 1)
        assert provider.made
    finally:
        preparing.result(SOON)
        host.stop(0).result(SOON)


class BehindAWall:
    """A machine of this host on which one port can be reached: the agent's."""

    direct = None

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._open = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._machine, name)

    async def dial(self, endpoint: str) -> Any:
        """Connect to the agent, which is the first to be asked for."""
        self._open = self._open or endpoint
        if endpoint != self._open:
            raise ConnectionRefusedError("refused by a firewall")
        return await self._machine.dial(endpoint)


@dataclass(frozen=True)
class Walled(sky.Local):
    """A provider of such machines."""

    transport: Literal["auto", "unix", "tcp"] = "tcp"

    async def create(self, order: Order) -> Any:
        """Make a machine behind a wall."""
        return BehindAWall(await super().create(order))


def test_workers_that_cannot_be_reached_are_told_from_a_node_that_cannot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(node, "REPORT_SECONDS", 0.5)
    words = (
        "node 0: its worker cannot be reached, though its agent can: refused by a firewall; "
        "if a firewall is in between"
    )
    with pytest.raises(sky.errors.PoolStartError, match=words):
        sky.Compute(Walled(), options=QUIET).__enter__()


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_a_worker_process_that_ends_before_the_client_connects_is_replaced(
    transport: Literal["unix", "tcp"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent has announced it, and reports its end a moment after the client was refused."""
    killed: list[int] = []
    attempt = Node._attempt

    def on_a_dead_one(self: Node, up: ExecutorUp, *others: Any) -> None:
        if not killed:
            killed.append(up.pid)
            process = psutil.Process(up.pid)
            process.kill()
            psutil.wait_procs([process], SOON)
        attempt(self, up, *others)

    monkeypatch.setattr(Node, "_attempt", on_a_dead_one)
    with sky.Compute(sky.Local(transport=transport), options=QUIET) as compute:
        assert sky.function(abs)(-1) >> compute == 1
    assert killed


def test_a_worker_process_that_does_not_answer_is_told_with_the_number_of_those_that_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(node, "MANY", 3)
    monkeypatch.setattr(node, "REPORT_SECONDS", 0.5)
    reached: list[int] = []
    attempt = hosts.Approach.attempt

    def all_but_the_last(approach: hosts.Approach, *seconds: float) -> Any:
        if approach._hello.role == "data":
            reached.append(1)
            if len(reached) > 2:
                raise TimeoutError("timed out")
        return attempt(approach, *seconds)

    monkeypatch.setattr(hosts.Approach, "attempt", all_but_the_last)
    with pytest.raises(sky.errors.PoolStartError) as caught:
        sky.Compute(worker=sky.Worker(concurrency=3)).__enter__()
    said = str(caught.value)
    assert re.match(r"node 0: \d of 3 worker processes are connected, and another does not", said)
    assert "answer: timed out; if that is too many" in said
    assert "for threads of one process with executor='thread'" in said
    assert "starting workers: 1 of 3" in capsys.readouterr().err


def test_a_failing_new_node_leaves_the_pool_as_it_was() -> None:
    provider = Flaky(problem=RuntimeError("quota exceeded"))
    with sky.Compute(provider, options=QUIET) as compute:
        with pytest.raises(sky.errors.PoolStartError, match="quota exceeded"):
            compute.resize(2)
        assert [node.state for node in compute.nodes] == ["ready"]
        assert sky.function(abs)(-1) @ compute == [1]


def test_a_task_on_a_node_that_is_lost_while_it_first_starts_hears_of_no_other_loss() -> None:
    """Its workers take tasks one by one, as they come up."""
    with sky.Compute(options=QUIET) as compute:
        future = sky.function(time.sleep)(60) > compute
        fleet = compute._open_fleet
        lost = fleet.nodes[0]
        lost._state, lost.joined = "starting", False
        fleet.loop.call_soon(lambda: lost.handle_loss("its agent is gone"))
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
    with pytest.raises(sky.errors.PoolStartError) as caught:
        sky.Compute(options=QUIET).__enter__()
    assert time.monotonic() - began < SOON
    message = str(caught.value)
    assert "node 0: its agent ended with exit status 3" in message
    assert "it said:\nthis python is broken" in message


def test_workers_that_cannot_start_are_quoted_after_a_few_tries() -> None:
    """The agent starts, but its executors find no standard library."""
    image = sky.Image(env={"PYTHONHOME": "/nowhere"})
    began = time.monotonic()
    with pytest.raises(sky.errors.PoolStartError) as caught:
        sky.Compute(image=image, options=QUIET).__enter__()
    assert time.monotonic() - began < SOON
    message = str(caught.value)
    assert "node 0 worker 0 cannot run: it did not start" in message
    assert "exit status 1" in message
    assert "No module named 'encodings'" in message


def test_a_pool_that_did_not_start_can_be_made_anew() -> None:
    failing = sky.Compute(image=sky.Image(env={"PYTHONHOME": "/nowhere"}), options=QUIET)
    with pytest.raises(sky.errors.PoolStartError):
        failing.__enter__()
    with sky.Compute(options=QUIET) as compute:
        assert sky.function(abs)(-1) >> compute == 1


@only_in_all
def test_a_plugin_that_takes_long_costs_no_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agents hear of their client meanwhile, and the client of its agents."""
    monkeypatch.setattr(node, "LOST_SECONDS", 1.5)
    slow = sky.Plugin.create("slow").with_around_process(_slow)
    options = sky.Options(console=False, orphan_timeout=1.5)
    with sky.Compute(plugins=[slow], options=options) as compute:
        time.sleep(1.0)
        assert sky.function(abs)(-1) >> compute == 1
        assert compute.stats().nodes_lost == 0


def _slow(info: sky.InstanceInfo) -> Iterator[None]:
    time.sleep(3.0)
    yield


@only_in_all
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
    come_and_go("unix")
    come_and_go("tcp")
    gc.collect()
    eventually(lambda: used()[0] <= before[0], what="the end of all threads")
    eventually(lambda: used()[1] <= before[1], what=f"{before[1]} descriptors, not {used()[1]}")


def test_a_loop_that_cannot_be_made_is_an_error_and_not_a_wait(
    monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    async def work() -> int:
        return 7

    def refuse() -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(providers, "_loop", None)
    with monkeypatch.context() as changed:
        changed.setattr(providers.asyncio, "new_event_loop", refuse)
        with pytest.raises(OSError, match="Too many open files"):
            providers.submit(work())
    assert providers.submit(work()).result(100) == 7
    loop = providers._loop
    assert loop is not None
    loop.call_soon_threadsafe(loop.stop)
    eventually(lambda: not loop.is_running())
    loop.close()


def test_a_connection_that_is_made_too_late_is_closed(eventually: Eventually) -> None:
    made: list[socket.socket] = []
    waits = threading.Event()

    async def dial(endpoint: str) -> socket.socket:
        await asyncio.to_thread(waits.wait)
        made.append(socket.socket())
        return made[0]

    machine: Any = SimpleNamespace(dial=dial, direct=None, id="slow")
    with pytest.raises(TimeoutError, match=r"unix:there on slow was not reached in 0\.01 s"):
        hosts.Routes(machine, "", here=True).dial("unix:there", 0.01)
    waits.set()
    eventually(lambda: made and made[0].fileno() == -1, what="the end of the late connection")
