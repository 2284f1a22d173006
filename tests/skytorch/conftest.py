"""What SkyTorch's tests may use: a machine without a cluster or a GPU, and a node on it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from skytorch.client import Compute, init


@pytest.fixture(autouse=True, scope="module")
def _this_machine() -> Iterator[None]:
    """No kubeconfig of the developer's, and CPUs in place of GPUs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KUBECONFIG", "/dev/null")
        patch.setenv("SKYWARD_DEVICE", "cpu")
        yield


@pytest.fixture(autouse=True)
def _no_defaults() -> Iterator[None]:
    yield
    init()


@pytest.fixture(scope="module")
def node() -> Iterator[Compute]:
    """A ready compute, shared by the tests of a module."""
    compute = Compute(name="shared")
    asyncio.run(compute.ready())
    yield compute
    asyncio.run(compute.delete())
