"""Damaged and hostile files: every flipped bit and every missing byte is noticed and named."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import xxhash

import skyward as sky
from skyward.store.address import open_files
from skyward.store.manifest import FORMAT, SIZE_LIMIT, object_path

VALUE = {
    "a": torch.arange(20, dtype=torch.float32),
    "b": torch.arange(9, dtype=torch.int64).reshape(3, 3).t(),
    "c": torch.ones(7, dtype=torch.bool),
    "nested": {"lr": 0.1, "betas": (0.9, 0.99), "big": 2**80},
}


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with one version, which tests copy and then damage."""
    folder = tmp_path_factory.mktemp("pristine") / "store"
    sky.ModelStore(folder).save_model(VALUE, "m", metadata={"note": "x"})
    return folder


@pytest.fixture
def files(pristine: Path, folder: Path) -> list[Path]:
    """The files of a copy, all of which are needed to load the version."""
    shutil.copytree(pristine, folder)
    return [path for path in folder.rglob("*") if path.is_file()]


def test_every_flipped_bit_is_noticed(folder: Path, files: list[Path]) -> None:
    store = sky.ModelStore(folder)
    chance = random.Random(0)
    assert len(files) == 2
    for file in files:
        whole = file.read_bytes()
        for at in range(len(whole)):
            damaged = bytearray(whole)
            damaged[at] ^= 1 << chance.randrange(8)
            file.write_bytes(damaged)
            with pytest.raises(sky.errors.StoreDamagedError) as caught:
                store.load_model("m")
            assert file.name in str(caught.value), at
            assert "save the model again" in str(caught.value) or "update" in str(caught.value)
        file.write_bytes(whole)
    store.load_model("m")


def test_every_truncation_is_noticed(folder: Path, files: list[Path]) -> None:
    store = sky.ModelStore(folder)
    for file in files:
        whole = file.read_bytes()
        for length in range(0, len(whole), 17):
            file.write_bytes(whole[:length])
            with pytest.raises(sky.errors.StoreDamagedError, match=file.name):
                store.load_model("m")
        file.write_bytes(whole)


def test_a_missing_object_is_noticed(folder: Path, files: list[Path]) -> None:
    (next(file for file in files if "objects" in str(file))).unlink()

    with pytest.raises(
        sky.errors.StoreDamagedError, match="'m' version 1: the file is missing; load"
    ):
        sky.ModelStore(folder).load_model("m")


def test_a_model_is_stored_anew_when_its_object_is_lost(folder: Path, files: list[Path]) -> None:
    (next(file for file in files if "objects" in str(file))).unlink()

    version = sky.ModelStore(folder).save_model(VALUE, "m")

    assert version.added > 0
    assert torch.equal(sky.ModelStore(folder).load_model("m")["a"], VALUE["a"])


