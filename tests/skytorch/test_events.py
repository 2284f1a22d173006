"""Events and metrics: a compute's life and what functions log, told while it happens."""

from __future__ import annotations

import asyncio
import logging
import threading
from datetime import UTC, datetime, timedelta

import pytest
import torch

import skyward as sky
from skytorch.client import Compute, compute, log_event
from skytorch.client.event import Event
from skytorch.client.metrics import Metrics


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
    assert {event.type for event in heard} == {"Normal"}
    assert [event.timestamp for event in heard] == sorted(event.timestamp for event in heard)
    age = datetime.now(UTC) - heard[0].timestamp
    assert timedelta() <= age < timedelta(minutes=5)
    assert heard[0].timestamp == heard[0].first_timestamp == heard[0].last_timestamp


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


def test_a_warning_is_logged_as_one(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "skytorch"):
        log_event(Event("Failed", "no room", compute="node", type="Warning"))

    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        ("WARNING", "node: Failed: no room")
    ]


def test_log_event_wants_a_text() -> None:
    with pytest.raises(sky.errors.ConfigurationError, match=r"log_event\(3\): give a text"):
        log_event(3)  # type: ignore[arg-type]
    with pytest.raises(sky.errors.ConfigurationError, match=r"'Ready' event, loss=\.\.\."):
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
            assert enough.wait(100)

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
            assert called.wait(100)

    asyncio.run(main())

    assert "on_metrics failed and is not called again" in caplog.text
