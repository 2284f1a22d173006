"""Every kind of place passes the same tests: a folder, our server, fsspec's memory, and S3."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import sys
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

import skyward as sky
from skyward.store import manifest
from skyward.store.address import open_files
from skyward.store.catalog import Catalog
from skyward.store.places import Files
from skyward.store.remote import FsspecFiles

PLACES = ["folder", "file URL", "server", "memory", "renaming", "s3"]


@pytest.fixture(params=PLACES)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty place of each kind."""
    if request.param == "folder":
        return str(tmp_path / "store")
    if request.param == "file URL":
        return (tmp_path / "with space").as_uri()
    if request.param == "server":
        address: str = request.getfixturevalue("served")
        return address
    if request.param == "s3":
        return f"{request.getfixturevalue('s3')}/{uuid.uuid4().hex}"
    pytest.importorskip(
        "fsspec", reason="fsspec is not installed: pip install 'skyward-torch[store]'"
    )
    if request.param == "renaming":
        return f"dir::file://{tmp_path}/renamed"
    return f"memory://{uuid.uuid4().hex}"


@pytest.fixture
def place(url: str) -> Files:
    """The files there."""
    return open_files(url, None, durable=False)


def test_what_is_written_is_read(place: Files) -> None:
    place.write("objects/a/file", [b"hello ", memoryview(b"world")])

    buffer = memoryview(bytearray(5))
    assert place.read("objects/a/file", 0, 100) == b"hello world"
    assert place.read("objects/a/file", 6, 3) == b"wor"
    assert place.read_into("objects/a/file", 6, buffer) == 5
    assert bytes(buffer) == b"world"
    assert place.size("objects/a/file") == 11
    view = place.view("objects/a/file")
    assert view is None or bytes(view) == b"hello world"


def test_reading_past_the_end_gives_less(place: Files) -> None:
    place.write("objects/file", [b"abc"])

    assert place.read("objects/file", 2, 10) == b"c"
    assert place.read("objects/file", 3, 10) == b""
    assert place.read_into("objects/file", 1, memoryview(bytearray(8))) == 2


def test_a_file_that_is_not_there(place: Files) -> None:
    with pytest.raises(FileNotFoundError):
        place.read("objects/nothing", 0, 1)
    assert place.size("objects/nothing") is None
    assert place.list("objects/nothing") == []
    place.delete("objects/nothing")


def test_large_files_are_written_whole(place: Files) -> None:
    data = os.urandom(20 << 20)

    place.write("objects/large", [data[:100], memoryview(data)[100:]])

    assert place.size("objects/large") == len(data)
    assert place.read("objects/large", 0, len(data)) == data


def test_a_failed_write_leaves_nothing(place: Files) -> None:
    place.write("objects/file", [b"old"])
    with pytest.raises((sky.errors.StoreError, TypeError)):
        place.write("objects/file", [os.urandom(17 << 20), "no bytes"])  # type: ignore[list-item]

    assert place.read("objects/file", 0, 10) == b"old"


def test_a_durable_folder_has_the_file_on_the_disk_before_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[str]] = []
    names = lambda: sorted(file.name for file in (tmp_path / "d").glob("*"))
    monkeypatch.setattr(os, "fsync", lambda handle: seen.append(names()))
    place = open_files(tmp_path, None, durable=True)

    place.write("d/file", [b"1"])
    assert seen[-3:] == [[], [], ["file"]]
    assert place.create("d/other", b"2")
    assert seen[-2:] == [["file"], ["file", "other"]]


def test_a_listing_shows_files_with_sizes_and_times(place: Files) -> None:
    place.write("objects/d/one", [b"1"])
    place.write("objects/d/e/two", [b"22"])
    place.write("saves/other", [b"333"])

    found = sorted(place.list("objects/d"), key=lambda entry: entry.path)

    assert [(entry.path, entry.size) for entry in found] == [
        ("objects/d/e/two", 2),
        ("objects/d/one", 1),
    ]
    assert all(entry.modified > 1_600_000_000 for entry in found)
    place.delete("objects/d/one")
    assert [entry.path for entry in place.list("objects/d")] == ["objects/d/e/two"]


