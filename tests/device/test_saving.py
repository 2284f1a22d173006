"""Tensors on a sky device are printed, saved, loaded, pickled and copied as others are."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn


def _saved(value: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


MAKERS: dict[str, Callable[[torch.device], torch.Tensor]] = {
    "floats": lambda d: torch.arange(6.0, device=d).reshape(2, 3) / 7,
    "a number": lambda d: torch.tensor(3, device=d),
    "nothing": lambda d: torch.ones(0, 3, device=d),
    "complex": lambda d: torch.tensor([1 + 2j, 0.5j], device=d).conj(),
    "booleans": lambda d: torch.tensor([True, False], device=d),
    "bfloat16": lambda d: torch.ones(2, device=d).bfloat16(),
    "many": lambda d: torch.arange(3000, device=d),
    "infinite": lambda d: torch.tensor([float("inf"), float("nan"), 1.0], device=d),
    "a parameter": lambda d: nn.Parameter(torch.ones(2, device=d)),
    "of a graph": lambda d: torch.ones(2, device=d, requires_grad=True) * 2,
}


@pytest.mark.parametrize("make", MAKERS)
def test_a_tensor_prints_as_on_the_cpu_with_its_device(device: torch.device, make: str) -> None:
    ours = repr(MAKERS[make](device)).replace(f"device='{device}'", "")
    right = repr(MAKERS[make](torch.device("cpu")))

    def bare(text: str) -> str:
        return "".join(text.split()).replace(",,", ",").replace(",)", ")")

    assert bare(ours) == bare(right)
    assert f"device='{device}'" in repr(MAKERS[make](device))


def test_a_number_formats(device: torch.device) -> None:
    x = torch.tensor(2.5, device=device)
    assert f"{x:.2f} {x} {float(x)} {int(x)}" == "2.50 2.5 2.5 2"


@pytest.mark.parametrize("weights_only", [True, False])
def test_a_state_is_loaded_to_where_it_is_wanted(device: torch.device, weights_only: bool) -> None:
    model = nn.Linear(3, 2).to(device)
    right = model.weight.tolist()
    places: dict[Any, torch.device] = {
        None: device,
        "cpu": torch.device("cpu"),
        device: device,
        str(device): device,
        "sky": torch.device("sky", torch.sky.current_device()),
    }
    for wanted, expected in places.items():
        file = _saved(model.state_dict())
        state = torch.load(file, map_location=wanted, weights_only=weights_only)
        assert state["weight"].device == expected
        assert state["weight"].tolist() == right
    state = torch.load(_saved(nn.Linear(3, 2).state_dict()), map_location=device)
    assert state["weight"].device == device


def test_a_state_goes_from_one_device_to_another(
    device: torch.device, other_device: torch.device
) -> None:
    file = _saved(torch.arange(3.0, device=device))
    moved = torch.load(file, map_location={str(device): str(other_device)})
    assert moved.device == other_device
    assert moved.tolist() == [0.0, 1.0, 2.0]


def test_views_stay_views_of_one_storage(device: torch.device) -> None:
    base = torch.arange(10.0, device=device)
    views = [base[2:5], base[::2], base.view(2, 5).t()]
    for again in (torch.load(_saved(views)), copy.deepcopy(views)):
        assert [t.tolist() for t in again] == [t.tolist() for t in views]
        assert [t.stride() for t in again] == [t.stride() for t in views]
        assert [t.storage_offset() for t in again] == [t.storage_offset() for t in views]
        again[0][0] = 77.0
        assert again[1][1].item() == 77.0
    assert base[2].item() == 2.0


def test_whole_models(device: torch.device) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).to(device)
    for again in (
        torch.load(_saved(model), weights_only=False),
        pickle.loads(pickle.dumps(model)),
        copy.deepcopy(model),
    ):
        assert again[1].running_mean.device == device
        assert torch.equal(again[0].weight, model[0].weight)
        assert again[0].weight.requires_grad


def test_states_load_across_devices_both_ways(device: torch.device) -> None:
    here, there = nn.Linear(3, 2), nn.Linear(3, 2).to(device)
    there.load_state_dict(here.state_dict())
    assert torch.equal(there.weight.cpu(), here.weight)
    assert there.weight.device == device
    here.load_state_dict({k: v * 2 for k, v in there.state_dict().items()})
    assert torch.equal(here.weight, 2 * there.weight.cpu())
    empty = nn.Linear(3, 2, device="meta")
    empty.load_state_dict(there.state_dict(), assign=True)
    assert empty.weight.device == device
    filled = nn.Linear(3, 2, device="meta").to_empty(device=device)
    filled.load_state_dict(there.state_dict())
    assert torch.equal(filled.weight, there.weight)


def test_storages_are_read_written_and_resized(device: torch.device) -> None:
    x = torch.arange(4.0, device=device)
    storage, host = x.untyped_storage(), torch.arange(4.0).untyped_storage()
    assert storage.device == device
    assert storage.tolist() == storage.cpu().tolist() == host.tolist()
    assert storage.clone().tolist() == host.tolist()
    storage.copy_(torch.ones(4).untyped_storage())
    assert x.tolist() == [1.0] * 4
    host.copy_(storage)
    assert host.tolist() == torch.ones(4).untyped_storage().tolist()
    storage.resize_(32)
    assert x.set_(storage).shape == (8,)
    assert x[:4].tolist() == [1.0] * 4
    storage.fill_(0)
    assert x.tolist() == [0.0] * 8


def test_what_needs_memory_here_says_how_to_get_it(device: torch.device) -> None:
    with pytest.raises(TypeError, match=r"Use Tensor\.cpu\(\)"):
        torch.ones(2, device=device).numpy()
