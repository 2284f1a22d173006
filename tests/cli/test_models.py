"""`sky models`: every command, what it prints for people and for programs, and how it fails."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import skyward as sky

COMMANDS = ["push", "pull", "ls", "show", "rm", "gc", "serve"]


@pytest.fixture
def weights(store: sky.ModelStore) -> Path:
    """A file of torch.save in the folder we work in."""
    torch.save({"w": torch.ones(1000), "b": torch.zeros(3)}, "weights.pt")
    return Path("weights.pt")


@pytest.mark.parametrize("args", [["ls"], ["push", "weights.pt", "m"], ["gc"], ["rm", "m", "-y"]])
def test_without_a_store_the_error_names_both_ways_to_give_one(
    run, weights: Path, monkeypatch: pytest.MonkeyPatch, args: list[str]
) -> None:
    monkeypatch.delenv("SKYWARD_STORE")

    assert (
        "Error: no store is given; pass --store URL, or set SKYWARD_STORE, "
        "to a folder or an address such as s3://bucket/models\n"
    ) in run("models", *args, code=2).stderr


@pytest.mark.parametrize("where", [1, 2])
def test_the_store_may_be_given_before_or_after_the_command(
    run_json, store: sky.ModelStore, tmp_path: Path, where: int
) -> None:
    other = sky.ModelStore(tmp_path / "other")
    other.save_model({"x": 1}, "there")
    args = ["models", "ls"]
    args[where:where] = ["--store", str(tmp_path / "other")]

    assert [each["name"] for each in run_json(*args)] == ["there"]


def test_json_may_be_given_anywhere(run, store: sky.ModelStore) -> None:
    for args in (
        ["--json", "models", "ls"],
        ["models", "--json", "ls"],
        ["models", "ls", "--json"],
    ):
        assert run(*args).stdout == "[]\n"


def test_a_token_from_the_environment_is_for_http_alone(run, store: sky.ModelStore) -> None:
    run("models", "ls", env={"SKYWARD_STORE_TOKEN": "secret"})

    told = run("models", "ls", "--token", "secret", code=1).stderr
    assert "a folder takes no token; leave it out" in told
    assert "secret" not in told


def test_push_stores_a_file_with_metadata(run, store: sky.ModelStore, weights: Path) -> None:
    args = ["-m", "accuracy=0.99", "-m", "note=it works", "-m", "tags=[1,2]", "-m", "x=NaN"]

    first = run("models", "push", str(weights), "mnist", *args)
    second = run("models", "push", str(weights), "mnist")

    assert first.stdout == "mnist version 1: 3.9 KiB in 2 tensors, 3.9 KiB new\n"
    assert second.stdout == "mnist version 2: 3.9 KiB in 2 tensors, nothing new to store\n"
    assert store.versions("mnist")[0].metadata == {
        "accuracy": 0.99,
        "note": "it works",
        "tags": [1, 2],
        "x": "NaN",
    }


def test_push_prints_the_version_as_json(run_json, store: sky.ModelStore, weights: Path) -> None:
    found = run_json("models", "push", str(weights), "mnist", "-m", "a=1")

    assert found.pop("created").startswith("20")
    assert found == {
        "name": "mnist",
        "version": 1,
        "size": 4012,
        "added": 4012,
        "tensors": 2,
        "class_path": None,
        "torch": torch.__version__,
        "skyward": sky.__version__,
        "metadata": {"a": 1},
    }


@pytest.mark.parametrize(
    ("args", "code", "told"),
    [
        (
            ["nowhere.pt", "m"],
            2,
            "Error: Invalid value for 'FILE': Path 'nowhere.pt' does not exist.",
        ),
        (["notes.txt", "m"], 2, "'notes.txt' ends in neither .safetensors nor .pt, .pth, .bin"),
        (["weights.pt", "m", "-m", "x"], 2, "'x' is no KEY=VALUE; write -m accuracy=0.99"),
        (["weights.pt", "../m"], 2, "value for 'NAME': '../m': not a model's name; use up to 200"),
        (["broken.pt", "m"], 1, "broken.pt: cannot be imported, because it is not a file of torch"),
        (["cut.pt", "m"], 1, "it is damaged or holds more than tensors and plain values (Pytorch"),
        (["module.pt", "m"], 1, "plain values: torch.nn.modules.linear.Linear; load it where"),
        (["broken.safetensors", "m"], 1, "Error: broken.safetensors: cannot be imported, because"),
        (["empty", "m"], 1, "Error: empty: cannot be imported, because it holds neither"),
    ],
)
def test_what_cannot_be_pushed_is_refused(
    run, store: sky.ModelStore, weights: Path, args: list[str], code: int, told: str
) -> None:
    for name in ("notes.txt", "broken.pt", "broken.safetensors"):
        Path(name).write_text("hello")
    Path("empty").mkdir()
    Path("cut.pt").write_bytes(weights.read_bytes()[:1000])
    torch.save(torch.nn.Linear(2, 2), "module.pt")

    assert told in run("models", "push", *args, code=code).stderr
    assert store.list() == ()


def test_pull_writes_safetensors_unless_told_otherwise(
    run, run_json, store: sky.ModelStore
) -> None:
    value = {"w": torch.arange(5.0)}
    store.save_model(value, "group/mnist")
    store.save_model({"w": torch.zeros(1)}, "group/mnist")

    told = run("models", "pull", "group/mnist").stdout
    found = run_json("models", "pull", "group/mnist", "-o", "old.pt", "--version", "1")

    assert told == "mnist.safetensors: group/mnist version 2, 4 B in 1 tensor\n"
    assert found == {
        "name": "group/mnist",
        "version": 1,
        "path": "old.pt",
        "bytes": os.path.getsize("old.pt"),
    }
    assert torch.equal(torch.load("old.pt", weights_only=True)["w"], value["w"])


def test_what_is_pulled_can_be_pushed_back(run, store: sky.ModelStore) -> None:
    shared = torch.randn(4, 4)
    store.save_model({"head": shared, "wte": shared}, "m", metadata={"note": "kept"})

    run("models", "pull", "m")
    run("models", "push", "m.safetensors", "m")

    assert store.versions("m")[1].added == 0
    assert store.versions("m")[1].metadata == {"note": "kept"}
    loaded = store.load_model("m")
    assert loaded["head"].data_ptr() == loaded["wte"].data_ptr()


def test_pull_does_not_overwrite_unless_forced(run, store: sky.ModelStore) -> None:
    store.save_model({"w": torch.ones(3)}, "m")
    Path("m.safetensors").write_text("precious")

    told = run("models", "pull", "m", code=1).stderr
    assert told == (
        "Error: m.safetensors is there already; pass --force to overwrite it, or another -o\n"
    )
    assert Path("m.safetensors").read_text() == "precious"

    run("models", "pull", "m", "--force")
    assert Path("m.safetensors").read_bytes() != b"precious"
    assert os.listdir() == ["m.safetensors"]


@pytest.mark.parametrize(
    ("args", "code", "told"),
    [
        (["m", "-o", "m.onnx"], 2, "'m.onnx' ends in neither .safetensors nor .pt, .pth, .bin"),
        (
            ["m"],
            1,
            "'step', of type int, and a safetensors file has named tensors only; write a .pt",
        ),
        (["m", "-o", "no/m.pt"], 1, "writing failed: Parent directory no does not exist; check"),
        (["other"], 1, "has no model 'other'; it has: m"),
        (["m", "--version", "7", "-o", "m.pt"], 1, "has no version 7 of 'm'; it has: 1"),
        (["m", "--version", "0"], 2, "0 is not in the range x>=1"),
    ],
)
def test_what_cannot_be_pulled_leaves_no_file(
    run, store: sky.ModelStore, args: list[str], code: int, told: str
) -> None:
    store.save_model({"w": torch.ones(3), "step": 3}, "m")

    assert told in run("models", "pull", *args, code=code).stderr
    assert os.listdir() == []


def test_ls_lists_models_and_the_versions_of_one(run, run_json, store: sky.ModelStore) -> None:
    absent = f"no models yet in {store.url}, which does not exist\n"
    assert run("models", "ls").stderr == absent
    assert run("models", "gc").stderr == absent
    Path(store.url).mkdir()
    assert run("models", "ls").stderr == f"no models yet in {store.url}\n"
    store.save_model({"w": torch.ones(1000)}, "b")
    for _ in range(2):
        created = store.save_model({"w": torch.ones(1000)}, "a", metadata={"n": 1}).created

    lines = run("models", "ls").stdout.splitlines()
    assert lines[0].split() == ["NAME", "VERSION", "CREATED", "SIZE", "NEW", "TENSORS", "METADATA"]
    when = created.isoformat(timespec="seconds")
    assert lines[1].split() == ["a", "2", when, "3.9", "KiB", "0", "B", "1", "n=1"]
    assert lines[2].split()[:2] == ["b", "1"]
    assert [each["version"] for each in run_json("models", "ls", "a")] == [1, 2]
    assert "has no model 'c'; it has: a, b" in run("models", "ls", "c", code=1).stderr


def test_show_tells_everything(run, run_json, store: sky.ModelStore) -> None:
    module = torch.nn.Linear(3, 2)
    store.save_model(module, "linear", metadata={"steer": "\x1b[2J"})
    store.save_model({"nested": [{"w": torch.ones(2, 3)}], "s": torch.tensor(1.0)}, "linear")

    told = run("models", "show", "linear", "--version", "1").stdout
    assert told.startswith("linear version 1\n  created   20")
    assert "  size      32 B in 2 tensors\n" in told
    assert "  class     torch.nn.modules.linear.Linear\n" in told
    assert f"  saved by  skyward {sky.__version__}, torch {torch.__version__}\n" in told
    assert "  metadata  steer=\N{REPLACEMENT CHARACTER}[2J\n" in told

    listed = run("models", "show", "linear", "--tensors").stdout.splitlines()[-2:]
    assert [line.split() for line in listed] == [
        ["nested[0].w", "float32", "2x3", "24", "B"],
        ["s", "float32", "-", "4", "B"],
    ]
    assert "contents" not in run_json("models", "show", "linear")
    assert run_json("models", "show", "linear", "--tensors")["contents"] == [
        {"name": "nested[0].w", "dtype": "float32", "shape": [2, 3], "size": 24},
        {"name": "s", "dtype": "float32", "shape": [], "size": 4},
    ]


def test_rm_needs_yes_where_nobody_can_be_asked(run, run_json, store: sky.ModelStore) -> None:
    for _ in range(3):
        store.save_model({"x": 1}, "m")

    told = run("models", "rm", "m", code=2).stderr
    assert "no terminal to ask on; pass --yes to delete m, all 3 versions" in told
    assert len(store.versions("m")) == 3

    assert run("models", "rm", "m", "--version", "2", "-y").stdout == "deleted m version 2\n"
    assert run_json("models", "rm", "m", "--yes") == {"name": "m", "deleted": [1, 3]}
    assert "has no model 'm'" in run("models", "rm", "m", "--yes", code=1).stderr


def test_rm_of_a_version_that_is_not_there_deletes_nothing(run, store: sky.ModelStore) -> None:
    store.save_model({"x": 1}, "m")

    assert (
        "has no version 2 of 'm'; it has: 1"
        in run("models", "rm", "m", "--version", "2", "-y", code=1).stderr
    )
    assert len(store.versions("m")) == 1


def test_gc_frees_what_nothing_names(run, run_json, store: sky.ModelStore) -> None:
    store.save_model({"w": torch.ones(1000)}, "m")
    store.delete("m")

    assert run("models", "gc").stdout == "freed 0 B\n"
    assert run_json("models", "gc", "--older-than", "1h") == {"freed": 0}
    assert run("models", "gc", "--older-than", "0s").stdout.startswith("freed 4.")
    assert (
        "'soon' is no duration; write 90s, 30m, 24h or 7d"
        in run("models", "gc", "--older-than", "soon", code=2).stderr
    )


@pytest.mark.parametrize("given", ["--cert", "--key"])
def test_serve_wants_a_certificate_and_its_key(run, store: sky.ModelStore, given: str) -> None:
    Path("one.pem").touch()

    told = run("models", "serve", ".", given, "one.pem", code=2).stderr

    assert "TLS needs both --cert and --key" in told


def test_serve_wants_a_folder_that_is_there(run, store: sky.ModelStore) -> None:
    told = run("models", "serve", "stroe", code=2).stderr

    assert "'stroe' does not exist; create it, or correct the path" in told
    assert os.listdir() == []


@pytest.mark.parametrize("given", [["--token", ""], []])
def test_serve_takes_no_empty_token(run, store: sky.ModelStore, given: list[str]) -> None:
    told = run("models", "serve", ".", *given, code=1, env={"SKYWARD_STORE_TOKEN": ""}).stderr

    assert told.startswith("Error: --token: not a token, which is one or more letters")


def test_a_file_is_no_store(run, store: sky.ModelStore) -> None:
    Path("notes.txt").write_text("mine")

    told = run("models", "ls", "--store", "notes.txt", code=1).stderr

    assert told.startswith("Error: --store notes.txt: ")
    assert "notes.txt is a file, and a store is a folder; pass the folder" in told


def test_errors_name_options_and_not_parameters(run, store: sky.ModelStore) -> None:
    store.save_model({"w": torch.ones(3), "step": 3}, "team/ck")

    pulled = run("models", "pull", "team/ck", code=1).stderr
    opened = run("models", "serve", ".", "--host", "0.0.0.0", code=1).stderr

    assert pulled.endswith("named tensors only; write a .pt file: -o ck.pt\n")
    assert opened.startswith("Error: --host 0.0.0.0: without a token anyone")
    assert "pass --token or set SKYWARD_STORE_TOKEN, or allow it with --insecure\n" in opened


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_and_json(run, command: str) -> None:
    told = run("models", command, "--help").stdout

    assert "--json" in told
    assert "--debug" in told


def test_a_file_of_several_parts_comes_in_from_its_folder(run_json, store: sky.ModelStore) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    Path("parts").mkdir()
    safetensors.save_file({"a": torch.ones(2)}, "parts/1.safetensors")
    safetensors.save_file({"b": torch.ones(3)}, "parts/2.safetensors")
    places = {"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}
    Path("parts/model.safetensors.index.json").write_text(json.dumps(places))

    found: Any = run_json("models", "push", "parts", "m")

    assert (found["tensors"], sorted(store.load_model("m"))) == (2, ["a", "b"])


def damage(store: sky.ModelStore, place: Path) -> None:
    for name in ("bad", "good"):
        store.save_model({"x": 1}, name)
        store.save_model({"x": 2}, name)
    (place / "models" / "bad" / "2.json").write_bytes(b"garbage")


def test_one_damaged_version_does_not_hide_the_others(
    run, store: sky.ModelStore, tmp_path: Path
) -> None:
    damage(store, tmp_path / "store")

    all_models = run("models", "ls", code=1)
    versions = run("models", "ls", "bad", code=1)
    as_json = run("models", "ls", "--json", code=1)

    assert "good" in all_models.stdout
    assert "bad/2.json: the manifest is damaged" in all_models.stderr
    assert versions.stdout.count("bad") == 1
    assert [each["name"] for each in json.loads(as_json.stdout)] == ["good"]


def test_a_damaged_version_can_be_deleted(run, store: sky.ModelStore, tmp_path: Path) -> None:
    damage(store, tmp_path / "store")

    assert run("models", "rm", "bad", "--version", "2", "-y").stdout == "deleted bad version 2\n"
    assert run("models", "ls", "bad").exit_code == 0
    (tmp_path / "store" / "models" / "bad" / "1.json").write_bytes(b"garbage")
    assert run("models", "rm", "bad", "-y").stdout == "deleted bad, its one version\n"
    assert [each.name for each in store.list()] == ["good"]
