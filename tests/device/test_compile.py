"""torch.compile traces models on a sky device, and what it makes of them computes the same."""

from __future__ import annotations

import copy
import gc
import logging
import math
import weakref
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention

import skyward as sky
from skyward.device.graphs import client
from skyward.device.graphs.text import Compiled

from ..conftest import ALL, only_in_all, other_case

pytestmark = [
    pytest.mark.filterwarnings("ignore:enable_nested_tensor:UserWarning"),
    # Of torch's own, where it imports its compiler.
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),
]


class Model(nn.Module):
    """Attention and all that goes with it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.out = nn.Linear(16, 11)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return self.out(self.encoder(self.embedding(tokens), src_mask=mask))


def _loss_and_gradients(
    model: nn.Module, run: nn.Module, *inputs: torch.Tensor
) -> list[torch.Tensor]:
    model.zero_grad()
    loss = run(*inputs).square().mean()
    loss.backward()
    return [loss.detach().cpu(), *(p.grad.cpu() for p in model.parameters())]


@only_in_all
@pytest.mark.parametrize("backend", [pytest.param("aot_eager", marks=only_in_all), "sky"])
def test_a_compiled_model_with_attention_learns_as_it_does_uncompiled(
    device: torch.device, backend: str
) -> None:
    torch.manual_seed(0)
    model = Model().to(device)
    torch.compiler.reset()
    compiled = torch.compile(model, backend=backend)
    # A second length is compiled anew, for all lengths, which takes as long again.
    for length in (5, 7) if ALL else (5,):
        tokens = torch.arange(2 * length, device=device).view(2, length) % 11
        plain = _loss_and_gradients(model, model, tokens)
        torch.testing.assert_close(_loss_and_gradients(model, compiled, tokens), plain)
    if ALL:
        with torch.inference_mode():
            torch.testing.assert_close(compiled(tokens).cpu(), model(tokens).cpu())


@pytest.mark.parametrize(
    "options",
    [{"backend": "sky"}, pytest.param({"mode": "reduce-overhead"}, marks=other_case)],
)
def test_a_call_of_a_compiled_model_is_one_operation_each_way(
    device: torch.device, options: dict[str, str]
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 2)).to(device)
    rows = torch.randn(5, 3, device=device)
    plain = _loss_and_gradients(model, model, rows)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, **options)
    torch.testing.assert_close(_loss_and_gradients(model, compiled, rows), plain)
    out = compiled(rows)
    tangent = torch.ones_like(out)
    model.zero_grad()
    before = sky.device_stats(device)
    out = compiled(rows)
    out.backward(tangent)
    after = sky.device_stats(device)
    assert after.operations - before.operations == 2
    assert after.waits == before.waits
    with torch.inference_mode():
        torch.testing.assert_close(compiled(rows).cpu(), model(rows).cpu())


def _written(x: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return x * 2


def _views(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x.t(), x[1:], x, x.view(-1) + 1


def _broken(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    torch._dynamo.graph_break()
    return y.sin() + 1


def _constant(x: torch.Tensor) -> torch.Tensor:
    return x + torch.tensor([1.0, 2.0, 3.0], device=x.device) * torch.tensor(3.0)


@pytest.mark.parametrize("function", [_written, _views, _broken, _constant])
def test_a_compiled_function_does_what_it_did(
    device: torch.device, function: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    torch.compiler.reset()
    compiled = torch.compile(function, backend="sky")
    for seed in range(3):
        torch.manual_seed(seed)
        given = torch.randn(2, 3, device=device)
        same = given.clone()
        torch.testing.assert_close(compiled(given), function(same))
        assert torch.equal(given, same)


def test_a_result_that_is_a_view_of_an_input_is_one_still(device: torch.device) -> None:
    torch.compiler.reset()
    compiled = torch.compile(lambda x: (x[1:], x + 1), backend="sky")
    given = torch.zeros(3, device=device)
    view, _ = compiled(given)
    view.fill_(5)
    assert given.tolist() == [0, 5, 5]


def test_sizes_that_change_are_compiled_once(
    device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    def scaled(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        padding = x.new_ones(math.ceil(x.shape[0] / 32) * 32 + round(x.shape[0] * 0.3))
        return (x * 2).sum(0) + x.shape[0], padding * x.sum()

    torch.compiler.reset()
    compiled = torch.compile(scaled, backend="sky", dynamic=True)
    with caplog.at_level(logging.INFO, "skyward.device.graphs.client"):
        for length in (3, 5, 8, 33):
            rows = torch.randn(length, 6, device=device)
            torch.testing.assert_close(compiled(rows), scaled(rows))
    assert sum("bytes" in record.message for record in caplog.records) == 1


@only_in_all
def test_thirty_lengths_of_a_compiled_model_ask_the_worker_nothing(device: torch.device) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 4), nn.LayerNorm(4), nn.Linear(4, 3)).to(device)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="sky", dynamic=True)

    def step(length: int) -> list[torch.Tensor]:
        tokens = torch.arange(2 * length, device=device).view(2, length) % 11
        return _loss_and_gradients(model, compiled, tokens)

    step(4)
    before, lengths = sky.device_stats(device).asked, range(5, 35)
    results = {length: step(length) for length in lengths}
    assert sky.device_stats(device).asked == before
    for length in lengths[::10]:
        tokens = torch.arange(2 * length, device=device).view(2, length) % 11
        torch.testing.assert_close(results[length], _loss_and_gradients(model, model, tokens))


@pytest.fixture
def told_strides(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Strides that the client is told instead of those that the worker's code has."""
    instead: list[list[str]] = []
    ship = client._Shipped._ship

    def doctored(self: client._Shipped) -> Compiled:
        answer = ship(self)
        return msgspec.structs.replace(answer, strides=list(instead)) if instead else answer

    monkeypatch.setattr(client._Shipped, "_ship", doctored)
    return instead