def test_new_folders_of_a_durable_one_are_on_the_disk_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settled: list[str] = []
    monkeypatch.setattr(
        os, "fsync", lambda handle: settled.append(os.readlink(f"/dev/fd/{handle}"))
    )
    place = open_files(tmp_path / "new" / "store", None, durable=True)

    place.write("objects/ab/file", [b"1"])

    root = tmp_path / "new" / "store"
    folders = [tmp_path, root.parent, root, root / "objects", root / "objects" / "ab"]
    assert {str(folder) for folder in folders} <= set(settled)
    settled.clear()
    place.write("objects/ab/other", [b"1"])
    assert settled[1:] == [str(root / "objects" / "ab")]


def test_a_file_url_keeps_every_letter_of_its_path(tmp_path: Path) -> None:
    for url in (f"file://{tmp_path}/a#b?c%20d", f"file://localhost{tmp_path}/a#b?c%20d"):
        assert open_files(url, None, durable=False).url == f"{tmp_path}/a#b?c d"


def test_a_place_that_connects_at_once_and_cannot_is_named() -> None:
    pytest.importorskip("fsspec", reason="fsspec is not installed")
    with pytest.raises(
        sky.errors.StoreError, match=r"ftp://\*\*\*@127.*failed.*check the addr"
    ) as caught:
        sky.ModelStore("ftp://user:secret@127.0.0.1:1/x")
    assert "secret" not in str(caught.value)


class Unlisted(Exception):
    """What some filesystem raises."""


@pytest.mark.parametrize("problem", [PermissionError("no"), OSError(5, "broken"), Unlisted("no")])
def test_a_folder_that_cannot_be_listed_fails_the_listing(
    problem: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = pytest.importorskip("fsspec.implementations.memory", reason="fsspec is not installed")
    place = open_files(f"memory://{uuid.uuid4().hex}", None, durable=False)
    place.write("models/a/1.json", [b"1"])
    place.write("models/b/1.json", [b"1"])
    ls = spec.MemoryFileSystem.ls

    def failing(fs: object, path: str, *args: object, **options: object) -> object:
        if path.endswith("/b"):
            raise problem
        return ls(fs, path, *args, **options)

    monkeypatch.setattr(spec.MemoryFileSystem, "ls", failing)
    with pytest.raises(sky.errors.StoreError, match="models: listing failed"):
        place.list("models")


@pytest.mark.parametrize("scheme", ["", "dir::file://"])
def test_folders_behind_links_are_listed_once(tmp_path: Path, scheme: str) -> None:
    if scheme:
        pytest.importorskip("fsspec", reason="fsspec is not installed")
    place = open_files(f"{scheme}{tmp_path}/store", None, durable=False)
    place.write("models/a/1.json", [b"1"])
    (models,) = tmp_path.rglob("models")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "1.json").write_text("1")
    (models / "linked").symlink_to(tmp_path / "elsewhere")
    (models / "dangling").symlink_to(tmp_path / "nowhere")
    if not scheme:
        (models / "alias").symlink_to(models / "a")
        (models / "a" / "loop").symlink_to(models)

    found = sorted(entry.path for entry in place.list("models"))

    assert found == ["models/a/1.json", "models/linked/1.json"]


