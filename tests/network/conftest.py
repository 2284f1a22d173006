"""Pools whose every connection goes over a network that the test can break."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

import skyward as sky

from .network import Network, Remote


@dataclass
class Far:
    """A pool and the ways to its nodes."""

    pool: sky.Compute
    networks: dict[int, Network]

    def cut(self) -> None:
        """Reset every connection to every node."""
        for network in self.networks.values():
            network.cut()

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Nothing passes to or from any node."""
        with contextlib.ExitStack() as stack:
            for network in self.networks.values():
                stack.enter_context(network.hold())
            yield


FarPool = Callable[..., contextlib.AbstractContextManager[Far]]


@contextlib.contextmanager
def _far_pool(nodes: int = 1, *, worker: sky.Worker | None = None, **options: Any) -> Iterator[Far]:
    remote = Remote()
    settings: dict[str, Any] = {"worker": worker} if worker else {}
    try:
        with sky.Compute(
            remote, nodes=nodes, options=sky.Options(console=False, **options), **settings
        ) as pool:
            yield Far(pool, remote.networks)
    finally:
        remote.close()


@pytest.fixture
def far_pool() -> FarPool:
    """Enter a pool of its own: `with far_pool(nodes=2) as far`."""
    return _far_pool


@pytest.fixture(scope="module")
def far(sharing: Any) -> Iterator[Far]:
    """Two nodes over two networks, shared by the tests of a module."""
    remote = Remote()
    try:
        with sharing(sky.Compute(remote, nodes=2, options=sky.Options(console=False))) as pool:
            yield Far(pool, remote.networks)
    finally:
        remote.close()
