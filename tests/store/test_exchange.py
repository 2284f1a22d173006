"""Files of other tools come in and go out, whole or not at all, and hostile ones are refused."""

from __future__ import annotations

import json
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import skyward as sky
from skyward.store import exchange

safetensors = pytest.importorskip(
    "safetensors.torch", reason="safetensors is not installed: pip install safetensors"
)


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte = torch.nn.Embedding(20, 8)
        self.norm = torch.nn.LayerNorm(8)
        self.head = torch.nn.Linear(8, 20, bias=False)
        self.head.weight = self.wte.weight


def written(path: Path, table: object, data: bytes = b"", length: int | None = None) -> Path:
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def entry(shape: list[int], first: int, last: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [first, last]}


def test_a_safetensors_file_comes_in_with_its_metadata(
    store: sky.ModelStore, same: Any, tmp_path: Path
) -> None:
    file = tmp_path / "m.safetensors"
    value = {
        "a": torch.randn(3, 4),
        "b": torch.randn(5).bfloat16(),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(True),
        "c": torch.arange(7, dtype=torch.uint8),
        "d": torch.randn(3, dtype=torch.complex64),
    }
    safetensors.save_file(value, file, metadata={"format": "pt", "origin": "elsewhere", "n": "1"})

    version = store.import_file(file, "m", metadata={"n": 2})

    loaded = store.load_model("m")
    assert all(same(loaded[name], value[name]) for name in value)
    assert sorted(loaded) == sorted(value)
    assert version.metadata == {"origin": "elsewhere", "n": 2}


def test_a_safetensors_file_goes_out_for_its_own_library(
    store: sky.ModelStore, same: Any, tmp_path: Path
) -> None:
    value = {
        "columns": torch.randn(4, 6).T,
        "half": torch.randn(5).half(),
        "slice": torch.arange(10)[3:7],
        "empty": torch.empty(2, 0),
        "fp8": torch.randn(3).to(torch.float8_e4m3fnuz),
    }
    store.save_model(value, "m", metadata={"accuracy": 0.5, "note": "text"})

    version = store.export_file("m", tmp_path / "m.safetensors")

    found = safetensors.load_file(tmp_path / "m.safetensors")
    assert all(same(found[name], tensor.contiguous()) for name, tensor in value.items())
    assert len(found) == len(value)
    assert version == store.versions("m")[-1]
    with safetensors.safe_open(tmp_path / "m.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "accuracy": "0.5", "note": "text"}
    assert os.listdir(tmp_path) in (["m.safetensors", "store"], ["store", "m.safetensors"])


def test_a_safetensors_file_goes_out_of_a_place_that_cannot_be_mapped(
    same: Any, tmp_path: Path
) -> None:
    pytest.importorskip("fsspec", reason="fsspec is not installed")
    value = {"columns": torch.randn(4, 6).T, "large": torch.randn(400_000), "one": torch.ones(1)}
    far = sky.ModelStore("memory://exchanged")
    far.save_model(value, "m")

    far.export_file("m", tmp_path / "m.safetensors")

    found = safetensors.load_file(tmp_path / "m.safetensors")
    assert all(same(found[name], tensor.contiguous()) for name, tensor in value.items())
    assert os.listdir(tmp_path) == ["m.safetensors"]


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc/self")
def test_a_safetensors_file_is_mapped_and_not_copied(tmp_path: Path) -> None:
    file = tmp_path / "m.safetensors"
    safetensors.save_file({"a": torch.ones(1 << 18), "b": torch.ones(5)}, file)

    tensors, _ = exchange.read(file)

    with Path("/proc/self/maps").open() as maps:
        spans = [line.split()[0].split("-") for line in maps if str(file) in line]
    assert len(spans) == 1
    assert all(
        int(spans[0][0], 16) <= tensor.data_ptr() < int(spans[0][1], 16)
        for tensor in tensors.values()
    )


def test_a_missing_library_is_named(
    store: sky.ModelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.save_model({"w": torch.ones(2)}, "m")
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)

    with pytest.raises(sky.errors.ConfigurationError, match=r"install skyward-torch\[torch\]"):
        store.export_file("m", tmp_path / "m.safetensors")
    assert os.listdir(tmp_path) == ["store"]


def test_tied_weights_go_out_as_safetensors_has_them_and_come_back_tied(
    store: sky.ModelStore, tmp_path: Path
) -> None:
    model, other = Tied(), Tied()
    store.save_model(model, "m")

    store.export_file("m", tmp_path / "m.safetensors")
    again = store.import_file(tmp_path / "m.safetensors", "again")

    safetensors.load_model(other, tmp_path / "m.safetensors")
    assert torch.equal(other.head.weight, model.wte.weight)
    with safetensors.safe_open(tmp_path / "m.safetensors", "pt") as file:
        assert "wte.weight" not in file.keys()  # noqa: SIM118  # no mapping
        assert file.metadata()["wte.weight"] == "head.weight"
    loaded = store.load_model("again")
    assert loaded["wte.weight"].data_ptr() == loaded["head.weight"].data_ptr()
    assert (again.added, again.metadata) == (0, {})
    assert store.load_model("again", into=Tied()).head.weight.equal(model.head.weight)


def test_tensors_that_overlap_in_part_go_out_in_full(store: sky.ModelStore, tmp_path: Path) -> None:
    whole = torch.arange(10.0)
    store.save_model({"whole": whole, "end": whole[6:]}, "m")

    store.export_file("m", tmp_path / "m.safetensors")

    found = safetensors.load_file(tmp_path / "m.safetensors")
    assert torch.equal(found["whole"], whole)
    assert torch.equal(found["end"], whole[6:])


def test_what_safetensors_ties_in_its_own_way_stays_metadata(
    store: sky.ModelStore, tmp_path: Path
) -> None:
    """A name it leaves out may be another shape of the one it keeps; the file does not say."""
    safetensors.save_model(Tied(), str(tmp_path / "m.safetensors"))

    version = store.import_file(tmp_path / "m.safetensors", "m")

    assert "wte.weight" not in store.load_model("m")
    assert version.metadata == {"wte.weight": "head.weight"}


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ({"model": {"w": torch.ones(2)}}, "'model', of type dict"),
        ({"w": torch.ones(2), "step": 3}, "'step', of type int"),
        ([torch.ones(2)], "a value of type list"),
        (torch.ones(2), "a tensor without a name"),
        ({1: torch.ones(2)}, "the name 1"),
        ({"w": torch.ones(2, dtype=torch.complex128)}, "a tensor of dtype complex128"),
    ],
)
def test_what_no_safetensors_file_can_hold_is_refused(
    store: sky.ModelStore, value: Any, told: str, tmp_path: Path
) -> None:
    store.save_model(value, "m")

    with pytest.raises(sky.errors.StoreError) as failure:
        store.export_file("m", tmp_path / "out.safetensors")

    assert str(failure.value) == (
        f"'m' version 1 holds {told}, and a safetensors file has named tensors only; "
        "write a .pt file: out.pt"
    )
    assert os.listdir(tmp_path) == ["store"]


