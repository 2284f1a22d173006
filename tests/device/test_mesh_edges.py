"""A mesh where two of them meet, where its program errs, and where PyTorch expects a process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import skyward as sky
from skyward.errors import ConfigurationError, SerializationError
from skyward.nodes.fleet import Fleet


@pytest.fixture(scope="module")
def twins(four_nodes: sky.Compute) -> tuple[Any, Any]:
    """Two meshes of one shape."""
    return four_nodes.mesh("cpu", dp=2), four_nodes.mesh("cpu", dp=2)


def test_meshes_of_one_shape_are_not_each_other(twins: Any) -> None:
    one, other = twins
    assert one != other
    assert one["dp"] != other["dp"]
    assert one["dp"] == one["dp"]
    assert hash(one["dp"]) == hash(one["dp"])


def test_a_result_is_on_the_mesh_of_its_operands_where_another_has_the_same_shape(
    twins: Any,
) -> None:
    whole = torch.arange(8.0).view(4, 2)
    for mesh in twins:
        x = distribute_tensor(whole, mesh, [Shard(0)]).requires_grad_()
        partial = DTensor.from_local(torch.ones(4, 2, device=mesh.device), mesh, [Partial()])
        for y, right in (
            (x * 2, whole * 2),
            (x @ x.T, whole @ whole.T),
            (x.sum(), whole.sum()),
            (partial + 1, torch.full((4, 2), 3.0)),
            (x.redistribute(placements=[Replicate()]), whole),
        ):
            assert y.device_mesh is mesh
            assert y.device == y.to_local().device == mesh.device
            assert torch.equal(y.full_tensor().detach().cpu(), right)
        (x * x).sum().backward()
        assert x.grad.device_mesh is mesh
        assert torch.equal(x.grad.full_tensor().cpu(), 2 * whole)


def test_operands_of_two_meshes_are_an_error_that_names_both(twins: Any) -> None:
    x, y = (distribute_tensor(torch.ones(4), mesh, [Shard(0)]) for mesh in twins)
    one, other = (mesh.device for mesh in twins)
    with pytest.raises(RuntimeError, match=f"{one}.*{other}"):
        x + y


# The places of the ranks.


def test_the_number_of_a_rank_may_be_written_to(mesh: Any) -> None:
    for place in (mesh.get_rank(), mesh.get_local_rank("dp"), *mesh.get_coordinate()):
        place += 1
    assert mesh.each(mesh.get_rank()) == [0, 1, 2, 3]
    assert mesh.each(mesh.split(torch.arange(2))) == [0, 0, 1, 1]


def test_a_place_is_first_asked_for_in_any_mode(mesh: Any) -> None:
    def group(name: str) -> Any:
        return mesh["dp", "tp"]._flatten(name).get_group()

    inferred, traced = group("inferred"), group("traced")
    with torch.inference_mode():
        inferred.rank()
    assert not inferred.rank().is_inference()
    with FakeTensorMode():
        assert isinstance(traced.rank(), FakeTensor)
    assert mesh.each(traced.rank()) == [0, 1, 2, 3]
    with FakeTensorMode():
        assert isinstance(traced.rank(), FakeTensor)


# Functions.


@sky.function
def doubled(x: torch.Tensor, *others: torch.Tensor) -> list[Any]:
    x *= 2
    return [str(x.device), *(each.tolist() for each in (x, *others))]


def test_a_function_gets_the_tensor_of_its_own_rank_and_writes_to_it(
    mesh: Any, four_nodes: sky.Compute
) -> None:
    x = mesh.get_rank() + torch.ones(2, device=mesh.device)
    assert doubled(x) @ four_nodes == [["cpu", [2.0 * n] * 2] for n in (1, 2, 3, 4)]
    assert [each.tolist() for each in mesh.each(x)] == [[2.0 * n] * 2 for n in (1, 2, 3, 4)]


def test_a_function_gets_the_part_of_a_dtensor_that_its_rank_has(
    mesh: Any, four_nodes: sky.Compute
) -> None:
    x = distribute_tensor(torch.arange(4.0), mesh["tp"], [Shard(0)])
    found = doubled(x.to_local()) @ four_nodes
    assert found == [["cpu", [0.0, 2.0]], ["cpu", [4.0, 6.0]]] * 2
    assert x.full_tensor().tolist() == [0.0, 2.0, 4.0, 6.0]
    with pytest.raises(SerializationError, match=r"f\(x\.to_local\(\)\) @ compute"):
        doubled(x) @ four_nodes


@pytest.mark.filterwarnings("ignore:copies between sky")
def test_a_function_gets_what_is_on_other_devices_beside_the_tensors_of_its_rank(
    mesh: Any, four_nodes: sky.Compute
) -> None:
    elsewhere = torch.ones(2, device=four_nodes.device("cpu", node=1))
    found = doubled(mesh.get_rank(), elsewhere, torch.zeros(1)) @ four_nodes
    assert found == [["cpu", 2 * rank, [1.0, 1.0], [0.0]] for rank in range(4)]


def test_a_function_needs_as_many_ranks_as_workers(
    mesh: Any, twins: Any, four_nodes: sky.Compute, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = (torch.ones(2, device=each.device) for each in (mesh, twins[0]))
    fewer = r"2 ranks on nodes \[0, 1\], and the function runs on 4 workers of nodes \[0, 1, 2, 3\]"
    with pytest.raises(ConfigurationError, match=fewer):
        doubled(y) @ four_nodes
    # As where a node has several GPUs and one worker.
    monkeypatch.setattr(Fleet, "workers", lambda self: [(0, 0), (1, 0)])
    more = r"4 ranks on nodes \[0, 1, 2, 3\], and the function runs on 2 workers of nodes \[0, 1\]"
    with pytest.raises(ConfigurationError, match=more):
        doubled(x) @ four_nodes
    assert x.tolist() == y.tolist() == [1.0, 1.0]


@pytest.mark.filterwarnings("ignore:copies between sky")
def test_a_mesh_is_no_device_of_its_first_node(mesh: Any, four_nodes: sky.Compute) -> None:
    elsewhere = torch.ones(2, device=four_nodes.device("cpu", node=1))
    assert four_nodes.run(doubled(elsewhere), on=0) == ["cpu", [2.0, 2.0]]
    assert doubled(elsewhere) @ four_nodes == [["cpu", [2.0, 2.0]]] * 4


def test_a_node_with_any_rank_has_an_open_device(mesh: Any, four_nodes: sky.Compute) -> None:
    fleet = four_nodes._open_fleet
    assert all(fleet.has_devices(node) for node in fleet.nodes)


# Which devices it is of.


def _kinds(compute: sky.Compute, kind: str) -> list[str]:
    return [kind for _, kind in compute._open_fleet.devices._places(kind)]


def test_a_mesh_of_gpus_is_none_of_processors(
    four_nodes: sky.Compute, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = 'takes 2 ranks, and the pool has 0 with GPUs: 0 of its 4 nodes have one.*mesh."cpu"'
    with pytest.raises(ConfigurationError, match=said):
        four_nodes.mesh("cuda", dp=2)
    monkeypatch.setenv("SKYWARD_DEVICE", "cpu")
    with pytest.raises(ConfigurationError, match="takes 9 ranks, and the pool has 4 on 4 nodes"):
        four_nodes.mesh("cuda", dp=9)


def test_all_ranks_of_a_mesh_are_on_gpus_or_on_processors(
    four_nodes: sky.Compute, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _kinds(four_nodes, "auto") == ["cpu"] * 4
    for node in four_nodes._open_fleet.nodes[2:]:
        monkeypatch.setattr(node.host, "accelerators", 2)
    assert _kinds(four_nodes, "auto") == ["cuda:0", "cuda:1"] * 2
    assert _kinds(four_nodes, "cpu") == ["cpu"] * 4
    with pytest.raises(ConfigurationError, match="has 4 with GPUs: 2 of its 4 nodes have one"):
        four_nodes.mesh(dp=6)


# Parameters that fully_shard has padded.

REDUCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "max": lambda x: x.max(),
    "min": lambda x: (-x).min(),
    "amax": lambda x: x.amax(0),
    "sum": lambda x: x.exp().sum(),
    "sum of columns": lambda x: (x + 1).sum(0),
    "sum of rows": lambda x: x.exp().sum(1),
    "mean": lambda x: (x + 1).mean(),
    "count": lambda x: (x == 0).sum(),
    "nonzero": lambda x: torch.count_nonzero(x == 0),
    "any": lambda x: (x == 0).any(),
    "all": lambda x: (x != 0).all(),
    "product": lambda x: (x / 20).prod(),
    "norm": lambda x: x.norm(),
    "norm of order 0": lambda x: torch.linalg.vector_norm(x + 1, 0),
    "least norm": lambda x: torch.linalg.vector_norm(x, float("-inf")),
    "matrix product": lambda x: x.div(50).exp().T @ x.div(50).exp(),
    "logsumexp": lambda x: x.logsumexp(0),
}


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_reduction_is_that_of_the_parameter_without_its_padding(
    mesh: Any, reduction: str
) -> None:
    whole = torch.arange(30.0).view(5, 6) - 50
    model: Any = nn.Linear(6, 5)
    model.weight = nn.Parameter(whole.clone())
    weight = fully_shard(model, mesh=mesh["dp"]).weight.detach()
    assert weight.to_local().shape == (3, 6)
    found = REDUCTIONS[reduction](weight).full_tensor().cpu()
    torch.testing.assert_close(found, REDUCTIONS[reduction](whole))


def test_the_norm_of_parameters_that_were_filled_leaves_out_their_padding(mesh: Any) -> None:
    model: Any = fully_shard(nn.Linear(6, 5, device="meta"), mesh=mesh["dp"])
    model.to_empty(device=mesh.device)
    nn.init.ones_(model.weight)
    nn.init.ones_(model.bias)
    model(torch.ones(2, 6, device=mesh.device)).sum().backward()
    norms = [each.norm().full_tensor().item() ** 2 for each in model.parameters()]
    assert norms == pytest.approx([30, 5])
    assert [rows.sum() for rows in mesh.each(model.bias)] == [3, 3, 2, 2]


# Collectives.


def test_a_loop_that_asks_whether_a_collective_is_over_ends(mesh: Any) -> None:
    x = mesh.get_rank()
    here = torch.ones(2)
    for tensor, total in ((x, 6), (here, [4, 4])):
        work = dist.all_reduce(tensor, group=mesh.world, async_op=True)
        while not work.is_completed():
            pass
        assert tensor.tolist() == total


def test_ranks_multiply_before_they_add_up(mesh: Any) -> None:
    op = dist._make_nccl_premul_sum(0.5)
    own = mesh.get_rank().float() * torch.ones(4, device=mesh.device)
    part = torch.empty(1, device=mesh.device)
    dist.reduce_scatter_tensor(part, own, op, group=mesh.world)
    assert [each.tolist() for each in mesh.each(part)] == [[3.0]] * 4
    assert [each[0] for each in mesh.each(own)] == [0, 1, 2, 3]
    dist.all_reduce(own, op, group=mesh.world)
    assert own.tolist() == [3.0] * 4


def test_gradients_are_divided_by_the_factor_that_fully_shard_is_told(mesh: Any) -> None:
    def gradient(factor: float | None) -> torch.Tensor:
        model: Any = fully_shard(nn.Linear(2, 2).to(mesh.device), mesh=mesh["dp"])
        if factor is not None:
            model.set_gradient_divide_factor(factor)
        model(torch.ones(4, 2, device=mesh.device)).sum().backward()
        return model.bias.grad.full_tensor().cpu()  # type: ignore[no-any-return]

    assert torch.equal(gradient(8.0) * 4, gradient(None))


def test_objects_are_those_of_the_program(mesh: Any) -> None:
    gathered, listed, sent = [None] * 4, [None] * 4, [1, "two"]
    dist.all_gather_object(gathered, {"a": 1}, group=mesh.world)
    dist.gather_object({"a": 1}, listed, group=mesh.world)
    dist.gather_object({"a": 1}, dst=2, group=mesh.world)
    dist.broadcast_object_list(sent, src=2, group=mesh.world)
    assert gathered == listed == [{"a": 1}] * 4
    assert sent == [1, "two"]
    for give in (
        lambda: dist.scatter_object_list([None], [1, 2, 3, 4], group=mesh.world),
        lambda: dist.send_object_list([1], dst=1, group=mesh.world),
        lambda: dist.recv_object_list([None], src=1, group=mesh.world),
    ):
        with pytest.raises(ConfigurationError, match="one program, which has all objects"):
            give()


# What a process per rank has.


def test_what_a_mesh_has_no_default_of_says_what_to_give(mesh: Any) -> None:
    x = torch.ones(2, device=mesh.device)
    for use, what in (
        (lambda: fully_shard(nn.Linear(2, 2).to(mesh.device)), "mesh"),
        (lambda: dist.new_group([0, 1]), "group"),
        (lambda: dist.new_subgroups(2), "group"),
        (lambda: dist.all_reduce(x), "group"),
        (dist.get_rank, "group"),
        (lambda: torch.utils.data.DistributedSampler([1, 2]), "group"),
    ):
        said = rf"makes no default {what}.*mesh=mesh\[.*group=mesh\.get_group\("
        with pytest.raises((ConfigurationError, RuntimeError), match=said):
            use()


def test_a_device_mesh_of_sky_devices_is_made_by_a_pool(mesh: Any) -> None:
    for make in (
        lambda: init_device_mesh("sky", (4,)),
        lambda: DeviceMesh("sky", [0, 1, 2, 3]),
    ):
        with pytest.raises(ConfigurationError, match=r"made by compute\.mesh\("):
            make()


# What a block or a thread changes.


def test_the_current_device_is_that_of_before_when_a_block_of_a_mesh_ends(
    mesh: Any, twins: Any
) -> None:
    before = torch.sky.current_device()
    for one in twins:
        with one, mesh["dp"]:
            assert torch.sky.current_device() == mesh.device.index
            with one:
                assert torch.sky.current_device() == one.device.index
            assert torch.sky.current_device() == mesh.device.index
        assert torch.sky.current_device() == before


def test_a_group_is_as_one_for_the_thread_that_says_so(mesh: Any) -> None:
    group = mesh.get_group("dp")
    with ThreadPoolExecutor(1) as thread, group.as_one():
        assert group.rank() == 0
        assert mesh.each(thread.submit(group.rank).result()) == [0, 0, 1, 1]
    assert mesh.each(group.rank()) == [0, 0, 1, 1]


@pytest.mark.parametrize("view", [torch.conj, lambda x: x.conj().imag], ids=["conj", "neg"])
def test_a_view_that_negates_is_read_by_rank(
    mesh: Any, view: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    whole = torch.tensor([1 + 2j, 3 - 1j])
    there = view(whole.to(mesh.device))
    assert torch.equal(there.on(2), view(whole))
    assert all(torch.equal(each, view(whole)) for each in mesh.each(there))
    assert str(mesh.device) in repr(there)
