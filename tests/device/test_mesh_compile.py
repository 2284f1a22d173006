"""torch.compile on a mesh: one graph for all ranks, collectives and their places within it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import skyward as sky
from skyward.errors import DeviceError

from ..conftest import only_in_all, other_case

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is deprecated. Please use:FutureWarning"),
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module.*returned a view:UserWarning"),
    pytest.mark.filterwarnings("ignore:DTensor random operators:UserWarning"),
    # The tracer of torch looks at the parameters that `fully_shard` has gathered.
    pytest.mark.filterwarnings(
        "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
    ),
    # Of torch's own, where it imports its compiler.
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),
]


@pytest.fixture(scope="module")
def pair(compute: sky.Compute) -> Any:
    """A mesh of two ranks."""
    return compute.mesh("cpu", dp=2)


@pytest.fixture
def own(pair: Any) -> torch.Tensor:
    """Another tensor on each rank."""
    return (pair.get_rank() + 1) * torch.arange(8.0, device=pair.device).view(4, 2)


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def graphs(caplog: pytest.LogCaptureFixture) -> Callable[[], int]:
    """How many graphs the workers have got."""
    name = "skyward.device.graphs.client"
    caplog.set_level(logging.INFO, name)
    return lambda: sum(record.name == name for record in caplog.records)


def _agree(mesh: Any, ours: Any, theirs: Any) -> None:
    """The same on each rank, whose tensors may differ from one another."""
    if isinstance(ours, DTensor):
        assert (ours.device_mesh, ours.placements) == (theirs.device_mesh, theirs.placements)
    torch.testing.assert_close(mesh.each(ours), mesh.each(theirs))


# Functions.


def _collected(x: torch.Tensor, mesh: Any) -> list[torch.Tensor]:
    summed = x * 2
    dist.all_reduce(summed, group=mesh.get_group())
    return [
        summed + 1,
        functional.all_reduce(x.sin(), "avg", mesh) * 2,
        functional.all_gather_single(x + 1, 0, mesh) - 1,
        functional.reduce_scatter_single(x, "sum", 0, mesh).cos(),
        functional.all_to_all_single(x, None, None, mesh) * x[:1],
        functional.broadcast(x, 1, mesh) - x,
        functional.permute_tensor(x, [1, 0], mesh) * x,
        # What a rank has of its place is no number in the graph.
        x * (mesh.get_local_rank() + 1) + mesh.get_rank(),
    ]


def test_a_graph_has_the_collectives_and_the_places_of_its_ranks(
    pair: Any, own: torch.Tensor, graphs: Callable[[], int]
) -> None:
    plain = _collected(own, pair)
    compiled = torch.compile(_collected, fullgraph=True)
    for ours, theirs in zip(compiled(own, pair), plain, strict=True):
        _agree(pair, ours, theirs)
    assert graphs() == 1
    before = sky.device_stats(pair.device)
    compiled(own, pair)
    after = sky.device_stats(pair.device)
    assert after.operations - before.operations == 1
    assert after.waits == before.waits


def _redistributed(x: DTensor) -> tuple[Any, ...]:
    mesh = x.device_mesh
    columns = (x * 2).redistribute(mesh, [Shard(1)])
    whole = columns.redistribute(mesh, [Replicate()])
    product = whole @ columns
    rows = whole.sin().redistribute(mesh, [Shard(0)])
    local = DTensor.from_local(rows.to_local(), mesh, [Partial()])
    return product, rows, x.mean(), local.full_tensor(), x.full_tensor() + 1


def test_dtensors_are_redistributed_within_a_graph(pair: Any, graphs: Callable[[], int]) -> None:
    torch.manual_seed(0)
    x = distribute_tensor(torch.randn(4, 4), pair, [Shard(0)]).requires_grad_()
    compiled = torch.compile(_redistributed, fullgraph=True)
    found = []
    for function in (_redistributed, compiled):
        results = function(x)
        wholes = [each.full_tensor() if isinstance(each, DTensor) else each for each in results]
        (gradient,) = torch.autograd.grad(sum(whole.sum() for whole in wholes), [x])
        found.append([*results, gradient])
    for ours, theirs in zip(*found, strict=True):
        _agree(pair, ours, theirs)
    assert graphs() == 2


def test_a_rank_drops_out_its_own_part(pair: Any) -> None:
    """As without a compiler, whose random numbers are others."""
    x = distribute_tensor(torch.ones(16, 16), pair, [Shard(0)])
    dropped = torch.compile(lambda x: nn.functional.dropout(x, 0.5), fullgraph=True)(x)
    first, second = pair.each(dropped)
    assert not torch.equal(first, second)
    assert set(torch.cat([first, second]).unique().tolist()) == {0, 2}


@only_in_all
def test_a_mesh_of_the_same_shape_has_a_graph_of_its_own(
    pair: Any, compute: sky.Compute, graphs: Callable[[], int]
) -> None:
    """A graph has the names of process groups in it."""

    def function(x: torch.Tensor, mesh: Any) -> torch.Tensor:
        return functional.all_reduce(x, "sum", mesh) + mesh.get_rank()

    other: Any = compute.mesh("cpu", dp=2)
    compiled = torch.compile(function)
    for mesh in (pair, other, pair):
        x = mesh.get_rank() * torch.ones(2, device=mesh.device)
        _agree(mesh, compiled(x, mesh), function(x, mesh))
    assert graphs() == 2


# Models.


class Layer(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(self.linear(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.up, self.down = Layer(4, 8), Layer(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(self.norm(x)))


def _trained(mesh: Any, model: nn.Module, batch: torch.Tensor, run: Any = None) -> list[Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    found = []
    for _ in range(2):
        loss = (model if run is None else run)(batch).square().mean()
        loss.backward()
        found.append(mesh.each(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *(mesh.each(parameter.detach()) for parameter in model.parameters())]


def _parallel(mesh: Any) -> nn.Module:
    plan: dict[str, Any] = {"up.linear": ColwiseParallel(), "down.linear": RowwiseParallel()}
    return parallelize_module(Net().to(mesh.device), mesh, plan)


def _sequence_parallel(mesh: Any) -> nn.Module:
    plan: dict[str, Any] = {
        "norm": SequenceParallel(),
        "up.linear": ColwiseParallel(input_layouts=Shard(1)),
        "down.linear": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    return parallelize_module(Net().to(mesh.device), mesh, plan)


def _sharded(mesh: Any) -> nn.Module:
    model = Net()
    for layer in (model.up, model.down):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _layers_compiled(model: Any) -> None:
    model.up.compile()
    model.down.compile()


def _whole_compiled(model: Any) -> Any:
    return torch.compile(model)


WAYS: dict[str, tuple[Callable[[Any], nn.Module], Callable[[Any], Any]]] = {
    "tensor parallel": (_parallel, _whole_compiled),
    "sequence parallel": (_sequence_parallel, _whole_compiled),
    "fully_shard, by layers": (_sharded, _layers_compiled),
    "fully_shard, whole": (_sharded, _whole_compiled),
    "replicate": (lambda mesh: mesh.replicate(Net()), _whole_compiled),
    "replicate of a compiled one": (
        lambda mesh: mesh.replicate(Net()),
        lambda model: model.module.compile(),
    ),
}
FIRST = ("tensor parallel",)


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[] if way in FIRST else other_case) for way in WAYS]
)
def test_a_compiled_model_trains_as_it_does_uncompiled(
    pair: Any, way: str, graphs: Callable[[], int]
) -> None:
    prepare, compile_it = WAYS[way]
    torch.manual_seed(0)
    batch = torch.randn(4, 2, 4)
    there = batch.to(pair.device) if "parallel" in way else pair.split(batch)

    def trained(wrap: Callable[[Any], Any]) -> list[Any]:
        torch.manual_seed(1)
        model = prepare(pair)
        return _trained(pair, model, there, wrap(model))

    torch.testing.assert_close(trained(compile_it), trained(lambda model: None))
    assert graphs() >= 2


@only_in_all
def test_a_compiled_model_that_is_sharded_both_ways(mesh: Any) -> None:
    x = torch.randn(4, 4)

    def trained(wrap: Callable[[Any], Any]) -> list[Any]:
        torch.manual_seed(1)
        model = fully_shard(_parallel(mesh["tp"]), mesh=mesh["dp"])
        return _trained(mesh, model, mesh.split(x), wrap(model))

    torch.testing.assert_close(trained(_whole_compiled), trained(lambda model: None))


@other_case
def test_a_compiled_step_of_an_optimizer(pair: Any, graphs: Callable[[], int]) -> None:
    x, found = torch.randn(4, 4, device=pair.device), []
    for wrap in (torch.compile, lambda step: step):
        torch.manual_seed(1)
        model = _parallel(pair)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
        step = wrap(optimizer.step)  # type: ignore[operator]
        for _ in range(2):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            step()
        found.append([pair.each(parameter.detach()) for parameter in model.parameters()])
    torch.testing.assert_close(*found)
    assert graphs()


# What no graph has.


@other_case
def test_a_branch_on_a_value_that_differs_is_an_error(pair: Any, own: torch.Tensor) -> None:
    @torch.compile
    def function(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.sum() > 30 else x - 1

    with pytest.raises(DeviceError, match="the ranks of the mesh have different values here"):
        function(own)


def test_what_goes_to_a_mesh_and_comes_from_it_is_no_part_of_a_graph(
    pair: Any, own: torch.Tensor
) -> None:
    def function(x: torch.Tensor) -> list[torch.Tensor]:
        return [x.on(1), *pair.each(x[:2, 0] + pair.split(torch.arange(4.0)))]

    torch.testing.assert_close(torch.compile(function)(own), function(own))
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"split"):
        torch.compile(lambda x: pair.split(x) + 1, fullgraph=True)(own)
