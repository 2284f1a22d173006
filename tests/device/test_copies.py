"""Copies between devices go from process to process, in order with the operations of both."""

from __future__ import annotations

import copy
import ctypes
import random
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

import skyward as sky
from skyward.device import meeting
from skyward.device.core import core
from skyward.device.peers import Peers, Unreachable
from skyward.wire.handshake import CLIENT, Authority

from ..conftest import only_in_all, other_case
from .proxy import Proxy
from .test_defects import device_processes

MIB = 1 << 20
DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


def some(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    values = torch.arange(torch.Size(shape).numel()).reshape(shape) * 3 + 1
    return (values % 127).to(dtype)


@pytest.fixture(scope="session")
def three_nodes(sharing) -> Iterator[sky.Compute]:
    """A pool of three nodes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        with sharing(sky.Compute(nodes=3, options=sky.Options(console=False))) as compute:
            yield compute


@pytest.fixture(scope="session")
def three(three_nodes: sky.Compute) -> list[torch.device]:
    """Devices of three nodes."""
    return three_nodes.devices("cpu")


@pytest.fixture(scope="session")
def remote(sharing) -> Iterator[list[torch.device]]:
    """Devices of two nodes that the client reaches as over a network."""
    local = sky.Local(transport="tcp")
    with sharing(sky.Compute(local, nodes=2, options=sky.Options(console=False))) as compute:
        yield compute.devices("cpu")


@pytest.fixture
def over_network(remote: list[torch.device], monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """The same, which do not see that they are on one machine."""
    rearrange(monkeypatch, lambda endpoint: endpoint if endpoint.startswith("tcp:") else "")
    return remote


@pytest.fixture(scope="module")
def proxied_pool(sharing) -> Iterator[tuple[list[torch.device], Proxy]]:
    """Two nodes, and a proxy for what goes between them."""
    proxy = Proxy()
    local = sky.Local(transport="tcp")
    with sharing(sky.Compute(local, nodes=2, options=sky.Options(console=False))) as compute:
        yield compute.devices("cpu"), proxy
    proxy.close()


@pytest.fixture
def proxied(
    proxied_pool: tuple[list[torch.device], Proxy], monkeypatch: pytest.MonkeyPatch
) -> tuple[list[torch.device], Proxy]:
    """Devices that reach each other through the proxy."""
    _, proxy = proxied_pool
    rearrange(monkeypatch, lambda e: proxy.endpoint_for(e) if e.startswith("tcp:") else "")
    return proxied_pool


def rearrange(patch: pytest.MonkeyPatch, endpoint_for: Callable[[str], str]) -> None:
    """Have devices connect to other endpoints than those that their processes listen at."""
    arrange = meeting.arrange

    def otherwise(*args: Any) -> meeting.Meeting:
        made = arrange(*args)
        made.endpoints = tuple(filter(None, map(endpoint_for, made.endpoints)))
        return made

    patch.setattr(meeting, "arrange", otherwise)


# What is copied.


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (2, 3, 4, 5)], ids=str)
def test_a_copy_has_the_same_bits(
    device: torch.device, other_device: torch.device, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    x = some(*shape, dtype=dtype)
    there = x.to(device).to(other_device)
    assert there.device == other_device
    assert there.dtype == dtype
    assert torch.equal(there.cpu(), x)


@pytest.mark.parametrize("size", [0, 1, 64 << 10, MIB - 1, MIB, MIB + 1, 40 * MIB + 3])
def test_any_size_arrives(device: torch.device, other_device: torch.device, size: int) -> None:
    x = torch.randint(256, (size,), dtype=torch.uint8)
    assert torch.equal(x.to(device).to(other_device).cpu(), x)


@pytest.mark.parametrize("source", DTYPES, ids=str)
@pytest.mark.parametrize("target", DTYPES, ids=str)
def test_a_copy_converts_as_on_one_device(
    device: torch.device, other_device: torch.device, source: torch.dtype, target: torch.dtype
) -> None:
    x = some(4, 6, dtype=source)
    there = torch.zeros(4, 6, dtype=target, device=other_device)
    right = torch.zeros(4, 6, dtype=target)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        there.copy_(x.to(device))
        right.copy_(x)
        assert torch.equal(there.cpu(), right)


@pytest.mark.parametrize("source", [(), (1,), (5,), (4, 1), (1, 5), (4, 5)], ids=str)
def test_a_copy_broadcasts(
    device: torch.device, other_device: torch.device, source: tuple[int, ...]
) -> None:
    x = some(*source)
    there = torch.zeros(4, 5, device=other_device).copy_(x.to(device))
    assert torch.equal(there.cpu(), torch.zeros(4, 5).copy_(x))


def test_a_source_that_does_not_fit_is_refused_at_the_call(
    device: torch.device, other_device: torch.device
) -> None:
    with pytest.raises(RuntimeError, match="must match the existing size"):
        torch.zeros(4, 5, device=other_device).copy_(torch.zeros(3, device=device))


STRIDED = {
    "transposed": lambda t: t.t(),
    "every second": lambda t: t[:, ::2],
    "a column": lambda t: t[:, 3],
    "a row": lambda t: t[2],
    "the end": lambda t: t[4:],
    "a diagonal": lambda t: t.diagonal(),
    "overlapping": lambda t: t.reshape(-1).unfold(0, 6, 2),
    "repeated": lambda t: t[:1].expand(6, 8),
}


@pytest.mark.parametrize("view", STRIDED, ids=str)
def test_views_are_copied_from_and_to(
    device: torch.device, other_device: torch.device, view: str
) -> None:
    look = STRIDED[view]
    x = some(6, 8)
    from_view = look(x.to(device)).to(other_device)
    assert from_view.stride() == look(x).to("cpu", copy=True).stride()
    assert torch.equal(from_view.cpu(), look(x))
    if view in ("overlapping", "repeated"):
        return
    whole, right = torch.zeros(6, 8, device=other_device), torch.zeros(6, 8)
    look(whole).copy_(look(x.to(device)) + 1)
    look(right).copy_(look(x) + 1)
    assert torch.equal(whole.cpu(), right)


def test_channels_last_stays_so(device: torch.device, other_device: torch.device) -> None:
    x = some(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    there = x.to(device).to(other_device)
    assert there.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(there.cpu(), x)


def test_lazy_conjugation_and_negation_become_values(
    device: torch.device, other_device: torch.device
) -> None:
    x = torch.randn(5, 4, dtype=torch.complex64)
    assert torch.equal(x.to(device).conj().to(other_device).cpu(), x.conj())
    assert torch.equal(x.to(device).conj().imag.to(other_device).cpu(), x.conj().imag)
    there = torch.zeros(5, 4, dtype=torch.complex64, device=other_device)
    there.conj().copy_(x.to(device))
    assert torch.equal(there.cpu(), x.conj())


def test_many_tensors_are_copied_at_once(device: torch.device, other_device: torch.device) -> None:
    sources = [some(n, n) for n in range(1, 9)]
    targets = [torch.zeros_like(s, device=other_device) for s in sources]
    torch._foreach_copy_(targets, [s.to(device) for s in sources])
    assert all(torch.equal(t.cpu(), s) for t, s in zip(targets, sources, strict=True))


def test_operations_on_tensors_of_two_devices_are_refused(
    device: torch.device, other_device: torch.device
) -> None:
    with pytest.raises(sky.errors.DeviceError, match=r"same device, but found sky:\d and sky:\d"):
        torch.ones(2, device=device) + torch.ones(2, device=other_device)


MAKERS = {
    "zeros": torch.zeros_like,
    "ones": torch.ones_like,
    "full": lambda t, **where: torch.full_like(t, 3.0, **where),
    "new_zeros": lambda t, **where: t.new_zeros(2, 3, **where),
}


@pytest.mark.parametrize("make", MAKERS)
def test_a_tensor_like_another_is_made_where_it_is_asked_for(
    device: torch.device, other_device: torch.device, make: str
) -> None:
    x = torch.randn(2, 3, device=device)
    for place in (device, other_device, torch.device("cpu")):
        made = MAKERS[make](x, device=place)
        assert made.device == place
        assert torch.equal(made.cpu(), MAKERS[make](x.cpu()))


# Models.


def test_a_model_moves_with_its_ties(device: torch.device, other_device: torch.device) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    right = copy.deepcopy(model.state_dict())
    model.to(device)
    kept = model[0].weight
    duplicate = copy.deepcopy(model).to(other_device)
    model.to(other_device)
    assert model[0].weight is kept
    assert model[2].weight is kept
    for each in (model, duplicate):
        assert {p.device for p in each.parameters()} == {other_device}
        assert all(torch.equal(v.cpu(), right[k]) for k, v in each.state_dict().items())


def test_a_state_is_loaded_from_another_device(
    device: torch.device, other_device: torch.device
) -> None:
    trained, fresh = nn.Linear(6, 3).to(device), nn.Linear(6, 3).to(other_device)
    fresh.load_state_dict(trained.state_dict())
    assert torch.equal(fresh.weight.cpu(), trained.weight.cpu())
    assert fresh.weight.device == other_device


def test_gradients_flow_back_over_devices(device: torch.device, other_device: torch.device) -> None:
    def run(first: torch.device | str, second: torch.device | str) -> list[torch.Tensor]:
        torch.manual_seed(3)
        one, two = nn.Linear(8, 16), nn.Linear(16, 4)
        x = torch.randn(5, 8)
        one.to(first)
        two.to(second)
        inner = torch.tanh(one(x.to(first))).to(second)
        loss = two(inner).square().mean()
        loss.backward()
        assert one.weight.grad.device == torch.device(first)
        return [p.grad.cpu() for m in (one, two) for p in m.parameters()] + [loss.detach().cpu()]

    ours, right = run(device, other_device), run("cpu", "cpu")
    assert all(map(torch.equal, ours, right))


def test_a_pipeline_of_micro_batches_trains_as_on_one_device(
    device: torch.device, other_device: torch.device
) -> None:
    def run(first: torch.device | str, second: torch.device | str) -> list[float]:
        torch.manual_seed(4)
        stages = [nn.Linear(8, 16), nn.Linear(16, 1)]
        x, y = torch.randn(12, 8), torch.randn(12, 1)
        stages[0].to(first)
        stages[1].to(second)
        optimizers = [torch.optim.Adam(stage.parameters(), 0.01) for stage in stages]
        losses = []
        for _ in range(5):
            parts = zip(x.to(first).chunk(4), y.to(second).chunk(4), strict=True)
            moved = [(torch.relu(stages[0](a)).to(second), b) for a, b in parts]
            loss = sum(nn.functional.mse_loss(stages[1](a), b) for a, b in moved)
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
        return [loss.item() for loss in losses]

    assert run(device, other_device) == run("cpu", "cpu")


@other_case
def test_copies_of_a_model_on_several_devices_train_as_one(three: list[torch.device]) -> None:
    def train(places: list[torch.device]) -> list[torch.Tensor]:
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        x, y = torch.randn(12, 6).double(), torch.randn(12, 1).double()
        replicas = [copy.deepcopy(model).to(place) for place in places]
        first = list(replicas[0].parameters())
        optimizer = torch.optim.SGD(first, 0.1, momentum=0.9)
        for _ in range(4):
            parts = zip(replicas, x.chunk(len(places)), y.chunk(len(places)), strict=True)
            for place, (replica, a, b) in zip(places, parts, strict=True):
                replica.zero_grad()
                loss = nn.functional.mse_loss(replica(a.to(place)), b.to(place))
                (loss / len(replicas)).backward()
            for replica in replicas[1:]:
                for p, q in zip(first, replica.parameters(), strict=True):
                    p.grad += q.grad.to(p.device)
            optimizer.step()
            for replica in replicas[1:]:
                for p, q in zip(first, replica.parameters(), strict=True):
                    q.data.copy_(p.data)
        return [p.detach().cpu() for p in replicas[-1].parameters()]

    for ours, right in zip(train(three), train([torch.device("cpu")]), strict=True):
        torch.testing.assert_close(ours, right)


# Order.


def test_an_earlier_write_shows_in_a_copy_and_a_later_one_does_not(
    device: torch.device, other_device: torch.device
) -> None:
    x = torch.zeros(4 * MIB, device=device)
    copies = []
    for step in range(6):
        x.fill_(step)
        copies.append(x.to(other_device))
        x.fill_(-1)
    for step, copied in enumerate(copies):
        assert copied.min().item() == copied.max().item() == step


def test_what_is_freed_right_after_a_copy_still_arrives(
    device: torch.device, other_device: torch.device
) -> None:
    copies = [torch.full((2 * MIB,), float(i), device=device).to(other_device) for i in range(8)]
    torch.full((2 * MIB,), -1.0, device=device)
    assert [c.mean().item() for c in copies] == list(range(8))


def test_a_write_to_the_target_before_and_after(
    device: torch.device, other_device: torch.device
) -> None:
    x = torch.ones(4 * MIB, device=device)
    y = torch.zeros(4 * MIB, device=other_device)
    y.fill_(5)
    y.copy_(x)
    y.mul_(3)
    y[:10].copy_(x[:10])
    assert y[:10].sum().item() == 10
    assert y[10:].min().item() == y[10:].max().item() == 3


def test_copies_in_a_circle_wait_for_nothing_but_what_they_need(
    three: list[torch.device],
) -> None:
    size = 24 * MIB  # of floats: more than all that is between two processes holds
    held = [torch.full((size,), float(i), device=d) for i, d in enumerate(three)]
    for _ in range(3):
        held = [held[i - 1].to(three[i]) for i in range(3)]
    assert [h.mean().item() for h in held] == [0, 1, 2]
    one, two = held[0], held[1]
    back = two.to(three[0]), one.to(three[1])
    assert back[0].mean().item() == 1
    assert back[1].mean().item() == 0


def test_threads_copy_in_all_directions_at_once(three: list[torch.device]) -> None:
    problems: list[BaseException] = []

    def run(number: int) -> None:
        try:
            here, there = three[number % 3], three[(number + 1) % 3]
            for step in range(10):
                x = torch.full((MIB // 2,), float(100 * number + step), device=here)
                back = x.to(there).to(here)
                x.zero_()
                assert back.mean().item() == 100 * number + step
        except BaseException as problem:
            problems.append(problem)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems


@pytest.mark.parametrize("seed", range(6))
def test_any_mix_of_copies_and_writes_is_as_on_one_device(
    three: list[torch.device], seed: int
) -> None:
    choose = random.Random(seed)
    size = choose.choice([1000, 300_000, 600_000])  # also above what is passed on
    values = [torch.arange(float(size)) + 1000 * i for i in range(6)]
    pairs = [(value.to(three[i % 3]), value) for i, value in enumerate(values)]
    for _ in range(100):
        kind = choose.randrange(6)
        (a, right_a), (b, right_b) = choose.sample(pairs, 2)
        low = choose.randrange(size)
        high = choose.randrange(low, size) + 1
        half = (high - low + 1) // 2
        for x, y in ((a, b), (right_a, right_b)):
            if kind < 2:
                y.copy_(x)
            elif kind == 2:
                y[low:high].copy_(x[low:high])
            elif kind == 3:
                y[low:high:2].copy_(x[low : low + half])
            elif kind == 4:
                x[low:high].add_(1)
        if kind == 5:
            moved = (a.to(choose.choice(three), copy=True), right_a.clone())
            pairs = [moved if pair[0] is b else pair for pair in pairs]
    assert all(torch.equal(ours.cpu(), right) for ours, right in pairs)


# One source, many devices.


def test_a_node_sends_the_same_content_once(three: list[torch.device]) -> None:
    first, second, third = three
    x = torch.randn(2 * MIB, device=first)
    before = [sky.device_stats(d).bytes_to_devices for d in three]
    copies = [x.to(second), x.to(third)]
    after = [sky.device_stats(d).bytes_to_devices for d in three]
    assert [b - a for a, b in zip(before, after, strict=True)] == [x.nbytes, x.nbytes, 0]
    assert all(torch.equal(c.cpu(), x.cpu()) for c in copies)


WRITES = {
    "the source": lambda x, copied: x.add_(1),
    "a view of the source": lambda x, copied: x[:7].zero_(),
    "the copy": lambda x, copied: copied.add_(1),
    "an out= that is the copy": lambda x, copied: torch.mul(copied, 2, out=copied),
    "the source from here": lambda x, copied: x.copy_(torch.randn(x.shape)),
    "the copy from here": lambda x, copied: copied.copy_(torch.randn(x.shape)),
    "many at once": lambda x, copied: torch._foreach_add_([x], 1.0),
}


@pytest.mark.parametrize("write", WRITES)
def test_no_stale_content_is_passed_on(three: list[torch.device], write: str) -> None:
    first, second, third = three
    x = torch.randn(MIB, device=first)
    copied = x.to(second)
    WRITES[write](x, copied)
    assert torch.equal(x.to(third).cpu(), x.cpu())


@only_in_all
def test_content_that_a_function_writes_to_later_is_not_passed_on(
    three: list[torch.device], three_nodes: sky.Compute, tmp_path: Path, eventually
) -> None:
    def fill_when_told(x: torch.Tensor, begun: Path, told: Path) -> None:
        begun.touch()
        while not told.exists():
            time.sleep(0.01)
        x.fill_(5)

    first, second, third = three
    x = torch.ones(MIB, device=first)
    begun, told = tmp_path / "begun", tmp_path / "told"
    filling = sky.function(fill_when_told)(x, begun, told) > three_nodes
    eventually(begun.exists)
    copied = x.to(second)
    torch.sky.synchronize(second)
    told.touch()
    filling.result(60)
    assert torch.equal(x.to(third).cpu(), torch.full((MIB,), 5.0))
    assert copied[0].item() == 1


def test_a_copy_that_is_gone_is_not_passed_on(three: list[torch.device]) -> None:
    first, second, third = three
    x = torch.randn(MIB, device=first)
    copied = x.to(second)
    del copied
    torch.zeros(MIB, device=second)  # takes the place of the copy
    assert torch.equal(x.to(third).cpu(), x.cpu())


# Failures.


def test_a_failed_source_fails_its_copy_and_no_other(
    device: torch.device, other_device: torch.device
) -> None:
    good = torch.ones(3, device=device)
    for index in (1, 7):  # the first has its shape asked for, the second fails later
        bad = torch.arange(3, device=device)[torch.tensor([index]).to(device)]
    copied, fine = bad.to(other_device), good.to(other_device)
    with pytest.raises((IndexError, sky.errors.DeviceError), match="out of"):
        copied.cpu()
    with pytest.raises(IndexError):
        torch.sky.synchronize(device)
    assert fine.sum().item() == 3


def test_a_copy_that_failed_at_the_node_that_passes_it_on_comes_from_the_source_the_next_time(
    three: list[torch.device],
) -> None:
    first, second, third = three
    x = torch.arange(MIB, device=first)
    index = torch.zeros(MIB, dtype=torch.int64, device=second)
    torch.arange(3, device=second)[index]  # its shape is asked for, so that the next fails later
    failed = torch.arange(3, device=second)[index + 7]
    failed.copy_(x)
    with pytest.raises((IndexError, sky.errors.DeviceError), match="out of"):
        x.to(third).cpu()
    assert torch.equal(x.to(third).cpu(), x.cpu())
    with pytest.raises(IndexError):
        torch.sky.synchronize(second)


def test_a_lost_device_fails_what_was_to_come_from_it() -> None:
    options = sky.Options(console=False)
    with sky.Compute(nodes=2, options=options) as compute:
        first, second = compute.devices("cpu")
        torch.ones(3, device=first).to(second).cpu()
        x = torch.ones(64 * MIB, device=first)
        torch.sky.synchronize(first)
        slow = torch.randn(1500, 1500, device=first)
        for _ in range(40):
            slow = slow @ slow
        x.add_(slow[0, 0])
        copied = x.to(second)
        place = core().place(first.index)
        device_processes(compute)[0].kill()
        with pytest.raises(sky.errors.DeviceError, match=rf"sky:\d+ \({place}\) cannot be reached"):
            copied.cpu()
        assert torch.ones(2, device=second).sum().item() == 2


# Over a network, and without one.


def test_copies_over_a_network_have_the_same_bits(over_network: list[torch.device]) -> None:
    one, two = over_network
    x = torch.randn(5 * MIB)
    there = x.to(one).to(two)
    assert torch.equal(there.cpu(), x)
    assert torch.equal(there.to(one).cpu(), x)
    small = [torch.full((i,), float(i), device=one).to(two) for i in range(1, 20)]
    assert [s.sum().item() for s in small] == [i * i for i in range(1, 20)]


@only_in_all
def test_long_tensors_change_places_over_a_network(over_network: list[torch.device]) -> None:
    one, two = over_network
    x, y = torch.randn(12 * MIB), torch.randn(12 * MIB)
    here, there = x.to(one), y.to(two)
    for _ in range(3):
        # What comes back arrives before its place is free: `here` is still leaving.
        moved = here.to(two)
        here.copy_(there)
        there.copy_(moved)
    assert torch.equal(here.cpu(), y)
    assert torch.equal(there.cpu(), x)


@only_in_all
@pytest.mark.parametrize(
    "lost",
    # The end that did not dial waits 20 s for the other one to come back.
    [pytest.param(0, id="source", marks=only_in_all), pytest.param(1, id="target")],
)
def test_a_device_lost_in_the_middle_of_a_long_copy_harms_no_other(
    lost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rearrange(monkeypatch, lambda endpoint: endpoint if endpoint.startswith("tcp:") else "")
    local = sky.Local(transport="tcp")
    with sky.Compute(local, nodes=2, options=sky.Options(console=False)) as compute:
        devices = compute.devices("cpu")
        x = torch.ones(64 * MIB, device=devices[0])
        y = torch.zeros_like(x, device=devices[1])
        y[:1].copy_(x[:1])
        torch.sky.synchronize(devices[1])
        y.copy_(x)
        assert [torch.ones(1, device=each).item() for each in devices] == [1, 1]
        device_processes(compute)[lost].kill()
        if lost == 0:
            gone = "the other device's process did not come back"
            with pytest.raises(sky.errors.DeviceError, match=f"cannot be reached.*{gone}"):
                y.cpu()
        else:
            # A write waits until the memory has left, or need not.
            assert x.add_(1).max().item() == 2
        assert torch.ones(2, device=devices[1 - lost]).sum().item() == 2


def test_devices_of_two_pools_reach_each_other(
    device: torch.device, over_network: list[torch.device]
) -> None:
    x = torch.randn(MIB)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(x.to(device).to(over_network[0]).cpu(), x)
        assert torch.equal(x.to(over_network[1]).to(device).cpu(), x)


def test_without_the_key_of_its_pool_a_device_is_not_reached_from_another() -> None:
    """As in a job on a kept pool: its process's own certificate would be refused."""
    own = Authority("one").issue(CLIENT)
    here, there = (
        meeting.Whereabouts(pool, "node", ("tcp:127.0.0.1:9",), lambda: None)
        for pool in ("one", "other")
    )
    arranged = meeting.arrange(1, "sky:0", here, "sky:1", there)
    with pytest.raises(Unreachable, match="credentials for pool other here: its key is with"):
        Peers(ctypes.CDLL(None), own).dial(arranged)


def test_nodes_of_one_machine_share_memory_however_the_client_reaches_them() -> None:
    local = sky.Local(transport="tcp")
    with sky.Compute(local, nodes=2, options=sky.Options(console=False)) as compute:
        first, second = compute.devices("cpu")
        x = torch.randn(MIB)
        assert torch.equal(x.to(first).to(second).cpu(), x)
        mapped = [Path(f"/proc/{p.pid}/maps").read_text() for p in device_processes(compute)]
        assert all("memfd:skyward-device" in each for each in mapped)


def test_copies_go_through_the_client_where_nodes_do_not_reach_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rearrange(monkeypatch, lambda endpoint: f"{endpoint}.not-here")
    with sky.Compute(nodes=2, options=sky.Options(console=False)) as compute:
        first, second = compute.devices("cpu")
        x = torch.randn(5 * MIB)
        with pytest.warns(UserWarning, match=r"go through this process.*on another host") as told:
            there = x.to(first).to(second)
        assert len(told) == 1
        assert torch.equal(there.cpu(), x)
        back = there.to(first)
        there.zero_()
        assert torch.equal(back.cpu(), x)
        assert sky.device_stats(first).bytes_to_devices == 0


@only_in_all
def test_a_holder_that_does_not_reach_the_third_node_is_passed_over_in_silence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arrange = meeting.arrange

    def apart(link: int, own: str, here: Any, other: str, there: Any) -> meeting.Meeting:
        made = arrange(link, own, here, other, there)
        if "node 0" not in own + other:
            made.endpoints = ()
        return made

    monkeypatch.setattr(meeting, "arrange", apart)
    with sky.Compute(nodes=3, options=sky.Options(console=False)) as compute:
        first, second, third = compute.devices("cpu")
        x = torch.randn(MIB)
        here = x.to(first)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            there = here.to(second)
            assert torch.equal(here.to(third).cpu(), x)
        with pytest.warns(UserWarning, match=r"between sky:\d+ and sky:\d+ go through this"):
            assert torch.equal(there.to(third).cpu(), x)


def test_a_link_that_is_cut_goes_on_where_it_was(
    proxied: tuple[list[torch.device], Proxy],
) -> None:
    (first, second), proxy = proxied
    x = torch.randn(8 * MIB)
    here = x.to(first)
    here[:1].to(second).cpu()
    before = proxy.cuts
    proxy.cut_after([3 * MIB, MIB, 12 * MIB])
    there = here.to(second)
    assert torch.equal(there.cpu(), x)
    assert proxy.cuts - before == 3


@only_in_all
@pytest.mark.parametrize(("mode", "waits"), [("reduce-overhead", True), ("default", False)])
def test_a_graph_that_uses_its_memory_again_waits_until_its_result_has_left(
    proxied: tuple[list[torch.device], Proxy], mode: str, waits: bool
) -> None:
    (first, second), proxy = proxied
    torch.compiler.reset()
    double = torch.compile(lambda x: x * 2, mode=mode)
    ones = torch.ones(24 * MIB, device=first)  # more than all the buffers on the way take
    double(ones)[:1].to(second).cpu()
    answered = threading.Event()

    def ask() -> None:
        ones[0].item()
        answered.set()

    asking = threading.Thread(target=ask)
    with proxy.hold():
        there = double(ones).to(second)
        double(ones)
        asking.start()
        assert answered.wait(1 if waits else 30) is not waits
    asking.join(100)
    assert answered.is_set()
    assert there.sum().item() == 2 * ones.numel()


@other_case
def test_a_link_that_was_lost_is_made_again_at_the_next_copy(
    proxied: tuple[list[torch.device], Proxy], eventually
) -> None:
    (first, second), proxy = proxied
    x = torch.randn(2 * MIB)
    here, into = x.to(first), torch.zeros(2 * MIB, device=second)
    into[:1].copy_(here[:1])
    torch.sky.synchronize(second)
    proxy.leave()
    into.copy_(here)
    before = proxy.connections

    def is_made_again() -> bool:
        # The end that has dialed is refused, gives up, and tells of it with its next answer.
        here[0].item()
        here[:1].to(second)
        return proxy.connections > before

    eventually(is_made_again, 15)
    with pytest.raises(
        sky.errors.DeviceError, match=r"cannot be reached.*copy again what was to come"
    ):
        torch.sky.synchronize(second)
    assert torch.equal(here.to(second).cpu(), x)
    assert torch.equal(into.copy_(here).cpu(), x)


@only_in_all
def test_a_link_that_has_ended_leaves_nothing_behind(
    device: torch.device, compute: sky.Compute, eventually
) -> None:
    process = device_processes(compute)[0]

    def held() -> tuple[int, int]:
        return process.num_threads(), process.num_fds()

    counts = []
    for _ in range(3):
        with sky.Compute(options=sky.Options(console=False)) as other:
            there = torch.ones(MIB, device=device).to(other.device("cpu"))
            assert there.sum().item() == MIB
            counts.append(held())
        torch.sky.synchronize(device)
    eventually(lambda: held() < counts[0], 10)
    assert counts[2] == counts[0]


@only_in_all
def test_more_than_a_gigabyte_arrives(device: torch.device, other_device: torch.device) -> None:
    """Takes long: half a minute of copying on a small machine."""
    if psutil.virtual_memory().available < 8 << 30:
        pytest.skip("needs 8 GiB of memory")
    x = torch.randint(-(1 << 60), 1 << 60, (150 << 20,))
    assert torch.equal(x.to(device).to(other_device).cpu(), x)
