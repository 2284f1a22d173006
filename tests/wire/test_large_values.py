"""Large values between processes: shared memory or TLS, sent once, never stale, never mixed up."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import skyward as sky
from skyward.objects import memory
from skyward.wire.frames import DESCRIPTOR_LIMIT

from ..conftest import only_in_all, other_case

MIB = 1 << 20
CAP = 8 * MIB


@pytest.fixture(scope="module", params=["unix", pytest.param("tcp", marks=other_case)])
def small_cap(request: pytest.FixtureRequest) -> Iterator[sky.Compute]:
    """Two nodes that keep no more than a few megabytes of blobs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SKYWARD_BLOB_CAP", str(CAP))
        with sky.Compute(
            sky.Local(transport=request.param),
            nodes=2,
            worker=sky.Worker(concurrency=2, executor="thread"),
            options=sky.Options(console=False, default_timeout=300),
        ) as compute:
            yield compute


@sky.function
def total(values: Any) -> float:
    return float(values.sum())


@sky.function
def totals(values: list[Any]) -> list[float]:
    return [float(value.sum()) for value in values]


@sky.function
def wait_for(folder: str) -> None:
    while not Path(folder, "go").exists():
        time.sleep(0.005)


@sky.function
def total_when_told(values: Any, folder: str) -> float:
    Path(folder, "begun").touch()
    wait_for.local(folder)
    return float(values.sum())


def full(value: float, size: int = MIB) -> np.ndarray[Any, Any]:
    return np.full(size // 8, value)


def test_an_unchanged_value_is_not_sent_again(small_cap: sky.Compute) -> None:
    values = torch.arange(MIB // 4, dtype=torch.float32)
    expected = float(values.sum())
    assert small_cap.run(total(values), on=0) == expected
    before = small_cap.stats().bytes_sent
    for _ in range(5):
        assert small_cap.run(total(values), on=0) == expected
    assert small_cap.stats().bytes_sent - before < 50_000


def test_a_write_through_another_view_is_seen(small_cap: sky.Compute) -> None:
    tensor = torch.zeros(MIB // 4)
    view = tensor.numpy()
    for value in range(5):
        view[:] = value
        assert total(tensor) >> small_cap == value * MIB / 4


@pytest.mark.parametrize("size", [800, 100_000, MIB])
def test_a_value_changed_after_submitting_was_sent_as_it_was(
    small_cap: sky.Compute, size: int, tmp_path: Path
) -> None:
    blockers = [small_cap.submit(wait_for(str(tmp_path)), on=0) for _ in range(4)]
    array, data = full(0, size), bytearray(size)
    futures = []
    for value in range(5):
        array[:] = value
        data[:] = bytes([value]) * size
        futures.append((small_cap.submit(total(array), on=0), value * size / 8))
        futures.append((small_cap.submit(sum_of(data), on=0), value * size))
    (tmp_path / "go").touch()
    assert [future.result() for future, _ in futures] == [expected for _, expected in futures]
    for blocker in blockers:
        blocker.result()


@sky.function
def sum_of(data: bytearray) -> int:
    return sum(data)


def test_a_task_waiting_while_its_value_is_replaced_and_still_mapped(
    small_cap: sky.Compute, tmp_path: Path, eventually: Any
) -> None:
    """Its shared memory has been forgotten by then, and must not be referred to."""
    array = full(1)
    holding = small_cap.submit(total_when_told(array, str(tmp_path)), on=0)
    eventually((tmp_path / "begun").exists)
    other = tmp_path / "other"
    other.mkdir()
    blocker = small_cap.submit(wait_for(str(other)), on=0)
    waiting = [small_cap.submit(total(array), on=0) for _ in range(6)]
    array[:] = 2
    changed = small_cap.submit(total(array), on=0)
    assert small_cap.run(total(full(3)), on=1) == 3 * MIB / 8
    (other / "go").touch()
    assert [future.result() for future in waiting] == [MIB / 8] * 6
    assert changed.result() == 2 * MIB / 8
    (tmp_path / "go").touch()
    assert holding.result() == MIB / 8
    blocker.result()


def test_arguments_larger_than_the_cap_arrive(small_cap: sky.Compute) -> None:
    values = [full(number, 2 * MIB) for number in range(3 * CAP // (2 * MIB))]
    expected = [number * 2 * MIB / 8 for number in range(len(values))]
    for _ in range(3):
        assert totals(values) >> small_cap == expected
    assert totals(values) @ small_cap == [expected, expected]


@only_in_all
def test_more_pieces_of_shared_memory_than_one_frame_can_carry(pool: sky.Compute) -> None:
    values = [torch.full((70_000,), float(number)) for number in range(DESCRIPTOR_LIMIT + 20)]
    expected = [number * 70_000.0 for number in range(len(values))]
    for value, answer in zip(values, expected, strict=True):
        assert pool.run(total(value), on=0) == answer
    for node in (1, 0, 1):
        assert pool.run(totals(values), on=node) == expected


def test_many_values_through_a_small_cap_are_never_mixed_up(small_cap: sky.Compute) -> None:
    rng = np.random.default_rng(7)
    pieces = [full(number, int(rng.integers(1, 8)) * MIB // 2) for number in range(12)]
    calls, expected = [], []
    for _ in range(60):
        chosen = [pieces[i] for i in rng.integers(0, len(pieces), int(rng.integers(1, 4)))]
        calls.append(totals(chosen))
        expected.append([float(piece.sum()) for piece in chosen])
    assert sky.gather(*calls) >> small_cap == expected


def test_results_stay_as_they_were_while_later_ones_arrive(small_cap: sky.Compute) -> None:
    @sky.function
    def made(value: float) -> Any:
        return full(value)

    kept = [small_cap.run(made(number), on=0) for number in range(8)]
    more = list(small_cap.map(made, range(100, 110)))
    assert [float(array[0]) for array in kept] == list(range(8))
    assert [float(array[-1]) for array in more] == list(range(100, 110))
    kept[0][:] = -1
    assert float(kept[1][0]) == 1.0


def test_what_a_task_does_to_its_argument_stays_with_it(small_cap: sky.Compute) -> None:
    @sky.function
    def spoiled(values: Any) -> float:
        was = float(values.sum())
        values[:] = 99
        return was

    array = full(1)
    tensor = torch.ones(MIB // 4)
    for _ in range(3):
        assert spoiled(array) @ small_cap == [MIB / 8, MIB / 8]
        assert spoiled(tensor) @ small_cap == [MIB / 4, MIB / 4]
    assert float(array.sum()) == MIB / 8


def test_a_model_with_tied_weights_comes_back_tied(small_cap: sky.Compute) -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(2000, 64), torch.nn.Linear(64, 2000, False))
    model[1].weight = model[0].weight

    @sky.function
    def nudged(model: Any) -> Any:
        with torch.no_grad():
            model[0].weight.add_(1)
        assert model[1].weight is model[0].weight
        return model

    got = nudged(model) >> small_cap
    assert got[1].weight is got[0].weight
    assert torch.equal(got[0].weight, model[0].weight + 1)


def test_large_values_are_named_on_systems_that_pin_no_processors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    block = memoryview(bytes(8 << 20))
    expected = memory.digests([block])
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(memory, "_crew", None)

    assert memory.digests([block]) == expected
