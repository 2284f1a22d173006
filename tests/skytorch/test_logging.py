"""What an executed function logs, heard here while it runs."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from skytorch.client import Compute, log_event
from skytorch.client.event import Event

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


def test_what_a_function_logs_is_heard_while_it_runs(telling: Compute, tmp_path: Path) -> None:
    heard = tmp_path / "heard"

    def train() -> str:
        for epoch in range(3):
            log_event("epoch done", epoch=epoch)
        deadline = time.monotonic() + 30
        while not heard.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        return "trained"

    async def main() -> tuple[int, str]:
        running = asyncio.create_task(telling.execute(train))
        while len(events) < 3 and not running.done():
            await asyncio.sleep(0.01)
        early = not running.done()
        heard.touch()
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


def test_giving_up_on_a_function_stops_it_and_frees_the_node(
    telling: Compute, patient: None
) -> None:
    def forever() -> None:
        while True:
            log_event("still here")
            time.sleep(0.01)

    async def main() -> int:
        running = asyncio.create_task(telling.execute(forever))
        while not events and not running.done():
            await asyncio.sleep(0.01)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(running, 1.0)
        return int(await telling.execute(abs, -3))

    assert asyncio.run(main()) == 3
    before = len(events)
    assert before
    assert asyncio.run(telling.execute(abs, -4)) == 4
    assert len(events) == before
