"""Events and metrics: a compute's life and what functions log, told while it happens."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterator

import pytest
import torch

import skyward as sky
from skytorch.client import Compute, compute, log_event
from skytorch.events import Event
from skytorch.metrics import Metrics

events: list[Event] = []


@pytest.fixture(scope="module")
def telling() -> Iterator[Compute]:
    """A compute whose events go to the list `events`."""
    node = Compute(name="telling", on_events=events.append)
    asyncio.run(node.ready())
    yield node
    asyncio.run(node.delete())


@pytest.fixture(autouse=True)
def _afresh() -> None:
    events.clear()


def test_a_life_is_told_in_order(nothing_left: None) -> None:
    heard: list[Event] = []

    async def main() -> None:
        async with Compute(name="short", on_events=heard.append) as node:
            await node.suspend()
            await node.resume()

    asyncio.run(main())

    reasons = ["Starting", "Ready", "Suspended", "Starting", "Ready", "Deleted"]
    assert [event.reason for event in heard] == reasons
    assert {event.compute for event in heard} == {"short"}


def test_what_a_function_logs_is_heard_while_it_runs(telling: Compute) -> None:
    def train() -> str:
        for epoch in range(3):
            log_event("epoch done", epoch=epoch)
        time.sleep(0.5)
        return "trained"

    async def main() -> tuple[int, str]:
        running = asyncio.create_task(telling.execute(train))
        while len(events) < 3:
            await asyncio.sleep(0.01)
        early = not running.done()
        return early, await running

    early, result = asyncio.run(main())

    assert early
    assert result == "trained"
    assert [(e.reason, e.message, e.details, e.compute) for e in events] == [
        ("Logged", "epoch done", {"epoch": epoch}, "telling") for epoch in range(3)
    ]


def test_its_threads_and_coroutines_are_heard_too(telling: Compute) -> None:
    async def busy() -> None:
        log_event("from the coroutine")
        thread = threading.Thread(target=log_event, args=("from a thread",))
        thread.start()
        thread.join()

    asyncio.run(telling.execute(busy))

    assert [event.message for event in events] == ["from the coroutine", "from a thread"]


def test_results_are_remote_and_exceptions_themselves_also_with_events(telling: Compute) -> None:
    def fail() -> None:
        log_event("about to")
        raise LookupError("nothing there")

    tensor = asyncio.run(telling.execute(torch.ones, 2))
    with pytest.raises(LookupError, match="nothing there"):
        asyncio.run(telling.execute(fail))

    assert tensor.device == telling.device()
    assert [event.message for event in events] == ["about to"]


def test_giving_up_on_a_function_stops_it_and_frees_the_node(telling: Compute) -> None:
    def forever() -> None:
        while True:
            log_event("still here")
            time.sleep(0.01)

    async def main() -> int:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(telling.execute(forever), 1.0)
        return int(await telling.execute(abs, -3))

    assert asyncio.run(main()) == 3
    before = len(events)
    assert before
    assert asyncio.run(telling.execute(abs, -4)) == 4
    assert len(events) == before


def test_a_listener_that_fails_is_noticed(nothing_left: None) -> None:
    def listen(event: Event) -> None:
        if event.reason == "Logged":
            raise RuntimeError("cannot take it")

    async def main() -> None:
        async with Compute(name="deaf", on_events=listen) as node:
            await node.execute(log_event, "hello")

    with pytest.raises(RuntimeError, match="cannot take it"):
        asyncio.run(main())


def test_log_event_is_itself_a_listener_that_writes_to_the_log(
    caplog: pytest.LogCaptureFixture, nothing_left: None
) -> None:
    @compute(name="logged", on_events=log_event)
    async def main(node: Compute) -> None:
        log_event("here", step=1)
        await node.execute(log_event, "there")

    with caplog.at_level(logging.INFO, "skytorch"):
        asyncio.run(main())

    said = [record.getMessage() for record in caplog.records if record.name == "skytorch"]
    assert said == [
        "logged: Starting: on this machine",
        "logged: Ready: it can be used",
        "logged: Logged: here, step=1",
        "logged: Logged: there",
        "logged: Deleted: it is gone",
    ]


def test_log_event_wants_a_text() -> None:
    with pytest.raises(sky.ConfigurationError, match=r"log_event\(3\): give a text"):
        log_event(3)  # type: ignore[arg-type]
    with pytest.raises(sky.ConfigurationError, match=r"'Ready' event, loss=\.\.\."):
        log_event(Event("Ready", "again"), loss=1)


@pytest.mark.slow
def test_metrics_come_every_second_also_while_the_event_loop_is_held(nothing_left: None) -> None:
    """Slow: waits for a second reading, and holds the event loop meanwhile."""
    readings: list[Metrics] = []
    enough = threading.Event()

    def listen(reading: Metrics) -> None:
        readings.append(reading)
        if reading.operations:
            enough.set()

    async def main() -> None:
        async with Compute(name="metered", on_metrics=listen) as node:
            await node.execute(abs, -1)
            (torch.ones(2, device=node.device()) + 1).sum().item()
            assert enough.wait(20)

    asyncio.run(main())

    last = readings[-1]
    assert last.compute == "metered"
    assert last.calls == 1
    assert 0 < last.memory_used < last.memory_total


def test_a_metrics_listener_that_fails_is_logged_and_left_alone(
    caplog: pytest.LogCaptureFixture, nothing_left: None
) -> None:
    called = threading.Event()

    def listen(reading: Metrics) -> None:
        called.set()
        raise RuntimeError("not now")

    async def main() -> None:
        async with Compute(name="metered", on_metrics=listen):
            assert called.wait(20)

    asyncio.run(main())

    assert "on_metrics failed and is not called again" in caplog.text
