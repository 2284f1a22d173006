"""Tensors and their memory on a sky device live as long as they are held, on any thread."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import psutil
import pytest
import torch

import skyward as sky

from ..conftest import only_in_all
from ..memory import in_use
from .test_defects import device_processes

MEBIBYTE = 1 << 20
LARGE = 64 * MEBIBYTE // 4


@dataclass(frozen=True)
class Alone:
    """A device that no other test uses, and the process behind it."""

    device: torch.device
    process: psutil.Process

    def held(self) -> int:
        """Bytes that the worker says its tensors take."""
        gc.collect()
        return torch.sky.memory_allocated(self.device)

    def in_use(self) -> float:
        """MiB that the worker's process has allocated, for tensors and all else."""
        gc.collect()
        torch.sky.synchronize(self.device)
        return in_use(self.process) / MEBIBYTE


@pytest.fixture(scope="module")
def alone(sharing) -> Iterator[Alone]:
    with sharing(sky.Compute(options=sky.Options(console=False))) as compute:
        device = compute.device("cpu")
        (process,) = device_processes(compute)
        torch.ones(LARGE, device=device).sum().item()
        yield Alone(device, process)


@only_in_all
def test_the_workers_memory_returns_to_its_baseline(alone: Alone) -> None:
    """Some allocators give memory back, others keep it for the next tensors; none needs more."""
    held, before = alone.held(), 0.0
    for _ in range(3):
        tensors = [torch.ones(LARGE, device=alone.device) for _ in range(2)]
        assert alone.held() == held + 2 * 4 * LARGE
        del tensors
        assert alone.held() == held
        before = before or alone.in_use()
        assert alone.in_use() < before + 32


def test_sky_alone_is_a_device_that_is_open(device: torch.device) -> None:
    before = torch.sky.current_device()
    try:
        with sky.Compute(options=sky.Options(console=False)) as compute:
            there = compute.device("cpu")
            torch.sky.set_device(there)
            assert torch.zeros(2, device="sky").device == there
        assert torch.ones(2, device="sky").sum().item() == 2.0
    finally:
        torch.sky.set_device(before)


def test_a_view_keeps_the_memory_and_nothing_else_does(alone: Alone) -> None:
    held, before = alone.held(), alone.in_use()
    base = torch.ones(2 * LARGE, device=alone.device)
    view = base[5:9]
    del base
    assert alone.held() == held + 2 * 4 * LARGE
    assert view.sum().item() == 4.0
    del view
    assert alone.held() == held
    assert alone.in_use() < before + 32


def test_a_loop_uses_the_same_slots_again(device: torch.device) -> None:
    x = torch.ones(4, device=device)

    def slot() -> int:
        return (x + 1).untyped_storage().data_ptr()

    first = slot()
    assert {slot() for _ in range(1000)} == {first}


def test_cycles_are_freed_by_the_garbage_collector(device: torch.device) -> None:
    gc.collect()
    probe = torch.ones(1, device=device)
    free = probe.untyped_storage().data_ptr()
    del probe
    cycle = [torch.ones(1, device=device)]
    cycle.append(cycle)
    assert cycle[0].untyped_storage().data_ptr() == free
    del cycle
    gc.collect()
    assert torch.ones(1, device=device).untyped_storage().data_ptr() == free


def test_threads_compute_side_by_side(device: torch.device, other_device: torch.device) -> None:
    def work(number: int) -> float:
        where = (device, other_device)[number % 2]
        x = torch.full((8,), float(number), device=where)
        for step in range(200):
            x = x * 1.0 + 1.0
            if step % 50 == 0:
                x.sum().item()
        return x.sum().item()

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(work, range(16))) == [8.0 * (n + 200) for n in range(16)]


def test_a_tensor_may_be_freed_by_another_thread(device: torch.device) -> None:
    held = [torch.ones(8, device=device) for _ in range(500)]
    thread = threading.Thread(target=held.clear)
    thread.start()
    total = torch.zeros(8, device=device)
    for _ in range(500):
        total += torch.ones(8, device=device)
    thread.join()
    assert total.tolist() == [500.0] * 8


def test_tensors_may_outlive_their_pool() -> None:
    with sky.Compute(options=sky.Options(console=False)) as compute:
        x = torch.ones(3, device=compute.device("cpu"))
        x.sum().item()
    with pytest.raises(RuntimeError, match=r"gone|closed|no device"):
        x.cpu()
    assert x.shape == (3,)
