"""A sky tensor given to a function on the node that holds it is that node's own tensor there."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

import skyward as sky
from skyward.objects import references

from ..conftest import only_in_all, other_case
from ..memory import in_use
from ..waiting import wait_for
from .test_defects import device_processes

LARGE = 64 << 20
"""Elements of four bytes: 256 MiB."""


@sky.function
def add(x: torch.Tensor, by: float) -> str:
    x += by
    return str(x.device)


@sky.function
def total(*tensors: torch.Tensor) -> float:
    return sum(t.sum().item() for t in tensors)


@sky.function
def node_of(*_: Any) -> int:
    return sky.instance_info().node


@sky.function
def add_after(x: torch.Tensor, flag: str) -> float:
    import time

    Path(flag + ".begun").touch()
    while not os.path.exists(flag):
        time.sleep(0.01)
    x += 1
    return x.sum().item()


@pytest.fixture(scope="module")
def alone(two_executors: sky.Compute) -> tuple[sky.Compute, torch.device, psutil.Process]:
    """A pool of one node with two executors, its device, and that one's process."""
    device = two_executors.device("cpu")
    *_, process = device_processes(two_executors)  # Others opened its GPU before.
    return two_executors, device, process


def fetched(device: torch.device) -> int:
    return sky.device_stats(device).bytes_fetched


# Sharing memory.


def test_what_the_function_changes_is_changed_for_the_client(compute, device) -> None:
    x = torch.zeros(5, device=device)
    assert add(x, 2.0) >> compute == "cpu"
    assert x.tolist() == [2.0] * 5
    x *= 3
    assert add(x, 1.0) >> compute == "cpu"
    assert x.tolist() == [7.0] * 5


def test_what_was_issued_before_the_call_is_seen_by_it(compute, device) -> None:
    x = torch.eye(256, device=device)
    for _ in range(50):
        x = (x @ x) + 0.0
    x += 1
    assert total(x) >> compute == 256 * 257


