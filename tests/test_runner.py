"""`tests/run.py`: what it runs again, and what it says about that."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

FAILS_FIRST = """
import pathlib

{needs}

class TestIt:
    def test_fails_first(self):
        mark = pathlib.Path(__file__).with_suffix(".mark")
        if not mark.exists():
            mark.touch()
            raise AssertionError("{words}")

    def test_passes(self):
        pass
"""

LEAKS = """@pytest.fixture
    def leak(self):
        yield
        self.end()

    def test_leaks(self, leak):
        pass

    def end(self):"""


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
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -p no:cacheprovider\n")
    return module


def test_what_needs_software_of_others_is_run_again_alone(
    run: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = FAILS_FIRST.format(needs="kube = 1", words="no such pod")
    (tmp_path / "tests/providers/test_pods.py").write_text(words)
    assert run.main() == 0
    said = capsys.readouterr().out
    assert (
        "== PASSED ONLY WHEN RUN AGAIN: 1; what failed before is above\n"
        "tests/providers/test_pods.py::TestIt::test_fails_first\n" in said
    )
    assert said.index("no such pod") < said.index("== PASSED ONLY")
    assert "== 1 passed, 1 passed when run again in" in said


def test_an_error_in_a_fixture_gets_no_second_chance(
    run: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = FAILS_FIRST.format(needs="import pytest\nkube = 1", words="left behind")
    teardown = words.replace("def test_fails_first(self):", LEAKS)
    (tmp_path / "tests/providers/test_pods.py").write_text(teardown)
    assert run.main() == 1
    said = capsys.readouterr().out
    assert "== failed\ntests/providers/test_pods.py::TestIt::test_leaks\n" in said
    assert "running again" not in said


FAILS_AT = """
import itertools, os

def test_fails_sometimes():
    for number in itertools.count(1):
        try:
            os.mkdir(f"{{__file__}}.{{number}}")
            break
        except FileExistsError:
            pass
    assert number not in {runs}
"""


@pytest.mark.parametrize(("fails_at", "code"), [([1], 0), ([1, 3], 1)], ids=["once", "once more"])
def test_several_copies_of_a_test_of_our_own_must_pass_when_it_is_run_again(
    run: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    fails_at: list[int],
    code: int,
) -> None:
    (tmp_path / "tests/test_ours.py").write_text(FAILS_AT.format(runs=fails_at))
    assert run.main() == code
    said = capsys.readouterr().out
    name = "tests/test_ours.py::test_fails_sometimes\n"
    verdict = f"== failed\n{name}" if code else f"what failed before is above\n{name}"
    assert verdict in said
    assert len(list((tmp_path / "tests").glob("test_ours.py.*"))) == 1 + run.OWN_COPIES


@pytest.mark.parametrize("needs", ["kube = 1", ""], ids=["of others", "our own"])
def test_many_failures_are_no_accident(
    run: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], needs: str
) -> None:
    most = run.AGAIN if needs else run.OWN_AGAIN
    lines = [needs, *(f"def test_{number}(): assert 0" for number in range(most + 1))]
    (tmp_path / "tests/providers/test_pods.py").write_text("\n".join(lines))
    assert run.main() == 1
    assert "running again" not in capsys.readouterr().out
