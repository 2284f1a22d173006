"""Results that stay: the tensors that a function returns are sky tensors, and never come here."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import skyward as sky

from ..conftest import only_in_all, other_case
from .test_defects import device_processes

LARGE = 8 << 20
"""Elements of four bytes: 32 MiB."""


@pytest.fixture(scope="module")
def alone(two_executors: sky.Compute) -> tuple[sky.Compute, torch.device]:
    """A pool of one node with two executors, and its device."""
    return two_executors, two_executors.device()


@pytest.fixture
def device(compute: sky.Compute) -> torch.device:
    """The device of the first node that results stay on unless another is asked for."""
    return compute.device()


@pytest.fixture
def other_device(compute: sky.Compute) -> torch.device:
    """That of the second node."""
    return compute.device(node=1)


def moved(compute: sky.Compute, device: torch.device) -> list[int]:
    """The bytes of tensors that have come here or gone there."""
    stats = sky.device_stats(device)
    return [
        stats.bytes_fetched,
        stats.bytes_uploaded,
        sum(compute._open_fleet.dispatcher.traffic()),
    ]


def in_use(device: torch.device) -> int:
    gc.collect()
    return torch.sky.memory_allocated(device)


def make(count: int, value: float = 1.0) -> torch.Tensor:
    return torch.full((count,), value)


# What a result is.


def test_a_tensor_stays_on_the_node(alone) -> None:
    compute, device = alone
    sky.remote(make)(1) >> compute
    before = moved(compute, device)
    x = sky.remote(make)(LARGE, 2.0) >> compute
    assert x.device == device
    after = moved(compute, device)
    assert after[:2] == before[:2]
    assert after[2] - before[2] < 8192
    assert (x * 2).sum().item() == 4.0 * LARGE


def test_a_module_has_its_parameters_on_the_device(compute, device) -> None:
    def load(width: int) -> nn.Module:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(width, 300), nn.BatchNorm1d(300), nn.Linear(300, 2))
        model[0].weight.requires_grad_(False)
        return model.eval()

    model = compute.run(sky.remote(load)(200), on=0)
    expected = load(200)
    assert {t.device for t in model.state_dict().values()} == {device}
    assert not model.training
    assert isinstance(model[0].weight, nn.Parameter)
    assert [p.requires_grad for p in model.parameters()] == [False] + [True] * 5
    assert "running_mean" in dict(model[1].named_buffers())
    for name, tensor in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name].cpu(), tensor), name
    x = torch.ones(4, 200)
    torch.testing.assert_close(model(x.to(device)).cpu(), expected(x))


def test_memory_that_is_shared_stays_shared(compute, device) -> None:
    def load() -> list[torch.Tensor]:
        whole = torch.arange(100_000.0).view(100, 1000)
        small = torch.zeros(4, 3)
        return [whole, whole[1], whole.t(), small, small[:, 1], small.t()]

    whole, row, turned, small, column, across = compute.run(sky.remote(load)(), on=0)
    row.zero_()
    column += 1
    assert whole[1].sum().item() == 0
    assert turned.stride() == (1, 1000)
    assert turned[:, 1].sum().item() == 0
    assert small.sum().item() == across.sum().item() == 4
    assert len({t.untyped_storage()._cdata for t in (whole, row, turned)}) == 1


def test_only_the_part_that_is_covered_takes_memory(alone) -> None:
    compute, device = alone

    def part() -> torch.Tensor:
        return torch.arange(float(LARGE))[1000:101_000]

    before = in_use(device)
    x = sky.remote(part)() >> compute
    assert x[0].item() == 1000
    assert in_use(device) - before < 1 << 20


@other_case
def test_tied_weights_and_their_optimiser_come_as_one(alone) -> None:
    def load() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.ModuleDict({"a": nn.Linear(40, 40), "b": nn.Linear(40, 40)})
        model["b"].weight = model["a"].weight
        optimizer = torch.optim.Adam(model.parameters(), 0.1)
        step(model, optimizer, "cpu")
        return model, optimizer

    def step(model: Any, optimizer: torch.optim.Optimizer, device: Any) -> float:
        optimizer.zero_grad()
        loss = model["b"](model["a"](torch.ones(2, 40, device=device))).square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    compute, device = alone
    model, optimizer = sky.remote(load)() >> compute
    assert model["a"].weight is model["b"].weight
    assert optimizer.param_groups[0]["params"][0] is model["a"].weight
    state = optimizer.state[model["a"].weight]
    assert state["exp_avg"].device == device
    assert state["step"].device.type == "cpu"  # the host's, as ever: read at every step
    here, its = load()
    losses = [step(model, optimizer, device) for _ in range(3)]
    assert losses == pytest.approx([step(here, its, "cpu") for _ in range(3)])


@dataclass
class Batch:
    x: torch.Tensor
    labels: list[Any]


def test_any_container_keeps_its_other_parts(compute, device) -> None:
    def load() -> Any:
        x = torch.ones(3, dtype=torch.bfloat16)
        batch = Batch(x, ["a", torch.tensor([1, 2])])
        return {"batch": batch, "deep": ({"x": [x]}, 7), "name": "net", "none": None}

    found = compute.run(sky.remote(load)(), on=0)
    assert found["name"] == "net"
    assert found["deep"][1] == 7
    assert found["none"] is None
    batch = found["batch"]
    assert type(batch).__name__ == "Batch"
    assert batch.labels[0] == "a"
    assert batch.labels[1].device == batch.x.device == device
    assert batch.x.dtype == torch.bfloat16
    assert batch.labels[1].tolist() == [1, 2]
    assert found["deep"][0]["x"][0] is batch.x


def test_tensors_keep_what_they_are(compute, device) -> None:
    def load() -> list[torch.Tensor]:
        return [
            torch.empty(0, 3),
            torch.tensor(7),
            torch.ones(2, requires_grad=True),
            nn.Parameter(torch.ones(1), requires_grad=False),
            torch.tensor([1 + 2j]).conj(),
            torch.tensor([True, False]),
            torch.arange(6.0)[::2],
        ]

    found = compute.run(sky.remote(load)(), on=0)
    for mine, its in zip(load(), found, strict=True):
        assert its.device == device
        assert type(its) is type(mine)
        assert (its.dtype, its.shape, its.requires_grad) == (
            mine.dtype,
            mine.shape,
            mine.requires_grad,
        )
        assert its.tolist() == mine.tolist()


def test_an_argument_that_is_returned_is_the_clients_own_memory(compute, device) -> None:
    @sky.function
    def grow(x: torch.Tensor, model: nn.Module) -> tuple[torch.Tensor, torch.Tensor, nn.Module]:
        return x[1:], x + 1, model

    x, model = torch.zeros(3, device=device), nn.Linear(2, 2).to(device)
    part, fresh, same = sky.remote(grow)(x, model) >> compute
    part += 5
    fresh += 1
    assert x.tolist() == [0.0, 5.0, 5.0]
    assert fresh.tolist() == [2.0, 2.0, 2.0]
    with torch.no_grad():
        same.weight.zero_()
    assert model.weight.sum().item() == 0


def test_a_device_in_the_result_is_the_one_its_tensors_are_on(compute, device) -> None:
    def load() -> tuple[torch.device, torch.device, torch.Tensor]:
        return torch.device("cpu"), torch.device("meta"), torch.ones(1)

    here, meta, x = compute.run(sky.remote(load)(), on=0)
    assert here == x.device == device
    assert meta.type == "meta"


@only_in_all
def test_a_result_without_tensors_needs_no_device() -> None:
    with sky.Compute(options=sky.Options(console=False)) as compute:
        assert sky.remote(lambda: {"a": 1})() >> compute == {"a": 1}
        assert not device_processes(compute)
        x = sky.remote(make)(5) >> compute
        assert len(device_processes(compute)) == 1
        assert x.sum().item() == 5


# Every way to call.


def test_every_way_to_call_gives_staying_results(compute, device, other_device) -> None:
    make_there = sky.remote(make)
    assert [x.device for x in make_there(4) @ compute] == [device, other_device]
    assert compute.run(make_there(4), on=1).device == other_device
    future = compute.submit(make_there(70_000, 3.0), on=1)
    assert future.result(60).sum().item() == 210_000
    one, two = (make_there(4) & make_there(5)) >> compute
    assert [one.sum().item(), two.sum().item()] == [4, 5]
    sums = [x.sum().item() for x in sky.gather(*[make_there(n) for n in range(1, 6)]) >> compute]
    assert sums == [1, 2, 3, 4, 5]
    assert [x.sum().item() for x in compute.map(make_there, [1, 2])] == [1, 2]


def test_items_of_a_generator_stay_one_by_one(compute, device) -> None:
    def grow(count: int) -> Iterator[torch.Tensor]:
        for n in range(count):
            yield torch.full((20_000,), float(n))

    stream = compute.run(sky.remote(grow)(40), on=0)
    assert [(x.device, x[-1].item()) for x in stream] == [(device, float(n)) for n in range(40)]


def test_coroutines_and_awaited_calls(compute, device) -> None:
    import asyncio

    async def load() -> torch.Tensor:
        return torch.ones(3)

    async def main() -> torch.Tensor:
        return await compute.submit(sky.remote(load)(), on=0)

    assert asyncio.run(main()).device == device


@only_in_all
def test_threads_of_one_executor_make_room_for_each(compute) -> None:
    worker = sky.Worker(concurrency=3, executor="thread")
    with sky.Compute(worker=worker, options=sky.Options(console=False)) as threads:
        found = sky.gather(*[sky.remote(make)(30_000, float(n)) for n in range(9)]) >> threads
        assert [x[-1].item() for x in found] == list(map(float, range(9)))


def test_a_sky_device_names_its_node(compute, device, other_device) -> None:
    make_there = sky.remote(make, device=other_device)
    assert (make_there(3) >> compute).device == other_device
    with pytest.raises(
        sky.errors.ConfigurationError, match="is on node 1, but the call runs on node 0"
    ):
        compute.run(make_there(3), on=0)


@only_in_all
def test_over_tls_it_is_the_same() -> None:
    options = sky.Options(console=False)
    with sky.Compute(sky.Local(transport="tcp"), options=options) as compute:
        device = compute.device("cpu")
        sky.remote(make)(1) >> compute
        before = moved(compute, device)
        x = sky.remote(make)(LARGE) >> compute
        after = moved(compute, device)
        assert after[:2] == before[:2]
        assert after[2] - before[2] < 8192
        assert x.sum().item() == LARGE


# What can go wrong.


def test_a_device_that_the_node_lacks_is_named(compute) -> None:
    with pytest.raises(sky.errors.ConfigurationError, match="the node has no 'cuda:7'"):
        compute.run(sky.remote(make, device="cuda:7")(3), on=0)
    assert (sky.remote(make)(3) >> compute).sum().item() == 3


def test_a_wrong_device_is_refused_at_once() -> None:
    for wrong in ("", "sky:0", 3, torch.device("cpu")):
        with pytest.raises(
            sky.errors.ConfigurationError, match="give 'cuda', 'cpu', 'mps' or 'auto'"
        ):
            sky.remote(make, device=wrong)  # type: ignore[call-overload]


def test_if_the_memory_cannot_be_opened_the_bytes_are_sent(alone) -> None:
    compute, device = alone

    def load() -> dict[str, Any]:
        from skyward.objects import references

        def refuse(description: bytes) -> Any:
            # This result alone: the executor runs the calls of other tests, too.
            references.flat = before
            raise references.CannotOpenError("for the test")

        before, references.flat = references.flat, refuse
        x = torch.arange(50_000.0)
        return {"x": x, "part": x[10:20]}

    uploaded = sky.device_stats(device).bytes_uploaded
    found = sky.remote(load)() >> compute
    assert found["x"].device == device
    found["part"].zero_()
    assert found["x"][:30].sum().item() == sum(range(30)) - sum(range(10, 20))
    assert sky.device_stats(device).bytes_uploaded > uploaded


def test_memory_is_free_when_the_client_drops_the_tensors(alone, eventually) -> None:
    compute, device = alone
    before = in_use(device)
    found = sky.remote(lambda: [torch.ones(LARGE), torch.ones(LARGE), torch.ones(10)])() >> compute
    assert in_use(device) - before >= 8 * LARGE
    del found[0]
    assert in_use(device) - before < 5 * LARGE
    del found
    assert in_use(device) <= before


@other_case
def test_a_result_that_nobody_takes_is_freed(alone, eventually) -> None:
    compute, device = alone
    before = in_use(device)
    for future in [sky.remote(make)(LARGE) > compute for _ in range(3)]:
        future.result(60)
    del future
    eventually(lambda: in_use(device) <= before)
    stream = sky.gather(*[sky.remote(make)(LARGE) for _ in range(3)], stream=True) >> compute
    next(stream)
    stream.close()
    eventually(lambda: in_use(device) <= before)


def test_a_cancelled_call_leaves_no_memory(alone, tmp_path: Path, eventually) -> None:
    compute, device = alone

    def slow(flag: str) -> torch.Tensor:
        import time

        Path(flag).touch()
        time.sleep(0.05)
        return torch.ones(LARGE)

    before = in_use(device)
    for n in range(4):
        flag = tmp_path / str(n)
        future = sky.remote(slow)(str(flag)) > compute
        eventually(flag.exists)
        threading.Event().wait(0.03 * n)
        future.cancel()
        del future
    eventually(lambda: in_use(device) <= before)

    def is_answered() -> bool:
        # On a busy machine a cancelled call may end with its executor.
        with contextlib.suppress(sky.WorkerDiedError):
            return (sky.remote(make)(3) >> compute).sum().item() == 3
        return False

    eventually(is_answered)


@only_in_all
def test_an_executor_that_dies_leaves_no_memory(alone, eventually) -> None:
    compute, device = alone

    def die() -> torch.Tensor:
        import torch as local

        class Bomb:
            def __reduce__(self) -> Any:
                os.kill(os.getpid(), signal.SIGKILL)
                return int, ()

        return local.ones(LARGE), Bomb()  # type: ignore[return-value]

    before = in_use(device)
    with pytest.raises(sky.WorkerDiedError):
        sky.remote(die)() >> compute
    assert in_use(device) <= before


@only_in_all
def test_a_device_that_dies_while_the_result_comes_is_said_or_replaced(eventually) -> None:
    options = sky.Options(console=False)
    with sky.Compute(options=options) as compute:
        compute.device("cpu")
        (process,) = device_processes(compute)

        def kill(pid: int) -> torch.Tensor:
            os.kill(pid, signal.SIGKILL)
            return torch.ones(LARGE)

        # The client hears of the death before the result needs memory, or after.
        with contextlib.suppress(sky.errors.DeviceError):
            x = sky.remote(kill)(process.pid) >> compute
            assert x.sum().item() == LARGE
        eventually(lambda: process not in device_processes(compute))
        assert (sky.remote(make)(3) >> compute).sum().item() == 3


@only_in_all
def test_an_earlier_error_of_the_device_is_raised(alone) -> None:
    compute, device = alone
    x = torch.ones(3, device=device)
    for index in (torch.tensor([n], device=device) for n in (0, 7)):
        x[index]
    with pytest.raises(Exception, match=r"out of bounds|out of range|device-side assert"):
        sky.remote(make)(100) >> compute
    if torch.cuda.is_available():
        return  # A GPU's process computes nothing more after a failed assertion.
    assert (sky.remote(make)(3) >> compute).sum().item() == 3


# On a GPU.

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


@pytest.fixture(scope="module")
def on_gpu(sharing) -> Iterator[tuple[sky.Compute, torch.device]]:
    """A pool of one node with its first GPU as a device."""
    with sharing(sky.Compute(options=sky.Options(console=False))) as compute:
        yield compute, compute.device("cuda")


@needs_cuda
def test_on_a_gpu_a_model_of_the_gpu_and_one_of_the_host_stay(on_gpu, eventually) -> None:
    compute, device = on_gpu

    def load(where: str) -> tuple[nn.Module, torch.device]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 4)).to(where)
        return model, next(model.parameters()).device

    before = in_use(device)
    expected = load("cpu")[0]
    for where in ("cuda", "cpu"):
        fetched = sky.device_stats(device).bytes_fetched
        model, its_device = sky.remote(load)(where) >> compute
        assert {p.device for p in model.parameters()} == {device} == {its_device}
        assert sky.device_stats(device).bytes_fetched == fetched
        for mine, its in zip(expected.parameters(), model.parameters(), strict=True):
            assert torch.equal(mine, its.cpu())
        del model, its
    eventually(lambda: in_use(device) <= before)


@needs_cuda
def test_on_a_gpu_the_result_is_complete_when_it_is_there(on_gpu) -> None:
    compute, device = on_gpu

    def late() -> torch.Tensor:
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(200_000_000)
            return torch.full((LARGE,), 3.0, device="cuda")

    x = sky.remote(late)() >> compute
    assert x.device == device
    assert x.sum().item() == 3.0 * LARGE