def test_not_a_byte_moves(alone) -> None:
    compute, device, _ = alone
    x = torch.zeros(LARGE, device=device)
    add(torch.zeros(1, device=device), 1.0) >> compute  # the code itself has to be sent once
    store = compute._open_fleet.dispatcher.packer.store
    before = fetched(device), compute.stats().bytes_sent, store._size
    add(x, 1.0) >> compute
    assert fetched(device) == before[0]
    assert compute.stats().bytes_sent - before[1] < 4096
    assert store._size == before[2]
    assert x[:: LARGE // 4].tolist() == [1.0] * 4


def test_views_are_views_of_the_same_memory(compute, device) -> None:
    @sky.function
    def look(whole: torch.Tensor, row: torch.Tensor, turned: torch.Tensor) -> list[Any]:
        row += 1
        one = whole.untyped_storage().data_ptr()
        shared = [t.untyped_storage().data_ptr() == one for t in (row, turned)]
        return [shared, whole.tolist(), turned.stride(), turned.tolist(), row.storage_offset()]

    x = torch.arange(6.0, device=device).view(2, 3)
    shared, whole, stride, turned, offset = look(x, x[1], x.t()) >> compute
    assert shared == [True, True]
    assert whole == [[0, 1, 2], [4, 5, 6]] == x.tolist()
    assert (stride, turned, offset) == ((1, 3), [[0, 4], [1, 5], [2, 6]], 3)


def test_a_view_alone_gives_access_to_its_part(compute, device) -> None:
    x = torch.zeros(1000, device=device)
    add(x[10:20], 1.0) >> compute
    assert x.sum().item() == 10
    assert x[10:20].sum().item() == 10


def test_tensors_keep_what_they_are(compute, device) -> None:
    @sky.function
    def describe(tensors: list[torch.Tensor]) -> list[Any]:
        return [
            (t.dtype, tuple(t.shape), t.requires_grad, type(t).__name__, t.tolist())
            for t in tensors
        ]

    tensors = [
        torch.ones(2, dtype=torch.bfloat16, device=device),
        torch.tensor(7, dtype=torch.int64, device=device),
        torch.empty(0, 3, device=device),
        torch.ones(2, device=device, requires_grad=True),
        nn.Parameter(torch.ones(1, device=device), requires_grad=False),
        torch.tensor([1 + 2j], device=device),
        torch.tensor([1 + 2j], device=device).conj(),
        torch.tensor([True, False], device=device),
    ]
    assert describe(tensors) >> compute == [
        *describe.local([t.cpu() for t in tensors[:4]]),
        (torch.float32, (1,), False, "Parameter", [1.0]),
        *describe.local([t.cpu() for t in tensors[5:]]),
    ]


def test_tensors_of_the_host_go_along_as_ever(compute, device) -> None:
    @sky.function
    def mix(far: torch.Tensor, near: torch.Tensor) -> torch.Tensor:
        far += near
        near += 1
        return near

    far, near = torch.ones(1 << 20, device=device), torch.ones(1 << 20)
    assert (mix(far, near) >> compute).sum().item() == 2 << 20
    assert far.sum().item() == 2 << 20
    assert near.sum().item() == 1 << 20


# Models.


def test_a_model_is_trained_where_it_is(compute, device) -> None:
    @sky.function
    def train(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(20):
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
    x, y = torch.randn(32, 4), torch.randn(32, 1)
    there = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
    there.load_state_dict(model.state_dict())
    there.to(device)
    before = fetched(device)
    loss = train(there, x.to(device), y.to(device)) >> compute
    assert fetched(device) == before
    assert loss == pytest.approx(train.local(model, x, y))
    for name, tensor in there.state_dict().items():
        torch.testing.assert_close(tensor.cpu(), model.state_dict()[name])


def test_a_model_given_back_is_a_model_here(compute, device) -> None:
    @sky.function
    def train(model: nn.Module) -> nn.Module:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(3.0)
        return model

    model = nn.Linear(2, 2).to(device)
    back = train(model) >> compute
    assert isinstance(back, nn.Linear)
    assert back.weight.device.type == "cpu"
    assert back(torch.ones(1, 2)).tolist() == [[9.0, 9.0]]
    back.weight.data.zero_()
    assert model.weight.sum().item() == 12


def test_tied_weights_stay_tied(compute, device) -> None:
    @sky.function
    def is_tied(model: nn.ModuleList) -> bool:
        return model[0].weight is model[1].weight

    model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    model[1].weight = model[0].weight
    assert is_tied(model.to(device)) >> compute


def test_a_device_is_what_its_tensors_are_on(compute, device, other_device) -> None:
    class Net(nn.Module):
        def __init__(self, device: torch.device) -> None:
            super().__init__()
            self.layer, self.device = nn.Linear(2, 2, device=device), device

    @sky.function
    def where(model: Net, *others: torch.device) -> list[str]:
        y = model.layer(torch.ones(1, 2, device=model.device))
        return [str(each) for each in (y.device, *others)]

    assert where(Net(device), device, other_device) >> compute == ["cpu"] * 3
    assert where(Net(device), torch.device("meta")) @ compute == [["cpu", "meta"]] * 2


def test_a_generator_keeps_its_references_to_the_end(compute, device) -> None:
    @sky.function
    def grow(x: torch.Tensor, by: Iterator[float]) -> Iterator[float]:
        for step in by:
            x += step
            yield x.sum().item()

    kept = torch.zeros(4, device=device)
    stream = grow(kept, [float(n) for n in range(40)]) >> compute
    assert list(stream) == [2.0 * n * (n + 1) for n in range(40)]
    assert kept.sum().item() == 2.0 * 39 * 40
    assert list(grow(torch.zeros(2, device=device), [1.0, 2.0]) >> compute) == [2.0, 6.0]


def test_a_function_may_name_both_torch_and_sky(compute, device) -> None:
    @sky.function
    def spread(x: torch.Tensor) -> float:
        return torch.full_like(x, sky.instance_info().total_nodes).sum().item()

    assert spread(torch.ones(3, device=device)) >> compute == 6


def test_arguments_are_pickled_once(compute, device) -> None:
    class Counted:
        times = 0

        def __reduce__(self) -> Any:
            Counted.times += 1
            return int, (7,)

    conj = torch.tensor([1j], device=device).conj()
    before = fetched(device)
    found = sky.function(lambda *args: list(args))
    x, seven, z, where = found(torch.ones(2, device=device), Counted(), conj, device) >> compute
    assert Counted.times == 1
    assert (x.tolist(), seven, z.tolist(), str(where)) == ([1.0, 1.0], 7, [-1j], "cpu")
    assert fetched(device) == before


# Where a call goes.


def test_a_call_goes_to_the_node_that_holds_its_tensors(compute, device, other_device) -> None:
    here, there = torch.ones(1, device=device), torch.ones(1, device=other_device)
    for _ in range(3):
        assert node_of(here) >> compute == 0
        assert node_of(there) >> compute == 1
    assert (node_of(there) > compute).result() == 1
    assert ((node_of(here) & node_of([there])) >> compute) == (0, 1)
    assert sky.gather(*[node_of({"x": there}) for _ in range(5)]) >> compute == [1] * 5
    assert list(compute.map(node_of, [there, here])) == [1, 0]


def test_another_node_gets_a_copy(compute, device) -> None:
    x = torch.ones(3, device=device)
    assert compute.run(add(x, 1.0), on=1) == "cpu"
    assert x.tolist() == [1.0] * 3
    assert compute.run(add(x, 1.0), on=0) == "cpu"
    assert x.tolist() == [2.0] * 3


def test_tensors_of_two_nodes_meet_where_most_of_the_bytes_are(
    compute, device, other_device
) -> None:
    @sky.function
    def meet(small: torch.Tensor, large: torch.Tensor) -> int:
        large += small.sum()
        small.zero_()
        return sky.instance_info().node

    small, large = torch.ones(3, device=device), torch.ones(5, device=other_device)
    before = fetched(device), fetched(other_device)
    assert meet(small, large) >> compute == 1
    assert (fetched(device), fetched(other_device)) == before
    assert small.tolist() == [1.0] * 3
    assert large.tolist() == [4.0] * 5


def test_a_result_may_have_the_copy_that_its_function_was_given(
    compute, device, other_device
) -> None:
    @sky.function
    def grow(x: torch.Tensor) -> torch.Tensor:
        x += 1
        return x

    x = torch.ones(3, device=device)
    before = fetched(device), fetched(other_device)
    y = compute.run(sky.remote(grow)(x), on=1)
    assert (fetched(device), fetched(other_device)) == before
    assert y.device == other_device
    assert (x.tolist(), y.tolist()) == ([1.0] * 3, [2.0] * 3)


def test_a_broadcast_copies_from_node_to_node(compute, device, other_device) -> None:
    @sky.function
    def both(x: torch.Tensor, part: torch.Tensor, conj: torch.Tensor, words: str) -> list[Any]:
        part += 1
        return [x.tolist(), conj.tolist(), sky.instance_info().node, words]

    x = torch.ones(3, device=device)
    conj = torch.tensor([1j], device=device).conj()
    add(x, 0.0) >> compute
    before = fetched(device), fetched(other_device)
    assert add(x, 1.0) @ compute == ["cpu", "cpu"]
    assert (fetched(device), fetched(other_device)) == before
    told = [[[1.0, 2.0, 2.0], [-1j], node, "a"] for node in (0, 1)]
    assert both(x, x[1:], conj, "a") @ compute == told
    assert x.tolist() == [1.0] * 3


@only_in_all
def test_each_worker_has_its_own_copy_in_a_broadcast_also_without_a_device() -> None:
    @sky.function
    def grow(x: torch.Tensor) -> torch.Tensor:
        x += 1
        return x

    worker = sky.Worker(per_node=2)
    with sky.Compute(nodes=2, worker=worker, options=sky.Options(console=False)) as compute:
        device = compute.device("cpu", node=1)
        x = torch.ones(1000, device=device)
        results = sky.remote(grow)(x) @ compute
        assert fetched(device) == 4000  # once, for the workers of node 0
        assert [y.device == device for y in results] == [False, False, True, True]
        assert [y.sum().item() for y in results] == [2000] * 4
        assert x.sum().item() == 1000


def test_frozen_data_is_a_copy(compute, device) -> None:
    x = torch.ones(3, device=device)
    frozen = sky.put(x)
    x += 1
    assert total(frozen) >> compute == 3


def test_another_pool_gets_a_copy(alone, compute, device) -> None:
    other, its_device, _ = alone
    mine, its = torch.ones(3, device=device), torch.ones(3, device=its_device)
    assert add(mine, 1.0) >> other == add(its, 1.0) >> compute == "cpu"
    assert mine.tolist() == its.tolist() == [1.0] * 3
    add(mine, 1.0) >> compute
    add(its, 1.0) >> other
    assert mine.tolist() == its.tolist() == [2.0] * 3


def test_several_executors_share_one_tensor(alone, tmp_path: Path, eventually) -> None:
    compute, device, _ = alone

    @sky.function
    def meet(x: torch.Tensor, mine: int) -> int:
        import time

        x[mine] = os.getpid()
        deadline = time.monotonic() + 20
        while not x[1 - mine].item() and time.monotonic() < deadline:
            time.sleep(0.001)
        return os.getpid()

    x = torch.zeros(2, dtype=torch.int64, device=device)
    pids = sky.gather(meet(x, 0), meet(x, 1)) >> compute
    assert len(set(pids)) == 2
    assert x.tolist() == pids


@only_in_all
def test_threads_of_one_executor_share_it_too() -> None:
    worker = sky.Worker(concurrency=2, executor="thread")
    with sky.Compute(worker=worker, options=sky.Options(console=False)) as compute:
        x = torch.zeros(1000, device=compute.device("cpu"))
        sky.gather(*[add(x[n * 100 : (n + 1) * 100], float(n)) for n in range(10)]) >> compute
        assert x.sum().item() == 100 * 45


@only_in_all
def test_over_tls_it_is_the_same_until_the_pool_is_closed(compute) -> None:
    options = sky.Options(console=False)
    with sky.Compute(sky.Local(transport="tcp"), options=options) as other:
        x = torch.zeros(1 << 20, device=other.device("cpu"))
        before = fetched(x.device)
        add(x, 1.0) >> other
        assert fetched(x.device) == before
        assert x.sum().item() == 1 << 20
    with pytest.raises(RuntimeError, match="its pool was closed"):
        total(x) >> compute


# Lives and deaths.


def test_a_future_keeps_the_tensors_until_the_function_is_done(
    alone, tmp_path: Path, eventually
) -> None:
    compute, device, _ = alone
    flag = tmp_path / "go"
    future = add_after(torch.full((1000,), 5.0, device=device), str(flag)) > compute
    eventually((tmp_path / "go.begun").exists)
    # Would take the slot, if that were free, and fill the memory behind it.
    others = [torch.full((1000,), 9.0, device=device) for _ in range(20)]
    torch.sky.synchronize(device)
    flag.touch()
    assert future.result(100) == 6000
    assert {t.sum().item() for t in others} == {9000.0}


def test_a_slot_used_again_refers_to_its_new_memory(alone) -> None:
    compute, device, _ = alone
    slots = set()
    for n in range(20):
        x = torch.full((1000 + n,), float(n), device=device)
        slots.add(x.untyped_storage().data_ptr())
        assert total(x) >> compute == n * (1000 + n)
        del x
    assert len(slots) < 20


def test_what_a_function_keeps_stays_what_it_was(alone) -> None:
    compute, device, _ = alone

    @sky.function
    def keep(x: torch.Tensor) -> int:
        import builtins

        builtins.kept_by_test = x  # type: ignore[attr-defined]
        return os.getpid()

    @sky.function
    def look() -> tuple[int, float]:
        import builtins

        kept = getattr(builtins, "kept_by_test", None)
        return os.getpid(), -1.0 if kept is None else kept.sum().item()

    pid = keep(torch.ones(1 << 20, device=device)) >> compute
    others = [torch.zeros(1 << 20, device=device) for _ in range(4)]
    torch.sky.synchronize(device)
    seen = dict(sky.gather(*[look() for _ in range(8)]) >> compute)
    assert seen.get(pid, float(1 << 20)) == 1 << 20
    del others


def test_a_tensor_that_grew_is_exported_anew(alone) -> None:
    compute, device, _ = alone
    out = torch.ones(3, device=device)
    add(out, 1.0) >> compute
    x = torch.ones(1 << 16, device=device)
    with pytest.warns(UserWarning, match="An output with one or more elements was resized"):
        torch.add(x, x, out=out)
    add(out, 1.0) >> compute
    assert out.sum().item() == 3 << 16
    out.resize_(1 << 17)[1 << 16 :] = 0
    add(out, 1.0) >> compute
    assert out.sum().item() == (3 << 16) + (1 << 17)


def test_descriptors_and_memory_come_back(alone, tmp_path: Path, eventually) -> None:
    compute, device, process = alone

    @sky.function
    def meet(own: str, other: str, *tensors: torch.Tensor) -> int:
        Path(own).touch()
        wait_for(other)
        return os.getpid()

    kept = torch.ones(1000, device=device)
    # Both executors are there then: an earlier test may have killed one, and each opens something
    # while it starts, and when it has its first task.
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    meeting = sky.gather(meet(one, two, kept), meet(two, one, kept))
    executors = [psutil.Process(pid) for pid in meeting >> compute]

    def files() -> list[int]:
        torch.sky.synchronize(device)
        return [each.num_fds() for each in (process, *executors)]

    def mappings() -> int:
        return sum(
            "/memfd:" in line
            for each in executors
            for line in Path(f"/proc/{each.pid}/maps").read_text().splitlines()
        )

    for _ in range(10):
        total(kept) @ compute
        total(torch.ones(1000, device=device), kept) >> compute
    gc.collect()
    before, mapped = files(), mappings()
    in_use = torch.sky.memory_allocated(device)
    for n in range(200):
        passing = torch.ones(1000 + n, device=device)
        assert total(passing, kept) >> compute == 2000 + n
        del passing
    gc.collect()
    eventually(
        lambda: all(now <= was for was, now in zip(before, files(), strict=True)),
        30,
        f"the return of descriptors to {before}",
    )
    assert mappings() <= mapped
    assert torch.sky.memory_allocated(device) == in_use


def test_large_memory_comes_back(alone, eventually) -> None:
    compute, device, process = alone

    def allocated() -> int:
        torch.sky.synchronize(device)
        return in_use(process)

    total(torch.ones(1 << 20, device=device)) >> compute
    held, before = torch.sky.memory_allocated(device), allocated()
    x = torch.ones(LARGE, device=device)
    assert total(x) >> compute == LARGE
    assert allocated() < before + 1.25 * 4 * LARGE  # moved, not doubled
    del x
    eventually(lambda: torch.sky.memory_allocated(device) <= held, 30, "the tensor's end")
    eventually(lambda: allocated() < before + (32 << 20), 30, "the memory's return")


def test_a_killed_executor_does_no_harm(alone) -> None:
    compute, device, _ = alone

    @sky.function
    def die(x: torch.Tensor) -> None:
        x += 1
        os.kill(os.getpid(), signal.SIGKILL)

    x = torch.zeros(1000, device=device)
    with pytest.raises(sky.WorkerDiedError):
        die(x) >> compute
    assert x.sum().item() == 1000
    add(x, 1.0) >> compute
    assert x.sum().item() == 2000


@other_case
def test_a_retry_has_the_tensors_too(alone, tmp_path: Path) -> None:
    compute, device, _ = alone

    @sky.function(retries=1)
    def fragile(x: torch.Tensor, flag: str) -> float:
        x += 1
        if not os.path.exists(flag):
            Path(flag).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return x.sum().item()

    x = torch.zeros(10, device=device)
    assert fragile(x, str(tmp_path / "flag")) >> compute == 20


@pytest.fixture(scope="module")
def mortal(sharing) -> Iterator[sky.Compute]:
    """A pool whose device tests may kill: the next one is opened anew."""
    with sharing(sky.Compute(options=sky.Options(console=False))) as compute:
        yield compute


@only_in_all
def test_a_device_that_ends_leaves_the_function_its_memory(
    mortal: sky.Compute, tmp_path: Path, eventually
) -> None:
    x = torch.ones(1 << 20, device=mortal.device("cpu"))
    flag = tmp_path / "go"
    future = add_after(x, str(flag)) > mortal
    eventually((tmp_path / "go.begun").exists)
    (process,) = device_processes(mortal)
    process.kill()
    process.wait(100)
    flag.touch()
    assert future.result(100) == 2 << 20
    with pytest.raises(RuntimeError, match=r"sky:\d+ .*is gone"):
        total(x) >> mortal
    y = torch.ones(3, device=mortal.device("cpu"))
    assert total(y) >> mortal == 3


# Errors.


def test_an_error_on_the_device_is_raised_at_the_call(compute, device) -> None:
    table = torch.ones(4, 2, device=device)
    table[torch.tensor([1], device=device)]
    table[torch.tensor([9], device=device)]
    with pytest.raises(IndexError, match="index 9 is out of bounds"):
        total(table) >> compute
    assert total(table) >> compute == 8


def test_a_poisoned_tensor_cannot_be_given(compute, device) -> None:
    table = torch.ones(4, 2, device=device)
    table[torch.tensor([1], device=device)]
    bad = table[torch.tensor([9], device=device)]
    for _ in range(2):
        with pytest.raises((IndexError, RuntimeError), match="index 9 is out of bounds"):
            total(bad) >> compute


def test_the_functions_own_error_comes_back(compute, device) -> None:
    @sky.function
    def fail(x: torch.Tensor) -> None:
        x += 1
        raise ValueError(f"with {x.tolist()}")

    x = torch.zeros(2, device=device)
    with pytest.raises(ValueError, match=r"with \[1.0, 1.0\]"):
        fail(x) >> compute
    assert x.tolist() == [1.0, 1.0]


# Where memory cannot be opened.


def test_what_cannot_be_exported_is_copied(
    compute, device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from skyward.device.core import Core

    monkeypatch.setattr(Core, "export", lambda self, index, storages, rank: [b""] * len(storages))
    x = torch.ones(3, device=device)
    assert add(x, 1.0) >> compute == "cpu"
    assert x.tolist() == [1.0] * 3


def broken(description: bytes, how: str) -> bytes:
    pid, descriptor, name, size = references._MEMORY.unpack(description)
    if how == "a process that is gone":
        pid = (1 << 22) + 1
    elif how == "another file":
        name = b"0" * 32
    elif how == "too little":
        size += 1
    elif how == "a GPU that is not there":
        return description + bytes(references._ON_GPU.size)
    return references._MEMORY.pack(pid, descriptor, name, size)


@pytest.mark.parametrize(
    "how", ["a process that is gone", "another file", "too little", "a GPU that is not there"]
)
def test_what_cannot_be_opened_is_copied(alone, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    from skyward.device.core import Core

    compute, device, _ = alone
    real = Core.export
    monkeypatch.setattr(
        Core, "export", lambda *given: [broken(description, how) for description in real(*given)]
    )

    @sky.function
    def scale(xs: Iterator[float], x: torch.Tensor) -> Iterator[float]:
        for each in xs:
            yield (x * each).sum().item()

    x = torch.ones(1 << 20, device=device)
    assert add(x, 1.0) >> compute == "cpu"
    assert (add(x, 1.0) > compute).result(100) == "cpu"
    assert x.sum().item() == 1 << 20
    assert list(scale([1.0, 2.0], x) >> compute) == [1 << 20, 2 << 20]


@only_in_all
def test_a_device_gone_before_the_call_is_opened_raises_its_own_error(
    mortal: sky.Compute, monkeypatch: pytest.MonkeyPatch
) -> None:
    from skyward.device.core import Core

    x = torch.ones(3, device=mortal.device("cpu"))
    (process,) = device_processes(mortal)
    real = Core.export

    def export_and_die(*given: Any) -> list[bytes]:
        descriptions = real(*given)
        process.kill()
        process.wait(100)
        return descriptions

    monkeypatch.setattr(Core, "export", export_and_die)
    with pytest.raises(RuntimeError, match=r"sky:\d+ .*is gone"):
        total(x) >> mortal
    monkeypatch.undo()
    assert total(torch.ones(2)) >> mortal == 2


@only_in_all
def test_a_call_cancelled_while_its_bytes_are_fetched_leaves_nothing(
    alone, monkeypatch: pytest.MonkeyPatch, eventually
) -> None:
    from skyward.calls.packer import Packer
    from skyward.device.core import Core

    compute, device, _ = alone
    real, parcel = Core.export, Packer.parcel
    monkeypatch.setattr(
        Core, "export", lambda *given: [broken(d, "another file") for d in real(*given)]
    )
    repacking, go_on = threading.Event(), threading.Event()

    def slow(self: Packer, encoded: Any, **details: bool) -> Any:
        if threading.current_thread() is not threading.main_thread():
            repacking.set()
            go_on.wait(100)
        return parcel(self, encoded, **details)

    monkeypatch.setattr(Packer, "parcel", slow)
    store = compute._open_fleet.dispatcher.packer.store
    pinned = dict(store._pins)
    future = total(torch.ones(1 << 20, device=device)) > compute
    assert repacking.wait(100)
    future.cancel()
    go_on.set()
    assert total(torch.ones(2)) >> compute == 2
    eventually(lambda: store._pins == pinned, 10, "the release of what was packed")


# On a GPU.


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


@pytest.fixture(scope="module")
def on_gpu(sharing) -> Iterator[tuple[sky.Compute, torch.device, Callable[[], int]]]:
    """A pool of one node with its first GPU as a device, and the bytes in use there."""
    with sharing(sky.Compute(options=sky.Options(console=False))) as compute:
        device = compute.device("cuda")

        def in_use() -> int:
            gc.collect()
            torch.sky.synchronize(device)
            return torch.sky.memory_allocated(device)

        torch.ones(1, device=device).sum().item()
        yield compute, device, in_use


@needs_cuda
def test_on_a_gpu_the_function_changes_the_same_memory(on_gpu) -> None:
    compute, device, _ = on_gpu
    x = torch.zeros(LARGE, device=device)
    before = fetched(device)
    for n in range(1, 4):
        assert add(x, 1.0) >> compute == "cuda:0"
        assert x[:: LARGE // 4].tolist() == [float(n)] * 4
    small, empty = torch.ones(3, device=device), torch.empty(0, device=device)
    assert total(small, x[:5], empty, small[1:]) >> compute == 3 + 15 + 2
    assert fetched(device) - before < 4096


@needs_cuda
def test_on_a_gpu_a_model_is_trained_where_it_is(on_gpu) -> None:
    compute, device, _ = on_gpu

    @sky.function
    def train(model: nn.Module, x: torch.Tensor, device: torch.device) -> nn.Module:
        assert next(model.parameters()).device == x.device == device == torch.device("cuda:0")
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(10):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model

    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8)).to(device)
    before = [p.detach().cpu() for p in model.parameters()]
    back = train(model, torch.ones(16, 64, device=device), device) >> compute
    for old, new, copy in zip(before, model.parameters(), back.parameters(), strict=True):
        torch.testing.assert_close(new.detach().cpu(), copy.detach().cpu())
        assert not torch.equal(old, copy.detach().cpu())


@needs_cuda
def test_on_a_gpu_work_is_done_when_the_result_is_there(on_gpu) -> None:
    compute, device, _ = on_gpu

    @sky.function
    def long(x: torch.Tensor) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(200_000_000)
            x += 1

    x = torch.zeros(1000, device=device)
    long(x) >> compute
    assert x.sum().item() == 1000


@needs_cuda
def test_on_a_gpu_what_a_function_keeps_stays_what_it_was(on_gpu) -> None:
    compute, device, in_use = on_gpu

    @sky.function
    def keep(x: torch.Tensor) -> None:
        import builtins

        builtins.kept_by_test = x  # type: ignore[attr-defined]

    @sky.function
    def look_and_drop() -> float:
        import builtins

        kept = builtins.kept_by_test  # type: ignore[attr-defined]
        del builtins.kept_by_test  # type: ignore[attr-defined]
        return float(kept.sum().item())

    before = in_use()
    keep(torch.ones(LARGE, device=device)) >> compute
    others = [torch.zeros(LARGE, device=device) for _ in range(4)]
    torch.sky.synchronize(device)
    assert look_and_drop() >> compute == LARGE
    del others
    assert in_use() == before


@needs_cuda
def test_on_a_gpu_descriptors_and_memory_come_back(on_gpu, eventually) -> None:
    compute, device, in_use = on_gpu
    (process,) = device_processes(compute)
    total(torch.ones(1000, device=device)) >> compute
    before, files = in_use(), process.num_fds()
    for n in range(200):
        passing = torch.ones(1000 + n, device=device)
        assert total(passing) >> compute == 1000 + n
        del passing
    eventually(lambda: (in_use(), process.num_fds()) == (before, files), 10, "their return")


@needs_cuda
def test_on_a_gpu_a_killed_executor_does_no_harm(on_gpu, eventually) -> None:
    compute, device, in_use = on_gpu

    @sky.function
    def die(x: torch.Tensor) -> None:
        x += 1
        torch.cuda.synchronize()
        os.kill(os.getpid(), signal.SIGKILL)

    before = in_use()
    x = torch.zeros(1000, device=device)
    with pytest.raises(sky.WorkerDiedError):
        die(x) >> compute
    assert x.sum().item() == 1000
    add(x, 1.0) >> compute
    assert x.sum().item() == 2000
    del x
    eventually(lambda: in_use() == before, 10, "the memory's return")
