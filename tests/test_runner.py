"""`tests/run.py`: the order of tests, and what it says of those that fail and of a newer torch."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The runner, over the tests of a folder that is empty yet."""
    described = importlib.util.spec_from_file_location("runner", Path(__file__).with_name("run.py"))
    assert described
    assert described.loader
    module = importlib.util.module_from_spec(described)
    monkeypatch.setitem(sys.modules, "runner", module)
    described.loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "TESTS", tmp_path / "tests")
    (tmp_path / "tests" / "providers").mkdir(parents=True)
    monkeypatch.setattr(module, "REPORTS", tmp_path / "build")
    monkeypatch.setattr(module, "TABLE", tmp_path / "seconds.txt")
    monkeypatch.setattr(sys, "argv", ["run.py"])
    monkeypatch.setenv("SKYWARD_OPS_DTYPES", "float32")
    monkeypatch.setenv("SKYWARD_TEST_ORDER", "")
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -p no:cacheprovider\n")
    return module


FAILS_ONCE = """
import pathlib

kube = 1

class TestIt:
    def test_fails_once(self):
        mark = pathlib.Path(__file__).with_suffix(".mark")
        if not mark.exists():
            mark.touch()
            raise AssertionError("{words}")

    def test_passes(self):
        pass
"""


def test_a_test_that_failed_is_named_and_not_run_again(
    run: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = FAILS_ONCE.format(words="no such pod")
    (tmp_path / "tests/providers/test_pods.py").write_text(words)
    assert run.main() == 1
    said = capsys.readouterr().out
    assert "== failed\ntests/providers/test_pods.py::TestIt::test_fails_once\n" in said
    assert "no such pod" in said
    assert "== 1 failed, 1 passed in" in said
    (order,) = re.findall(r"; --order (\d+)\n", said)
    assert f" run.py --order={order}\n" in said
    again = f"SKYWARD_TEST_ORDER={order} {os.path.relpath(sys.executable)} -m pytest"
    assert said.endswith(f" {again} tests/providers/test_pods.py\n")


def test_a_run_leaves_the_reports_of_another_that_is_under_way(
    run: ModuleType, tmp_path: Path
) -> None:
    (tmp_path / "tests/test_it.py").write_text("def test_it():\n    pass\n")
    other, old = tmp_path / "build/1/other.xml", tmp_path / "build/2/old.xml"
    for each in (other, old):
        each.parent.mkdir(parents=True)
        each.touch()
    os.utime(old.parent, (0, 0))
    assert run.main() == 0
    reports = {path.relative_to(tmp_path / "build") for path in tmp_path.glob("build/*/*.xml")}
    assert reports == {Path("1/other.xml"), Path(f"{os.getpid()}/tests-test_it-py.xml")}


def test_a_test_that_does_not_end_is_told_with_the_line_where_it_waits(
    run: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "import threading\n\ndef test_waits():\n    threading.Event().wait()\n"
    (tmp_path / "tests/test_waiting.py").write_text(words)
    (tmp_path / "pytest.ini").write_text("[pytest]\ntimeout = 0.2\ntimeout_method = thread\n")
    assert run.main() == 1
    said = capsys.readouterr().out.partition("== failed")[2]
    assert "a test did not end:" in said
    assert "tests/test_waiting.py:4 in test_waits: threading.Event().wait()" in said


NOTES_ITS_ORDER = """
import pathlib

import pytest

NOTES = pathlib.Path(__file__).parent.with_name("notes")

@pytest.fixture(scope="module", params=["a", "b", "c"])
def costly(request):
    with NOTES.open("a") as notes:
        notes.write(f"{request.param} made, ")
    return request.param

class TestIt:
    @pytest.mark.parametrize("number", range(5))
    def test_notes(self, number, costly):
        with NOTES.open("a") as notes:
            notes.write(f"{__name__[-1]} {number} {costly}, ")
"""


def test_every_commit_has_another_order_that_can_be_given_again(
    run: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("first", "second"):
        (tmp_path / f"tests/test_{name}.py").write_text(NOTES_ITS_ORDER)
    shutil.copy(Path(__file__).with_name("conftest.py"), tmp_path / "tests")
    notes = tmp_path / "notes"
    seen: list[str] = []
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    for day in range(1, 3):
        dates = {f"GIT_{who}_DATE": f"2026-01-0{day}T00:00:00Z" for who in ("AUTHOR", "COMMITTER")}
        commit = [*git, "commit", "-q", "--allow-empty", "-m", "one"]
        subprocess.run(commit, env={**os.environ, **dates}, check=True)
        assert run.main() == 0
        (order,) = re.findall(r"--order (\d+)", capsys.readouterr().out)
        seen.append(notes.read_text())
        notes.unlink()
    assert sorted(seen[0].split(", ")) == sorted(seen[1].split(", "))
    assert seen[0] != seen[1]
    assert seen[0].count("made") == 6, "a fixture of a module is made once for each argument"
    monkeypatch.setattr(sys, "argv", ["run.py", "--order", order])
    assert run.main() == 0
    assert notes.read_text() == seen[1]


@pytest.mark.parametrize(
    ("said", "good"),
    [
        ("ERROR: No matching distribution found for torch", True),
        ("ERROR: Could not install packages due to an OSError: No space left on device", False),
        ("", False),
    ],
)
def test_the_newest_torch_is_skipped_only_where_there_is_none(
    run: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    said: str,
    good: bool,
) -> None:
    """With a pip that fails so."""
    python = tmp_path / "newest" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\necho '{said}' >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(run, "NEWEST", tmp_path / "newest")
    monkeypatch.setattr(sys, "argv", ["run.py", "--newest"])
    assert run.main() == (0 if good else 1)
    told = capsys.readouterr().out.splitlines()[-1]
    assert told.startswith("skipped: pip offers no torch: " if good else "failed: pip cannot")
    assert told.endswith(said or "pip said nothing")
