"""The async face: `async with`, futures that are awaited, pools inside a running event loop."""

import asyncio
import contextlib
import time
from pathlib import Path

import pytest

import skyward as sky
from skyward.providers import Allocation, Capabilities

from .conftest import only_in_all, wait_until
from .waiting import wait_for

QUIET = sky.Options(console=False)


@pytest.fixture(scope="module")
def compute(pool):
    return pool


async def until(condition, seconds=10.0):
    """In the event loop: until a condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        await asyncio.sleep(0.005)


@sky.function
def add(a, b=1):
    return a + b


@sky.function
def fail(problem):
    raise problem


@sky.function
def wait_then(path, value):
    wait_for(path)
    return value


@sky.function
def endless(started, stopped):
    Path(started).touch()
    try:
        wait_for("/nowhere", 60)
    finally:
        Path(stopped).touch()


@sky.function
def job():
    return sky.instance_info().job_id


def test_async_with_opens_and_closes_a_pool():
    async def main():
        async with sky.Compute(options=QUIET) as compute:
            inside = await (add(1) > compute)
        with pytest.raises(sky.errors.PoolClosedError):
            add(1) >> compute
        return inside

    assert asyncio.run(main()) == 2


def test_the_event_loop_runs_on_while_a_pool_starts_and_stops(monkeypatch):
    beats = 0

    def until_it_beats_on(does):
        def after_some_beats(pool):
            enough = beats + 10
            wait_until(lambda: beats > enough)
            does(pool)

        return after_some_beats

    for name in ("_open", "close"):
        monkeypatch.setattr(sky.Compute, name, until_it_beats_on(getattr(sky.Compute, name)))

    async def main():
        async def beat():
            nonlocal beats
            while True:
                beats += 1
                await asyncio.sleep(0.001)

        beating = asyncio.create_task(beat())
        async with sky.Compute(options=QUIET):
            pass
        beating.cancel()

    asyncio.run(main())


def test_an_exception_in_the_block_comes_out_as_it_is():
    async def main():
        async with sky.Compute(options=QUIET):
            raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        asyncio.run(main())


def test_a_pool_that_cannot_start_raises_from_async_with():
    async def main():
        async with sky.Compute(image=sky.Image(pip=["no-such-package-anywhere"]), options=QUIET):
            pass

    with pytest.raises(sky.errors.ImageError, match="no-such-package-anywhere"):
        asyncio.run(main())


@pytest.mark.usefixtures("nothing_left")
def test_cancelling_a_pool_while_it_starts_leaves_nothing_behind():
    async def enter():
        async with sky.Compute(options=QUIET):
            pytest.fail("it was cancelled before it was ready")

    async def main():
        entering = asyncio.create_task(enter())
        await asyncio.sleep(0)
        entering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await entering

    asyncio.run(main())


class Slow:
    """A provider whose machines take an hour."""

    name = "slow"
    capabilities = Capabilities()
    waiting = False

    def check(self, request): ...
    def describe(self):
        return {}

    def price(self, request): ...
    async def find(self, pool):
        return []

    def allocate(self, pool):
        return Allocation(self, pool)

    async def create(self, order):
        self.waiting = True
        try:
            await asyncio.sleep(3600)
        finally:
            self.waiting = False


def test_cancelling_a_pool_ends_the_wait_for_its_machines(monkeypatch, tmp_path):
    monkeypatch.setenv("SKYWARD_STATE", str(tmp_path))
    provider = Slow()

    async def main():
        entering = asyncio.create_task(sky.Compute(provider, options=QUIET).__aenter__())
        await until(lambda: provider.waiting)
        entering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await entering

    asyncio.run(main())

    assert not provider.waiting


def test_a_future_can_be_awaited_more_than_once(compute):
    async def main():
        future = add(1) > compute
        return await future, await future

    assert asyncio.run(main()) == (2, 2)


def test_a_future_made_outside_can_be_awaited_in_any_loop(compute):
    future = add(1) > compute

    async def main():
        return await future

    assert [asyncio.run(main()), asyncio.run(main()), future.result()] == [2, 2, 2]


def test_awaiting_raises_what_the_function_raised(compute):
    async def main():
        await (fail(KeyError("lost")) > compute)

    with pytest.raises(KeyError, match="lost"):
        asyncio.run(main())


def test_asyncio_gather_awaits_many_futures(compute):
    async def main():
        return await asyncio.gather(*[add(number) > compute for number in range(100)])

    assert asyncio.run(main()) == list(range(1, 101))


def test_asyncio_gather_can_return_exceptions(compute):
    async def main():
        calls = [add(1) > compute, fail(KeyError("lost")) > compute]
        return await asyncio.gather(*calls, return_exceptions=True)

    value, problem = asyncio.run(main())

    assert value == 2
    assert isinstance(problem, KeyError)


def test_a_task_group_takes_awaited_futures(compute):
    async def scored(number):
        return await (add(number) > compute)

    async def main():
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(scored(number)) for number in range(5)]
        return [task.result() for task in tasks]

    assert asyncio.run(main()) == [1, 2, 3, 4, 5]


def test_the_event_loop_runs_on_while_a_future_is_awaited(compute, tmp_path):
    async def main():
        waiting = asyncio.ensure_future(_awaited(wait_then(tmp_path / "gate", "done") > compute))
        await asyncio.sleep(0)
        (tmp_path / "gate").touch()  # never reached if awaiting blocked the loop
        return await waiting

    assert asyncio.run(main()) == "done"


async def _awaited(future):
    return await future


def test_the_synchronous_operators_work_inside_a_running_loop(compute):
    async def main():
        return (
            add(1) >> compute,
            add(1) @ compute,
            (add(1) & add(2)) >> compute,
            list(compute.map(add, range(3))),
            list(sky.function(lambda: (n for n in range(3)))() >> compute),
        )

    assert asyncio.run(main()) == (2, [2, 2], (2, 3), [1, 2, 3], [0, 1, 2])


def test_a_synchronous_block_works_inside_a_running_loop():
    async def main():
        with sky.Compute(options=QUIET) as compute:
            return add(1) >> compute, await (add(2) > compute)

    assert asyncio.run(main()) == (2, 3)


def test_cancelling_the_awaiting_task_cancels_the_remote_work(
    compute, tmp_path, eventually, patient
):
    started, stopped = tmp_path / "started", tmp_path / "stopped"

    async def main():
        waiting = asyncio.create_task(_awaited(endless(started, stopped) > compute))
        await asyncio.sleep(0)  # a task that has not begun awaits nothing yet
        await until(started.exists)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await until(stopped.exists)

    asyncio.run(main())

    eventually(lambda: not any(view.running for view in compute.nodes))
    assert add(0) @ compute == [1, 1]


def test_a_timeout_of_asyncio_cancels_the_remote_work(compute, tmp_path, eventually, patient):
    started, stopped = tmp_path / "started", tmp_path / "stopped"

    async def main():
        future = endless(started, stopped) > compute
        await until(started.exists)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await future

    asyncio.run(main())

    eventually(stopped.exists)


def test_a_shielded_future_goes_on_when_its_waiter_is_cancelled(compute, tmp_path):
    async def main():
        future = wait_then(tmp_path / "gate", "done") > compute
        inner = asyncio.wrap_future(future)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.01):
                await asyncio.shield(inner)
        (tmp_path / "gate").touch()
        return await future

    assert asyncio.run(main()) == "done"


@only_in_all
def test_the_module_means_the_pool_of_the_async_block():
    async def main():
        async with sky.Compute(options=QUIET) as outer:
            first = job() >> outer
            async with sky.Compute(options=QUIET) as inner:
                assert job() >> sky == job() >> inner != first
            assert await (job() > sky) == first

    asyncio.run(main())


def test_tasks_of_one_loop_may_each_have_their_own_pool():
    async def own():
        async with sky.Compute(options=QUIET) as compute:
            mine = await (job() > compute)
            await asyncio.sleep(0)
            return [mine, await (job() > sky), await asyncio.to_thread(lambda: job() >> sky)]

    async def main():
        return await asyncio.gather(own(), own())

    first, second = asyncio.run(main())

    assert len(set(first)) == len(set(second)) == 1
    assert first[0] != second[0]
