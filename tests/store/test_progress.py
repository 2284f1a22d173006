"""Progress is exact, arrives from any thread, and is drawn on a terminal and nowhere else."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
import uuid
from pathlib import Path

import pytest
import torch

import skyward as sky
from skyward.console.measures import ago, clock, of_size, size
from skyward.console.transfers import described

BIG = 5_000_000
"""Elements of float32: enough for an object of its own."""


class Listener:
    """Keeps what it hears."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.total = self.moved = self.spared = 0
        self.is_done = False
        self._lock = threading.Lock()

    def begin(self, total: int) -> None:
        assert not self.is_done
        self.total, self.moved, self.spared = total, 0, 0

    def advance(self, count: int) -> None:
        with self._lock:
            self.moved += count

    def reused(self, count: int) -> None:
        with self._lock:
            self.spared += count

    def done(self) -> None:
        self.is_done = True


class Ear:
    """A watch that remembers every progress it made."""

    def __init__(self) -> None:
        self.heard: list[Listener] = []

    def __call__(self, title: str) -> Listener:
        self.heard.append(Listener(title))
        return self.heard[-1]

    @property
    def last(self) -> tuple[str, int, int, int]:
        listener = self.heard[-1]
        assert listener.is_done
        return listener.title, listener.total, listener.moved, listener.spared


@pytest.fixture
def ear() -> Ear:
    return Ear()


@pytest.fixture(params=["folder", "memory"])
def watched(request: pytest.FixtureRequest, ear: Ear, folder: Path) -> sky.ModelStore:
    """A store with somebody watching: one that is mapped, and one that is downloaded."""
    if request.param == "folder":
        return sky.ModelStore(folder, progress=ear)
    pytest.importorskip(
        "fsspec", reason="fsspec is not installed: pip install 'skyward-torch[store]'"
    )
    return sky.ModelStore(f"memory://{uuid.uuid4().hex}", progress=ear)


def model() -> torch.nn.Module:
    return torch.nn.ParameterDict(
        {"big": torch.arange(BIG, dtype=torch.float32), "small": torch.ones(10), "none": []}
        | {f"part{i}": torch.full((1000 + i,), float(i)) for i in range(20)}
    )


def extent(module: torch.nn.Module) -> int:
    return sum(each.numel() * each.element_size() for each in module.state_dict().values())


def test_a_first_save_writes_every_byte(watched: sky.ModelStore, ear: Ear) -> None:
    watched.save_model(model(), "m")

    assert ear.last == ("saving m", extent(model()), extent(model()), 0)


def test_a_second_save_tells_what_it_reuses(watched: sky.ModelStore, ear: Ear) -> None:
    changed = model()
    watched.save_model(changed, "m")
    with torch.no_grad():
        changed.small += 1

    watched.save_model(changed, "m")

    assert ear.last == ("saving m", extent(changed), 40, extent(changed) - 40)


def test_equal_tensors_are_written_once(watched: sky.ModelStore, ear: Ear) -> None:
    watched.save_model([torch.ones(100), torch.ones(100)], "m")

    assert ear.last == ("saving m", 800, 400, 400)


def test_what_an_interrupted_save_left_behind_is_reused(folder: Path, ear: Ear) -> None:
    sky.ModelStore(folder).save_model({"x": torch.ones(100)}, "m")
    for manifest in folder.glob("models/m/*"):
        manifest.unlink()

    sky.ModelStore(folder, progress=ear).save_model({"x": torch.ones(100)}, "m")

    assert ear.last == ("saving m", 400, 0, 400)


def test_a_load_reads_every_byte_once(watched: sky.ModelStore, ear: Ear) -> None:
    watched.save_model(model(), "m")

    watched.load_model("m")
    assert ear.last == ("loading m", extent(model()), extent(model()), 0)

    watched.load_model("m", into=model())
    assert ear.last == ("loading m", extent(model()), extent(model()), 0)


def test_a_load_that_needs_part_of_an_object_counts_that_part(
    watched: sky.ModelStore, ear: Ear
) -> None:
    watched.save_model({f"x{i}": torch.full((1000,), float(i)) for i in range(10)}, "all")
    part = {f"x{i}": torch.full((1000,), float(i)) for i in (0, 2, 4, 6, 8)}
    watched.save_model(part, "part")

    watched.load_model("part")

    assert ear.last == ("loading part", 20_000, 20_000, 0)


@pytest.mark.parametrize("file", ["m.pt", "m.safetensors"])
def test_files_in_and_out_are_watched(
    watched: sky.ModelStore, ear: Ear, file: str, tmp_path: Path
) -> None:
    watched.save_model({"x": torch.ones(100)}, "m")

    watched.export_file("m", tmp_path / file)
    assert ear.last == ("loading m", 400, 400, 0)

    watched.import_file(tmp_path / file, "copy")
    assert ear.last == ("saving copy", 400, 0, 400)


def test_a_failure_ends_the_progress(watched: sky.ModelStore, ear: Ear) -> None:
    with pytest.raises(sky.errors.SerializationError):
        watched.save_model({"x": object()}, "m")

    assert ear.last == ("saving m", 0, 0, 0)


def test_a_store_can_still_be_sent_to_a_worker(folder: Path) -> None:
    sky.ModelStore(folder).save_model({"x": 1}, "m")

    assert pickle.loads(pickle.dumps(sky.ModelStore(folder))).load_model("m") == {"x": 1}


def test_a_store_that_is_sent_keeps_quiet_if_it_did(folder: Path) -> None:
    for given, expected in ((True, True), (False, False), (lambda title: Ear(), False)):
        sent = pickle.loads(pickle.dumps(sky.ModelStore(folder, progress=given)))
        assert sent._progress is expected


def test_nothing_is_drawn_where_there_is_no_terminal(folder: Path) -> None:
    code = (
        "import sys\n"
        "from skyward.store.progress import UNWATCHED, watched\n"
        "with watched(True, 'saving m') as progress:\n"
        "    sys.exit(progress is not UNWATCHED or 'rich' in sys.modules)"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=200)

    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ((4 << 30, 0, 0, 0.0), "0 B of 4.0 GiB"),
        ((4 << 30, 1 << 30, 0, 4.0), "1.0 of 4.0 GiB, 256 MiB/s, 0:12 left"),
        (
            (4 << 30, 512 << 20, 3 << 30, 14.0),
            "3.5 of 4.0 GiB, 36.6 MiB/s, 0:02 left, 3.0 GiB already stored",
        ),
        ((4 << 20, 4 << 20, 0, 2.0), "4.0 of 4.0 MiB, 2.0 MiB/s"),
    ],
)
def test_a_bar_says_bytes_rate_remaining_time_and_reuse(
    state: tuple[int, int, int, float], text: str
) -> None:
    assert described(*state) == text


def test_measures_read_well() -> None:
    from datetime import UTC, datetime, timedelta

    now = datetime.now(UTC)

    assert [size(n) for n in (0, 1023, 1024, 1_288_490_189, 200 << 20, 1023 << 20)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "1.2 GiB",
        "200 MiB",
        "1.0 GiB",
    ]
    assert of_size(1 << 20, 1 << 30) == "1.0 MiB of 1.0 GiB"
    assert [clock(s) for s in (3, 75, 3723)] == ["0:03", "1:15", "1:02:03"]
    past = [timedelta(0), timedelta(seconds=59), timedelta(minutes=1), timedelta(days=400)]
    assert [ago(now - each) for each in past] == [
        "just now",
        "59 seconds ago",
        "1 minute ago",
        "400 days ago",
    ]
