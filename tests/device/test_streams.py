"""Streams and events, copies that do not wait, and how much memory is in use."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")

LARGE = 4 << 20
"""Elements: too many to ride in the op stream, and more than fit between the processes at once."""


@pytest.fixture(autouse=True)
def current(device: torch.device) -> Iterator[None]:
    """Events are those of the current device, which is another one's if it was opened first."""
    with torch.sky.device(device):
        yield


def busy(x: torch.Tensor, times: int) -> torch.Tensor:
    """Some work on the device."""
    for _ in range(times):
        x = (x @ x).tanh()
    return x


def fetched(x: torch.Tensor) -> torch.Tensor:
    """A copy in pinned memory that may still be on its way."""
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)


def test_what_is_issued_on_a_stream_is_seen_after_waiting_for_it(device: torch.device) -> None:
    x = torch.eye(64, device=device)
    side = torch.sky.Stream(device)
    with torch.sky.stream(side):
        assert torch.sky.current_stream(device) == side
        y = busy(x, 20)
    assert torch.sky.current_stream(device) == torch.sky.default_stream(device)
    torch.sky.current_stream(device).wait_stream(side)
    assert torch.equal(y.cpu(), busy(torch.eye(64), 20))


def test_each_thread_has_a_stream_of_its_own(device: torch.device) -> None:
    from threading import Thread

    seen = []
    with torch.Stream(device):
        thread = Thread(target=lambda: seen.append(torch.sky.current_stream(device)))
        thread.start()
        thread.join()
    assert seen == [torch.sky.default_stream(device)]


def test_new_streams_differ(device: torch.device) -> None:
    streams = [torch.Stream(device) for _ in range(3)]
    assert len({stream.stream_id for stream in streams}) == 3
    assert torch.Stream(device, priority=-1) != torch.Stream(device)


def test_events_time_what_lies_between_them(device: torch.device) -> None:
    x = torch.randn(512, 512, device=device)

    def timed() -> tuple[float, float]:
        start, middle, end = (torch.sky.Event(enable_timing=True) for _ in range(3))
        torch.sky.synchronize(device)
        began = time.perf_counter()
        start.record()
        y = busy(x, 4)
        middle.record()
        y = busy(y, 40)
        end.record()
        end.synchronize()
        waited = 1000 * (time.perf_counter() - began)
        assert end.query()
        assert 0 < start.elapsed_time(middle) < start.elapsed_time(end) <= waited
        return start.elapsed_time(middle), middle.elapsed_time(end)

    # Ten times the work: the events are not recorded when they are issued, which is at once. A
    # machine that stands still for a moment may stretch the lesser.
    tries = (timed() for _ in range(5))
    assert any(much > 2 * little for little, much in tries)


def test_the_time_of_an_event_without_timing_is_refused(device: torch.device) -> None:
    start, end = torch.sky.Event(), torch.sky.Event()
    start.record()
    end.record()
    end.synchronize()
    with pytest.raises(ValueError, match="enable_timing"):
        start.elapsed_time(end)


def test_waiting_for_an_event_raises_what_went_wrong_before_it(device: torch.device) -> None:
    table = torch.zeros(4, 2, device=device)
    torch.nn.functional.embedding(torch.zeros(3, dtype=torch.long, device=device), table)
    torch.nn.functional.embedding(torch.full((3,), 9, device=device), table)
    event = torch.sky.Event()
    event.record()
    with pytest.raises(IndexError, match="index out of range"):
        event.synchronize()


def test_a_backward_pass_runs_on_the_streams_of_its_forward(device: torch.device) -> None:
    x = torch.randn(8, 8, device=device, requires_grad=True)
    with torch.Stream(device) as side:
        loss = (x @ x).sum()
    loss.backward()
    side.synchronize()
    reference = x.detach().cpu().requires_grad_()
    (reference @ reference).sum().backward()
    assert torch.equal(x.grad.cpu(), reference.grad)


