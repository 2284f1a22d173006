"""What is saved comes back: values, dtypes, strides, ties and structure."""

from __future__ import annotations

import collections
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import skyward as sky
from skyward.store import catalog, manifest
from skyward.store.manifest import ITEM_SIZES

DTYPES = [name for name in ITEM_SIZES if hasattr(torch, name)]


def of_dtype(name: str, *shape: int) -> torch.Tensor:
    """Any bits at all, except that a bool is 0 or 1."""
    size = math.prod(shape) * ITEM_SIZES[name]
    bits = torch.randint(0, 2 if name == "bool" else 256, (size,), dtype=torch.uint8)
    return bits.view(getattr(torch, name)).reshape(shape)


class Tied(nn.Module):
    """An output layer that is the embedding, as in many language models."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.norm = nn.BatchNorm1d(6)
        self.out = nn.Linear(6, 11, bias=False)
        self.out.weight = self.embedding.weight


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_returns_bit_for_bit(store: sky.ModelStore, same: Any, dtype: str) -> None:
    value = {"some": of_dtype(dtype, 3, 5), "one": of_dtype(dtype, 1), "none": of_dtype(dtype, 0)}

    store.save_model(value, "m")

    assert same(store.load_model("m"), value)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(1.5),
        torch.empty(0, 3),
        torch.empty(2, 0, 4),
        torch.randn(4, 6).t(),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(6, 6)[1:4, 2:5],
        torch.randn(10)[::2],
        torch.randn(3, 1).expand(3, 1000),
        torch.randn(4, dtype=torch.complex64).conj(),
        nn.Parameter(torch.randn(3)),
        torch.randn(1, 1, 1),
    ],
    ids=lambda tensor: f"{tuple(tensor.shape)}/{tensor.stride()}",
)
def test_layouts_return_as_they_were(
    store: sky.ModelStore, same: Any, tensor: torch.Tensor
) -> None:
    store.save_model(tensor, "m")

    assert same(store.load_model("m"), tensor.detach().resolve_conj())


def test_a_slice_of_something_large_is_saved_without_the_rest(store: sky.ModelStore) -> None:
    matrix = torch.randn(1000, 1000)

    version = store.save_model({"column": matrix[4:, 3], "row": matrix[3]}, "m")

    loaded = store.load_model("m")
    assert version.size == 4 * 996 + 4 * 1000
    assert torch.equal(loaded["column"], matrix[4:, 3])
    assert loaded["row"].untyped_storage().nbytes() == 4000


def test_a_module_comes_back_into_a_module(store: sky.ModelStore, same: Any) -> None:
    model, other = Tied(), Tied()
    model.norm.running_mean.fill_(3)

    version = store.save_model(model, "m")
    returned = store.load_model("m", into=other)

    assert returned is other
    assert same(dict(other.state_dict()), dict(model.state_dict()))
    assert version.class_path == f"{Tied.__module__}.Tied"


def test_a_state_dict_keeps_its_type_order_and_versions(store: sky.ModelStore, same: Any) -> None:
    state = Tied().state_dict()

    store.save_model(state, "m")
    loaded = store.load_model("m")

    assert type(loaded) is collections.OrderedDict
    assert same(loaded, state)
    assert loaded._metadata == state._metadata
    Tied().load_state_dict(loaded)


def test_tied_weights_stay_tied_and_are_stored_once(store: sky.ModelStore) -> None:
    version = store.save_model(Tied(), "m")
    loaded = store.load_model("m")

    loaded["out.weight"].fill_(7)

    assert (loaded["embedding.weight"] == 7).all()
    assert version.size == 11 * 6 * 4 + 4 * 6 * 4 + 8


@pytest.mark.parametrize("kind", ["parts of complex numbers", "bytes seen as numbers"])
def test_overlapping_tensors_of_different_elements(
    store: sky.ModelStore, same: Any, kind: str
) -> None:
    if kind == "parts of complex numbers":
        numbers = torch.randn(4, dtype=torch.complex64)
        value = {"imag": numbers.imag, "rest": numbers[1:]}
    else:
        raw = torch.arange(16, dtype=torch.uint8)
        value = {"half": raw[2:10].view(torch.float16), "single": raw[4:12].view(torch.float32)}

    store.save_model(value, "m")

    assert same(store.load_model("m"), value)


def test_what_no_reader_would_accept_is_not_published(
    store: sky.ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest, "_flaw", lambda view, regions: "begins between two elements")

    with pytest.raises(
        sky.errors.SerializationError, match="'m' cannot be stored: tensor 0 begins betw"
    ):
        store.save_model({"x": torch.ones(3)}, "m")
    assert store.list() == ()


def test_values_that_a_manifest_has_no_room_for_are_refused_before_anything_is_written(
    store: sky.ModelStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog, "MANIFEST_LIMIT", 1 << 20)

    with pytest.raises(
        sky.errors.SerializationError, match=r"would take 2 MiB, .* has room for 1; turn"
    ):
        store.save_model({"x": torch.ones(3), "text": b"x" * (3 << 19)}, "m")
    assert not folder.exists()


def test_overlapping_views_share_memory_again(store: sky.ModelStore) -> None:
    base = torch.arange(12.0)
    bits = base.view(torch.int32)

    store.save_model({"all": base, "part": base[3:9:2], "bits": bits}, "m")
    loaded = store.load_model("m")
    loaded["all"].zero_()

    assert loaded["part"].tolist() == [0, 0, 0]
    assert loaded["bits"].tolist() == [0] * 12


@pytest.mark.parametrize("size", [10, 5_000_000], ids=["packed", "mapped"])
def test_equal_tensors_do_not_become_one(store: sky.ModelStore, size: int) -> None:
    version = store.save_model({"a": torch.ones(size), "b": torch.ones(size)}, "m")
    loaded = store.load_model("m")

    loaded["a"].zero_()

    assert version.added == size * 4
    assert (loaded["b"] == 1).all()
    assert (store.load_model("m")["a"] == 1).all()


def test_an_optimiser_resumes_where_it_was(store: sky.ModelStore, same: Any) -> None:
    model = nn.Linear(4, 3)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.randn(2, 4)).sum().backward()
    optimiser.step()
    checkpoint = {"model": model.state_dict(), "optimiser": optimiser.state_dict(), "epoch": 3}

    store.save_model(checkpoint, "run")
    loaded = store.load_model("run")

    assert same(loaded, checkpoint)
    torch.optim.AdamW(model.parameters()).load_state_dict(loaded["optimiser"])


PLAIN = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary()
    | st.complex_numbers()
    | st.sampled_from([torch.float32, torch.bfloat16, torch.device("cpu"), torch.Size([2, 3])])
)
KEYS = st.text() | st.integers() | st.booleans() | st.none()


@given(
    value=st.recursive(
        PLAIN | st.builds(torch.tensor, st.lists(st.floats(width=32))),
        lambda inner: (
            st.lists(inner)
            | st.lists(inner).map(tuple)
            | st.dictionaries(KEYS, inner)
            | st.dictionaries(st.text(), inner).map(collections.OrderedDict)
        ),
        max_leaves=20,
    )
)
@settings(
    max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
def test_nested_values_return_as_they_were(store: sky.ModelStore, same: Any, value: Any) -> None:
    version = store.save_model(value, "nested")

    assert same(store.load_model("nested", version=version.version), value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": {"b": object()}}, r"a\.b: a builtins\.object cannot be stored"),
        ({"hook": print}, "hook: a builtins.builtin_function_or_method cannot be stored"),
        ({"net": nn.Linear(1, 1)}, r"net: .* save its state_dict\(\)"),
        ([torch.eye(2).to_sparse()], r"\[0\]: a tensor of layout torch.sparse_coo"),
        ({"w": torch.empty(2, device="meta")}, "w: a tensor on the meta device has no values"),
        ({(1, 2): 3}, r"the key \(1, 2\) cannot be stored"),
        ({"text": "\ud800"}, "text: the text .* is not valid Unicode"),
    ],
    ids=lambda case: case if isinstance(case, str) else "",
)
def test_what_cannot_be_stored_is_named_by_its_path(
    store: sky.ModelStore, value: Any, message: str
) -> None:
    with pytest.raises(sky.errors.SerializationError, match=message):
        store.save_model(value, "m")
    assert store.list() == ()


def test_a_value_that_contains_itself_is_refused(store: sky.ModelStore) -> None:
    value: list[Any] = []
    value.append(value)

    with pytest.raises(sky.errors.SerializationError, match="contains itself"):
        store.save_model(value, "m")


def test_numpy_numbers_become_plain_ones_and_arrays_are_refused(store: sky.ModelStore) -> None:
    numpy = pytest.importorskip("numpy")
    store.save_model({"step": numpy.int64(3), "loss": numpy.float32(0.5)}, "m")

    assert store.load_model("m") == {"step": 3, "loss": 0.5}
    with pytest.raises(sky.errors.SerializationError, match=r"x: .*torch\.from_numpy"):
        store.save_model({"x": numpy.zeros(3)}, "m")


def test_files_of_torch_save_come_in_and_go_out(
    store: sky.ModelStore, same: Any, tmp_path: Path
) -> None:
    value = {"model": Tied().state_dict(), "step": 5}
    torch.save(value, tmp_path / "in.pt")

    store.import_file(tmp_path / "in.pt", "m")
    store.export_file("m", tmp_path / "out.pt")

    assert same(torch.load(tmp_path / "out.pt", weights_only=True), value)


@pytest.mark.parametrize("old", [False, True])
def test_a_file_with_code_in_it_is_not_imported(
    store: sky.ModelStore, tmp_path: Path, old: bool
) -> None:
    file = tmp_path / "hostile.pt"
    torch.save({"f": Tied()}, file, _use_new_zipfile_serialization=not old)

    with pytest.raises(
        sky.errors.StoreError, match=r"hostile\.pt: cannot be imported.*Tied.*state_dict\(\)"
    ):
        store.import_file(file, "m")
    assert store.list() == ()


def test_objects_are_safetensors_files(store: sky.ModelStore, folder: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    value = {"a": torch.randn(3, 4), "b": torch.randn(5).half(), "c": torch.arange(6_000_000)}

    store.save_model(value, "m")

    found = [
        tensor
        for file in folder.glob("objects/*/*")
        for tensor in safetensors.load_file(file).values()
    ]
    assert len(found) == 3
    for tensor in value.values():
        assert any(each.dtype == tensor.dtype and torch.equal(each, tensor) for each in found), (
            tensor.dtype
        )
