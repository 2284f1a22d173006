"""Kills, full disks and little memory: what was published stays, and the next save works."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import skyward as sky
from skyward.store import local

from ..conftest import ALL, only_in_all


@only_in_all
@pytest.mark.slow
def test_a_kill_at_any_moment_leaves_a_working_store(folder: Path) -> None:
    """Many kills, each at a random moment of a save, each followed by a full check."""
    count = "100" if ALL else "12"
    script = Path(__file__).with_name("killing.py")

    done = subprocess.run(
        [sys.executable, script, folder, count], capture_output=True, text=True, timeout=280
    )

    assert done.returncode == 0, done.stderr
    kills, _, version = done.stdout.strip().rpartition(" ")
    assert kills == f"{count} kills, version"
    assert int(version) > int(count), "the kills came before anything was saved"


def test_a_full_disk_costs_the_save_and_nothing_else(small_disk: Path) -> None:
    store = sky.ModelStore(small_disk)
    store.save_model({"x": torch.randn(100_000)}, "m")

    with pytest.raises(sky.errors.StoreFullError, match=r"No space left.*make room.*save again"):
        store.save_model({"x": torch.randn(2_000_000)}, "m")

    assert [each.version for each in store.versions("m")] == [1]
    assert list((small_disk / "tmp").iterdir()) == []
    store.save_model({"x": torch.randn(100_000)}, "m")
    assert store.load_model("m", version=1)["x"].shape == (100_000,)


@pytest.mark.parametrize("removable", [True, False])
def test_a_version_whose_name_does_not_reach_the_disk_is_not_published(
    folder: Path, monkeypatch: pytest.MonkeyPatch, removable: bool
) -> None:
    """A disk that does not remove the name either keeps it; the first error is the one to tell."""
    store = sky.ModelStore(folder, durable=True)
    store.save_model({"x": torch.ones(3)}, "m")
    sync = os.fsync

    def full(handle: int) -> None:
        if os.path.samestat(os.fstat(handle), os.stat(folder / "models" / "m")):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(handle)

    unlink = os.unlink

    def broken(path: Path) -> None:
        if path.parent == folder / "models" / "m":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        unlink(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        if not removable:
            patch.setattr(os, "unlink", broken)
        with pytest.raises(sky.errors.StoreFullError, match="make room"):
            store.save_model({"x": torch.zeros(3)}, "m")

    assert [each.version for each in store.versions("m")] == ([1] if removable else [1, 2])


def test_versions_can_be_deleted_on_a_full_disk(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = sky.ModelStore(folder)
    for number in range(3):
        store.save_model({"x": torch.full((3,), number)}, "m")

    def full(handle: int, part: memoryview, at: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        store.delete("m", version=1)
        with pytest.raises(sky.errors.StoreFullError):
            store.delete("m", version=3)

    assert [each.version for each in store.versions("m")] == [2, 3]


@pytest.mark.parametrize("budget", [0, 1000, 45_000, 45_500])
def test_wherever_the_room_ends_the_old_version_stays(
    folder: Path, monkeypatch: pytest.MonkeyPatch, budget: int
) -> None:
    store = sky.ModelStore(folder)
    store.save_model({"x": torch.ones(3)}, "m")
    left = budget

    def write(handle: int, part: memoryview, at: int) -> int:
        nonlocal left
        if left <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left -= len(part[: max(left, 1)])
        return len(part)

    with monkeypatch.context() as patch:
        patch.setattr(local.memory.os, "pwrite", write)
        with pytest.raises(sky.errors.StoreFullError, match="make room"):
            while True:
                store.save_model({"x": torch.randn(10_000)}, "m")
                store = sky.ModelStore(folder)
                left = 0

    assert torch.equal(store.load_model("m", version=1)["x"], torch.ones(3))
    assert list((folder / "tmp").iterdir()) == []


def test_a_folder_one_may_not_use_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = sky.ModelStore(tmp_path / "file" / "store")

    with pytest.raises(
        sky.errors.StoreError, match=r"file/store/.* failed: Not a directory; check"
    ):
        store.save_model({"x": torch.ones(1)}, "m")


MEASURED = """
import re, sys, torch
import skyward as sky

MIB = 1 << 20
store = sky.ModelStore(sys.argv[1])
action = sys.argv[2]
if action == "pack":
    model = {str(i): torch.zeros(4 * MIB, 3)[:, 0] for i in range(24)}
    for i, column in enumerate(model.values()):
        column[0] = i
elif action != "load":
    model = torch.nn.ParameterList([torch.full((2 * MIB,), float(i)) for i in range(64)])
if action == "fill":
    for parameter in model:
        parameter.data.fill_(-1)
store.list()

def peak():
    # Not getrusage's, which begins with what the parent had when it forked.
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) >> 10

before = peak()
if action in ("save", "pack"):
    store.save_model(model, action)
elif action == "load":
    kept = store.load_model("save")
    assert all((tensor == index).all() for index, tensor in enumerate(kept.values()))
elif action == "fill":
    store.load_model("save", into=model)
    assert all((parameter == index).all() for index, parameter in enumerate(model))
print(peak() - before)
"""


@only_in_all
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
def test_memory_stays_close_to_the_size_of_the_model(folder: Path) -> None:
    """Half a GiB goes to the disk and comes back, in a new process each time; in `make test-all` it
    also comes back into a model, and tensors are saved that have to be copied, 16 MiB each."""

    def measured(action: str) -> int:
        done = subprocess.run(
            [sys.executable, "-c", MEASURED, folder, action],
            capture_output=True,
            text=True,
            timeout=280,
        )
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    assert measured("save") < 300
    assert 300 < measured("load") < 512 + 300
    if ALL:
        assert measured("fill") < 300
        assert measured("pack") < 300
