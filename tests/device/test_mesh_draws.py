"""Random numbers of sharded tensors: those that a whole tensor of one device would have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    Replicate,
    Shard,
    distribute_tensor,
    rand,
    randn,
    zeros,
)
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module


def _whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor().cpu()  # type: ignore[no-any-return]


def _drawn(draw: Callable[[], Any]) -> Any:
    torch.manual_seed(3)
    return draw()


FILLS: dict[str, Callable[[torch.Tensor], object]] = {
    "normal": nn.init.normal_,
    "uniform": nn.init.uniform_,
    "bernoulli": lambda x: x.bernoulli_(0.3),
}


@pytest.mark.parametrize("fill", FILLS)
def test_a_sharded_tensor_is_filled_as_a_whole_one(mesh: Any, fill: str) -> None:
    with torch.no_grad():
        whole, sharded = (
            torch.zeros(8, 6, device=mesh.device),
            zeros(8, 6, device_mesh=mesh, placements=[Shard(0), Shard(1)]),
        )
        _drawn(lambda: FILLS[fill](whole))
        _drawn(lambda: FILLS[fill](sharded))
    assert torch.equal(_whole(sharded), whole.cpu())


def test_a_model_that_was_sharded_without_values_is_initialized_as_a_whole_one(mesh: Any) -> None:
    right = _drawn(lambda: nn.Linear(6, 7, device=mesh.device))
    # Seven rows have no equal parts.
    model: Any = fully_shard(nn.Linear(6, 7, device="meta"), mesh=mesh)
    model.to_empty(device=mesh.device)
    _drawn(model.reset_parameters)
    assert torch.equal(_whole(model.weight), right.weight.cpu())
    assert torch.equal(_whole(model.bias), right.bias.cpu())


def test_a_parallel_model_that_is_fully_sharded_is_initialized_as_a_whole_one(mesh: Any) -> None:
    right = _drawn(lambda: nn.Linear(6, 8, device=mesh.device))
    model: Any = nn.Sequential(nn.Linear(6, 8, device="meta"))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    fully_shard(model, mesh=mesh["dp"]).to_empty(device=mesh.device)  # type: ignore[attr-defined]
    _drawn(model[0].reset_parameters)
    assert torch.equal(_whole(model[0].weight), right.weight.cpu())


def test_a_sharded_tensor_is_dropped_out_as_a_whole_one(mesh: Any) -> None:
    x = torch.arange(1.0, 33, device=mesh.device).view(8, 4)
    right = _drawn(lambda: nn.functional.dropout(x, 0.5)).cpu()
    sharded = distribute_tensor(x, mesh["dp"], [Shard(0)]).requires_grad_()
    dropped = _drawn(lambda: nn.functional.dropout(sharded, 0.5))
    assert torch.equal(_whole(dropped), right)
    dropped.sum().backward()
    assert torch.equal(_whole(sharded.grad) * x.cpu(), right)


def test_new_tensors_are_drawn_as_whole_ones(mesh: Any) -> None:
    for here, there in ((torch.randn, randn), (torch.rand, rand)):
        right = _drawn(lambda here=here: here(4, 2, device=mesh.device)).cpu()  # type: ignore[misc]
        sharded = _drawn(
            lambda there=there: there(4, 2, device_mesh=mesh["tp"], placements=[Shard(0)])  # type: ignore[misc]
        )
        assert torch.equal(_whole(sharded), right)


def test_tensors_like_a_sharded_one_are_drawn_as_whole_ones(mesh: Any) -> None:
    whole = torch.full((8, 4), 0.5, device=mesh.device)
    sharded = distribute_tensor(whole, mesh, [Shard(0), Replicate()])
    draws: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
        torch.randn_like,
        torch.rand_like,
        lambda x: torch.randint_like(x, 9),
    )
    for draw in draws:
        right = _drawn(lambda draw=draw: draw(whole)).cpu()  # type: ignore[misc]
        assert torch.equal(_whole(_drawn(lambda draw=draw: draw(sharded))), right)  # type: ignore[misc]
    chances = _whole(_drawn(lambda: torch.bernoulli(sharded)))
    assert not torch.equal(chances[:4], chances[4:])
