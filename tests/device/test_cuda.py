"""What only a GPU can show: real streams, real events, its allocator's figures."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward import kernel
from skyward.device.processors import threads_beside_a_worker

from .test_capture import LOOPS

torch = pytest.importorskip("torch")

if not torch.cuda.is_available():
    pytest.skip("there is no GPU here", allow_module_level=True)


@pytest.fixture(scope="module")
def gpu() -> Iterator[torch.device]:
    with sky.Compute(options=sky.Options(console=False)) as compute:
        device = compute.device("cuda")
        with torch.sky.device(device):
            yield device


@pytest.fixture(scope="module")
def far() -> Iterator[torch.device]:
    """A GPU whose client sends it everything over a network."""
    options = sky.Options(console=False)
    with sky.Compute(sky.Local(transport="tcp"), options=options) as compute:
        yield compute.device("cuda")


def spin(x: torch.Tensor, times: int) -> torch.Tensor:
    """Work that takes the GPU long and issues quickly."""
    for _ in range(times):
        x = (x @ x).tanh()
    return x


def test_a_stream_waits_for_an_event_of_another(gpu: torch.device) -> None:
    x = torch.randn(4096, 4096, device=gpu) / 64
    expected = spin(x, 20).cpu()
    side, done = torch.sky.Stream(gpu), torch.sky.Event()
    side.wait_stream(torch.sky.current_stream(gpu))
    with torch.sky.stream(side):
        y = spin(x, 20)
        done.record(side)
    torch.sky.current_stream(gpu).wait_event(done)
    y.record_stream(torch.sky.current_stream(gpu))
    assert torch.equal(y.cpu(), expected)


def test_events_measure_the_gpu_and_not_the_issue(gpu: torch.device) -> None:
    x = torch.randn(4096, 4096, device=gpu) / 64
    spin(x, 3)
    torch.sky.synchronize(gpu)
    start, end = (torch.sky.Event(enable_timing=True) for _ in range(2))
    began = time.perf_counter()
    start.record()
    spin(x, 50)
    end.record()
    issued = 1000 * (time.perf_counter() - began)
    assert not end.query()
    end.synchronize()
    assert end.query()
    assert start.elapsed_time(end) > 2 * issued


def test_its_memory_is_its_allocators(gpu: torch.device) -> None:
    before = torch.sky.memory_allocated(gpu)
    x = torch.empty(1 << 20, device=gpu)
    assert torch.sky.memory_allocated(gpu) == before + x.nbytes
    assert torch.sky.memory_reserved(gpu) >= before + x.nbytes
    free, total = torch.sky.mem_get_info(gpu)
    assert 0 < free < total
    del x
    torch.sky.empty_cache()
    assert torch.sky.memory_allocated(gpu) == before


def test_large_copies_both_ways(gpu: torch.device) -> None:
    host = torch.randn(48 << 18)
    there = host.to(gpu, non_blocking=True)
    back = torch.empty_like(host, pin_memory=True).copy_(there, non_blocking=True)
    torch.sky.synchronize(gpu)
    assert torch.equal(back, host)
    assert torch.equal((there + 1).cpu(), host + 1)


@pytest.mark.parametrize("seed", [0, 7])
def test_random_numbers_are_those_of_the_gpu(gpu: torch.device, seed: int) -> None:
    torch.sky.manual_seed(seed)
    ours = torch.randn(1000, device=gpu).cpu()
    generator = torch.Generator("cuda").manual_seed(seed)
    assert torch.equal(ours, torch.randn(1000, device="cuda", generator=generator).cpu())


def test_a_profile_times_the_gpus_kernels(gpu: torch.device) -> None:
    x = torch.randn(4096, 4096, device=gpu) / 64
    spin(x, 3)
    torch.sky.synchronize(gpu)
    start, end = (torch.sky.Event(enable_timing=True) for _ in range(2))
    with sky.profile(gpu) as p:
        start.record()
        spin(x, 50)
        end.record()
    measured = start.elapsed_time(end) / 1000
    found = p.breakdown()
    assert found.kernels == pytest.approx(measured, rel=0.1)
    assert found.wall >= found.worker_bound >= found.kernels
    (recorded,) = p._recorded
    recording = recorded.recording
    assert len(recording.operations) == 100
    for o in recording.operations:
        assert o.issue_start <= o.run_start <= o.kernel_start <= o.kernel_end
        assert o.kernel_end <= recording.end + 50_000  # nanoseconds: two clocks are compared
    for before, after in zip(recording.operations, recording.operations[1:], strict=False):
        assert before.kernel_end <= after.kernel_start
    # The last kernel ends long after its issue: the GPU is behind.
    assert recording.operations[-1].kernel_end > recording.operations[-1].run_end
    assert p.operations()[0].name == "aten::mm"


def test_a_profile_tells_streams_apart(gpu: torch.device, tmp_path) -> None:
    import json

    x = torch.randn(2048, 2048, device=gpu) / 64
    side = torch.sky.Stream(gpu)
    side.wait_stream(torch.sky.current_stream(gpu))
    with sky.profile(gpu) as p:
        spin(x, 10)
        with torch.sky.stream(side):
            spin(x, 10)
    p.export(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {"operations", "kernels", "kernels, stream 1"} <= names


def test_more_operations_are_profiled_than_there_are_events_for_them(gpu: torch.device) -> None:
    x = torch.ones(8, device=gpu)
    with sky.profile(gpu) as p:
        for _ in range(10_000):
            x = x + 1
    (recorded,) = p._recorded
    operations = recorded.recording.operations
    assert len(operations) == 10_000
    assert all(0 < o.kernel_start <= o.kernel_end for o in operations)


def test_pytorchs_profiler_times_the_gpu(gpu: torch.device) -> None:
    x = torch.randn(4096, 4096, device=gpu) / 64
    with torch.autograd.profiler.profile(use_device="sky") as p:
        spin(x, 5)
    (mm,) = (each for each in p.key_averages() if each.key == "aten::mm")
    assert mm.count == 5
    assert mm.device_time_total > 0


def test_the_gpu_is_described_as_the_node_describes_it(gpu: torch.device) -> None:
    real = torch.cuda.get_device_properties(0)
    found = torch.sky.get_device_properties(gpu)
    assert (found.name, found.total_memory) == (real.name, real.total_memory)
    assert torch.sky.get_device_name(gpu) == torch.cuda.get_device_name(0)
    assert torch.sky.get_device_capability(gpu) == torch.cuda.get_device_capability(0)
    assert torch.sky.is_bf16_supported() == torch.cuda.is_bf16_supported()


@pytest.fixture
def precision() -> Iterator[None]:
    """The precision of matrix products as it was, after a test that sets it."""
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def test_the_precision_of_products_is_the_one_chosen_here(
    gpu: torch.device, precision: None
) -> None:
    a, b = torch.randn(512, 512), torch.randn(512, 512)
    x, w = torch.randn(8, 64, 32, 32), torch.randn(64, 64, 3, 3)
    found = []
    for allowed in (False, True):
        torch.set_float32_matmul_precision("high" if allowed else "highest")
        with torch.backends.cudnn.flags(allow_tf32=allowed):
            ours, theirs = (
                [
                    (a.to(where) @ b.to(where)).cpu(),
                    torch.nn.functional.conv2d(x.to(where), w.to(where)).cpu(),
                ]
                for where in (gpu, torch.device("cuda"))
            )
        assert all(map(torch.equal, ours, theirs))
        found.append(ours)
    assert not any(map(torch.equal, *found))


@pytest.mark.parametrize("kind", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN])
def test_a_recurrent_layer_is_one_call_with_the_bits_of_the_gpu(gpu: torch.device, kind) -> None:
    layer = kind(16, 32, num_layers=2, bidirectional=True)
    x = torch.randn(20, 4, 16)
    lengths = torch.tensor([20, 14, 9, 3])

    def run(where: torch.device) -> list[torch.Tensor]:
        import copy

        there = copy.deepcopy(layer).to(where)
        there.flatten_parameters()
        packed = torch.nn.utils.rnn.pack_padded_sequence(x.to(where), lengths)
        with torch.no_grad():
            return [there(x.to(where))[0].cpu(), there(packed)[0].data.cpu()]

    with torch.no_grad():
        run(gpu)
        before = sky.device_stats(gpu).operations
        ours = run(gpu)
        assert sky.device_stats(gpu).operations - before < 100
    assert all(map(torch.equal, ours, run(torch.device("cuda"))))


def test_batch_norm_has_the_bits_of_the_gpu(gpu: torch.device) -> None:
    x = torch.randn(8, 16, 24, 24)
    ours, theirs = (
        torch.nn.BatchNorm2d(16).to(where)(x.to(where)).detach().cpu()
        for where in (gpu, torch.device("cuda"))
    )
    assert torch.equal(ours, theirs)


def test_pinned_batches_arrive_while_the_gpu_is_busy(gpu: torch.device) -> None:
    x = torch.randn(4096, 4096, device=gpu) / 64
    spin(x, 50)
    batches = [torch.full((1 << 20,), float(i)).pin_memory() for i in range(8)]
    there = [batch.to(gpu, non_blocking=True) for batch in batches]
    del batches
    again = [torch.full((1 << 20,), -1.0).pin_memory() for _ in range(8)]
    assert [t.mean().item() for t in there] == list(range(8))
    assert all(t.eq(-1).all() for t in again)


def test_batches_arrive_over_a_network_before_what_uses_them(far: torch.device) -> None:
    """The GPU waits for the bytes: operations are issued to it while they are on their way."""
    busy = torch.randn(2048, 2048, device=far) / 64
    sizes = (70_000, 1 << 20, 2 << 20, (2 << 20) + 1, 3 << 20, 33 << 20, 100 << 20)
    for pinned in (True, False):
        batches = [torch.randint(0, 256, (n,), dtype=torch.uint8) for n in (*sizes, *sizes)]
        if pinned:
            batches = [batch.pin_memory() for batch in batches]
        found = []
        for batch in batches:
            found.append(batch.to(far, non_blocking=True) ^ 255)
            spin(busy, 3)
        assert all(torch.equal(f.cpu(), b ^ 255) for f, b in zip(found, batches, strict=True))


def test_batches_arrive_over_a_network_on_another_stream(far: torch.device) -> None:
    side = torch.sky.Stream(far)
    batches = [torch.randn(1 << 20).pin_memory() for _ in range(8)]
    with torch.sky.stream(side):
        found = [batch.to(far, non_blocking=True) + 1 for batch in batches]
    side.synchronize()
    assert all(torch.equal(f.cpu(), b + 1) for f, b in zip(found, batches, strict=True))


def test_a_batch_that_does_not_fit_is_taken_from_the_network_all_the_same(
    far: torch.device,
) -> None:
    first, last = (torch.randn(1 << 20).pin_memory() for _ in range(2))
    there = first.to(far, non_blocking=True)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 42, dtype=torch.uint8, device=far).item()
    after = last.to(far, non_blocking=True)
    assert torch.equal(there.cpu(), first)
    assert torch.equal(after.cpu(), last)


def test_backward_on_the_gpu_of_this_machine_says_the_way(gpu: torch.device) -> None:
    weight = torch.ones(2, device="cuda", requires_grad=True)
    with pytest.raises(RuntimeError, match=r"sky\.Local\(\)"):
        weight.sum().backward()


def test_pytorchs_threads_leave_processors_to_the_worker() -> None:
    before = torch.get_num_threads()
    with sky.Compute(options=sky.Options(console=False)) as compute:
        compute.device("cuda")
        assert torch.get_num_threads() <= threads_beside_a_worker(kernel.processors())
    assert torch.get_num_threads() == before


def test_an_operation_on_host_memory_follows_one_on_the_gpu(gpu: torch.device) -> None:
    """The seeds of fused attention stay on the host; the same template may have met the GPU's."""
    there = torch.zeros((), dtype=torch.int64, device=gpu)
    assert [(there + 1).item() for _ in range(2)] == [1, 1]
    q = torch.randn(1, 1, 8, 8, device=gpu, dtype=torch.float16)
    _, _, seed, _ = torch.ops.aten._scaled_dot_product_efficient_attention(q, q, q, None, True)
    once = (seed + 1).item()
    assert (seed + 1).item() == once


