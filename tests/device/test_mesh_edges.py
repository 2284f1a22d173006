"""A mesh where two of them meet, where its program errs, and where PyTorch expects a process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import skyward as sky


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