def test_a_result_has_the_layout_that_was_told_though_code_for_other_sizes_chose_another(
    device: torch.device, told_strides: list[list[str]]
) -> None:
    told_strides.append(["1", "4"])
    torch.compiler.reset()
    compiled = torch.compile(lambda x: x * 2, backend="sky")
    rows = torch.arange(24.0).reshape(4, 6)
    result = compiled(rows.to(device))
    assert result.stride() == (1, 4)
    assert torch.equal(result.cpu(), rows * 2)
    assert torch.equal((result + 1).cpu(), rows * 2 + 1)


@only_in_all
def test_a_layout_that_cannot_be_kept_is_an_error_and_the_next_call_asks(
    told_strides: list[list[str]],
) -> None:
    told_strides.append(["0", "1"])
    torch.compiler.reset()
    compiled = torch.compile(lambda x: x * 2)
    rows = torch.arange(24.0).reshape(4, 6)
    with sky.Compute(options=sky.Options(console=False)) as compute:
        there = rows.to(compute.device("cpu"))
        with pytest.raises(
            sky.errors.DeviceError, match="cannot be laid out as the client expects"
        ):
            compiled(there).cpu()
        result = compiled(there)
        assert result.stride() == (6, 1)
        assert torch.equal(result.cpu(), rows * 2)


def test_random_numbers_follow_the_seed_of_the_device(device: torch.device) -> None:
    torch.compiler.reset()
    compiled = torch.compile(lambda x: functional.dropout(x, 0.5), backend="sky")
    ones = torch.ones(64, device=device)
    torch.manual_seed(3)
    first, second = compiled(ones).tolist(), compiled(ones).tolist()
    torch.manual_seed(3)
    assert compiled(ones).tolist() == first != second