@pytest.mark.parametrize("elements", [10, 100_000, LARGE])
@pytest.mark.parametrize("pinned", [False, True])
def test_an_upload_takes_what_the_memory_held_at_the_call(
    device: torch.device, elements: int, pinned: bool
) -> None:
    host = torch.arange(elements, dtype=torch.float32)
    host = host.pin_memory() if pinned else host
    expected = host.clone()
    busy(torch.randn(512, 512, device=device), 10)
    there = [host.to(device, non_blocking=not pinned)]
    host.zero_()
    there.append(host.to(device, non_blocking=not pinned))
    host.fill_(1)
    there.append(host.to(device))
    assert torch.equal(there[0].cpu(), expected)
    assert not there[1].cpu().any()
    assert there[2].cpu().eq(1).all()


def test_pinned_memory_that_is_freed_while_it_is_copied_is_not_used_again(
    device: torch.device,
) -> None:
    there = []
    for number in range(20):
        host = torch.full((300_000,), float(number)).pin_memory()
        there.append(host.to(device, non_blocking=True))
        if number % 5 == 0:
            busy(torch.randn(512, 512, device=device), 5)
        del host
    assert [t.mean().item() for t in there] == list(range(20))


def test_pinned_memory_may_be_changed_after_an_event_behind_its_upload(
    device: torch.device,
) -> None:
    host = torch.arange(100_000, dtype=torch.float32).pin_memory()
    expected = host.clone()
    busy(torch.randn(512, 512, device=device), 10)
    there = host.to(device, non_blocking=True)
    done = torch.Event(device)
    done.record()
    done.synchronize()
    host.zero_()
    assert torch.equal(there.cpu(), expected)


def test_a_part_of_pinned_memory_goes_up_and_comes_back(device: torch.device) -> None:
    host = torch.arange(400_000, dtype=torch.float32).pin_memory()
    part = host[100_000:300_000]
    there = part.to(device, non_blocking=True)
    back = torch.zeros(400_000).pin_memory()
    back[50_000:250_000].copy_(there, non_blocking=True)
    torch.sky.synchronize(device)
    assert torch.equal(back[50_000:250_000], part)
    assert not back[:50_000].any()
    assert not back[250_000:].any()
    back[50_000:250_000].copy_(there * 2)
    assert torch.equal(back[50_000:250_000], part * 2)


def test_two_devices_copy_from_the_same_pinned_memory(
    device: torch.device, other_device: torch.device
) -> None:
    host = torch.arange(300_000, dtype=torch.float32).pin_memory()
    there = [host.to(where, non_blocking=True) for where in (device, other_device, device)]
    assert all(torch.equal(t.cpu(), host) for t in there)


@pytest.mark.parametrize("elements", [10, LARGE])
def test_a_download_into_pinned_memory_is_there_after_synchronize(
    device: torch.device, elements: int
) -> None:
    x = torch.randn(elements, device=device)
    copies = [fetched(x * factor) for factor in range(4)]
    assert all(copy.is_pinned() for copy in copies)
    torch.sky.synchronize(device)
    plain = x.cpu()
    assert all(torch.equal(copy, plain * factor) for factor, copy in enumerate(copies))


def test_downloads_that_wait_and_do_not_wait_keep_their_order(device: torch.device) -> None:
    x = torch.randn(LARGE, device=device)
    first = fetched(x)
    second = (x + 1).cpu()
    torch.sky.synchronize(device)
    assert torch.equal(first + 1, second)


def test_an_error_before_a_download_is_raised_when_it_is_waited_for(device: torch.device) -> None:
    table = torch.zeros(4, 2, device=device)
    torch.nn.functional.embedding(torch.zeros(5, dtype=torch.long, device=device), table)
    bad = torch.nn.functional.embedding(torch.full((5,), 9, device=device), table)
    fetched(bad)
    with pytest.raises(IndexError, match="index out of range"):
        torch.sky.synchronize(device)
    torch.sky.synchronize(device)


def test_a_loader_pins_its_batches(device: torch.device) -> None:
    data = torch.utils.data.TensorDataset(torch.arange(20.0))
    loader = torch.utils.data.DataLoader(data, batch_size=5, pin_memory=True)
    batches = [batch for (batch,) in loader]
    assert all(batch.is_pinned() for batch in batches)
    moved = [batch.to(device, non_blocking=True) for batch in batches]
    assert torch.equal(torch.cat(moved).cpu(), torch.arange(20.0))


