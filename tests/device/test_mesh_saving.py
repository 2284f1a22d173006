"""Models on a mesh are saved, and loaded on this mesh, on another one and without one."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import skyward as sky
from skyward.errors import ConfigurationError, DeviceError

from ..conftest import other_case

State = dict[str, torch.Tensor]
pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:Please use DTensor instead"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view"),
]
WHOLE = StateDictOptions(full_state_dict=True)
ON_THE_CPU = StateDictOptions(full_state_dict=True, cpu_offload=True)


def _model(seed: int = 0) -> nn.Sequential:
    """A model whose last layer has no equal parts for four ranks."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 6))


def _fully_sharded(model: nn.Module, mesh: Any) -> nn.Module:
    return fully_shard(model.to(mesh.device), mesh=mesh._flatten("all"))


def _hybrid(model: nn.Module, mesh: Any) -> nn.Module:
    return fully_shard(model.to(mesh.device), mesh=mesh["dp", "tp"])


def _in_columns_and_rows(model: nn.Module, mesh: Any) -> nn.Module:
    plan = {
        "0": ColwiseParallel(output_layouts=Replicate()),
        "2": RowwiseParallel(input_layouts=Replicate()),
    }
    return parallelize_module(model.to(mesh.device), mesh["tp"], plan)  # type: ignore[arg-type]


def _both(model: nn.Module, mesh: Any) -> nn.Module:
    return fully_shard(_in_columns_and_rows(model, mesh), mesh=mesh["dp"])


def _replicated(model: nn.Module, mesh: Any) -> nn.Module:
    return mesh.replicate(model, "dp").module  # type: ignore[no-any-return]


KINDS: dict[str, Callable[[nn.Module, Any], nn.Module]] = {
    "fully_shard": _fully_sharded,
    "hybrid": _hybrid,
    "tensor parallel": _in_columns_and_rows,
    "both": _both,
    "DDP": _replicated,
}
FEW = [pytest.param(kind, marks=() if kind == "both" else other_case) for kind in KINDS]


def _trained(model: nn.Module, mesh: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    model(torch.ones(4, 8, device=mesh.device)).sum().backward()
    optimizer.step()
    return optimizer


def _here(value: Any) -> torch.Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).cpu()


def _state(model: nn.Module) -> State:
    return {name: _here(value) for name, value in model.state_dict().items()}


def _moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    states = get_optimizer_state_dict(model, optimizer, options=WHOLE)["state"]
    return {
        f"{name}.{key}": _here(value)
        for name, state in states.items()
        for key, value in state.items()  # type: ignore[union-attr]
    }


def _assert_equal(found: State, right: State) -> None:
    assert found.keys() == right.keys()
    assert [name for name in right if not torch.equal(found[name], right[name])] == []


