"""Versions: numbered once, listed, deleted; unchanged tensors shared, unnamed ones collected."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import skyward as sky
from skyward.objects import memory
from skyward.store.catalog import GRACE, Catalog
from skyward.store.local import LocalFiles
from skyward.store.places import FileEntry
from skyward.store.save import Saving
from skyward.store.values import Span, encode


def objects(folder: Path) -> set[str]:
    return {file.name for file in folder.glob("objects/*/*")}


def layers(count: int = 20, size: int = 1000) -> dict[str, torch.Tensor]:
    return {f"layer{i}": torch.randn(size) for i in range(count)}


def test_versions_count_up_and_the_newest_is_loaded(store: sky.ModelStore) -> None:
    for value in (10, 20, 30):
        store.save_model({"x": torch.tensor(value)}, "m", metadata={"value": value})

    assert [each.version for each in store.versions("m")] == [1, 2, 3]
    assert [each.metadata["value"] for each in store.versions("m")] == [10, 20, 30]
    assert store.load_model("m")["x"] == 30
    assert store.load_model("m", version=1)["x"] == 10


def test_a_version_tells_what_it_is(store: sky.ModelStore) -> None:
    saved = store.save_model(nn.Linear(3, 2), "org/model", metadata={"accuracy": 0.5, "tags": [1]})

    assert store.list() == (saved,)
    assert (saved.name, saved.version, saved.tensors, saved.size) == ("org/model", 1, 2, 32)
    assert saved.class_path == "torch.nn.modules.linear.Linear"
    assert saved.torch == torch.__version__
    assert saved.skyward == sky.__version__
    assert saved.metadata == {"accuracy": 0.5, "tags": [1]}


def test_only_what_changed_is_added(store: sky.ModelStore, folder: Path) -> None:
    base = layers()
    store.save_model(base, "base")
    tuned = base | {"layer3": torch.randn(1000), "head": torch.randn(10)}

    version = store.save_model(tuned, "tuned")
    again = store.save_model(tuned, "tuned")

    assert version.added == 4000 + 40
    assert again.added == 0
    assert all(torch.equal(store.load_model("tuned")[name], tuned[name]) for name in tuned)
    assert len(objects(folder)) == 2


def test_deleting_a_model_spares_what_others_share(store: sky.ModelStore, folder: Path) -> None:
    base = layers()
    store.save_model(base, "base")
    store.save_model(base | {"head": torch.randn(10)}, "tuned")
    store.save_model({"alone": torch.randn(10)}, "alone")

    store.delete("base")
    store.delete("alone")
    freed = store.gc(older_than=0)

    assert freed >= 40
    assert len(objects(folder)) == 2
    assert torch.equal(store.load_model("tuned")["layer7"], base["layer7"])
    assert [each.name for each in store.list()] == ["tuned"]
    store.delete("tuned")
    store.gc(older_than=0)
    assert objects(folder) == set()


def test_the_collector_leaves_young_files_alone(store: sky.ModelStore, folder: Path) -> None:
    store.save_model(layers(), "m")
    store.delete("m")

    assert store.gc() == 0
    assert len(objects(folder)) == 1


def test_a_version_number_is_never_used_again(store: sky.ModelStore) -> None:
    for value in (1, 2, 3):
        store.save_model({"x": torch.tensor(value)}, "m")

    store.delete("m", version=3)
    assert store.load_model("m")["x"] == 2
    assert store.save_model({"x": torch.tensor(4)}, "m").version == 4
    store.delete("m")
    assert store.save_model({"x": torch.tensor(5)}, "m").version == 5
    assert [each.version for each in store.versions("m")] == [5]


def test_what_is_not_there_is_named_with_what_is(store: sky.ModelStore) -> None:
    store.save_model({}, "mnist")

    with pytest.raises(sky.errors.ModelNotFoundError, match="no model 'minst'; it has: mnist"):
        store.load_model("minst")
    with pytest.raises(sky.errors.ModelNotFoundError, match="no version 7 of 'mnist'; it has: 1"):
        store.load_model("mnist", version=7)
    with pytest.raises(sky.errors.ModelNotFoundError, match="no model 'x'"):
        store.delete("x")
    with pytest.raises(sky.errors.ModelNotFoundError, match="no model 'x'"):
        store.versions("x")


@pytest.mark.parametrize(
    "name",
    [
        *("", "..", "../x", "a/../../x", "/etc/passwd", "a//b", "a/", "a/./b", ".hidden", "-rf"),
        *("a\\b", "a b", "a\0", "a\n", "ä", "1.json", "a/3.json", "m/2.GONE", "x" * 201),
    ],
)
def test_names_that_lead_elsewhere_are_refused(
    store: sky.ModelStore, folder: Path, name: str
) -> None:
    for action in (
        lambda: store.save_model({}, name),
        lambda: store.load_model(name),
        lambda: store.delete(name),
        lambda: store.versions(name),
    ):
        with pytest.raises(sky.errors.ConfigurationError, match="not a model's name; use up to"):
            action()
    assert not folder.exists()


def test_a_name_may_lie_below_another(store: sky.ModelStore) -> None:
    store.save_model({"x": 1}, "a")
    store.save_model({"x": 2}, "a/b")
    store.save_model({"x": 3}, "a/1")

    assert [each.name for each in store.list()] == ["a", "a/1", "a/b"]
    assert [each.version for each in store.versions("a")] == [1]
    store.delete("a")
    assert store.load_model("a/1") == {"x": 3}


def test_names_that_differ_only_in_case_are_told_apart(store: sky.ModelStore, folder: Path) -> None:
    store.save_model({"x": 1}, "model")
    # What a filesystem that ignores case shows of the other name.
    (folder / "models" / "Model").symlink_to(folder / "models" / "model")

    with pytest.raises(
        sky.errors.StoreDamagedError, match=r"holds version 1 of 'model'.*another name"
    ):
        Catalog(LocalFiles(folder)).read("Model", 1)


@pytest.mark.parametrize("metadata", [{1: 2}, "text", ["list"]])
def test_metadata_must_be_a_mapping(store: sky.ModelStore, metadata: object) -> None:
    with pytest.raises(sky.errors.ConfigurationError, match="must be a mapping with text for keys"):
        store.save_model({}, "m", metadata=metadata)  # type: ignore[arg-type]


def test_metadata_must_be_json(store: sky.ModelStore) -> None:
    with pytest.raises(sky.errors.SerializationError, match="metadata cannot be written as JSON"):
        store.save_model({}, "m", metadata={"when": object()})


def test_concurrent_writers_get_versions_of_their_own(folder: Path) -> None:
    base = layers()
    results: list[sky.ModelVersion] = []

    def save(value: int) -> None:
        store = sky.ModelStore(folder)
        results.extend(
            store.save_model(base | {"x": torch.tensor([value, step])}, "m") for step in range(5)
        )

    threads = [threading.Thread(target=save, args=(value,)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    store = sky.ModelStore(folder)
    assert sorted(each.version for each in results) == list(range(1, 21))
    seen = {tuple(store.load_model("m", version=v)["x"].tolist()) for v in range(1, 21)}
    assert len(seen) == 20


def test_a_save_that_loses_a_reused_version_stores_its_tensors_itself(folder: Path) -> None:
    store = sky.ModelStore(folder)
    base = layers()
    store.save_model(base, "base")
    files = LocalFiles(folder)
    saving = Saving(Catalog(files), "tuned")

    store.delete("base")
    store.gc(older_than=0)
    manifest = saving.save(*encode(base), {}, None)

    assert manifest.added == 20 * 4000
    assert torch.equal(store.load_model("tuned")["layer0"], base["layer0"])
    assert list(folder.glob("saves/*")) == []


def test_a_lease_keeps_objects_until_its_save_is_done(folder: Path) -> None:
    store = sky.ModelStore(folder)
    store.save_model(layers(), "m")
    (name,) = objects(folder)
    store.delete("m")
    (folder / "saves").mkdir(exist_ok=True)
    (folder / "saves" / "running.json").write_text(f'{{"objects": ["{name}"]}}')

    assert store.gc(older_than=0) == 0
    (folder / "saves" / "running.json").unlink()
    assert store.gc(older_than=0) > 80_000
    assert objects(folder) == set()


def test_an_interrupted_save_is_resumed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = sky.ModelStore(folder)
    value = {f"large{i}": torch.randn(4_500_000) for i in range(3)} | layers()

    def killed(*_: object) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(LocalFiles, "create", killed)
        with pytest.raises(KeyboardInterrupt):
            store.save_model(value, "m")
    uploaded = objects(folder)
    store.save_model(value, "m")

    assert len(uploaded) == 4
    assert objects(folder) == uploaded


def test_a_change_during_the_save_is_noticed(
    store: sky.ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = {"x": torch.zeros(1000)}

    stored = Saving._stored

    def meddled(saving: Saving, spans: list[Span]) -> object:
        value["x"].add_(1)
        return stored(saving, spans)

    monkeypatch.setattr(Saving, "_stored", meddled)
    with pytest.raises(sky.errors.StoreError, match=r"x changed while it was being saved"):
        store.save_model(value, "m")
    assert store.list() == ()


@pytest.mark.parametrize("size", [1000, 1 << 20], ids=["small", "large"])
def test_what_is_stored_has_the_name_of_what_was_written(
    store: sky.ModelStore, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    value = {"x": torch.zeros(size)}
    hidden = value["x"].numpy()
    write = memory.write_named

    def meddled(descriptor: int, start: int, buffer: memoryview) -> bytes:
        hidden[:] += 1
        return write(descriptor, start, buffer)

    monkeypatch.setattr(memory, "write_named", meddled)
    if size < LocalFiles.whole // 4:
        with pytest.raises(
            sky.errors.StoreError, match=r"shape \[1000\] changed while it was being"
        ):
            store.save_model(value, "m")
        assert store.list() == ()
    else:
        store.save_model(value, "m")
        assert torch.equal(store.load_model("m")["x"], torch.ones(size))


@pytest.mark.parametrize("version", [1.0, True, "1"])
def test_a_version_is_a_whole_number(store: sky.ModelStore, version: object) -> None:
    store.save_model({"x": 1}, "m")

    for action in (store.delete, store.describe):
        with pytest.raises(
            sky.errors.ConfigurationError, match="a version is a whole number; pass an"
        ):
            action("m", version=version)  # type: ignore[arg-type]
    assert len(store.versions("m")) == 1


def test_what_is_deleted_while_it_is_listed_is_left_out(
    store: sky.ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "a", "b"):
        store.save_model({"x": 1}, name)
    numbers = Catalog.numbers

    def deleting(catalog: Catalog, name: str | None = None) -> dict[str, list[int]]:
        found = numbers(catalog, name)
        with monkeypatch.context() as patch:
            patch.setattr(Catalog, "numbers", numbers)
            for other, version in (("a", 2), ("b", 1)):
                with contextlib.suppress(sky.errors.ModelNotFoundError):
                    sky.ModelStore(store._files.url).delete(other, version=version)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(Catalog, "numbers", deleting)
        assert [(each.name, each.version) for each in store.list()] == [("a", 1)]
    store.save_model({"x": 1}, "a")
    with monkeypatch.context() as patch:
        patch.setattr(Catalog, "numbers", lambda catalog, name: {"a": [1, 2, 3]})
        assert [each.version for each in store.versions("a")] == [1, 3]


@pytest.mark.parametrize("action", ["versions", "delete"])
def test_a_model_that_goes_while_it_is_looked_up(
    store: sky.ModelStore, monkeypatch: pytest.MonkeyPatch, action: str
) -> None:
    store.save_model({"x": 1}, "m")
    answers = iter([{"m": [1]}, {}])
    monkeypatch.setattr(Catalog, "numbers", lambda catalog, name: next(answers))

    if action == "delete":
        store.delete("m")
    else:
        with pytest.raises(sky.errors.ModelNotFoundError, match="'m' any more: it was deleted"):
            store.versions("m")


def test_the_collector_removes_old_marks_but_the_highest(
    store: sky.ModelStore, folder: Path
) -> None:
    for _ in range(3):
        store.save_model({"x": 1}, "m")
        store.delete("m")
    store.gc()
    young = sorted(each.name for each in folder.glob("models/m/*"))
    for each in folder.glob("models/m/*"):
        os.utime(each, (0, 0))

    store.gc()

    assert young == ["1.gone", "2.gone", "3.gone"]
    assert [each.name for each in folder.glob("models/m/*")] == ["3.gone"]
    assert store.save_model({"x": 1}, "m").version == 4


@pytest.mark.parametrize("listing", range(7))
def test_the_collector_spares_what_is_written_after_the_clock_was_set_back_meanwhile(
    store: sky.ModelStore, folder: Path, monkeypatch: pytest.MonkeyPatch, listing: int
) -> None:
    for _ in range(2):
        store.save_model({"x": 1}, "m")
    store.delete("m")
    clock = SimpleNamespace(time=lambda: 1e9)
    monkeypatch.setattr("skyward.store.catalog.time", clock)
    left = folder / "objects" / "ab" / "abandoned"
    new = [folder / "tmp" / "draft", folder / "saves" / "lease.json", folder / "models/m/1.gone"]
    for each in folder.glob("**/*"):
        os.utime(each, (9e8, 9e8))
    for each in (left, *new[:2]):
        each.parent.mkdir(parents=True, exist_ok=True)
    left.write_text("of an interrupted save")
    os.utime(left, (9e8, 9e8))
    list_files = LocalFiles.list
    count = itertools.count()

    def set_back(files: LocalFiles, place: str) -> list[FileEntry]:
        if next(count) == listing:
            clock.time = lambda: 1e9 - 2 * GRACE
            for each in new:
                each.write_text('{"objects": ["abandoned"]}')
                os.utime(each, (clock.time(), clock.time()))
        return list_files(files, place)

    monkeypatch.setattr(LocalFiles, "list", set_back)
    store.gc()

    assert next(count) > listing
    assert [each for each in new if not each.exists()] == []
    # A lease that comes after the leases were read names nothing that is so old.
    assert left.exists() == (listing < 5)


@pytest.mark.parametrize("older_than", [None, 0, -60])
@pytest.mark.parametrize("deleted", ["last", "each", "first"])
def test_a_number_that_was_used_and_deleted_meanwhile_is_not_used_again(
    store: sky.ModelStore,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    deleted: str,
    older_than: float | None,
) -> None:
    """Also if the collector runs in between, and spares no young files."""
    last_number = Catalog.last_number

    def meanwhile(catalog: Catalog, name: str) -> int:
        found = last_number(catalog, name)
        monkeypatch.setattr(Catalog, "last_number", last_number)
        other = sky.ModelStore(folder)
        for _ in range(2):
            other.save_model({"x": 1}, "m")
            if deleted == "each":
                other.delete("m")
        if deleted != "each":
            other.delete("m", version=None if deleted == "last" else 1)
        if older_than is not None:
            other.gc(older_than)
        return found

    monkeypatch.setattr(Catalog, "last_number", meanwhile)

    assert store.save_model({"x": 2}, "m").version == 3
    assert [each.version for each in store.versions("m")][-1] == 3


def test_a_number_that_was_deleted_is_not_seen_with_another_value(
    store: sky.ModelStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save has got it, and is killed before it takes its manifest back."""
    store.save_model({"x": 1}, "m")
    store.delete("m")
    with monkeypatch.context() as patch:
        patch.setattr(Catalog, "last_number", lambda catalog, name: 0)
        patch.setattr(LocalFiles, "delete", lambda *_: sys.exit())
        with pytest.raises(SystemExit):
            store.save_model({"x": 2}, "m")
    assert (folder / "models/m/1.json").exists()

    assert store.numbers() == {}
    for version in (None, 1):
        with pytest.raises(sky.errors.ModelNotFoundError, match="has no model 'm'"):
            store.load_model("m", version=version)
    assert store.save_model({"x": 3}, "m").version == 2
    store.gc()
    assert sorted(each.name for each in folder.glob("models/m/*")) == ["1.gone", "2.json"]


