"""A device for the tests of it, and the page that says what it can do."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import skyward as sky

torch = pytest.importorskip("torch")

from ..conftest import has_compiler  # noqa: E402
from .tally import Tally  # noqa: E402


@pytest.fixture(scope="session")
def one_thread() -> Iterator[None]:
    """One thread on either side: sums come out equal to the last bit, and samples are faster."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def compute(sharing, one_thread) -> Iterator[sky.Compute]:
    """A pool of two nodes for the whole session: a device process each takes seconds to start."""
    with sharing(sky.Compute(nodes=2, options=sky.Options(console=False))) as compute:
        yield compute


@pytest.fixture(scope="session")
def four_nodes(sharing, one_thread) -> Iterator[sky.Compute]:
    """A pool of four nodes for the whole session."""
    with sharing(sky.Compute(nodes=4, options=sky.Options(console=False))) as compute:
        yield compute


@pytest.fixture(scope="session")
def mesh(four_nodes: sky.Compute) -> Any:
    """A mesh of two times two ranks: four processes, which take seconds to start."""
    return four_nodes.mesh("cpu", dp=2, tp=2)


@pytest.fixture(scope="session")
def two_executors(sharing) -> Iterator[sky.Compute]:
    """A pool of one node for the whole session: its executors take seconds to import torch."""
    options = sky.Options(console=False)
    with sharing(sky.Compute(worker=sky.Worker(concurrency=2), options=options)) as compute:
        yield compute


@pytest.fixture(scope="session")
def device(compute: sky.Compute) -> torch.device:
    """A CPU of the first node, as a sky device."""
    return compute.device("cpu")


@pytest.fixture(scope="session")
def other_device(compute: sky.Compute) -> torch.device:
    """A CPU of the second node."""
    return compute.device("cpu", node=1)


@pytest.fixture(scope="session")
def tally() -> Iterator[Tally]:
    """Counts samples; written to the page named by SKYWARD_COVERAGE_PAGE."""
    tally = Tally()
    yield tally
    page = os.environ.get("SKYWARD_COVERAGE_PAGE")
    if page and tally.operations:
        Path(page).write_text(tally.page())


def _ours(items: list[pytest.Item]) -> list[pytest.Item]:
    return [item for item in items if Path(__file__).parent in item.path.parents]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests read values all the time; the advice against it is not for them."""
    for item in _ours(items):
        item.add_marker(pytest.mark.filterwarnings("ignore:this loop waits:UserWarning"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Compile the cores before the first test: that may take longer than a test may."""
    if _ours(session.items) and has_compiler():
        from skyward.device import build

        build.libraries()