class Tied(nn.Module):
    """An embedding that is also the last layer, and buffers that are counted up."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.out = nn.Linear(4, 7, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(self.embedding(tokens)))


@only_in_all
@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
        pytest.param(lambda p: torch.optim.Adam(p, 0.01), marks=only_in_all),
    ],
)
@pytest.mark.filterwarnings("ignore:.*optimizer.step.*:UserWarning")
def test_a_compiled_optimizer_trains_tied_weights_and_counts_buffers(
    device: torch.device, optimizer: Callable[..., torch.optim.Optimizer]
) -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    plain = Tied().to(device)
    compiled = copy.deepcopy(plain)
    tokens = torch.arange(5, device=device)
    run = torch.compile(compiled, backend="sky")
    ours, theirs = optimizer(compiled.parameters()), optimizer(plain.parameters())
    step = torch.compile(ours.step, backend="sky")
    for _ in range(3):
        for model, call, update in ((compiled, run, step), (plain, plain, theirs.step)):
            model.zero_grad()
            functional.cross_entropy(call(tokens), tokens).backward()
            update()
    torch.testing.assert_close(compiled.state_dict(), plain.state_dict())


def test_a_graph_that_cannot_be_shipped_runs_and_says_why(device: torch.device) -> None:
    torch.compiler.reset()
    beside = torch.arange(3.0)
    compiled = torch.compile(lambda x, y: x.sum() + y.sum().to(x.device), backend="sky")
    with pytest.warns(
        UserWarning, match=r"operation by operation.*a tensor on cpu of shape \(3,\)"
    ):
        result = compiled(torch.ones(3, device=device), beside)
    assert result.item() == 6


@only_in_all
@pytest.mark.filterwarnings("ignore:torch.compile. the worker of:UserWarning")
def test_flex_attention_is_compiled_as_libraries_compile_it(device: torch.device) -> None:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def causal(
        batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        return query >= key

    torch.compiler.reset()
    query = torch.randn(1, 2, 128, 8, device=device, requires_grad=True)
    mask = torch.compile(create_block_mask)(causal, None, None, 128, 128, device=device)
    ours = torch.compile(flex_attention)(query, query, query, block_mask=mask)
    plain = scaled_dot_product_attention(query, query, query, is_causal=True)
    torch.testing.assert_close(ours.cpu(), plain.cpu())
    gradients = [torch.autograd.grad(out.square().sum(), query)[0].cpu() for out in (ours, plain)]
    torch.testing.assert_close(*gradients)


def test_a_function_without_tensors_of_the_device_runs_as_it_is() -> None:
    torch.compiler.reset()
    assert torch.compile(lambda x: x + 1, backend="sky")(torch.ones(2)).tolist() == [2, 2]


@only_in_all
def test_a_second_worker_starts_with_the_code_of_the_first_and_a_new_one_gets_the_graph_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    torch.compiler.reset()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    compiled = torch.compile(lambda x: x.sum() * 3, backend="sky")
    devices = []
    with caplog.at_level(logging.INFO, "skyward.device.graphs.client"):
        for _ in range(2):
            with sky.Compute(options=sky.Options(console=False)) as compute:
                devices.append(compute.device("cpu"))
                assert compiled(torch.ones(5, device=devices[-1])).item() == 15
    shipped = [record.message for record in caplog.records if "bytes" in record.message]
    assert devices[0] == devices[1]
    assert ["from its cache" in message for message in shipped] == [False, True]


@only_in_all
def test_a_new_worker_with_other_layouts_or_no_compiler_says_so_and_computes_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # What the new worker answers for each function, in their order.
    answers = iter(
        [
            {"strides": [["1", "4"]]},
            {"strides": [], "instead": "RuntimeError: no compiler"},
            {"strides": [["1", "4"]]},
            {"strides": [["1", "4"]]},
        ]
    )
    ship = client._Shipped._ship

    def doctored(self: client._Shipped) -> Compiled:
        is_again = hasattr(self, "strides")
        answer = ship(self)
        return msgspec.structs.replace(answer, **next(answers)) if is_again else answer

    monkeypatch.setattr(client._Shipped, "_ship", doctored)
    torch.compiler.reset()
    first, second, third = (
        torch.compile(function) for function in (lambda x: x * 2, lambda x: x * 3, lambda x: x * 4)
    )
    rows = torch.arange(24.0).reshape(4, 6)
    with sky.Compute(options=sky.Options(console=False)) as compute:
        there = rows.to(compute.device("cpu"))
        before = [first(there).cpu(), second(there).cpu()]
        with monkeypatch.context() as patch:
            # As if the sizes of its result did not follow from those of its input.
            patch.setattr(client._Shipped, "_promised", lambda self, shape: None)
            third(there).cpu()
    with sky.Compute(options=sky.Options(console=False)) as compute:
        there = rows.to(compute.device("cpu"))
        with pytest.warns(UserWarning, match="the new worker of sky:.* lays out the results"):
            result = first(there)
        assert result.stride() == (6, 1)
        with pytest.warns(UserWarning, match="operation by operation.*no compiler"):
            again = [result.cpu(), second(there).cpu()]
        for _ in range(2):
            with pytest.raises(
                sky.errors.DeviceError, match=r"in another way.*torch\.compiler\.reset"
            ):
                third(there)
    assert all(map(torch.equal, again, before))


@pytest.mark.parametrize("shape", [(2, 3, 5, 8), (3, 5, 8)])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"dropout_p": 0.5}])
def test_attention_on_tensors_without_memory_has_the_right_shape(
    device: torch.device, shape: tuple[int, ...], options: dict[str, float]
) -> None:
    with FakeTensorMode():
        query = torch.randn(shape, device=device, requires_grad=True)
        out = scaled_dot_product_attention(query, query, query, **options)
        (gradient,) = torch.autograd.grad(out.sum(), query)
        with torch.inference_mode():
            still = scaled_dot_product_attention(query, query, query, **options)
    assert out.shape == gradient.shape == still.shape == shape
    assert out.device == still.device == torch.device(device)


def test_a_graph_can_be_dropped_while_another_is_traced(device: torch.device) -> None:
    torch.compile(torch.sin, backend="sky")(torch.ones(3, device=device))
    token = torch.zeros(1, dtype=torch.uint8, device=device)
    before = sky.device_stats(device)
    with FakeTensorMode():
        client._drop(token, 1 << 40)
    after = sky.device_stats(device)
    assert after.bytes_sent > before.bytes_sent
    assert after.operations == before.operations  # the user has issued none


def test_a_graph_that_is_garbage_is_no_part_of_a_recording(
    device: torch.device, other_device: torch.device
) -> None:
    """It may be collected amid any call, with a word to the worker that had the graph."""

    class Circle:
        def __init__(self) -> None:
            self.itself = self

    def leave_garbage() -> None:
        for each in (device, other_device):
            token = torch.zeros(1, dtype=torch.uint8, device=each)
            weakref.finalize(Circle(), client._drop, token, 1 << 40)

    @sky.replay
    def double(x: torch.Tensor) -> torch.Tensor:
        y = x + x
        gc.collect()
        return y

    torch.compile(torch.sin, backend="sky")(torch.ones(3, device=device))
    gc.disable()
    try:
        for number in range(4):
            leave_garbage()
            before = sky.device_stats(other_device)
            assert double(torch.tensor(number).to(device)).item() == 2 * number
            is_recorded = number < 2
            assert (sky.device_stats(other_device).bytes_sent > before.bytes_sent) == is_recorded
            assert sky.device_stats(other_device).operations == before.operations
    finally:
        gc.enable()
    assert double.replayed == 2
