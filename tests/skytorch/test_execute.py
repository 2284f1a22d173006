"""Functions executed on a compute: shipped like any other, with results that stay remote."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import skyward as sky
from skytorch.client import Compute
from skytorch.placement import StateDict


class Net(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, width)
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.norm(self.embed(x)))
        return out


class Pair(NamedTuple):
    first: torch.Tensor
    second: int


def seeded_net(width: int = 8) -> Net:
    torch.manual_seed(7)
    return Net(width)


def seeded_weights(width: int = 8) -> dict[str, torch.Tensor]:
    return seeded_net(width).state_dict()


def run(node: Compute, fn: Any, *args: Any, **kwargs: Any) -> Any:
    return asyncio.run(node.execute(fn, *args, **kwargs))


def test_a_returned_tensor_is_on_the_computes_device(node: Compute) -> None:
    tensor = run(node, lambda n: torch.arange(n), 4)

    assert tensor.device == node.device()
    assert tensor.cpu().tolist() == [0, 1, 2, 3]


def test_a_returned_module_is_remote_and_works_there(node: Compute) -> None:
    model = run(node, seeded_net).eval()
    tokens = torch.tensor([1, 2, 3])

    assert {p.device for p in model.parameters()} == {node.device()}
    assert model.head.weight is model.embed.weight
    expected = seeded_net().eval()(tokens)
    torch.testing.assert_close(model(tokens.to(node.device())).cpu(), expected)


def test_tensors_inside_containers_are_remote_and_plain_values_are_themselves(
    node: Compute,
) -> None:
    def mixed() -> Any:
        ones = torch.ones(2)
        return [{"loss": 0.5, "at": (ones, ones)}, Pair(torch.zeros(1), 3), "text"]

    first, pair, text = run(node, mixed)

    assert first["loss"] == 0.5
    assert first["at"][0] is first["at"][1]
    assert first["at"][0].device == pair.first.device == node.device()
    assert (type(pair).__name__, pair.second, text) == ("Pair", 3, "text")


def test_what_requires_grad_still_does_and_is_a_leaf(node: Compute) -> None:
    def leaf() -> torch.Tensor:
        return torch.ones(3, requires_grad=True)

    tensor = run(node, leaf)
    tensor.square().sum().backward()

    assert tensor.grad.cpu().tolist() == [2.0, 2.0, 2.0]


def test_remote_tensors_are_arguments_like_any_other(node: Compute) -> None:
    def total(model: nn.Module, x: torch.Tensor) -> tuple[str, float]:
        return x.device.type, float(x.sum()) + float(next(model.parameters()).sum())

    device = node.device()
    model = nn.Linear(2, 2, bias=False).to(device)
    with torch.no_grad():
        model.weight.fill_(1.0)

    kind, value = run(node, total, model, torch.ones(4, 4, device=device)[1:, ::2])

    assert (kind, value) == ("cpu", 10.0)


def test_what_a_function_writes_to_remote_tensors_is_seen_here(node: Compute) -> None:
    def double(model: nn.Module) -> None:
        with torch.no_grad():
            model.weight.mul_(2.0)

    model = nn.Linear(2, 2, bias=False).to(node.device())
    before = model.weight.detach().cpu()

    run(node, double, model)

    assert torch.equal(model.weight.detach().cpu(), 2 * before)


def test_a_returned_state_dict_loads_into_a_local_model(node: Compute) -> None:
    weights = run(node, seeded_weights)
    model = Net()

    assert isinstance(weights, StateDict)
    assert {tensor.device for tensor in weights.values()} == {node.device()}
    assert weights.load_into(model) is model
    for name, tensor in seeded_weights().items():
        torch.testing.assert_close(model.state_dict()[name], tensor)


def test_a_model_on_the_meta_device_takes_the_remote_tensors_themselves(node: Compute) -> None:
    weights = run(node, seeded_weights)
    with torch.device("meta"):
        model = Net()

    weights.load_into(model).eval()

    assert isinstance(model.head.weight, nn.Parameter)
    assert model.head.weight is model.embed.weight
    tokens = torch.tensor([1, 2, 3])
    expected = seeded_net().eval()(tokens)
    torch.testing.assert_close(model(tokens.to(node.device())).cpu(), expected)


def test_a_model_on_the_device_is_filled_in_place(node: Compute) -> None:
    model = Net().to(node.device())
    before = model.embed.weight

    run(node, seeded_weights).load_into(model)

    assert model.embed.weight is before
    torch.testing.assert_close(before.cpu(), seeded_net().embed.weight)


def test_a_state_dict_that_does_not_fit_names_everything_and_changes_nothing(
    node: Compute,
) -> None:
    def odd() -> dict[str, torch.Tensor]:
        weights = OrderedDict(seeded_weights())
        del weights["norm.bias"]
        weights["norm.extra"] = torch.zeros(1)
        weights["norm.weight"] = torch.zeros(3)
        return weights

    model = Net()
    before = model.embed.weight.clone()

    with pytest.raises(sky.ConfigurationError) as caught:
        run(node, odd).load_into(model)

    message = str(caught.value)
    assert "it lacks norm.bias" in message
    assert "Net has no norm.extra" in message
    assert "norm.weight is (3,) here and (8,) in Net" in message
    assert torch.equal(model.embed.weight, before)


def test_load_into_wants_a_module(node: Compute) -> None:
    with pytest.raises(sky.ConfigurationError, match=r"give an nn\.Module"):
        run(node, seeded_weights).load_into({})


def test_the_first_device_asked_for_is_where_results_go(node: Compute) -> None:
    device = node.device("cuda")

    assert run(node, torch.ones, 2).device == device


def test_a_coroutine_function_is_awaited_there(node: Compute) -> None:
    async def later(x: int) -> int:
        await asyncio.sleep(0)
        return x + 1

    assert run(node, later, x=2) == 3


def test_a_sky_function_is_as_good_as_a_plain_one(node: Compute) -> None:
    @sky.function
    def double(x: int) -> int:
        return 2 * x

    assert run(node, double, 4) == 8


def test_an_exception_arrives_as_what_it_was(node: Compute) -> None:
    def fail() -> None:
        raise LookupError("no such weights")

    with pytest.raises(LookupError, match="no such weights"):
        run(node, fail)


def test_calls_run_beside_the_event_loop(node: Compute) -> None:
    async def main() -> list[int]:
        return list(await asyncio.gather(*(node.execute(abs, -n) for n in range(4))))

    assert asyncio.run(main()) == [0, 1, 2, 3]


def test_what_cannot_be_executed_is_refused(node: Compute) -> None:
    def numbers() -> Iterator[int]:
        yield 1

    with pytest.raises(sky.ConfigurationError, match=r"execute\(3\): give a function"):
        run(node, 3)
    with pytest.raises(sky.ConfigurationError, match=r"execute\(numbers\): it yields"):
        run(node, numbers)
