"""A start of a container that is cancelled: what it made is removed, what was there stays."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward.providers import Order, Request
from skyward.providers.container.service import POOL
from skyward.spec import Image

from .docker_service import DOCKER, Service, serving


def container(state: str) -> dict[str, Any]:
    """A container of the pool's, as the service describes it."""
    return {"Config": {"Labels": {POOL: "p"}}, "State": {"Status": state}}


def cancel(folder: Path, service: Service, *, keep: bool = True) -> None:
    """Cancel the creation of a node of the pool while its container starts."""

    async def attempt() -> None:
        provider = sky.Container("python:3", host=f"unix://{folder}/docker.sock")
        request = Request(None, None, None, Image(), (), keep=keep)
        creating = asyncio.create_task(provider.create(Order("p", 0, request)))
        await asyncio.to_thread(service.starting.wait, 60)
        creating.cancel()
        service.may_start.set()
        with pytest.raises(asyncio.CancelledError):
            await creating

    service.may_start.clear()
    asyncio.run(attempt())


def test_a_container_that_was_stopped_is_stopped_again_with_its_files(tmp_path: Path) -> None:
    with serving(tmp_path, DOCKER) as service:
        service.former = container("exited")
        cancel(tmp_path, service)
    assert (service.stopped, service.removed) == (["/containers/c1/stop"], [])


def test_a_container_that_was_made_is_removed(tmp_path: Path) -> None:
    with serving(tmp_path, DOCKER) as service:
        cancel(tmp_path, service, keep=False)
    assert (service.stopped, service.removed) == ([], ["/containers/c1"])
