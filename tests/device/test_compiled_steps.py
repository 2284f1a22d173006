"""Steps of compiled models, optimizers and backward passes: what they cost, and what they keep."""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import math
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

import skyward as sky

from ..conftest import only_in_all, other_case

pytestmark = [
    # Of torch's own, where it imports its compiler.
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),
    # A graph that is not compiled is a failure here.
    pytest.mark.filterwarnings("error:torch.compile. (a graph runs|the worker of):UserWarning"),
]
OURS = "CompiledFunctionOfSkyward"


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch.compiler.reset()


@contextlib.contextmanager
def _graphs(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """What is said of each graph that is compiled meanwhile."""
    found: list[str] = []
    caplog.clear()
    with caplog.at_level(logging.INFO, "skyward.device.graphs.client"):
        yield found
    found += [record.message for record in caplog.records if "bytes" in record.message]


def _warm(function: Callable[..., torch.Tensor], *given: torch.Tensor) -> None:
    """The first call is AOTAutograd's, from then on it is the core's."""
    function(*given).sum().backward()
    for each in given:
        each.grad = None


def _exp_of_product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x * y).exp()


@pytest.fixture
def pair(device: torch.device) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(3, 4).to(device).requires_grad_() for _ in range(2)]


def test_a_warm_call_is_one_node_of_autograd_with_the_gradients_of_the_first(
    pair: list[torch.Tensor], device: torch.device
) -> None:
    compiled = torch.compile(_exp_of_product)
    first = compiled(*pair)
    expected = torch.autograd.grad(first.square().sum(), pair)
    again = compiled(*pair)
    assert OURS not in first.grad_fn.name()
    assert OURS in again.grad_fn.name()
    found = torch.autograd.grad(again.square().sum(), pair)
    assert torch.equal(first, again)
    assert all(map(torch.equal, found, expected))
    with torch.no_grad():
        assert compiled(*pair).grad_fn is None


def test_what_a_warm_call_has_saved_is_checked_and_freed_as_elsewhere(
    pair: list[torch.Tensor],
) -> None:
    compiled = torch.compile(_exp_of_product)
    _warm(compiled, *pair)
    out = compiled(*pair)
    once = torch.autograd.grad(out.sum(), pair, retain_graph=True)
    assert all(map(torch.equal, once, torch.autograd.grad(out.sum(), pair)))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        out.sum().backward()
    out = compiled(*pair)
    with torch.no_grad():
        pair[0].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    out = compiled(*pair)
    with torch.no_grad():
        out.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_the_gradient_of_a_gradient_is_refused(pair: list[torch.Tensor]) -> None:
    compiled = torch.compile(_exp_of_product)
    _warm(compiled, *pair)
    (gradient,) = torch.autograd.grad(compiled(*pair).sum(), pair[0], create_graph=True)
    with pytest.raises(RuntimeError, match="does not support double backward"):
        gradient.sum().backward()


