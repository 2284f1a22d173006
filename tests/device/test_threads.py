"""Threads and processes share a sky device, or are kept apart from it, without disturbing it."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import skyward as sky
from skyward.device.core import core
from skyward.device.processors import give_back, spared, threads_beside_a_worker

from ..conftest import only_in_all, worker_processes


def _trained(seed: int, device: torch.device) -> list[float]:
    """A small training with uploads, downloads, random numbers and freed tensors all over."""
    generator = torch.Generator(device).manual_seed(seed)
    host = torch.Generator().manual_seed(seed)
    w = torch.randn(6, 4, generator=host).to(device).requires_grad_()
    losses = []
    for step in range(12):
        x = torch.randn(5 + step % 3, 6, generator=host).to(device)
        noise = torch.randn(x.shape, device=device, generator=generator)
        loss = torch.tanh((x + 0.1 * noise) @ w).square().mean()
        (grad,) = torch.autograd.grad(loss, w)
        w = (w - 0.1 * grad).detach().requires_grad_()
        if step % 4 == 3:
            losses.append(loss.item())
    return losses + w.detach().cpu().flatten().tolist()


def test_trainings_in_many_threads_equal_serial_ones(
    device: torch.device, other_device: torch.device
) -> None:
    right = [_trained(seed, torch.device("cpu")) for seed in range(8)]

    def work(seed: int) -> list[float]:
        return _trained(seed, (device, other_device)[seed % 2])

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(work, range(8))) == right
    assert [work(seed) for seed in range(8)] == right


def test_many_short_threads(device: torch.device) -> None:
    sums: dict[int, float] = {}

    def work(number: int) -> None:
        x = torch.arange(4.0, requires_grad=True)
        (x.to(device) * number).sum().backward()
        sums[number] = x.grad.sum().item()

    for start in range(0, 120, 6):
        threads = [threading.Thread(target=work, args=(start + i,)) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sums == {number: 4.0 * number for number in range(120)}


def test_backward_in_another_thread(device: torch.device) -> None:
    x = torch.ones(3, device=device, requires_grad=True)
    loss = (x * x).sum()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    assert x.grad.tolist() == [2.0, 2.0, 2.0]


def test_tensors_made_in_one_thread_are_used_and_freed_in_others(device: torch.device) -> None:
    numbers = random.Random(0)
    held = [torch.full((3,), float(i), device=device) for i in range(400)]
    numbers.shuffle(held)
    total, lock = [], threading.Lock()

    def work() -> None:
        while True:
            with lock:
                if not held:
                    return
                mine = held.pop()
            twice = mine * 2
            del mine
            with lock:
                total.append(twice.sum().item())

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: work(), range(4)))
    assert sum(total) == sum(6.0 * i for i in range(400))


def test_each_thread_has_its_own_current_device(
    device: torch.device, other_device: torch.device
) -> None:
    def made_on() -> torch.device:
        return torch.ones(1, device="sky").device

    def made_on_a_new_thread() -> torch.device:
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(made_on).result()

    first = made_on_a_new_thread()
    assert first != other_device
    with torch.sky.device(other_device):
        assert made_on_a_new_thread() == first
        assert made_on() == other_device


@pytest.fixture(scope="module")
def encrypted(sharing) -> Iterator[torch.device]:
    """A device whose bytes are carried by Python threads of this process, as to another machine."""
    options = sky.Options(console=False)
    with sharing(sky.Compute(sky.Local(transport="tcp"), options=options)) as compute:
        yield compute.device("cpu")


READS: dict[str, Callable[[torch.Tensor], object]] = {
    "an index": lambda x: x[torch.tensor(3, device=x.device)].item(),
    "a slice": lambda x: x[torch.tensor(1, device=x.device) :].tolist(),
    "a range": lambda x: list(range(5))[torch.tensor(2, device=x.device)],
    "a search": lambda x: 3 in x,
    "an element of a new tensor": lambda x: torch.tensor([x[0], x[1]]).tolist(),
    "a size": lambda x: torch.zeros(x[3].int()).tolist(),
    "a generator": lambda x: torch.Generator(x.device).manual_seed(3).get_state().tolist(),
    "a storage": lambda x: x.untyped_storage().tolist(),
}


@pytest.mark.parametrize("read", READS)
def test_waiting_never_keeps_out_the_threads_that_carry_the_bytes(
    encrypted: torch.device, read: str
) -> None:
    x = torch.arange(5.0)
    assert READS[read](x.to(encrypted)) == READS[read](x)


def test_threads_share_an_encrypted_device(encrypted: torch.device) -> None:
    right = [_trained(seed, torch.device("cpu")) for seed in range(4)]

    def work(seed: int) -> list[float]:
        garbage = [torch.ones(3, device=encrypted) for _ in range(50)]
        result = _trained(seed, encrypted)
        garbage.clear()
        return result

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(work, range(4))) == right


@pytest.mark.parametrize("pinned", [False, True])
def test_a_data_loader_with_workers_feeds_the_device(device: torch.device, pinned: bool) -> None:
    torch.manual_seed(5)
    right = torch.rand(2).tolist()
    data = TensorDataset(torch.arange(40.0))
    torch.manual_seed(5)
    total = torch.zeros((), device=device)
    # Its workers are forked and seed every device they know; the parent's must not notice.
    for (batch,) in DataLoader(data, batch_size=4, num_workers=2, pin_memory=pinned):
        total += batch.to(device, non_blocking=True).sum()
    assert total.item() == 780.0
    assert torch.rand(2, device=device).tolist() == right


def _in_child(work: Callable[[], object]) -> str:
    """What a forked child says, without Python's own end of a process."""
    near, far = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            said = repr(work())
        except BaseException as problem:
            said = f"{type(problem).__name__}: {problem}"
        os.write(far, said.encode())
        os._exit(0)
    os.close(far)
    with os.fdopen(near) as end:
        said = end.read()
    os.waitpid(pid, 0)
    return said


