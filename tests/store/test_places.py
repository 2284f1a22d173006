"""Every kind of place passes the same tests: a folder, our server, fsspec's memory, and S3."""

from __future__ import annotations

import os
import sys
import threading
import uuid
from pathlib import Path

import pytest
import torch

import skyward as sky
from skyward.store.files import Files, open_files

PLACES = ["folder", "file URL", "server", "memory", "renaming", "s3"]


@pytest.fixture(params=PLACES)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty place of each kind."""
    if request.param == "folder":
        return str(tmp_path / "store")
    if request.param == "file URL":
        return (tmp_path / "with space").as_uri()
    if request.param == "server":
        address: str = request.getfixturevalue("serve")(tmp_path / "served").address
        return address
    if request.param == "s3":
        return f"{request.getfixturevalue('s3')}/{uuid.uuid4().hex}"
    pytest.importorskip("fsspec", reason="fsspec is not installed: pip install 'skyward[store]'")
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
    with pytest.raises((sky.StoreError, TypeError)):
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
    assert seen == [[], ["file"]]
    assert place.create("d/other", b"2")
    assert seen[2:] == [["file"], ["file", "other"]]


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
        with pytest.raises(sky.StoreDamagedError, match="objects/"):
            store.load_model("m")


@pytest.mark.parametrize(
    ("url", "token", "message"),
    [
        ("", None, "not a place for models"),
        ("nonsense://x", None, "Protocol not known: nonsense"),
        ("/some/folder", "secret", "a folder takes no token"),
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
    with pytest.raises(sky.ConfigurationError, match=message) as caught:
        sky.ModelStore(url, token)
    assert "secret" not in str(caught.value)


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    core = pytest.importorskip("fsspec.core", reason="fsspec is not installed")

    def missing(*_: object) -> None:
        raise ImportError("Install s3fs to access S3")

    with monkeypatch.context() as patch:
        patch.setattr(core, "url_to_fs", missing)
        with pytest.raises(
            sky.ConfigurationError, match=r"s3:// is missing; install skyward\[s3\]"
        ):
            sky.ModelStore("s3://bucket/models")
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(sky.ConfigurationError, match=r"needs fsspec; install skyward\[store\]"):
        sky.ModelStore("memory://x")
