"""A compute's life: ready, suspended, resumed, deleted, and what each state allows."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest
import torch

import skyward as sky
from skytorch.client import Compute, default_namespace, init
from skytorch.client.event import Event

from ..conftest import only_in_all


def process() -> int:
    return os.getpid()


def variable(name: str) -> str | None:
    return os.environ.get(name)


def test_async_with_starts_it_and_takes_it_down(nothing_left: None) -> None:
    async def main() -> Compute:
        async with Compute(name="mnist") as node:
            assert await node.execute(process) != os.getpid()
            return node

    node = asyncio.run(main())

    assert repr(node) == "<skytorch.Compute mnist: deleted>"


def test_ready_twice_starts_once(nothing_left: None) -> None:
    async def main() -> tuple[int, int]:
        node = Compute(name="twice")
        await asyncio.gather(node.ready(), node.ready())
        first = await node.execute(process)
        await node.ready()
        second = await node.execute(process)
        await node.delete()
        await node.delete()
        return first, second

    first, second = asyncio.run(main())

    assert first == second


def test_ready_suspend_and_resume_return_the_compute(nothing_left: None) -> None:
    async def main() -> None:
        node = Compute(name="chained")
        assert not node.is_ready()
        assert await node.ready(timeout=120) is node
        assert node.is_ready()
        assert await node.suspend() is node
        assert not node.is_ready()
        assert await node.resume() is node
        assert node.is_ready()
        await node.delete()
        assert not node.is_ready()

    asyncio.run(main())


def test_ready_gives_up_after_its_timeout_and_can_be_called_again(nothing_left: None) -> None:
    heard: list[Event] = []

    async def main() -> None:
        node = Compute(name="hasty", on_events=heard.append)
        with pytest.raises(TimeoutError, match=r"ready\(timeout=0\.001\): .*'hasty' did not start"):
            await node.ready(timeout=0.001)
        assert not node.is_ready()
        assert (await node.ready()).is_ready()
        await node.delete()

    asyncio.run(main())

    reasons = [(event.reason, event.type) for event in heard]
    assert reasons[:2] == [("Starting", "Normal"), ("Failed", "Warning")]


@pytest.mark.parametrize("timeout", [0, -1, True, "1"])
def test_a_timeout_that_is_none_is_refused(timeout: Any) -> None:
    with pytest.raises(
        sky.errors.ConfigurationError, match=r"ready\(timeout=.*give seconds, more than 0"
    ):
        asyncio.run(Compute(name="hasty").ready(timeout))


@only_in_all
def test_a_suspended_compute_refuses_its_device_until_it_is_resumed(nothing_left: None) -> None:
    async def main() -> None:
        async with Compute(name="napper") as node:
            before = torch.ones(3, device=node.device())
            await node.suspend()

            with pytest.raises(
                sky.errors.PoolClosedError, match=r"'napper' is suspended.*resume\(\)"
            ):
                node.device()
            with pytest.raises(sky.errors.PoolClosedError, match=r"execute\(\): .* is suspended"):
                await node.execute(process)
            with pytest.raises(sky.errors.PoolClosedError, match=r"ready\(\): .* is suspended"):
                await node.ready()
            with pytest.raises(RuntimeError, match="is gone"):
                before.sum().item()

            await node.resume()
            after = torch.ones(3, device=node.device())
            assert after.sum().item() == 3.0
            with pytest.raises(RuntimeError, match="is gone"):
                before.sum().item()

    asyncio.run(main())


def test_made_suspended_it_waits_for_resume(nothing_left: None) -> None:
    async def main() -> None:
        async with Compute(name="later", suspend=True) as node:
            with pytest.raises(sky.errors.PoolClosedError, match="'later' is suspended"):
                node.device()
            await node.resume()
            assert await node.execute(process) != os.getpid()

    asyncio.run(main())


def test_before_it_is_ready_it_says_how_to_start_it() -> None:
    with pytest.raises(
        sky.errors.PoolClosedError, match=r"'new' has not started; `await node\.ready\(\)`"
    ):
        Compute(name="new").device()


def test_once_deleted_it_stays_so() -> None:
    async def main() -> None:
        node = Compute(name="past")
        await node.delete()
        for again in (node.ready, node.resume, node.suspend):
            with pytest.raises(
                sky.errors.PoolClosedError, match="'past' was deleted; make another"
            ):
                await again()

    asyncio.run(main())


def test_env_reaches_functions_and_defaults_are_replaced_as_a_whole(nothing_left: None) -> None:
    async def main() -> list[str | None]:
        init(env={"FIRST": "1", "BOTH": "init"})
        async with Compute(name="plain") as plain, Compute(name="own", env={"BOTH": "own"}) as own:
            return [
                await node.execute(variable, name)
                for node in (plain, own)
                for name in ("FIRST", "BOTH")
            ]

    assert asyncio.run(main()) == ["1", "init", None, "own"]


def test_init_takes_a_namespace() -> None:
    assert default_namespace() == Compute(name="node").namespace == "default"
    init(namespace="research")
    assert default_namespace() == Compute(name="node").namespace == "research"
    with pytest.raises(
        sky.errors.ConfigurationError, match=r"namespace='My Space'\): a namespace has"
    ):
        init(namespace="My Space")
    assert default_namespace() == "research"
