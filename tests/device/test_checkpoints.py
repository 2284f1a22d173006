"""Checkpoints: a device whose process is lost comes back with the tensors that were saved."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import skyward as sky
from skyward.device.core import core

from ..conftest import only_in_all, other_case
from .test_defects import device_processes

QUIET = sky.Options(console=False)


@pytest.fixture(scope="module")
def pool(sharing) -> Iterator[sky.Compute]:
    with sharing(sky.Compute(options=QUIET)) as compute:
        yield compute


@pytest.fixture
def store(tmp_path: Path) -> sky.ModelStore:
    return sky.ModelStore(tmp_path / "store", progress=False)


def lose(compute: sky.Compute, device: torch.device) -> None:
    """Kill the device's process, and see the first error."""
    (process,) = device_processes(compute)
    process.send_signal(signal.SIGKILL)
    with pytest.raises(sky.errors.DeviceError, match=rf"{device}.* is gone: "):
        torch.sky.synchronize(device)


def owner(x: torch.Tensor) -> int:
    """The process that holds a tensor, as it describes the tensor to other processes."""
    (description,) = core().export(x.device.index, [x.untyped_storage().data_ptr()])
    return int.from_bytes(description[:4], "little")


class Training:
    """A small training with dropout, whose state is on the device but for the optimiser's steps."""

    def __init__(self, device: torch.device) -> None:
        torch.manual_seed(1)
        self.device = device
        self.model = nn.Sequential(
            nn.Linear(8, 300), nn.BatchNorm1d(300), nn.Dropout(0.3), nn.Linear(300, 1)
        ).to(device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), 0.01)
        self.x = torch.randn(64, 8).to(device)
        self.generator = torch.Generator(device=device).manual_seed(5)

    def step(self) -> float:
        noise = torch.rand(64, 8, device=self.device, generator=self.generator)
        loss = (self.model(self.x + 0.1 * noise) - self.x.sum(1, keepdim=True)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def steps(self, count: int) -> list[float]:
        return [self.step() for _ in range(count)]


def test_a_training_goes_on_from_its_checkpoint_bit_for_bit(pool, store) -> None:
    device = pool.device("cpu")
    training = Training(device)
    training.steps(5)
    objects = {"model": training.model, "optimizer": training.optimizer}
    sky.checkpoint(device, store, step=5, **objects)
    expected = training.steps(5)
    weight = training.model[0].weight
    (process,) = device_processes(pool)
    process.send_signal(signal.SIGKILL)
    with pytest.raises(
        sky.errors.DeviceError, match=r"is gone: .* lost: .*compute\.device\(\) brings"
    ):
        training.steps(1000)
    again = pool.device("cpu")
    assert again == device
    assert sky.restore(device, store, **objects) == {"step": 5}
    assert training.model[0].weight is weight
    assert training.steps(5) == expected
    assert len(device_processes(pool)) == 1


def test_tensors_come_back_as_they_were_and_later_ones_say_their_name(pool, store) -> None:
    device = pool.device("cpu")
    base = torch.arange(12.0, device=device).view(3, 4)
    view, large = base[1], torch.full((1 << 20,), 7.0, device=device)
    module = nn.Linear(4, 4).to(device)
    weight = module.weight.detach().cpu()
    sky.checkpoint(device, store)
    base.zero_()
    later = torch.ones(5, 7, device=device)
    module.extra = nn.Parameter(torch.ones(3, device=device))
    lose(pool, device)
    assert pool.device("cpu") == device
    assert base.tolist() == torch.arange(12.0).view(3, 4).tolist()
    view += 1
    assert base[1].tolist() == [5, 6, 7, 8]
    assert large.sum().item() == 7 << 20
    assert torch.equal(module.weight.cpu(), weight)
    with pytest.raises(
        sky.errors.DeviceError, match=r"\(5x7 float32\) was lost .* made after the check"
    ):
        later.sum().item()
    with pytest.raises(sky.errors.DeviceError, match=r"Linear\.extra \(3 float32\) was lost"):
        (module.extra * 2).sum().item()
    fresh = torch.ones(3, device=device)
    assert (fresh + module.weight[0, :3].detach()).shape == (3,)
    del later, module
    gc.collect()
    held = torch.sky.memory_allocated(device)
    del large
    assert held - torch.sky.memory_allocated(device) == 4 << 20


@other_case
def test_a_slot_with_another_tensor_is_not_filled_with_the_old_one(pool, store) -> None:
    device = pool.device("cpu")
    old, kept = torch.ones(1000, device=device), torch.full((10,), 3.0, device=device)
    sky.checkpoint(device, store)
    del old
    new = torch.full((1000,), 2.0, device=device)
    kept.zero_()
    sky.restore(device, store)
    assert new.sum().item() == 2000
    assert kept.sum().item() == 30
    lose(pool, device)
    pool.device("cpu")
    assert kept.sum().item() == 30
    with pytest.raises(sky.errors.DeviceError, match="made after the checkpoint"):
        new.sum().item()


@only_in_all
def test_a_device_can_be_lost_again_and_again(pool, store) -> None:
    device = pool.device("cpu")
    x = torch.zeros(3, device=device)
    lost = []
    for n in range(1, 3):
        x += 1
        assert sky.checkpoint(device, store).version == n
        lost.append(torch.ones(2, device=device))
        lose(pool, device)
        assert pool.device("cpu") == device
        assert x.tolist() == [float(n)] * 3
    for each in lost:
        with pytest.raises(sky.errors.DeviceError, match="was lost"):
            each.sum().item()
    assert sky.restore(device, store, version=1) == {}
    assert x.tolist() == [1.0] * 3


@only_in_all
def test_tensors_without_their_contents_are_not_read(pool, store, tmp_path: Path) -> None:
    device = pool.device("cpu")
    x = torch.ones(3, device=device)
    sky.checkpoint(device, store)
    lose(pool, device)
    kept = Path(store.url)
    away = kept.rename(tmp_path / "away")
    with pytest.raises(sky.SkywardError):
        pool.device("cpu")
    with pytest.raises(sky.errors.DeviceError, match="checkpoint cannot be read"):
        x.sum().item()
    away.rename(kept)
    assert pool.device("cpu") == device
    assert x.tolist() == [1.0] * 3


@only_in_all
def test_without_a_checkpoint_the_error_says_what_was_lost() -> None:
    with sky.Compute(options=QUIET) as compute:
        device = compute.device("cpu")
        model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 8, bias=False)).to(device)
        scratch = torch.ones(100, 100, device=device)
        lose(compute, device)
        with pytest.raises(sky.errors.DeviceError) as caught:
            scratch.sum().item()
        text = str(caught.value)
        assert "4 tensors (49.3 kB) lost: a tensor (100x100 float32), Sequential.0.weight" in text
        assert "(32x64 float32)" in text
        fresh = torch.ones(2, device=compute.device("cpu"))
        assert fresh.sum().item() == 2
        with pytest.raises(sky.errors.DeviceError, match="is gone"):
            model[0].weight.sum().item()
    # The end of a pool, which the user wants, loses nothing.
    with pytest.raises(sky.errors.DeviceError, match=r"is gone: its pool was closed$"):
        fresh.sum().item()