def test_a_damaged_manifest_stops_the_collector_and_not_a_save(
    folder: Path, files: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    store = sky.ModelStore(folder)
    (folder / "models" / "m" / "1.json").write_bytes(b"{}")
    kept = sorted(folder.rglob("*"))

    with pytest.raises(sky.errors.StoreDamagedError, match=r"1\.json: the manifest is damaged"):
        store.gc(older_than=0)
    assert sorted(folder.rglob("*")) == kept
    assert store.save_model(VALUE, "m").version == 2
    assert "not reusing tensors of 'm' version 1" in caplog.text
    store.delete("m", version=1)
    store.gc(older_than=0)
    store.load_model("m")


@pytest.mark.parametrize("place", ["folder", "memory"])
def test_a_model_is_left_alone_by_a_damaged_version_or_told_about(folder: Path, place: str) -> None:
    """A folder is checked before anything is copied; remote bytes are not downloaded twice."""
    if place == "memory":
        pytest.importorskip("fsspec", reason="fsspec is not installed")
    url = str(folder) if place == "folder" else f"memory://{folder.parent.name}"
    files = open_files(url, None, durable=False)
    model = torch.nn.Sequential(torch.nn.Linear(2100, 2100), torch.nn.Linear(2100, 2100))
    store = sky.ModelStore(url)
    store.save_model(model, "m")
    manifest = msgspec.json.decode(files.read("models/m/1.json", 0, 1 << 20))["manifest"]
    path = object_path(manifest["objects"][-1]["name"])
    files.write(path, [files.read(path, 0, 1 << 30)[:-1]])
    model.requires_grad_(False)
    for parameter in model.parameters():
        parameter.zero_()

    with pytest.raises(sky.errors.StoreDamagedError, match="too short") as caught:
        store.load_model("m", into=model)

    changed = any(bool(parameter.any()) for parameter in model.parameters())
    notes = getattr(caught.value, "__notes__", [])
    assert changed == (place == "memory")
    assert changed == any("load another version before" in note for note in notes)


def forge(folder: Path, **changes: Any) -> None:
    """Rewrite the manifest with other contents and a checksum that fits them."""
    path = folder / "models" / "m" / "1.json"
    manifest = msgspec.json.decode(path.read_bytes())["manifest"]
    for key, change in changes.items():
        manifest[key] = change(manifest[key]) if callable(change) else change
    body = msgspec.json.encode(manifest)
    checksum = xxhash.xxh3_128_hexdigest(body).encode()
    path.write_bytes(b'{"checksum":"' + checksum + b'","manifest":' + body + b"}\n")


def first(**changes: Any) -> Any:
    return lambda items: [items[0] | changes, *items[1:]]


def deep(levels: int) -> Any:
    node: Any = 1
    for _ in range(levels):
        node = [node]
    return node


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": FORMAT + 1}, "a manifest of format 2, .* update skyward"),
        ({"surprise": 1}, "unknown field"),
        ({"version": 2}, "holds version 2 of 'm'"),
        ({"name": "../../x"}, "holds version 1 of"),
        ({"objects": []}, "region 0 lies in object 0 of 0"),
        ({"objects": first(name="../../../../etc/passwd")}, "matching regex"),
        ({"objects": first(name="0" * 32 + "-" + "0" * 8)}, "the file is missing"),
        ({"objects": first(size=3)}, "region 0 ends behind the end of its object"),
        ({"regions": first(start=-1)}, "Expected `int` >= 0"),
        ({"regions": first(size=SIZE_LIMIT + 1)}, "Expected `int` <="),
        ({"regions": first(size=SIZE_LIMIT)}, "region 0 ends behind"),
        ({"regions": first(start=8)}, "its header and the manifest disagree"),
        ({"regions": first(size=4)}, "tensor 0 ends behind the end of its region"),
        ({"regions": first(digest="0" * 32)}, "its header and the manifest disagree"),
        ({"regions": first(digest="XYZ")}, "matching regex"),
        ({"tensors": first(region=99)}, "tensor 0 lies in region 99 of 3"),
        ({"tensors": first(region=None)}, "tensor 0 has no bytes"),
        ({"tensors": first(dtype="object")}, "unknown dtype 'object'"),
        ({"tensors": first(dtype="__class__")}, "unknown dtype"),
        ({"tensors": first(offset=2)}, "begins between two elements"),
        ({"tensors": first(offset=4)}, "tensor 0 ends behind"),
        ({"tensors": first(shape=[21])}, "tensor 0 ends behind"),
        ({"tensors": first(shape=[2**40, 2**40])}, "tensor 0 ends behind"),
        ({"tensors": first(shape=[1] * 65)}, "more or fewer dimensions"),
        ({"tensors": first(shape=[-1])}, "Expected `int` >= 0"),
        ({"tensors": first(strides=[1, 1])}, "more or fewer dimensions"),
        ({"tensors": first(strides=[2**47])}, "tensor 0 ends behind"),
        ({"tensors": []}, "its tree has tensor 0 of 0"),
        ({"tree": {"tensor": -1}}, "its tree has tensor -1 of 3"),
        ({"tree": {"tensor": True}}, "unknown kind 'tensor'"),
        ({"tree": {"pickle": "gASVAAAA"}}, "unknown kind 'pickle'"),
        ({"tree": {}}, "an entry that is no value"),
        ({"tree": {"tuple": [], "dict": []}}, "an entry of two kinds"),
        ({"tree": {"state": [], "other": []}}, "damaged"),
        ({"tree": {"dict": [[1]]}}, "a dict entry that is no pair"),
        ({"tree": {"dict": [[[], 1]]}}, "its tree has unhashable type"),
        ({"tree": {"int": "zz"}}, "its tree has invalid literal"),
        ({"tree": {"bytes": "?"}}, "its tree has"),
        ({"tree": {"size": ["x"]}}, "its tree has"),
        ({"tree": {"dtype": "load"}}, "unknown kind 'dtype'"),
        ({"tree": {"device": "nowhere"}}, "unknown device"),
        ({"tree": deep(150)}, "more than 100 levels"),
        ({"tree": deep(900)}, "damaged"),
        ({"created": "yesterday"}, "damaged"),
    ],
    ids=lambda case: case if isinstance(case, str) else "",
)
def test_a_hostile_manifest_is_refused(
    folder: Path, files: list[Path], changes: dict[str, Any], message: str
) -> None:
    forge(folder, **changes)
    store = sky.ModelStore(folder)

    with pytest.raises(sky.errors.StoreDamagedError, match=message):
        store.load_model("m")
        store.list()


def test_the_class_that_a_manifest_names_is_not_imported(
    folder: Path, files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "malice.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    forge(folder, class_path="malice.Model")
    store = sky.ModelStore(folder)

    assert store.list()[0].class_path == "malice.Model"
    assert torch.equal(store.load_model("m")["a"], VALUE["a"])


def test_a_hostile_object_is_refused(folder: Path, files: list[Path]) -> None:
    """Its name fits its header, and the header tells lies."""
    (file,) = folder.glob("objects/*/*")
    for text in (b"[]", b"{}", b"null", b'{"__metadata__":1}', b"\xff", b'{"a":{}}', b"[" * 5000):
        head = len(text).to_bytes(8, "little") + text
        name = f"{xxhash.xxh3_128_hexdigest(head)}-00000000"
        target = folder / "objects" / name[:2] / name
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(head + file.read_bytes())
        forge(folder, objects=first(name=name, size=target.stat().st_size))
        with pytest.raises(sky.errors.StoreDamagedError, match=f"{name}.*disagree"):
            sky.ModelStore(folder).load_model("m")


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 100 << 20, 10_000])
def test_an_absurd_header_length_is_refused(folder: Path, files: list[Path], length: int) -> None:
    (file,) = folder.glob("objects/*/*")
    file.write_bytes(length.to_bytes(8, "little") + file.read_bytes()[8:])

    with pytest.raises(sky.errors.StoreDamagedError, match="header"):
        sky.ModelStore(folder).load_model("m")
