"""The corners of autograd, functorch and compilation work on a sky device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from ..conftest import other_case


def _loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ w).square().mean()


@pytest.fixture
def w() -> torch.Tensor:
    """A weight."""
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def x() -> torch.Tensor:
    """A batch."""
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(1))


def test_func_grad(device: torch.device, w: torch.Tensor, x: torch.Tensor) -> None:
    ours = torch.func.grad(_loss)(w.to(device), x.to(device))
    torch.testing.assert_close(ours.cpu(), torch.func.grad(_loss)(w, x))


def test_vmap_of_grad(device: torch.device, w: torch.Tensor, x: torch.Tensor) -> None:
    per_sample = torch.func.vmap(torch.func.grad(_loss), (None, 0))
    ours = per_sample(w.to(device), x.to(device))
    torch.testing.assert_close(ours.cpu(), per_sample(w, x))


def test_jacobians_forward_and_reverse(
    device: torch.device, w: torch.Tensor, x: torch.Tensor
) -> None:
    for jacobian in (torch.func.jacrev, torch.func.jacfwd):
        transform = jacobian(lambda w, x: torch.tanh(x @ w))
        torch.testing.assert_close(transform(w.to(device), x.to(device)).cpu(), transform(w, x))


FORWARD: dict[str, Callable[..., Any]] = {
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),)),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "hessian": lambda f, x: torch.func.hessian(lambda a: f(a).sum())(x),
    "linearize": lambda f, x: torch.func.linearize(f, x)[1](torch.ones_like(x)),
    "vmap": lambda f, x: torch.func.vmap(torch.func.jacfwd(f))(torch.stack([x, x])[1:]),
}


@pytest.mark.parametrize("transform", FORWARD)
@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning")
def test_forward_mode_of_a_part_of_a_tensor(device: torch.device, transform: str) -> None:
    """A tangent has the layout of its tensor, with what lies before it in the storage."""

    def f(part: torch.Tensor) -> torch.Tensor:
        return part.view(2, 3).square().sum(0)

    whole = torch.arange(24.0).reshape(4, 6)
    ours, right = (FORWARD[transform](f, t[1]) for t in (whole.to(device), whole))
    torch.testing.assert_close(tree_map(torch.Tensor.cpu, ours), right, rtol=0, atol=0)


def test_functional_call(device: torch.device, x: torch.Tensor) -> None:
    model = nn.Linear(4, 2).to(device)
    zeros = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    assert not torch.func.functional_call(model, zeros, (x.to(device),)).any()


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint(device: torch.device, x: torch.Tensor, reentrant: bool) -> None:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))

    def gradient(where: torch.device) -> torch.Tensor:
        model = block.to(where)
        model.zero_grad()
        torch.manual_seed(2)
        given = x.detach().to(where).requires_grad_()
        checkpoint(model, given, use_reentrant=reentrant).sum().backward()
        return given.grad.cpu()

    torch.testing.assert_close(gradient(device), gradient(torch.device("cpu")))


def test_hooks_see_tensors_of_the_device(device: torch.device, x: torch.Tensor) -> None:
    seen = []
    given = x.to(device).requires_grad_()
    given.register_hook(lambda grad: seen.append(grad.device) or grad * 2)
    model = nn.Linear(4, 1).to(device)
    model.register_full_backward_hook(lambda *_: seen.append("module"))
    model(given).sum().backward()
    assert seen == ["module", device]
    torch.testing.assert_close(given.grad, 2 * model.weight.expand(5, 4))


def test_double_backward(device: torch.device, x: torch.Tensor) -> None:
    def second(where: torch.device) -> torch.Tensor:
        given = x.detach().to(where).requires_grad_()
        (first,) = torch.autograd.grad(given.sin().prod(dim=1).sum(), given, create_graph=True)
        return torch.autograd.grad(first.square().sum(), given)[0].cpu()

    torch.testing.assert_close(second(device), second(torch.device("cpu")))


def test_a_function_of_ones_own(device: torch.device, x: torch.Tensor) -> None:
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx, grad):  # type: ignore[no-untyped-def]
            (x,) = ctx.saved_tensors
            return 3 * x**2 * grad

    given = x.to(device).requires_grad_()
    Cube.apply(given).sum().backward()
    torch.testing.assert_close(given.grad.cpu(), 3 * x**2)


@pytest.mark.filterwarnings("ignore:Anomaly Detection:UserWarning")
@pytest.mark.filterwarnings("ignore:Error detected in SqrtBackward:UserWarning")
def test_anomaly_mode_names_the_culprit(device: torch.device) -> None:
    x = torch.zeros(2, device=device, requires_grad=True)
    with torch.autograd.detect_anomaly():
        loss = (torch.sqrt(x) * 0).sum()
        with pytest.raises(RuntimeError, match="'SqrtBackward0' returned nan"):
            loss.backward()


def test_gradcheck(device: torch.device) -> None:
    x = torch.randn(3, dtype=torch.float64).to(device).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: x.sin() * x.exp(), (x,))


def test_in_place_changes_of_saved_tensors_are_caught(device: torch.device) -> None:
    x = torch.ones(3, device=device, requires_grad=True)
    y = x.exp()
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@other_case
@pytest.mark.slow
def test_compile_with_aot_eager(device: torch.device, x: torch.Tensor) -> None:
    """Slow: Dynamo and AOTAutograd trace for seconds."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))

    def gradients(where: torch.device, compiled: bool) -> list[torch.Tensor]:
        placed = model.to(where)
        placed.zero_grad()
        run = torch.compile(placed, backend="aot_eager") if compiled else placed
        run(x.to(where)).square().sum().backward()
        return [p.grad.cpu() for p in placed.parameters()]

    torch.testing.assert_close(
        gradients(device, compiled=True), gradients(torch.device("cpu"), compiled=False)
    )
