"""A pool whose processes are one group of torch, for the tests of several plugins."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import skyward as sky


@pytest.fixture(scope="session")
def torch_pool(sharing: Any) -> Iterator[sky.Compute]:
    """Two nodes with a process group: it takes five seconds of a processor to form."""
    plugins = [sky.plugins.torch(backend="gloo")]
    options = sky.Options(console=False, fail_grace=0.5)
    with sharing(sky.Compute(nodes=2, plugins=plugins, options=options)) as compute:
        yield compute


@pytest.fixture
def compute(torch_pool: sky.Compute) -> sky.Compute:
    """The shared pool, with two nodes again if a test has resized it."""
    if len(torch_pool.nodes) != 2:
        torch_pool.resize(2)
    return torch_pool
