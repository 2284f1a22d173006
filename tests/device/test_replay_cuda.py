"""The tests of `sky.replay`, on a GPU: programs are CUDA graphs there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import skyward as sky

torch = pytest.importorskip("torch")

if not torch.cuda.is_available():
    pytest.skip("there is no GPU here", allow_module_level=True)

from . import test_replay  # noqa: E402
from .test_replay import *  # noqa: E402, F403


@pytest.fixture(scope="module")
def device() -> Iterator[torch.device]:
    with sky.Compute(options=sky.Options(console=False)) as compute:
        yield compute.device("cuda")


class TestFailures(test_replay.TestFailures):
    test_an_operation_that_fails_raises_at_the_next_wait = None
    """An index beyond the end ends a GPU's process, replayed or not."""
