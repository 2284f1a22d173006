"""Loading into a model: all of it fits, or one report says what does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import skyward as sky


class Extra(nn.Module):
    """A module with state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.steps = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"steps": self.steps}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


def network(**layers: nn.Module) -> nn.Module:
    return nn.ModuleDict(layers)


def test_every_difference_is_in_one_report(store: sky.ModelStore) -> None:
    saved = network(encoder=nn.Linear(3, 4), head=nn.Linear(4, 2), norm=nn.LayerNorm(4).double())
    model = network(encodre=nn.Linear(3, 4), head=nn.Linear(4, 5), norm=nn.LayerNorm(4))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    store.save_model(saved, "m")

    with pytest.raises(sky.ModelMismatchError) as caught:
        store.load_model("m", into=model)

    assert str(caught.value) == (
        "'m' version 1 does not fit ModuleDict: 2 missing from the store, "
        "2 unexpected, not in the model, 2 of another shape, 2 of another dtype\n"
        "  missing from the store:\n"
        "    encodre.weight  [4, 3] float32; nearest: encoder.weight\n"
        "    encodre.bias  [4] float32; nearest: encoder.bias\n"
        "  unexpected, not in the model:\n"
        "    encoder.weight  [4, 3] float32; nearest: encodre.weight\n"
        "    encoder.bias  [4] float32; nearest: encodre.bias\n"
        "  of another shape:\n"
        "    head.weight  stored [2, 4] float32, model [5, 4] float32\n"
        "    head.bias  stored [2] float32, model [5] float32\n"
        "  of another dtype:\n"
        "    norm.weight  stored float64, model float32\n"
        "    norm.bias  stored float64, model float32\n"
        "nothing was loaded; pass strict=False to load what fits"
    )
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_long_report_is_cut(store: sky.ModelStore) -> None:
    store.save_model({}, "m")

    with pytest.raises(sky.ModelMismatchError, match="50 missing from the store") as caught:
        store.load_model("m", into=nn.ParameterList([torch.zeros(1) for _ in range(50)]))
    assert "and 30 more" in str(caught.value)


def test_not_strict_loads_what_fits_and_logs_the_rest(
    store: sky.ModelStore, caplog: pytest.LogCaptureFixture
) -> None:
    saved = network(body=nn.Linear(3, 4).half(), head=nn.Linear(4, 2))
    model = network(body=nn.Linear(3, 4), head=nn.Linear(4, 5), new=nn.Linear(1, 1))
    store.save_model(saved, "m")

    store.load_model("m", into=model, strict=False)

    assert torch.equal(model["body"].weight, saved["body"].weight.float())
    assert model["head"].weight.shape == (5, 4)
    assert "head.weight  stored [2, 4] float32, model [5, 4] float32" in caplog.text


def test_a_checkpoint_is_no_state_dict(store: sky.ModelStore) -> None:
    model = nn.Linear(2, 2)
    store.save_model({"model": model.state_dict(), "step": 3}, "run")
    store.save_model([torch.ones(1)], "list")

    with pytest.raises(sky.ModelMismatchError, match="no state dict but a dict of model, step"):
        store.load_model("run", into=model)
    with pytest.raises(sky.ModelMismatchError, match="no state dict but list"):
        store.load_model("list", into=model)


def test_into_takes_a_module(store: sky.ModelStore) -> None:
    store.save_model({}, "m")

    with pytest.raises(sky.ConfigurationError, match=r"into takes a torch\.nn\.Module"):
        store.load_model("m", into={})  # type: ignore[arg-type]


def test_state_that_is_no_tensor_returns_too(store: sky.ModelStore) -> None:
    saved, model = Extra(), Extra()
    saved.steps = 12
    store.save_model(saved, "m")

    store.load_model("m", into=model)

    assert model.steps == 12
    assert torch.equal(model.layer.weight, saved.layer.weight)


def test_parameters_keep_their_identity(store: sky.ModelStore) -> None:
    model = nn.Linear(3, 3)
    store.save_model(nn.Linear(3, 3), "m")
    weight, pointer = model.weight, model.weight.data_ptr()

    store.load_model("m", into=model)

    assert model.weight is weight
    assert model.weight.data_ptr() == pointer
    assert model.weight.requires_grad


class Tied(nn.Module):
    """Two names for one parameter, a buffer, and an empty parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.out = nn.Linear(3, 5, bias=False)
        self.out.weight = self.embedding.weight
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.none = nn.Parameter(torch.ones(0))
        self.register_buffer("count", torch.tensor(3))


def test_a_model_on_the_meta_device_is_made_real(store: sky.ModelStore, same: Any) -> None:
    saved = Tied()
    store.save_model(saved, "m")
    with torch.device("meta"):
        model = Tied()

    store.load_model("m", into=model)

    assert same(dict(model.state_dict()), dict(saved.state_dict()))
    assert model.out.weight is model.embedding.weight
    assert model.out.weight.requires_grad
    assert not model.frozen.requires_grad
    assert model.count == 3


def test_a_partial_load_reads_only_what_it_needs(store: sky.ModelStore, folder: Any) -> None:
    """The other object is gone, and not missed."""
    saved = network(body=nn.Linear(2, 2), head=nn.Linear(2100, 2100, bias=False))
    store.save_model(saved, "m")
    (large,) = [file for file in folder.glob("objects/*/*") if file.stat().st_size > 1 << 20]
    large.unlink()
    model = network(body=nn.Linear(2, 2))

    store.load_model("m", into=model, strict=False)

    assert torch.equal(model["body"].weight, saved["body"].weight)