@only_in_all
def test_results_of_which_one_is_used_and_gradients_that_are_passed_on(
    pair: list[torch.Tensor], device: torch.device
) -> None:
    def several(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x + y, x.sin(), (x > 0).sum()

    compiled = torch.compile(several)
    for _ in range(3):
        total, sine, count = compiled(*pair)
        expected = torch.autograd.grad(several(*pair)[0].sum(), pair)
        found = torch.autograd.grad(total.t().sum(), pair, retain_graph=True)
        assert all(map(torch.equal, found, expected))
        (other,) = torch.autograd.grad(sine.sum(), pair[0])
        torch.testing.assert_close(other, pair[0].cos())
        assert count.grad_fn is None
        assert count.item() == (pair[0] > 0).sum().item()
    assert OURS in total.grad_fn.name()


def test_a_function_that_is_gone_leaves_the_gradients_of_its_calls(
    pair: list[torch.Tensor], device: torch.device
) -> None:
    compiled = torch.compile(_exp_of_product)
    _warm(compiled, *pair)
    out = compiled(*pair)
    del compiled
    torch.compiler.reset()
    gc.collect()
    out.sum().backward()
    assert pair[0].grad.isfinite().all()


def test_changed_buffers_count_as_changed(device: torch.device) -> None:
    model = nn.BatchNorm1d(4).to(device)
    compiled = torch.compile(model)
    rows = torch.randn(6, 4, device=device)
    plain = copy.deepcopy(model)
    for _ in range(3):
        compiled(rows).sum().backward()
        plain(rows)
    torch.testing.assert_close(model.running_mean, plain.running_mean)
    before = model.running_mean._version
    compiled(rows)
    assert model.running_mean._version > before


class Rounded(nn.Module):
    """A model whose graphs have sizes that are rounded up."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(11, 8), nn.Linear(8, 11)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        wide = functional.pad(x, (0, 0, 0, math.ceil(x.shape[1] / 32) * 32 - x.shape[1]))
        weights = torch.softmax(wide @ wide.transpose(1, 2), -1)
        return self.out(weights @ wide)[:, : tokens.shape[1]].square().mean()


@only_in_all
def test_changing_lengths_with_rounded_sizes_stay_compiled(
    device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model = Rounded().to(device)
    plain = copy.deepcopy(model)
    compiled = torch.compile(model, dynamic=True)
    with _graphs(caplog) as graphs:
        for length in (5, 7, 31, 33, 40, 64, 65, 9):
            tokens = torch.arange(2 * length, device=device).view(2, length) % 11
            loss, expected = compiled(tokens), plain(tokens)
            loss.backward()
            expected.backward()
            torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(
            [p.grad for p in model.parameters()], [p.grad for p in plain.parameters()]
        )
        asked, operations = sky.device_stats(device).asked, sky.device_stats(device).operations
        for length in (31, 64, 5):
            tokens = torch.arange(2 * length, device=device).view(2, length) % 11
            loss = compiled(tokens)
        assert OURS in loss.grad_fn.name()
        assert sky.device_stats(device).asked == asked
        # The tokens are three operations.
        assert sky.device_stats(device).operations - operations <= 3 * 4
    # A length that needs no padding is traced on its own.
    assert len(graphs) <= 4


OPTIMIZERS = [
    lambda p: torch.optim.Adam(p, 0.01),
    pytest.param(lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), marks=other_case),
]


@only_in_all
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.filterwarnings("ignore:.*optimizer.step.*:UserWarning")
def test_a_compiled_optimizer_does_what_the_local_one_does(
    device: torch.device,
    optimizer: Callable[..., torch.optim.Optimizer],
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch.manual_seed(0)
    here = nn.Linear(4, 3)
    there = copy.deepcopy(here).to(device)
    rows = torch.randn(5, 4)
    with _graphs(caplog) as graphs:
        for model, x in ((here, rows), (there, rows.to(device))):
            made = optimizer(model.parameters())
            step = torch.compile(made.step)
            for _ in range(4):
                made.zero_grad()
                model(x).square().sum().backward()
                step()
    torch.testing.assert_close(
        [p.cpu() for p in there.parameters()], list(here.parameters()), check_device=False
    )
    assert 1 <= len(graphs) <= 2


@only_in_all
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_compiled_autograd_has_the_same_gradients(
    device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).to(device)
    rows = torch.randn(3, 4, device=device)
    expected = torch.autograd.grad(model(rows).square().sum(), list(model.parameters()))

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().sum()
        loss.backward()
        return loss

    with torch._dynamo.config.patch(compiled_autograd=True), _graphs(caplog) as graphs:
        compiled = torch.compile(step)
        for _ in range(3):
            model.zero_grad()
            compiled(rows)
            torch.testing.assert_close([p.grad for p in model.parameters()], list(expected))
    assert 2 <= len(graphs) <= 4


def test_compiled_autograd_is_to_be_on_when_the_function_is_called(
    pair: list[torch.Tensor],
) -> None:
    from torch._dynamo import compiled_autograd

    compiled = torch.compile(_exp_of_product)
    _warm(compiled, *pair)
    compiler = torch.compile(backend="eager")
    loss = compiled(*pair).sum()
    with (
        compiled_autograd._enable(compiler),
        pytest.raises(sky.errors.DeviceError, match="before it was switched on; call the function"),
    ):
        loss.backward()


@only_in_all
@pytest.mark.parametrize(
    "mode",
    [
        "reduce-overhead",
        pytest.param("max-autotune", marks=only_in_all),
        pytest.param("max-autotune-no-cudagraphs", marks=other_case),
    ],
)
def test_every_mode_trains_as_uncompiled(device: torch.device, mode: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).to(device)
    plain = copy.deepcopy(model)
    compiled = torch.compile(model, mode=mode)
    rows = torch.randn(6, 4, device=device)
    for one, call in ((model, compiled), (plain, plain)):
        optimizer = torch.optim.SGD(one.parameters(), 0.1)
        for _ in range(4):
            optimizer.zero_grad()
            call(rows).square().mean().backward()
            optimizer.step()
    torch.testing.assert_close(model.state_dict(), plain.state_dict())


@only_in_all
def test_a_new_session_finds_all_graphs_of_a_program_on_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    told, losses = list[list[str]](), list[list[float]]()
    for _ in range(2):
        torch.compiler.reset()
        torch.manual_seed(0)
        with sky.Compute(options=sky.Options(console=False)) as compute, _graphs(caplog) as graphs:
            device = compute.device("cpu")
            model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(device)
            compiled = torch.compile(model, dynamic=True)
            losses.append([])
            for length in (5, 9, 6):
                loss = compiled(torch.ones(length, 4, device=device)).square().mean()
                loss.backward()
                losses[-1].append(loss.item())
        told.append(graphs)
    cold, warm = ([message.count("from its cache") for message in each] for each in told)
    assert cold == [0, 0]
    assert warm == [1, 1]
    assert losses[0] == losses[1]


def test_nothing_warns_in_a_warm_step(pair: list[torch.Tensor]) -> None:
    compiled = torch.compile(_exp_of_product)
    _warm(compiled, *pair)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled(*pair).sum().backward()