def test_a_forked_child_cannot_disturb_the_parent(device: torch.device) -> None:
    x = torch.arange(4.0, device=device)
    held = [torch.full((2,), float(i), device=device) for i in range(600)]
    generator = torch.Generator(device)

    def work() -> bool:
        nonlocal generator
        held.clear()
        del generator
        torch.manual_seed(1)
        for attempt in (x.sum, x.cpu, lambda: torch.ones(2, device=device), torch.sky.synchronize):
            with pytest.raises(RuntimeError, match=r"sky:\d+ belongs to the process that opened"):
                attempt()
        return torch.sky._is_in_bad_fork()

    assert _in_child(work) == "True"
    assert not torch.sky._is_in_bad_fork()
    assert [t[0].item() for t in held] == list(range(600))
    assert x.tolist() == [0.0, 1.0, 2.0, 3.0]


@only_in_all
@pytest.mark.slow
def test_a_forked_child_and_another_client_may_end_as_processes_do(device: torch.device) -> None:
    """Slow: a client of its own, whose child runs through all of Python's finalisation.

    Its device comes after its first backward pass, which has set up autograd without the device.
    """
    ours = torch.arange(5.0, device=device)
    script = """
        import os, sys, torch
        import skyward as sky
        w = torch.ones(3, requires_grad=True)
        w.sum().backward()
        with sky.Compute(options=sky.Options(console=False)) as compute:
            x = torch.arange(4.0, device=compute.device("cpu"))
            x.sum().item()
            if not (pid := os.fork()):
                sys.exit(7)
            print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), x.sum().item())
            y = torch.ones(3, device=x.device, requires_grad=True)
            (y * 2).sum().backward()
            print(y.grad.sum().item())
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    assert done.stdout.split() == ["7", "6.0", "6.0"]
    assert (ours + 1).tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]


@only_in_all
@pytest.mark.slow
def test_a_forked_child_may_open_a_device_of_its_own(device: torch.device) -> None:
    """Slow: the child starts a pool."""
    script = """
        import os, torch
        import skyward as sky
        options = sky.Options(console=False)
        with sky.Compute(options=options) as compute:
            x = torch.arange(4.0, device=compute.device("cpu"))
            if not (pid := os.fork()):
                with sky.Compute(options=options) as mine:
                    device = mine.device("cpu")
                    torch.manual_seed(0)
                    print(torch.ones(3, device=device).sum().item(), flush=True)
                os._exit(torch.sky._is_in_bad_fork())
            print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), x.sum().item())
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    assert done.stdout.split() == ["3.0", "0", "6.0"]