@pytest.mark.parametrize("kind", FEW)
def test_a_checkpoint_is_loaded_on_every_mesh_and_without_one(
    mesh: Any, kind: str, tmp_path: Path
) -> None:
    model = KINDS[kind](_model(), mesh)
    optimizer = _trained(model, mesh)
    state = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=tmp_path)
    right = _state(model)

    local = _model(1)
    dcp.load({"model": local.state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    _assert_equal(local.state_dict(), right)

    for other in KINDS.values():
        again = other(_model(1), mesh)
        adam = torch.optim.AdamW(again.parameters(), lr=0.1, foreach=False)
        states = get_state_dict(again, adam)
        loaded = dict(zip(("model", "optim"), states, strict=True))
        dcp.load(loaded, checkpoint_id=tmp_path)
        set_state_dict(
            again, adam, model_state_dict=loaded["model"], optim_state_dict=loaded["optim"]
        )
        _assert_equal(_state(again), right)
        _assert_equal(_moments(again, adam), _moments(model, optimizer))


def test_a_checkpoint_has_each_shard_once_as_that_of_processes_has(
    mesh: Any, tmp_path: Path
) -> None:
    model = fully_shard(_model().to(mesh.device), mesh=mesh["dp", "tp"])
    written = dcp.save(model.state_dict(), checkpoint_id=tmp_path)
    rows = {
        name: [each.sizes[0] for each in about.chunks]  # type: ignore[union-attr]
        for name, about in written.state_dict_metadata.items()
    }
    assert rows["0.weight"] == [8, 8]
    assert rows["2.bias"] == [3, 3]


def test_a_checkpoint_is_loaded_on_a_mesh_of_another_size(
    mesh: Any, four_nodes: sky.Compute, tmp_path: Path
) -> None:
    model = _fully_sharded(_model(), mesh)
    dcp.save(model.state_dict(), checkpoint_id=tmp_path)
    two = four_nodes.mesh("cpu", dp=2)
    again = fully_shard(_model(1).to(two.device), mesh=two)
    torch.sky.set_device(mesh.device)
    state = again.state_dict()
    dcp.load(state, checkpoint_id=tmp_path)
    again.load_state_dict(state)
    _assert_equal(_state(again), _state(model))
    whole = get_model_state_dict(again, options=ON_THE_CPU)
    _assert_equal(whole, _state(model))  # type: ignore[arg-type]


def test_a_checkpoint_of_a_plain_program_is_loaded_on_a_mesh(mesh: Any, tmp_path: Path) -> None:
    dcp.save(_model().state_dict(), checkpoint_id=tmp_path, no_dist=True)
    model = _fully_sharded(_model(1), mesh)
    dcp.load(model.state_dict(), checkpoint_id=tmp_path)
    _assert_equal(_state(model), _model().state_dict())
    x = torch.ones(4, 8)
    assert torch.allclose(model(x.to(mesh.device)).cpu(), _model()(x), atol=1e-6)


def test_a_checkpoint_is_saved_while_training_goes_on(mesh: Any, tmp_path: Path) -> None:
    model = _fully_sharded(_model(), mesh)
    saving: Any = dcp.async_save(model.state_dict(), checkpoint_id=tmp_path)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    saving.result()
    dcp.load(model.state_dict(), checkpoint_id=tmp_path)
    _assert_equal(_state(model), _model().state_dict())


@pytest.mark.parametrize("kind", KINDS)
def test_whole_states_are_taken_and_set(mesh: Any, kind: str) -> None:
    model = KINDS[kind](_model(), mesh)
    optimizer = _trained(model, mesh)
    state = get_model_state_dict(model, options=ON_THE_CPU)
    moments = get_optimizer_state_dict(model, optimizer, options=ON_THE_CPU)
    assert all(type(value) is torch.Tensor and value.is_cpu for value in state.values())
    _assert_equal(state, _state(model))  # type: ignore[arg-type]
    for from_rank_0 in (False, True):
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=from_rank_0)
        again = KINDS[kind](_model(1), mesh)
        adam = torch.optim.AdamW(again.parameters(), lr=0.1, foreach=False)
        # PyTorch writes what it has made of a state into the dict that it is given.
        set_model_state_dict(again, dict(state), options=options)
        set_optimizer_state_dict(again, adam, copy.deepcopy(moments), options=options)
        _assert_equal(_state(again), _state(model))
        _assert_equal(_moments(again, adam), _moments(model, optimizer))


@pytest.mark.parametrize("kind", FEW)
def test_a_model_is_saved_to_a_store_and_loaded_from_it(
    mesh: Any, kind: str, tmp_path: Path
) -> None:
    store = sky.ModelStore(tmp_path, progress=False)
    model = KINDS[kind](_model(), mesh)
    version = store.save_model(model, "model")
    assert version.size == sum(value.nbytes for value in _model().state_dict().values())
    _assert_equal(store.load_model("model"), _model().state_dict())
    _assert_equal(store.load_model("model", into=_model(1)).state_dict(), _model().state_dict())
    for other in KINDS.values():
        again = store.load_model("model", into=other(_model(1), mesh))
        _assert_equal(_state(again), _model().state_dict())
    optimizer = _trained(model, mesh)
    states = get_optimizer_state_dict(model, optimizer)
    store.save_model(states, "optimizer")
    first = store.load_model("optimizer")["state"]["2.bias"]["exp_avg"]
    assert torch.equal(first, _moments(model, optimizer)["2.bias.exp_avg"])


def test_a_model_without_values_is_filled_after_to_empty(mesh: Any, tmp_path: Path) -> None:
    store = sky.ModelStore(tmp_path, progress=False)
    store.save_model(_model(), "model")
    model = fully_shard(_model().to("meta"), mesh=mesh["dp"])
    with pytest.raises(ConfigurationError, match="to_empty"):
        store.load_model("model", into=model, device=mesh.device)
    model.to_empty(device=mesh.device)
    store.load_model("model", into=model)
    _assert_equal(_state(model), _model().state_dict())


def test_a_whole_state_is_a_file_of_torch(mesh: Any) -> None:
    model = _fully_sharded(_model(), mesh)
    file = io.BytesIO()
    torch.save(get_model_state_dict(model, options=ON_THE_CPU), file)
    file.seek(0)
    _assert_equal(torch.load(file), _model().state_dict())


def test_a_sharded_tensor_is_not_pickled_but_says_what_to_do(mesh: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"torch\.distributed\.checkpoint\.save"):
        torch.save(_fully_sharded(_model(), mesh).state_dict(), io.BytesIO())


def test_a_sharded_tensor_is_copied(mesh: Any) -> None:
    model = copy.deepcopy(_in_columns_and_rows(_model(), mesh))
    _assert_equal(_state(model), _model().state_dict())


def test_what_all_ranks_have_alike_is_a_file_of_torch(mesh: Any) -> None:
    file = io.BytesIO()
    torch.save(_replicated(_model(), mesh).state_dict(), file)
    file.seek(0)
    _assert_equal(torch.load(file, map_location="cpu"), _model().state_dict())


def test_what_differs_between_the_ranks_is_not_saved_as_if_it_were_one(
    mesh: Any, tmp_path: Path
) -> None:
    different = mesh.get_local_rank("dp") + torch.ones(3, device=mesh.device)
    saves: tuple[Callable[[], object], ...] = (
        lambda: torch.save({"x": different}, io.BytesIO()),
        lambda: sky.ModelStore(tmp_path / "store", progress=False).save_model(
            {"x": different}, "x"
        ),
    )
    for save in saves:
        with pytest.raises(DeviceError, match=r"different values here; tensor\.on\(rank\)"):
            save()
    with pytest.raises(dcp.CheckpointException, match="different values here"):
        dcp.save({"x": different}, checkpoint_id=tmp_path / "checkpoint")
    torch.save({"x": different.on(0)}, io.BytesIO())


def test_a_sum_that_is_not_made_yet_is_not_saved(mesh: Any, tmp_path: Path) -> None:
    left = distribute_tensor(torch.ones(4, 4), mesh["tp"], [Shard(1)])
    right = distribute_tensor(torch.ones(4, 4), mesh["tp"], [Shard(0)])
    with pytest.raises(ValueError, match="partial placements"):
        sky.ModelStore(tmp_path, progress=False).save_model({"x": left @ right}, "x")


def test_training_goes_on_from_a_checkpoint_on_a_mesh_that_was_made_again(
    sharing: Any, eventually: Any, tmp_path: Path
) -> None:
    def begun(mesh: Any, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = fully_shard(_model(seed).to(mesh.device), mesh=mesh)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def losses(mesh: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        found = []
        for step in range(3):
            x = torch.arange(32.0).view(4, 8) / (step + 8)
            loss = model(mesh.split(x)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            whole = loss.detach().clone()
            dist.all_reduce(whole, dist.ReduceOp.AVG, group=mesh.get_group())
            found.append(whole.item())
        return found

    with sharing(sky.Compute(nodes=2, options=sky.Options(console=False))) as compute:
        before = {each.pid for each in psutil.Process().children(recursive=True)}
        mesh: Any = compute.mesh("cpu", dp=2)
        model, optimizer = begun(mesh, 0)
        losses(mesh, model, optimizer)
        states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.save(states, checkpoint_id=tmp_path)
        right = losses(mesh, model, optimizer)

        for each in psutil.Process().children(recursive=True):
            if each.pid not in before and "skyward.device.worker" in each.cmdline():
                each.kill()
        eventually(lambda: not mesh.is_open)
        again: Any = compute.mesh("cpu", dp=2)
        model, optimizer = begun(again, 1)
        states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.load(states, checkpoint_id=tmp_path)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=states["model"],
            optim_state_dict=states["optimizer"],
        )
        assert losses(again, model, optimizer) == right