@pytest.mark.parametrize("ending", ["pt", "safetensors"])
def test_a_file_that_cannot_be_written_says_so(
    store: sky.ModelStore, tmp_path: Path, ending: str
) -> None:
    store.save_model({"w": torch.ones(2)}, "m")

    with pytest.raises(sky.errors.StoreError, match=r"out\..*: writing failed: .*folder is there"):
        store.export_file("m", tmp_path / "nowhere" / f"out.{ending}")


@pytest.mark.parametrize("ending", ["pt", "safetensors"])
def test_an_export_that_fails_leaves_the_old_file(
    store: sky.ModelStore, tmp_path: Path, ending: str
) -> None:
    file = tmp_path / f"out.{ending}"
    file.write_bytes(b"old")
    store.save_model({"w": torch.ones(20)}, "m")
    stored = next(tmp_path.glob("store/objects/*/*"))
    stored.write_bytes(stored.read_bytes()[:-1] + b"!")

    with pytest.raises(sky.errors.StoreDamagedError):
        store.export_file("m", file)

    assert file.read_bytes() == b"old"
    assert sorted(os.listdir(tmp_path)) == [file.name, "store"]


def sharded(folder: Path) -> dict[str, torch.Tensor]:
    value = {"a": torch.randn(3), "b": torch.randn(4), "c": torch.randn(5)}
    folder.mkdir(exist_ok=True)
    safetensors.save_file({"a": value["a"], "b": value["b"]}, folder / "model-1.safetensors")
    safetensors.save_file({"c": value["c"]}, folder / "model-2.safetensors")
    places = {"a": "model-1.safetensors", "b": "model-1.safetensors", "c": "model-2.safetensors"}
    index = {"metadata": {"total_size": 48}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return value


def test_a_folder_with_a_sharded_checkpoint_comes_in_as_one(
    store: sky.ModelStore, tmp_path: Path
) -> None:
    value = sharded(tmp_path / "shards")

    store.import_file(tmp_path / "shards", "m")

    loaded = store.load_model("m")
    assert sorted(loaded) == sorted(value)
    assert all(torch.equal(loaded[name], value[name]) for name in value)


def test_a_folder_with_one_file_comes_in_too(store: sky.ModelStore, tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    safetensors.save_file({"a": torch.ones(2)}, tmp_path / "one" / "model.safetensors")

    store.import_file(tmp_path / "one", "m")

    assert list(store.load_model("m")) == ["a"]


@pytest.mark.parametrize(
    ("index", "told"),
    [
        (b"[]", "does not say which file holds what"),
        (b'{"weight_map": {"a": "../m.safetensors"}}', r"names '\.\./m\.safetensors', which is"),
        (b'{"weight_map": {"a": "gone.safetensors"}}', r"names 'gone\.safetensors', which is not"),
        (b'{"weight_map": {"z": "model-1.safetensors"}}', "promises 'z', which no file holds"),
    ],
)
def test_an_index_that_lies_is_refused(
    store: sky.ModelStore, tmp_path: Path, index: bytes, told: str
) -> None:
    sharded(tmp_path / "shards")
    (tmp_path / "shards" / "model.safetensors.index.json").write_bytes(index)

    with pytest.raises(sky.errors.StoreError, match=rf"index\.json: cannot be imported.*{told}"):
        store.import_file(tmp_path / "shards", "m")


def test_a_folder_without_a_checkpoint_is_refused(store: sky.ModelStore, tmp_path: Path) -> None:
    with pytest.raises(
        sky.errors.StoreError, match=r"holds neither model\.safetensors\.index\.json nor"
    ):
        store.import_file(tmp_path, "m")


HOSTILE = {
    "too short": (b"", None, b"", "its header is damaged: header too small"),
    "endless header": (b"{}", 1 << 60, b"", "its header is damaged: header too large"),
    "no JSON": (b"{{", None, b"", "its header is damaged"),
    "not text": (b'{"\xff": 1}', None, b"", "its header is damaged"),
    "a list": (b"[1]", None, b"", "its header is damaged"),
    "deep": (b'{"a":' * 9000, None, b"", "its header is damaged"),
    "metadata": ({"__metadata__": {"a": 1}}, None, b"", "its header is damaged"),
    "dtype": (
        {"a": entry([1], 0, 4, "F33")},
        None,
        b"1234",
        "unknown variant `F33`",
    ),
    "negative": ({"a": entry([-1], 0, 4)}, None, b"1234", "its header is damaged"),
    "shape": ({"a": entry([2], 0, 4)}, None, b"1234", "invalid shape, data type, or offset"),
    "huge": ({"a": entry([1 << 40] * 9, 0, 4)}, None, b"1234", "overflow computing buffer size"),
    "hole": ({"a": entry([1], 4, 8)}, None, b"12345678", "invalid offset for tensor `a`"),
    "overlap": (
        {"a": entry([1], 0, 4), "b": entry([1], 0, 4)},
        None,
        b"1234",
        "invalid offset for tensor `[ab]`",
    ),
    "truncated": (
        {"a": entry([2], 0, 8)},
        None,
        b"1234",
        "file not fully covered",
    ),
    "tied to nothing": (
        {"__metadata__": {"skyward.tied": '{"a": "b"}'}},
        None,
        b"",
        "it ties 'a' to 'b', which cannot be",
    ),
}


class Runs:
    """Makes a folder in whoever unpickles it."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (self._path,)


def test_a_pickle_that_runs_is_not_imported(store: sky.ModelStore, tmp_path: Path) -> None:
    (tmp_path / "bare.pt").write_bytes(pickle.dumps(Runs(tmp_path / "ran")))
    torch.save({"weight": torch.ones(2), "more": Runs(tmp_path / "ran")}, tmp_path / "model.pt")

    for name in ("bare.pt", "model.pt"):
        with pytest.raises(sky.errors.StoreError, match=r"holds more than tensors and plain"):
            store.import_file(tmp_path / name, "m")

    assert not (tmp_path / "ran").exists()
    assert store.list() == ()


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_safetensors_file_is_refused(
    store: sky.ModelStore, tmp_path: Path, kind: str
) -> None:
    table, length, data, told = HOSTILE[kind]
    file = written(tmp_path / "hostile.safetensors", table, data, length)
    if kind == "too short":
        file.write_bytes(b"1234")

    with pytest.raises(
        sky.errors.StoreError, match=rf"hostile\.safetensors: cannot be imported.*{told}"
    ):
        store.import_file(file, "m")
    assert store.list() == ()


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, 200), byte=st.integers(0, 255))
def test_a_flipped_byte_is_refused_or_read_and_nothing_else(
    tmp_path: Path, at: int, byte: int
) -> None:
    file = tmp_path / "m.safetensors"
    safetensors.save_file({"a": torch.ones(3), "b": torch.ones(2, 2)}, file)
    data = bytearray(file.read_bytes())
    data[at % len(data)] = byte
    file.write_bytes(data)

    try:
        tensors, _ = exchange.read(file)
    except sky.errors.StoreError:
        return
    assert len(tensors) <= 2