def test_a_creation_that_is_cut_short_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = pytest.importorskip("fsspec.implementations.local", reason="fsspec is not installed")
    place = open_files(f"dir::file://{tmp_path}", None, durable=False)

    def cut(fs: object, path: str, data: bytes, **_: object) -> None:
        Path(path).write_bytes(data[:3])
        raise ConnectionResetError("cut")

    with monkeypatch.context() as patch:
        patch.setattr(local.LocalFileSystem, "pipe_file", cut)
        with pytest.raises(sky.errors.StoreError, match="cut"):
            place.create("models/m/1.json", b"manifest")
    assert place.list("models") == []
    assert place.create("models/m/1.json", b"manifest")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_filesystem_is_told_from_others(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = pytest.importorskip("fsspec.implementations.memory", reason="fsspec is not installed")

    def full(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(spec.MemoryFileSystem, "pipe_file", full)
    with pytest.raises(sky.errors.StoreFullError, match="make room"):
        open_files("memory://full", None, durable=False).write("objects/x", [b"1"])


@pytest.mark.parametrize("count", [100, 5_000_000], ids=["packed", "alone"])
def test_deleting_a_damaged_version_and_saving_it_again_heals(url: str, count: int) -> None:
    value = {"x": torch.randn(count)}
    place = damaged(url, value)
    store = sky.ModelStore(url)

    store.delete("m")
    # What another process would do, which has not seen the damage.
    manifest._distrusted.clear()
    version = store.save_model(value, "m")

    assert version.added == 4 * count
    assert torch.equal(store.load_model("m")["x"], value["x"])
    assert len(place.list("objects")) == 2


def test_saving_a_model_that_was_found_damaged_heals(url: str) -> None:
    value = {"x": torch.randn(400), "y": torch.randn(5_000_000)}
    damaged(url, value)
    store = sky.ModelStore(url)

    store.save_model(value, "m")

    loaded = store.load_model("m")
    assert all(torch.equal(loaded[name], value[name]) for name in value)


def damaged(url: str, value: dict[str, torch.Tensor]) -> Files:
    """A store with one version, every object of which has a flipped bit; a load has noticed."""
    sky.ModelStore(url).save_model(value, "m")
    place = open_files(url, None, durable=False)
    for entry in place.list("objects"):
        whole = bytearray(place.read(entry.path, 0, entry.size))
        whole[-1] ^= 1
        place.write(entry.path, [bytes(whole)])
    with pytest.raises(sky.errors.StoreDamagedError):
        sky.ModelStore(url).load_model("m")
    return place


def test_what_an_interrupted_save_left_behind_is_not_counted_as_added(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = {"x": torch.randn(400), "y": torch.randn(5_000_000)}

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Catalog, "publish", killed)
        with pytest.raises(KeyboardInterrupt):
            sky.ModelStore(url).save_model(value, "m")
    before = open_files(url, None, durable=False).list("objects")

    assert (
        sky.ModelStore(url).save_model(value | {"z": torch.randn(4_800_000)}, "m").added
        == 19_200_000
    )
    assert len(before) == 2
    assert len(open_files(url, None, durable=False).list("objects")) == 3


def test_only_one_of_two_creates_a_file(place: Files) -> None:
    assert place.create("models/d/file", b"first")
    assert not place.create("models/d/file", b"second")
    assert place.read("models/d/file", 0, 10) == b"first"


def test_a_store_works_there(url: str) -> None:
    store = sky.ModelStore(url)
    base = {f"layer{i}": torch.randn(300) for i in range(10)} | {"large": torch.randn(5_000_000)}

    store.save_model(base, "base", metadata={"a": 1})
    tuned = sky.ModelStore(url).save_model(base | {"layer1": torch.zeros(300)}, "tuned")
    loaded = sky.ModelStore(url).load_model("tuned")

    assert tuned.added == 1200
    assert torch.equal(loaded["large"], base["large"])
    assert torch.equal(loaded["layer0"], base["layer0"])
    assert (loaded["layer1"] == 0).all()
    assert [each.name for each in store.list()] == ["base", "tuned"]
    store.delete("base")
    store.gc(older_than=-60)
    assert torch.equal(store.load_model("tuned")["large"], base["large"])
    store.delete("tuned")
    store.gc(older_than=-60)
    assert open_files(url, None, durable=False).list("objects") == []


def test_one_thread_at_a_time_makes_a_file_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The filesystem looks whether the file is there, and then writes it."""
    memory = fsspec.filesystem("memory")
    both, pipe, inside = threading.Barrier(2), type(memory).pipe_file, [0, 0]

    def noted(fs: object, path: str, value: bytes, **options: object) -> None:
        inside[0] += 1
        inside[1] = max(inside)
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.2)
        pipe(fs, path, value, **options)
        inside[0] -= 1

    monkeypatch.setattr(type(memory), "pipe_file", noted)
    files = FsspecFiles(memory, f"/{uuid.uuid4().hex}", "memory://")
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda name: files.create(name, b"data"), ("one", "other")))
    assert inside == [0, 1]


def test_concurrent_writers_get_versions_of_their_own(url: str) -> None:
    if url.startswith("dir::"):
        pytest.skip("a filesystem that can only rename cannot decide who came first")
    versions = []

    def save(value: int) -> None:
        versions.append(sky.ModelStore(url).save_model({"x": value}, "m").version)

    threads = [threading.Thread(target=save, args=(value,)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(versions) == [1, 2, 3, 4]
    found = {sky.ModelStore(url).load_model("m", version=v)["x"] for v in versions}
    assert found == {0, 1, 2, 3}


def test_damage_is_noticed_there(url: str) -> None:
    store = sky.ModelStore(url)
    store.save_model({"x": torch.randn(100), "y": torch.randn(50)}, "m")
    place = open_files(url, None, durable=False)
    (entry,) = place.list("objects")
    whole = place.read(entry.path, 0, entry.size)

    flipped = whole[:-1] + bytes([whole[-1] ^ 1])
    for damaged in (whole[:-1], whole[:4], b"", flipped):
        place.write(entry.path, [damaged])
        with pytest.raises(sky.errors.StoreDamagedError, match="objects/"):
            store.load_model("m")


@pytest.mark.parametrize(
    ("url", "token", "message"),
    [
        ("", None, "not a place for models"),
        ("nonsense://x", None, "Protocol not known: nonsense"),
        ("/some/folder", "secret", "a folder takes no token"),
        ("file://models", None, "names no folder of this machine; write file:///folder/models"),
        ("file://", None, "names no folder of this machine"),
        ("file://host/models", None, "names no folder of this machine"),
        ("s3://bucket", "secret", "s3 takes no token"),
        ("http://", None, "not a server's address"),
        ("http://host:port", None, "not a server's address"),
        ("http://host/?token=secret", None, "not a server's address"),
        ("http://user:secret@host", None, "no credentials in the address"),
        ("http://host", "secret\r\nX: y", "not a token"),
        ("http://host", "", "not a token"),
    ],
)
def test_places_that_cannot_be_are_refused(url: str, token: str | None, message: str) -> None:
    with pytest.raises(sky.errors.ConfigurationError, match=message) as caught:
        sky.ModelStore(url, token)
    assert "secret" not in str(caught.value)


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    core = pytest.importorskip("fsspec.core", reason="fsspec is not installed")

    def missing(*_: object) -> None:
        raise ImportError("Install s3fs to access S3")

    with monkeypatch.context() as patch:
        patch.setattr(core, "url_to_fs", missing)
        with pytest.raises(
            sky.errors.ConfigurationError, match=r"s3:// is missing; install skyward-torch\[s3\]"
        ):
            sky.ModelStore("s3://bucket/models")
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(
        sky.errors.ConfigurationError, match=r"needs fsspec; install skyward-torch\[store\]"
    ):
        sky.ModelStore("memory://x")


@pytest.mark.parametrize("place", [None, 7, b"models", "", "  "])
def test_what_names_no_place_is_refused_by_its_value(place: Any) -> None:
    told = rf"ModelStore\({re.escape(repr(place))}\): not a place for models; pass a folder"
    with pytest.raises(sky.errors.ConfigurationError, match=told):
        sky.ModelStore(place)


@pytest.mark.parametrize("device", ["cuda:99", "nonsense", "xpu:99"])
def test_a_device_that_is_not_here_is_refused_by_its_name(tmp_path: Path, device: str) -> None:
    store = sky.ModelStore(tmp_path)
    store.save_model({"x": torch.ones(1)}, "m")

    with pytest.raises(
        sky.errors.ConfigurationError, match=rf"device='{device}': cannot be used here: "
    ):
        store.load_model("m", device=device)
