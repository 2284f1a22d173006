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

    with pytest.raises(sky.errors.ModelMismatchError) as caught:
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

    with pytest.raises(sky.errors.ModelMismatchError, match="50 missing from the store") as caught:
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

    with pytest.raises(
        sky.errors.ModelMismatchError, match="no state dict but a dict of model, step"
    ):
        store.load_model("run", into=model)
    with pytest.raises(sky.errors.ModelMismatchError, match="no state dict but list"):
        store.load_model("list", into=model)


def test_into_takes_a_module(store: sky.ModelStore) -> None:
    store.save_model({}, "m")

    with pytest.raises(sky.errors.ConfigurationError, match=r"into takes a torch\.nn\.Module"):
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


class Kept(nn.Module):
    """Extra state that is a tensor, and some that has tensors inside."""

    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@pytest.mark.parametrize(
    "extra", [torch.arange(3.0), {"scales": [torch.ones(2), torch.empty(0)], "step": 3}]
)
def test_extra_state_may_hold_tensors(store: sky.ModelStore, same: Any, extra: Any) -> None:
    saved, model = Kept(extra), Kept(None)
    store.save_model(saved, "m")

    store.load_model("m", into=model)

    assert same(model.extra, extra)
    assert torch.equal(model.layer.weight, saved.layer.weight)


class Copying(nn.Module):
    """Its state dict shows copies, as that of a sharded or quantised module does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self._register_state_dict_hook(self._copied)

    @staticmethod
    def _copied(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        for name in list(state):
            state[name] = state[name].clone()


@pytest.mark.parametrize("place", ["cpu", "meta"])
def test_a_module_whose_state_dict_is_a_copy_is_loaded(store: sky.ModelStore, place: str) -> None:
    saved = Copying()
    store.save_model(saved, "m")
    with torch.device(place):
        model = Copying()

    store.load_model("m", into=model)

    assert torch.equal(model.layer.weight, saved.layer.weight)
    assert torch.equal(model.layer.bias, saved.layer.bias)


class Untied(Tied):
    """The same names, and each a parameter of its own; as are its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.out.weight = nn.Parameter(torch.zeros(5, 3))


def test_what_is_not_tied_in_the_model_gets_memory_of_its_own(store: sky.ModelStore) -> None:
    saved = Tied()
    store.save_model(saved, "m")
    with torch.device("meta"):
        model = Untied()

    store.load_model("m", into=model)
    with torch.no_grad():
        model.out.weight.zero_()

    assert torch.equal(model.embedding.weight, saved.embedding.weight)


def buffers(*tensors: torch.Tensor) -> nn.Module:
    module = nn.Module()
    for index, tensor in enumerate(tensors):
        module.register_buffer(f"b{index}", tensor)
    return module


def test_buffers_are_tied_as_the_model_has_them(store: sky.ModelStore) -> None:
    one, other = torch.ones(2), torch.zeros(2)
    store.save_model(buffers(one, one), "tied")
    store.save_model(buffers(one, other), "untied")
    meta = torch.empty(2, device="meta")
    apart, together = buffers(meta, meta.clone()), buffers(meta, meta)

    store.load_model("tied", into=apart)
    store.load_model("untied", into=together)
    apart.b0.zero_()

    assert apart.b1.sum() == 2
    assert together.b0 is together.b1


def test_names_of_other_values_are_compared_too(store: sky.ModelStore) -> None:
    store.save_model(nn.Linear(2, 2).state_dict() | {"step": 3}, "m")
    layer = nn.Linear(2, 2)

    with pytest.raises(sky.errors.ModelMismatchError) as unexpected:
        store.load_model("m", into=layer)
    store.save_model({f"layer.{name}": each for name, each in layer.state_dict().items()}, "m")
    with pytest.raises(sky.errors.ModelMismatchError) as missing:
        store.load_model("m", into=Extra())
    store.save_model({"weight": 1, "bias": layer.bias}, "m")
    with pytest.raises(sky.errors.ModelMismatchError) as reshaped:
        store.load_model("m", into=layer)

    assert "unexpected, not in the model:\n    step  a value that is no tensor" in str(
        unexpected.value
    )
    assert "missing from the store:\n    _extra_state  a value that is no tensor" in str(
        missing.value
    )
    assert "weight  stored a value that is no tensor, model [2, 2] float32" in str(reshaped.value)


def test_names_that_are_numbers_are_no_state_dict(store: sky.ModelStore) -> None:
    store.save_model({0: torch.ones(1)}, "m")

    with pytest.raises(
        sky.errors.ModelMismatchError, match="no state dict but a dict with the key 0;"
    ):
        store.load_model("m", into=nn.Linear(2, 2))


class Scaled(nn.Module):
    """Holds what its first version held ten times larger."""

    _version = 1

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))


class Rescaled(Scaled):
    """The second version."""

    _version = 2

    def _load_from_state_dict(self, state: Any, prefix: str, about: Any, *others: Any) -> None:
        if about.get("version") == 1:
            state[f"{prefix}weight"] = state[f"{prefix}weight"] / 10
        super()._load_from_state_dict(state, prefix, about, *others)


def test_a_module_converts_what_another_version_of_it_saved(store: sky.ModelStore) -> None:
    model = network(inner=Rescaled())
    store.save_model(network(inner=Scaled()), "old")
    store.save_model(model, "new")

    store.load_model("old", into=model)
    assert model["inner"].weight.tolist() == pytest.approx([0.1, 0.1])
    store.load_model("new", into=model)
    assert model["inner"].weight.tolist() == [1, 1]


def test_where_the_module_may_know_better_the_error_says_how_to_ask_it(
    store: sky.ModelStore,
) -> None:
    old = nn.utils.weight_norm(nn.Linear(2, 2))
    new = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    store.save_model(old, "m")

    with pytest.raises(sky.errors.ModelMismatchError) as caught:
        store.load_model("m", into=new)

    advice = "module.load_state_dict(store.load_model('m', version=1))"
    assert str(caught.value).endswith(advice)
    new.load_state_dict(store.load_model("m", version=1))
    assert torch.allclose(new.weight, old.weight)


def test_what_no_version_holds_stays_on_the_meta_device_and_is_told(
    store: sky.ModelStore, caplog: pytest.LogCaptureFixture
) -> None:
    def model() -> nn.Module:
        module = nn.Linear(2, 2)
        module.register_buffer("mask", torch.ones(2), persistent=False)
        return module

    store.save_model(model(), "m")
    with torch.device("meta"):
        hollow = model()

    store.load_model("m", into=hollow)

    assert "'m' version 1 holds nothing for mask, still on the meta device" in caplog.text
    assert "give it values before you use the model" in caplog.text
