"""On a terminal: a bar for what takes long, tables, questions; and Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import skyward as sky

from ..conftest import PATIENCE, only_in_all

pytest.importorskip("fsspec", reason="fsspec is not installed: pip install 'skyward-torch[store]'")


class Terminal:
    """What a person would see."""

    def __init__(self) -> None:
        self.mine, self.theirs = pty.openpty()
        self.seen = b""

    def read_until(self, text: bytes, seconds: float = PATIENCE) -> None:
        deadline = time.monotonic() + seconds
        os.set_blocking(self.mine, False)
        while text not in self.seen:
            assert time.monotonic() < deadline, self.seen
            with contextlib.suppress(BlockingIOError):
                self.seen += os.read(self.mine, 65536)
            time.sleep(0.01)

    def read_rest(self, process: subprocess.Popen[bytes]) -> None:
        os.close(self.theirs)
        os.set_blocking(self.mine, True)
        with contextlib.suppress(OSError):  # the other end is closed
            while data := os.read(self.mine, 65536):
                self.seen += data
        process.wait(PATIENCE)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    made = Terminal()
    yield made
    for end in (made.mine, made.theirs):
        with contextlib.suppress(OSError):
            os.close(end)


@pytest.fixture
def signs(tmp_path: Path) -> Path:
    (tmp_path / "signs").mkdir()
    return tmp_path / "signs"


@pytest.fixture
def pushing(tmp_path: Path, signs: Path, store: sky.ModelStore) -> list[str]:
    """The arguments of a push that waits for a sign, to the folder of `store`."""
    torch.save({"w": torch.ones(1000)}, "m.pt")
    return [str(signs), "models", "push", "m.pt", "m", "--store", f"waiting://{tmp_path}/store"]


def test_a_long_push_shows_a_bar_that_goes_away(
    start, terminal: Terminal, signs: Path, pushing: list[str]
) -> None:
    process = start(*pushing, script="waiting.py", stdout=terminal.theirs, stderr=terminal.theirs)

    terminal.read_until(b"0 B of 3.9 KiB")
    (signs / "go").touch()
    terminal.read_rest(process)

    text = terminal.seen.decode()
    assert process.returncode == 0, text
    assert "saving m" in text
    assert "━" in text
    # The line is erased before the result takes its place.
    assert text.rpartition("\x1b[2K")[2] == "m version 1: 3.9 KiB in 1 tensor, 3.9 KiB new\r\n"


@only_in_all
def test_no_bar_is_drawn_in_a_pipe(
    start, terminal: Terminal, signs: Path, pushing: list[str], eventually
) -> None:
    """Takes as long as a bar would take to appear, and a little longer."""
    process = start(*pushing, script="waiting.py", stdout=terminal.theirs)

    eventually((signs / "writing").exists)
    time.sleep(0.8)
    (signs / "go").touch()
    errors = process.communicate(timeout=PATIENCE)[1]
    terminal.read_rest(process)

    assert terminal.seen == b"m version 1: 3.9 KiB in 1 tensor, 3.9 KiB new\r\n"
    assert errors == b""


@only_in_all
def test_an_interrupted_push_publishes_nothing(
    start, signs: Path, pushing: list[str], store: sky.ModelStore, eventually
) -> None:
    """Pressed until it ends: an upload in flight does not hold it."""
    process = start(*pushing, script="waiting.py")
    eventually((signs / "writing").exists)

    while process.poll() is None:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.3)
    output, errors = process.communicate(timeout=PATIENCE)

    assert process.returncode == 130
    assert output == b""
    assert errors == b"Interrupted\n"
    assert store.list() == ()


@only_in_all
def test_a_push_that_is_interrupted_when_it_is_done_has_succeeded(
    start, signs: Path, pushing: list[str], store: sky.ModelStore
) -> None:
    process = start(*pushing, script="waiting.py")
    (signs / "go").touch()

    output = process.stdout.readline()
    while process.poll() is None:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.05)

    assert output == b"m version 1: 3.9 KiB in 1 tensor, 3.9 KiB new\n"
    assert process.returncode == 0
    assert process.stderr.read() == b""
    assert store.versions("m")[0].version == 1


@pytest.mark.parametrize(("answer", "code"), [(b"y\n", 0), (b"n\n", 1), (b"\n", 1)])
def test_rm_asks_on_a_terminal(
    start, terminal: Terminal, store: sky.ModelStore, answer: bytes, code: int
) -> None:
    store.save_model({"x": 1}, "m")
    store.save_model({"x": 2}, "m")
    process = start(
        *("models", "rm", "m"), **dict.fromkeys(("stdin", "stdout", "stderr"), terminal.theirs)
    )

    terminal.read_until(b"Delete m, all 2 versions? [y/N]: ")
    os.write(terminal.mine, answer)
    terminal.read_rest(process)

    assert process.returncode == code
    assert len(store.list()) == code
    told = b"Error: nothing was deleted" if code else b"deleted m, all 2 versions"
    assert told in terminal.seen


def test_tables_on_a_terminal_have_relative_times_and_cut_only_the_metadata(
    start, terminal: Terminal, store: sky.ModelStore
) -> None:
    store.save_model({"w": torch.ones(1000)}, "a/name", metadata={"note": "x" * 200, "esc": "\x1b"})

    process = start("models", "ls", stdout=terminal.theirs, stderr=terminal.theirs)
    terminal.read_rest(process)

    text = terminal.seen.decode()
    assert "a/name        1  just now  3.9 KiB  3.9 KiB        1  note=xxx" in text
    assert "…" in text
    assert "\x1b," not in text


def test_no_bar_is_drawn_where_it_is_switched_off_or_a_pool_draws(
    terminal: Terminal, store: sky.ModelStore
) -> None:
    code = (
        "import os\n"
        "from skyward.console import console_for\n"
        "from skyward.store.progress import UNWATCHED, watched\n"
        "console = console_for(None, several_workers=False)\n"
        "with watched(True, 'saving m') as progress:\n"
        "    assert progress is UNWATCHED\n"
        "console.close('')\n"
        "with watched(True, 'saving m') as progress:\n"
        "    assert progress is not UNWATCHED\n"
        "os.environ['SKYWARD_PROGRESS'] = '0'\n"
        "with watched(True, 'saving m') as progress:\n"
        "    assert progress is UNWATCHED\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stderr=terminal.theirs)
    terminal.read_rest(process)

    assert process.returncode == 0, terminal.seen
