"""Functions executed on a compute: shipped like any other, with results that stay remote."""

from __future__ import annotations

import asyncio
import copy
import sys
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import skyward as sky
from skytorch.client import Compute
from skytorch.client.state_dict import StateDict


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

    with pytest.raises(sky.errors.ConfigurationError) as caught:
        run(node, odd).load_into(model)

    message = str(caught.value)
    assert "it lacks norm.bias" in message
    assert "Net has no norm.extra" in message
    assert "norm.weight is (3,) here and (8,) in Net" in message
    assert torch.equal(model.embed.weight, before)


class Rotary(nn.Module):
    """As language models have it: a buffer that the state dict leaves out."""

    frequencies: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        self.register_buffer("frequencies", torch.zeros(2), persistent=False)


def seeded_rotary() -> Rotary:
    rotary = Rotary()
    with torch.no_grad():
        rotary.scale.fill_(3.0)
        rotary.frequencies.fill_(5.0)
    return rotary


@pytest.mark.parametrize("where", ["cpu", "meta"])
def test_a_returned_module_loads_into_a_model_with_its_non_persistent_buffers(
    node: Compute, where: str
) -> None:
    remote = run(node, seeded_rotary)
    with torch.device(where):
        model = Rotary()

    assert remote.load_into(model) is model

    assert model.scale.cpu().tolist() == [3.0, 3.0]
    assert model.frequencies.cpu().tolist() == [5.0, 5.0]
    assert list(model.state_dict()) == ["scale"]


def test_a_copy_of_a_returned_module_loads_its_own_tensors(node: Compute) -> None:
    remote = run(node, seeded_rotary)
    twin = copy.deepcopy(remote)
    with torch.no_grad():
        twin.scale.fill_(9.0)

    assert twin.load_into(Rotary()).scale.tolist() == [9.0, 9.0]
    assert remote.load_into(Rotary()).scale.tolist() == [3.0, 3.0]


def test_a_modules_own_load_into_stays(node: Compute) -> None:
    class Loader(nn.Linear):
        def load_into(self, model: nn.Module) -> str:
            return "my own"

    assert run(node, Loader, 1, 1).load_into(nn.Linear(1, 1)) == "my own"


def test_a_state_dict_may_carry_non_persistent_buffers(node: Compute) -> None:
    def everything() -> dict[str, torch.Tensor]:
        rotary = seeded_rotary()
        return {**rotary.state_dict(), "frequencies": rotary.frequencies}

    model = run(node, everything).load_into(Rotary())

    assert model.frequencies.tolist() == [5.0, 5.0]


def test_a_state_dict_without_them_leaves_those_with_memory_and_refuses_those_without(
    node: Compute,
) -> None:
    weights = run(node, lambda: seeded_rotary().state_dict())

    assert weights.load_into(Rotary()).frequencies.tolist() == [0.0, 0.0]
    with (
        torch.device("meta"),
        pytest.raises(
            sky.errors.ConfigurationError, match=r"frequencies.*return the module itself"
        ),
    ):
        weights.load_into(Rotary())


def test_on_log_gets_what_the_function_prints_and_the_console_does_not(
    node: Compute, capfd: pytest.CaptureFixture[str]
) -> None:
    def talk() -> int:
        print("loading")
        print("careful", file=sys.stderr)
        print("no newline", end="")
        return 3

    heard: list[tuple[str, str]] = []

    assert run(node, talk, on_log=lambda stream, text: heard.append((stream, text))) == 3

    assert sorted(heard) == [
        ("stderr", "careful\n"),
        ("stdout", "loading\n"),
        ("stdout", "no newline\n"),
    ]
    said = capfd.readouterr()
    assert "loading" not in said.out + said.err


def test_on_log_must_be_a_plain_function(node: Compute) -> None:
    with pytest.raises(
        sky.errors.ConfigurationError, match=r"execute\(on_log=3\): give a plain function"
    ):
        run(node, abs, 1, on_log=3)


def test_load_into_wants_a_module(node: Compute) -> None:
    with pytest.raises(sky.errors.ConfigurationError, match=r"give an nn\.Module"):
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

    with pytest.raises(sky.errors.ConfigurationError, match=r"execute\(3\): give a function"):
        run(node, 3)
    with pytest.raises(sky.errors.ConfigurationError, match=r"execute\(numbers\): it yields"):
        run(node, numbers)
