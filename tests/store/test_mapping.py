"""Files as private memory: writable, without a descriptor, and gone with the last tensor."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import skyward as sky
from skyward.objects import memory
from skyward.store import local, web
from skyward.store.local import mapped
from skyward.store.web import Download

from ..conftest import only_in_all

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc/self")


def view(file: Path) -> memoryview:
    with file.open("rb") as opened:
        return mapped(opened.fileno())


def mappings_of(file: Path) -> int:
    return Path("/proc/self/maps").read_text().count(str(file))


@contextlib.contextmanager
def descriptors(free: int) -> Iterator[None]:
    """Lets this process open so many files more; those that are open stay."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    numbers = (
        number for number in itertools.count() if not os.path.lexists(f"/proc/self/fd/{number}")
    )
    limit = next(itertools.islice(numbers, free, None))
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_it_is_private_writable_and_page_aligned(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"x" * 10_000)

    block = view(file)
    again = view(file)
    torch.frombuffer(block, dtype=torch.uint8)[0] = ord("y")

    assert bytes(block[:2]) == b"yx"
    assert (len(block), bytes(again), file.read_bytes()) == (10_000, b"x" * 10_000, b"x" * 10_000)
    assert memory.address(block) % mmap.PAGESIZE == 0


def test_it_goes_with_the_last_tensor(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(10_000))
    block = view(file)
    tensor = torch.frombuffer(block[4096:], dtype=torch.float32)
    del block
    half = tensor[:10]
    del tensor

    assert mappings_of(file) == 1
    file.unlink()
    assert half.sum() == 0
    del half
    assert mappings_of(file) == 0


def test_an_empty_file_is_an_empty_view(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    assert bytes(view(tmp_path / "file")) == b""


def test_what_cannot_be_mapped_is_an_ordinary_error(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(OSError, match="No such device"):
            mapped(descriptor)
    finally:
        os.close(descriptor)


def test_a_model_may_have_more_tensors_than_a_process_descriptors(
    store: sky.ModelStore, folder: Path
) -> None:
    saved = {str(number): torch.full((1 << 18,), float(number)) for number in range(60)}
    store.save_model(saved, "m")

    with descriptors(50):
        loaded = store.load_model("m")
        files = local.LocalFiles(folder)
        sent = Download(files, store._manifest("m", None))
        parts = [bytes(part[:1]) for part in sent.parts(0, sent.size)]
    assert all(torch.equal(loaded[name], saved[name]) for name in saved)
    assert len(parts) >= 60


def test_a_download_has_the_last_row_of_a_matrix_with_gaps(
    store: sky.ModelStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web, "_GATHER", 2 * 8 * 4)
    matrix = torch.arange(50.0).view(5, 10)[:, :8]
    store.save_model({"w": matrix}, "m")

    parts = Download(local.LocalFiles(folder), store._manifest("m", None))
    file = b"".join(bytes(part) for part in parts.parts(0, parts.size))

    assert file.endswith(matrix.contiguous().numpy().tobytes())


def test_a_download_keeps_no_object_mapped_that_it_has_sent(
    store: sky.ModelStore, folder: Path
) -> None:
    store.save_model({str(number): torch.full((1 << 18,), number) for number in range(5)}, "m")
    sent = Download(local.LocalFiles(folder), store._manifest("m", None))

    most = max(mappings_of(folder / "objects") for _ in sent.parts(0, sent.size))

    assert most == 1


def test_a_process_without_descriptors_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"x")
    with (
        descriptors(0),
        pytest.raises(sky.errors.StoreError, match=r"Too many open files.*ulimit -n"),
    ):
        local.LocalFiles(tmp_path).view("x")


ENDS = """
import atexit, os, sys
# The first to be registered is the last to be called.
atexit.register(lambda: os.write(1, b"%d" % value["x"].sum()))
import skyward as sky

value = sky.ModelStore(sys.argv[1]).load_model("m")
child = os.fork()
if not child:
    value["x"][0] = 7
    del value
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


@only_in_all
def test_it_outlives_a_fork_and_the_interpreter(store: sky.ModelStore, folder: Path) -> None:
    store.save_model({"x": torch.ones(1 << 18)}, "m")

    ended = subprocess.run([sys.executable, "-c", ENDS, folder], capture_output=True, text=True)

    assert (ended.returncode, ended.stderr, ended.stdout) == (0, "", str(1 << 18))