def test_memory_in_use_and_its_peak(device: torch.device) -> None:
    gc.collect()  # what earlier tests left in cycles
    torch.sky.reset_peak_memory_stats(device)
    before = torch.sky.memory_allocated(device)
    x = torch.empty(1 << 20, device=device)
    y = torch.empty(1 << 20, device=device)
    assert torch.sky.memory_allocated(device) == before + (8 << 20)
    del y
    assert torch.sky.memory_allocated(device) == before + (4 << 20)
    assert torch.sky.max_memory_allocated(device) >= before + (8 << 20)
    torch.sky.reset_peak_memory_stats(device)
    assert torch.sky.max_memory_allocated(device) == before + (4 << 20)
    x.resize_(2 << 20)
    assert torch.accelerator.memory_allocated(device) == before + (8 << 20)
    free, total = torch.sky.mem_get_info(device)
    assert 0 < free < total
    stats = torch.sky.memory_stats(device)
    assert stats["allocated_bytes.all.current"] == before + (8 << 20)
    torch.sky.empty_cache()


def test_large_memory_is_used_again_and_kept_within_bounds(device: torch.device) -> None:
    def idle() -> int:
        return int(torch.sky.memory_reserved(device) - torch.sky.memory_allocated(device))

    gc.collect()
    torch.sky.empty_cache()
    assert idle() == 0
    for first in (1, 2):
        # No whole number of the parts in which pages are made.
        host = torch.arange(first, first + (80 << 20) + 12345, dtype=torch.uint8)
        x = host.to(device)
        assert idle() == 0
        assert torch.equal(x.cpu(), host)
        del x
        assert idle() == len(host)
    # Memory that nobody writes to costs nothing.
    for size in (700, 800, 300):
        torch.empty(size << 20, dtype=torch.uint8, device=device)
    assert idle() <= 1 << 30
    torch.sky.empty_cache()
    assert idle() == 0


def test_the_accelerator_is_this_device(device: torch.device) -> None:
    assert torch.accelerator.current_accelerator() == torch.device("sky")
    assert torch.accelerator.is_available()
    assert torch.accelerator.device_count() == torch.sky.device_count() >= 1
    torch.accelerator.synchronize(device)
    x = torch.ones(2, device=device)
    x.record_stream(torch.Stream(device))
    assert x.sum().item() == 2


def test_a_stream_of_another_device_is_refused(
    device: torch.device, other_device: torch.device
) -> None:
    with pytest.raises(RuntimeError, match="is not used on a stream of sky"):
        torch.ones(2, device=device).record_stream(torch.Stream(other_device))


def test_a_known_family_of_operations_is_not_asked_about(device: torch.device) -> None:
    import skyward as sky

    x = torch.randn(7, 11, device=device)
    w = torch.randn(11, 5, device=device)
    before = sky.device_stats(device).asked
    y = ((x @ w).relu().exp() + 1).softmax(1)
    y.add_(y).mul_(0.5)
    z = torch.cat([y, y.t().contiguous().t()], 1).sum(1)
    assert sky.device_stats(device).asked == before
    x, w = x.cpu(), w.cpu()
    y = ((x @ w).relu().exp() + 1).softmax(1)
    assert torch.allclose(z.cpu(), 2 * y.sum(1))


def test_a_forked_child_does_not_give_out_its_parents_pinned_memory(device: torch.device) -> None:
    import os

    host = torch.full((300_000,), 7.0).pin_memory()
    child = os.fork()
    if not child:
        del host
        torch.full((300_000,), -1.0).pin_memory()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert host.eq(7).all()


def test_a_device_that_is_not_open_cannot_be_chosen(device: torch.device) -> None:
    before = torch.sky.current_device()
    for wrong in (63, "sky:63", -5):
        with pytest.raises(RuntimeError, match=r"there is no device sky:(63|-5)"):
            torch.sky.set_device(wrong)
    with pytest.raises(RuntimeError, match="'cpu' is not a sky device"):
        torch.sky.get_device_properties("cpu")
    assert torch.sky.current_device() == before