def test_a_module_is_trained_while_another_thread_reads_it(device: torch.device) -> None:
    model = nn.Linear(4, 1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    done = threading.Event()
    seen: list[float] = []

    def watch() -> None:
        while True:
            seen.append(model.weight.detach().sum().item())
            if done.is_set():
                return

    with ThreadPoolExecutor(1) as thread:
        watching = thread.submit(watch)
        for _ in range(50):
            loss = model(torch.ones(2, 4, device=device)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        done.set()
        watching.result()
    assert seen
    assert loss.item() < 1.0


@pytest.fixture
def sixteen_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """PyTorch has 16 threads that nobody has chosen; as before after the test."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(16)
    yield
    torch.set_num_threads(before)


def test_pytorchs_threads_leave_processors_to_gpu_workers_on_this_host(
    sixteen_threads: None,
) -> None:
    with spared(16):
        assert torch.get_num_threads() == 14
        with spared(16):
            assert torch.get_num_threads() == 14
        assert torch.get_num_threads() == 14
    assert torch.get_num_threads() == 16


def test_a_number_of_threads_that_the_user_has_chosen_stays(
    sixteen_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with spared(16):
        torch.set_num_threads(5)
    assert torch.get_num_threads() == 5
    with spared(16):
        assert torch.get_num_threads() == 5
    monkeypatch.setenv("OMP_NUM_THREADS", "16")
    torch.set_num_threads(16)
    with spared(16):
        assert torch.get_num_threads() == 16


def test_threads_come_back_though_the_worker_was_lost_on_another_thread(
    sixteen_threads: None,
) -> None:
    worker = spared(16)
    worker.__enter__()
    with ThreadPoolExecutor(1) as other:
        other.submit(worker.__exit__, None, None, None).result()
    assert torch.get_num_threads() == 14
    give_back()
    assert torch.get_num_threads() == 16


def test_a_cpu_worker_changes_no_threads(sixteen_threads: None, compute: sky.Compute) -> None:
    compute.device("cpu")
    assert torch.get_num_threads() == 16


@pytest.mark.parametrize(
    ("processors", "threads"), [(1, 1), (2, 2), (3, 2), (8, 7), (16, 14), (96, 84)]
)
def test_small_hosts_leave_a_worker_less(processors: int, threads: int) -> None:
    assert threads_beside_a_worker(processors) == threads


@contextlib.contextmanager
def _pressing(device: torch.device, *, goes_on: bool = False) -> Iterator[None]:
    """Devices answer nothing, and Ctrl-C is pressed once somebody waits for this one."""
    waits, over = core().stats(device.index).waits, threading.Event()
    processes = [each for each in worker_processes() if "device" in " ".join(each.cmdline())]
    assert processes

    def press() -> None:
        while core().stats(device.index).waits == waits and not over.wait(0.01):
            pass
        os.kill(os.getpid(), signal.SIGINT)
        if goes_on:
            resume()

    def resume() -> None:
        for process in processes:
            process.resume()

    for process in processes:
        process.suspend()
    with ThreadPoolExecutor(1) as thread:
        pressed = thread.submit(press)
        try:
            yield
        finally:
            over.set()
            resume()
            pressed.result()


WAITS: dict[str, Callable[[torch.Tensor], object]] = {
    "a value": lambda x: x[3].item(),
    "a synchronization": lambda x: torch.sky.synchronize(x.device),
    "a download": lambda x: x.cpu(),
    "a download behind others": lambda x: (x.to("cpu", non_blocking=True), x.cpu()),
}


@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize("link", ["device", "encrypted"])
def test_ctrl_c_ends_a_wait_and_leaves_the_device_usable(
    request: pytest.FixtureRequest, link: str, wait: str
) -> None:
    device = request.getfixturevalue(link)
    x = torch.arange(1 << 20, device=device)
    torch.sky.synchronize(device)
    with pytest.raises(KeyboardInterrupt), _pressing(device):
        WAITS[wait](x)
    later = (x + 1).to("cpu", non_blocking=True)
    assert x[7].item() == 7
    assert torch.equal(x.cpu(), torch.arange(1 << 20))
    torch.sky.synchronize(device)
    assert torch.equal(later, torch.arange(1, 1 + (1 << 20)))


def test_an_error_that_an_interrupted_wait_was_to_raise_is_raised_by_the_next(
    device: torch.device,
) -> None:
    index = torch.tensor([9], device=device)
    torch.sky.synchronize(device)
    with pytest.raises(KeyboardInterrupt), _pressing(device):
        torch.arange(3, device=device)[index].sum().item()
    with pytest.raises(IndexError, match="out of bounds"):
        torch.ones(2, device=device).sum().item()
    assert torch.ones(2, device=device).sum().item() == 2


def test_a_handler_of_the_programs_own_runs_when_the_wait_is_over(device: torch.device) -> None:
    x, seen = torch.arange(3.0, device=device), []
    before = signal.signal(signal.SIGINT, lambda *_: seen.append(x.sum().item()))
    try:
        with _pressing(device, goes_on=True):
            assert x[1].item() == 1.0
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [3.0]
