"""What goes to many nodes leaves the client once, and comes however the nodes fare."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import skyward as sky
from skyward.calls import dispatch

from ..conftest import only_in_all, other_case

MIB = 1 << 20
Eventually = Callable[..., None]


@pytest.fixture(scope="module")
def values() -> Any:
    return np.random.default_rng(3).integers(0, 255, 24 * MIB, np.uint8)


@sky.function
def total(values: Any) -> int:
    return int(values.sum())


@sky.function(retries=3)
def surely(values: Any) -> int:
    return int(values.sum())


@sky.function
def weighed(model: Any) -> float:
    return sum(parameter.sum().item() for parameter in model.parameters())


@sky.function
def hashed(value: Any) -> str:
    parts = value if isinstance(value, list) else [value]
    whole = b"".join(part.encode() if isinstance(part, str) else part for part in parts)
    return hashlib.sha256(whole).hexdigest()


@sky.function
def logged(folder: str, name: str, values: Any = None) -> None:
    with open(Path(folder, str(sky.instance_info().node)), "a") as lines:
        lines.write(f"{name}\n")


@contextlib.contextmanager
def sent(pool: sky.Compute) -> Iterator[Callable[[], float]]:
    """MiB that leave this process meanwhile."""
    before = pool.stats().bytes_sent
    yield lambda: (pool.stats().bytes_sent - before) / MIB


def lanes(pool: sky.Compute) -> list[Any]:
    return list(pool._open_fleet.dispatcher.lanes)  # type: ignore[union-attr]


def new(values: Any) -> Any:
    """The same size and other contents, which nobody has seen."""
    return np.frombuffer(np.random.default_rng().bytes(len(values)), np.uint8)


def test_a_broadcast_leaves_the_client_once(far_pool: Any, values: Any) -> None:
    with far_pool(nodes=4) as far, sent(far.pool) as mib:
        assert total(values) @ far.pool == [int(values.sum())] * 4
        assert 24 <= mib() < 25


@other_case
def test_so_does_data_that_was_put(far: Any, values: Any) -> None:
    data = new(values)
    handle = sky.put(data)
    with sent(far.pool) as mib:
        assert total(handle) @ far.pool == [int(data.sum())] * 2
        assert total(handle) @ far.pool == [int(data.sum())] * 2
        assert 24 <= mib() < 25


def test_and_what_one_call_after_the_other_needs(far: Any, values: Any) -> None:
    data = new(values)
    with sent(far.pool) as mib:
        for node in (0, 1, 0):
            assert far.pool.run(total(data), on=node) == int(data.sum())
        assert 24 <= mib() < 25


@only_in_all
def test_and_every_large_tensor_of_a_model(far: Any) -> None:
    torch = pytest.importorskip("torch")
    torch.manual_seed(5)
    model = torch.nn.Sequential(*(torch.nn.Linear(700, 700) for _ in range(6)))
    right = weighed.local(model)
    with sent(far.pool) as mib:
        assert weighed(model) @ far.pool == pytest.approx([right] * 2)
        assert mib() < 12


@pytest.mark.parametrize("kind", ["bytes", "str", "list of bytes"])
def test_and_what_is_large_without_being_an_array(far: Any, kind: str) -> None:
    data = os.urandom(6 * MIB)
    value: Any = {"bytes": data, "str": data.hex(), "list of bytes": [data, data[::-1]]}[kind]
    for call in (hashed(value), hashed(sky.put(value))):
        with sent(far.pool) as mib:
            assert call @ far.pool == [hashed.local(value)] * 2
            assert mib() < 13


def test_without_a_cluster_every_node_is_sent_its_own(far_pool: Any, values: Any) -> None:
    with far_pool(nodes=2, cluster=False) as far, sent(far.pool) as mib:
        assert total(values) @ far.pool == [int(values.sum())] * 2
        assert 48 <= mib() < 49
        assert not any(lane.holdings.can_fetch for lane in lanes(far.pool))


def test_peers_that_cannot_reach_each_other_are_sent_it(far_pool: Any, values: Any) -> None:
    with far_pool(nodes=3) as far, sent(far.pool) as mib:
        for lane in lanes(far.pool):
            lane.neighbor.address = "tcp:127.0.0.1:1"
        assert total(values) @ far.pool == [int(values.sum())] * 3
        assert 72 <= mib() < 73


def test_tasks_begin_in_the_order_in_which_they_were_sent(
    far: Any, tmp_path: Path, values: Any
) -> None:
    """Or two broadcasts that meet on every node could wait for each other for ever."""
    folder = str(tmp_path)
    futures = []
    for number in range(4):
        data = new(values[: 8 * MIB])
        for node in (0, 1):
            futures.append(far.pool.submit(logged(folder, f"large {number}", data), on=node))
        for node in (0, 1):
            futures.append(far.pool.submit(logged(folder, f"small {number}"), on=node))
    for future in futures:
        future.result()
    first, second = (file.read_text().splitlines() for file in tmp_path.iterdir())
    assert first == second == [f"{size} {n}" for n in range(4) for size in ("large", "small")]


@pytest.mark.parametrize("seed", range(3))
def test_whatever_is_cut_meanwhile_all_of_it_arrives(far: Any, values: Any, seed: int) -> None:
    chance = random.Random(seed)
    data = new(values)
    answers: list[Any] = []
    call = threading.Thread(target=lambda: answers.append(total(data) @ far.pool))
    call.start()
    while call.is_alive():
        time.sleep(chance.random() / 5)
        far.networks[chance.randrange(2)].cut()
        call.join(0.01)
    assert answers == [[int(data.sum())] * 2]


@pytest.mark.parametrize(("victim", "pause"), [pytest.param(0, 0.02, marks=other_case), (1, 0.1)])
def test_an_executor_that_dies_takes_nobody_elses_copy_along(
    far_pool: Any, values: Any, pause: float, victim: int
) -> None:
    """It gets its own anew, and those behind it get theirs from it or from the client."""
    with far_pool(nodes=3) as far:
        executors = {lane.node: lane.pid for lane in lanes(far.pool)}
        answers: list[Any] = []
        call = threading.Thread(target=lambda: answers.append(surely(values) @ far.pool))
        call.start()
        time.sleep(pause)
        os.kill(executors[victim], signal.SIGKILL)
        call.join(60)
        assert answers == [[int(values.sum())] * 3]


@only_in_all
def test_a_broadcast_given_up_half_way_leaves_the_pool_as_it_was(
    far_pool: Any, values: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A worker that is slow to end its task would be replaced, and with it what waits there.
    monkeypatch.setattr(dispatch, "CANCEL_GRACE", 60.0)
    with far_pool(nodes=3) as far:
        large = np.tile(values, 8)
        signal.signal(signal.SIGALRM, _interrupt)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.15)
            with contextlib.suppress(KeyboardInterrupt):
                total(large) @ far.pool
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
        assert total(values) @ far.pool == [int(values.sum())] * 3


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@only_in_all
def test_no_thread_of_a_fetch_is_left(far: Any, values: Any, eventually: Eventually) -> None:
    total(new(values)) @ far.pool
    executors = [psutil.Process(lane.pid) for lane in lanes(far.pool)]
    before = [process.num_threads() for process in executors]
    for _ in range(5):
        total(new(values)) @ far.pool
    eventually(lambda: [process.num_threads() for process in executors] <= before)