@only_in_all
def test_a_result_stays_on_no_device_that_is_still_to_come_back(pool, store) -> None:
    device = pool.device("cpu")
    x = torch.ones(3, device=device)
    sky.checkpoint(device, store)
    lose(pool, device)
    for kind in ("cpu", "auto"):
        with pytest.raises(
            sky.errors.DeviceError, match=r"\(cpu of node 0\) was lost; ask compute"
        ):
            sky.remote(torch.ones, device=kind)(3) >> pool
    # A device of another kind was not lost, and is asked for as ever.
    with pytest.raises(sky.errors.ConfigurationError, match="the node has no 'cuda:7'"):
        sky.remote(torch.ones, device="cuda:7")(3) >> pool
    assert pool.device("cpu") == device
    assert (sky.remote(torch.ones)(3) >> pool).device == device
    assert x.sum().item() == 3


def test_what_has_not_changed_is_not_saved_again(pool, store) -> None:
    device = pool.device("cpu")
    fixed = torch.rand(1 << 20, device=device)
    changing = torch.rand(1000, device=device)
    sky.checkpoint(device, store)
    changing += 1
    fetched = sky.device_stats(device).bytes_fetched
    sky.checkpoint(device, store)
    assert sky.device_stats(device).bytes_fetched - fetched < 64 << 10
    first, second = store.versions("checkpoint.device")
    assert first.added > 4 << 20
    assert second.added < 64 << 10
    assert fixed.numel() == 1 << 20


def poisoned(device: torch.device) -> torch.Tensor:
    """A tensor whose operation has failed on the worker, with the error seen."""
    x = torch.ones(3, device=device)
    x.scatter_(0, torch.tensor([100], device=device), 1.0)
    with pytest.raises(sky.errors.DeviceError, match="out of bounds"):
        torch.sky.synchronize(device)
    return x


@other_case
def test_a_tensor_that_an_operation_failed_on_is_left_out(pool, store) -> None:
    device = pool.device("cpu")
    others = [torch.full((4,), float(n), device=device) for n in range(300)]
    bad = poisoned(device)
    derived = bad[None] + 1
    with pytest.warns(UserWarning, match=r"without 2 tensors .*\(1x3 float32\).*out of bounds"):
        sky.checkpoint(device, store)
    del derived
    for x in others:
        x.zero_()
    sky.restore(device, store)
    assert [x.mean().item() for x in others] == list(range(300))
    lose(pool, device)
    pool.device("cpu")
    assert [x.mean().item() for x in others] == list(range(300))
    with pytest.raises(
        sky.errors.DeviceError, match=r"\(3 float32\) was lost .* it had failed before"
    ):
        bad.sum().item()