def test_metadata_must_be_unicode(store: sky.ModelStore, folder: Path) -> None:
    for metadata in ({"note": "\ud800"}, {"\ud800": 1}):
        with pytest.raises(
            sky.errors.SerializationError, match="metadata cannot be written as JSON"
        ):
            store.save_model({"x": torch.ones(3)}, "m", metadata=metadata)
    assert not folder.exists()


def test_few_manifests_are_remembered_and_none_for_a_listing(
    store: sky.ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skyward.store.catalog._KEPT", 3)
    for index in range(6):
        store.save_model({"x": index}, f"m{index}")
    assert len(store._catalog._kept) == 3

    fresh = sky.ModelStore(store._files.url)
    fresh.list()
    fresh.versions("m1")
    fresh.gc()
    assert len(fresh._catalog._kept) == 0
    fresh.load_model("m1")
    assert list(fresh._catalog._kept) == ["models/m1/1.json"]


@pytest.mark.parametrize("older_than", ["1d", None, True, float("nan")])
def test_the_collector_takes_seconds(store: sky.ModelStore, older_than: object) -> None:
    with pytest.raises(sky.errors.ConfigurationError, match="takes seconds"):
        store.gc(older_than=older_than)  # type: ignore[arg-type]


def test_the_collector_removes_nothing_when_a_listing_fails(
    store: sky.ModelStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever folder it is that a disk or a network fails to read."""
    for name in ("a", "b/c"):
        store.save_model({"x": torch.randn(10)}, name)
    kept = sorted(folder.rglob("*"))
    scandir = os.scandir

    for broken in ("models", "models/a", "models/b", "models/b/c", "objects", "saves"):
        (folder / "saves").mkdir(exist_ok=True)

        def failing(path: Path, broken: str = broken) -> object:
            if Path(path) == folder / broken:
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
            return scandir(path)

        monkeypatch.setattr(os, "scandir", failing)
        with pytest.raises(
            sky.errors.StoreError, match=f"{broken}: listing failed: Stale file handle"
        ):
            store.gc(older_than=0)
        monkeypatch.setattr(os, "scandir", scandir)
        assert sorted(folder.rglob("*")) == sorted({*kept, folder / "saves"})


def test_the_collector_spares_a_model_whose_folder_is_a_link(
    store: sky.ModelStore, folder: Path, tmp_path: Path
) -> None:
    store.save_model({"x": torch.ones(10)}, "m")
    (folder / "models" / "m").rename(tmp_path / "elsewhere")
    (folder / "models" / "m").symlink_to(tmp_path / "elsewhere")

    store.gc(older_than=0)

    assert [each.name for each in store.list()] == ["m"]
    assert (store.load_model("m")["x"] == 1).all()