def test_a_compiled_model_with_an_odd_vocabulary_learns_as_it_does_uncompiled(
    gpu: torch.device,
) -> None:
    def losses(*, compiled: bool) -> list[float]:
        torch.compiler.reset()
        torch.manual_seed(3)
        head = torch.nn.Linear(256, 5001, bias=False).to(gpu, torch.bfloat16)
        x = torch.randn(2048, 256).to(gpu, torch.bfloat16)
        y = torch.randint(5001, (2048,)).to(gpu)
        optimizer = torch.optim.SGD(head.parameters(), lr=0.5)

        def loss_of(x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.cross_entropy(head(x).float(), y)

        step = torch.compile(loss_of) if compiled else loss_of
        found = []
        for _ in range(4):
            optimizer.zero_grad()
            loss = step(x)
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    assert losses(compiled=True) == pytest.approx(losses(compiled=False), abs=0.01)


@sky.function
def memory_in_use() -> int:
    """The bytes of the GPU that are in use, by whomever."""
    free, total = torch.cuda.mem_get_info()
    return total - free


def used_by(pid: int) -> str:
    """How a process came to its memory: the number changes when another process has its place."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def test_kept_tensors_do_not_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of 512 MiB: the GPU has it once while it is kept, waits, and is used again."""
    from skyward.device.core import core

    def places(tensors: list[torch.Tensor]) -> list[bytes]:
        """Process, allocation and offset of each: the same only if nothing has moved."""
        pointers = [each.untyped_storage().data_ptr() for each in tensors]
        return core().export(tensors[0].device.index, pointers)

    monkeypatch.setenv("SKYWARD_STATE", str(tmp_path))
    options = sky.Options(console=False)
    whole, slack = 512 << 20, 128 << 20
    try:
        with sky.Compute(name="kept-on-the-gpu", keep=120, options=options) as compute:
            device = compute.device("cuda")
            model = torch.nn.Sequential(
                *(torch.nn.Linear(4096, 4096, bias=False) for _ in range(8))
            ).to(device)
            model.tied = model[0].weight
            expected = model[0].weight.sum().item()
            before = memory_in_use() >> compute
            compute.keep("model", model)
            assert abs((memory_in_use() >> compute) - before) < slack
            (kept,) = compute.kept_values()
            assert (kept.device, kept.bytes // whole) == ("cuda", 1)
            process = compute._open_fleet.devices.process_of(device.index)
            there, began = places(list(model.parameters())), used_by(process)
            del model
        with sky.attach("kept-on-the-gpu") as compute:
            assert abs((memory_in_use() >> compute) - before) < slack
            again = compute.kept("model")
            device = again[0].weight.device
            assert compute._open_fleet.devices.process_of(device.index) == process
            assert places(list(again.parameters())) == there
            assert used_by(process) == began
            assert again.tied is again[0].weight
            assert again[0].weight.sum().item() == expected
            assert abs((memory_in_use() >> compute) - before) < slack
            assert torch.sky.memory_allocated(device) < whole + slack
            del again
            compute.forget("model")
            torch.sky.synchronize(device)
            torch.sky.empty_cache()
            assert (memory_in_use() >> compute) < before - whole // 2
    finally:
        sky.attach("kept-on-the-gpu").down(force=True)


def test_a_second_client_gets_a_copy_of_kept_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From process to process on the GPU, while the first client goes on with the original."""
    monkeypatch.setenv("SKYWARD_STATE", str(tmp_path))
    options = sky.Options(console=False)
    try:
        with sky.Compute(name="kept-for-two", keep=120, options=options) as first:
            tensor = torch.full((1 << 20,), 3.0, device=first.device("cuda"))
            first.keep("tensor", {"whole": tensor, "part": tensor[7:9]})
            with sky.attach("kept-for-two") as second:
                copy = second.kept("tensor")
                assert copy["whole"].mean().item() == 3
                copy["whole"].zero_()
                assert copy["part"].tolist() == [0, 0]
            assert tensor.mean().item() == 3
    finally:
        sky.attach("kept-for-two").down(force=True)


@pytest.fixture(scope="module")
def uncaptured() -> Iterator[torch.device]:
    """A GPU on which loops run operation by operation."""
    image = sky.Image(env={"SKYWARD_CAPTURE": "0"})
    with sky.Compute(image=image, options=sky.Options(console=False)) as compute:
        yield compute.device("cuda")


def attending(device: Any, steps: int) -> list[Any]:
    """Attention with dropout, in bfloat16: seeds that lie on the host, or on the GPU in a graph."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(64, 4, 128, 0.1, batch_first=True).to(device)
    optimizer = torch.optim.AdamW(layer.parameters(), 1e-3)
    x, losses = torch.randn(8, 16, 64).to(device), []
    for number in range(steps):
        optimizer.zero_grad()
        with torch.autocast("sky", torch.bfloat16):
            loss = layer(x).float().square().mean()
        loss.backward()
        optimizer.step()
        if number % 20 == 0:
            losses.append(loss.item())
    return [*losses, torch.rand(4, device=device).cpu()]


def remembering(device: Any, steps: int, is_enough: Callable[[], bool] = lambda: True) -> list[Any]:
    """cuDNN's layers that remember, between which it drops some."""
    torch.manual_seed(0)
    layers = torch.nn.LSTM(32, 64, 2, dropout=0.2, batch_first=True).to(device)
    optimizer = torch.optim.Adam(layers.parameters(), 1e-3)
    losses: list[Any] = []
    while len(losses) < steps // 20 or not is_enough():
        for _ in range(20):
            optimizer.zero_grad()
            loss = layers(torch.randn(16, 20, 32).to(device))[0].square().mean()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_loop_becomes_graphs(gpu: torch.device, uncaptured: torch.device) -> None:
    """After seconds: torch is imported in the device's process before."""
    end, left = time.monotonic() + 60, 20

    def is_enough() -> bool:
        nonlocal left
        left -= sky.device_stats(gpu).captured.endswith("x as fast")
        return left == 0 or time.monotonic() > end

    found = remembering(gpu, 0, is_enough)
    assert "x as fast" in sky.device_stats(gpu).captured
    assert found == remembering(uncaptured, 20 * len(found))
    assert sky.device_stats(uncaptured).captured == ""


@pytest.mark.parametrize("loop", [attending, *LOOPS])
def test_a_loop_that_runs_as_graphs_has_the_same_bits(
    gpu: torch.device, uncaptured: torch.device, loop: Callable[[Any, int], list[Any]]
) -> None:
    found, expected = loop(gpu, 2000), loop(uncaptured, 2000)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