def test_a_named_object_is_not_saved_without_its_contents(pool, store) -> None:
    device = pool.device("cpu")
    model = nn.Linear(3, 3).to(device)
    model.bias.data = poisoned(device)
    with pytest.raises(
        sky.errors.DeviceError, match=r"model\.bias has no contents, .*out of bounds"
    ):
        sky.checkpoint(device, store, model=model)
    assert store.list() == ()


def test_a_tensor_that_an_operation_failed_on_since_is_set_back(pool, store) -> None:
    device = pool.device("cpu")
    x = torch.arange(3.0, device=device)
    view = x[1:]
    sky.checkpoint(device, store)
    x.scatter_(0, torch.tensor([100], device=device), 1.0)
    with pytest.raises(sky.errors.DeviceError, match="out of bounds"):
        sky.restore(device, store)
    sky.restore(device, store)
    assert x.tolist() == [0, 1, 2]
    view += 1
    assert x.tolist() == [0, 2, 3]
    sky.checkpoint(device, store, x=x)


@only_in_all
def test_a_lost_node_comes_back_with_the_tensors(store, eventually) -> None:
    with sky.Compute(options=QUIET) as compute:
        device = compute.device("cpu")
        x = torch.arange(5.0, device=device)
        sky.checkpoint(device, store)
        (process,) = device_processes(compute)
        process.parent().kill()
        with pytest.raises(sky.errors.DeviceError):
            for _ in range(10_000):
                (x + 1).sum().item()
        eventually(lambda: compute._open_fleet.dispatcher.counts.nodes_lost == 1)
        assert compute.device("cpu") == device
        assert x.tolist() == [0, 1, 2, 3, 4]
        x += 1
        assert x.sum().item() == 15


@only_in_all
def test_copies_to_other_nodes_have_what_came_back(store) -> None:
    with sky.Compute(nodes=3, options=QUIET) as compute:
        first, second, third = compute.devices("cpu")
        x = torch.ones(1 << 20, device=first)
        sky.checkpoint(first, store)
        x.fill_(2)
        assert x.to(second).sum().item() == 2 << 20
        os.kill(owner(x), signal.SIGKILL)
        with pytest.raises(sky.errors.DeviceError):
            torch.sky.synchronize(first)
        assert compute.device("cpu") == first
        assert x.to(third).sum().item() == x.to(second).sum().item() == 1 << 20


PROGRAM = """
import sys, torch, skyward as sky
from torch import nn
store = sky.ModelStore(sys.argv[1], progress=False)
with sky.Compute(options=sky.Options(console=False)) as compute:
    device = compute.device("cpu")
    model = nn.Linear(4, 4).to(device)
    optimizer = torch.optim.Adam(model.parameters())
    rest = sky.restore(device, store, model=model, optimizer=optimizer)
    state = optimizer.state[model.weight]
    assert rest == {"step": 3, "names": ["a"]}, rest
    assert state["exp_avg"].device == device and state["step"].device.type == "cpu"
    assert state["step"].item() == 1
    print(model.weight.sum().item(), torch.rand(1, device=device).item())
"""


@only_in_all
def test_another_program_gets_the_named_objects(pool, store, tmp_path: Path) -> None:
    device = pool.device("cpu")
    model = nn.Linear(4, 4).to(device)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 4, device=device)).sum().backward()
    optimizer.step()
    sky.checkpoint(device, store, model=model, optimizer=optimizer, step=3, names=["a"])
    expected = [model.weight.sum().item(), torch.rand(1, device=device).item()]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "store")],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ,
    )
    assert done.returncode == 0, done.stderr
    assert [float(word) for word in done.stdout.split()] == expected


def refusals(device: torch.device, store: sky.ModelStore) -> list[tuple[Callable[[], Any], str]]:
    return [
        (lambda: sky.checkpoint("cpu", store), "give a device of compute.device"),
        (lambda: sky.restore(device, "store"), "give a sky.ModelStore"),  # type: ignore[arg-type]
        (lambda: sky.restore(device, store, name="plain"), "is a model, and no checkpoint"),
        (lambda: sky.restore(device, store, step=3), r"restore\(step=3\): it has no load_state"),
        (lambda: sky.restore(device, store, net=nn.Linear(1, 1)), "has step; give sky.checkpoint"),
    ]


def test_what_cannot_be_is_refused(pool, store) -> None:
    device = pool.device("cpu")
    with pytest.raises(sky.errors.ModelNotFoundError):
        sky.restore(device, store)
    sky.checkpoint(device, store, step=1)
    store.save_model({"x": torch.ones(1)}, "plain")
    for action, match in refusals(device, store):
        with pytest.raises(sky.errors.ConfigurationError, match=match):
            action()
