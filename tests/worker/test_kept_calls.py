"""The calls by name that an agent keeps, when its disk does not do what it should."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from skyward.errors import PoolError
from skyward.worker.kept_calls import CallEnd, KeptCalls
from skyward.worker.kept_jobs import KeptJobs


@pytest.fixture
def calls(tmp_path: Path) -> Iterator[KeptCalls]:
    jobs, runners = KeptJobs(tmp_path / "jobs"), KeptJobs(tmp_path / "runners")
    kept = KeptCalls(tmp_path / "calls", jobs, runners)
    yield kept
    kept.close()


def test_a_call_whose_folder_cannot_be_made_is_not_there(calls: KeptCalls, tmp_path: Path) -> None:
    (tmp_path / "calls").write_text("no folder")
    with pytest.raises(OSError):
        calls.begin("run")
    assert not calls.working

    (tmp_path / "calls").unlink()
    calls.begin("run")
    assert calls.working


def test_an_end_that_cannot_be_written_is_told_all_the_same(calls: KeptCalls) -> None:
    folder = calls.begin("run")
    calls.add("run", "train", "me", lambda: "job")
    (folder / "ended.json").mkdir()  # nothing can be renamed to it
    calls.ended("run", CallEnd(0.0, "failed", "no room"))
    (folder / "ended.json").rmdir()

    assert (calls.get("run").state, calls.get("run").problem) == ("failed", "no room")
    calls.forget("run")
    with pytest.raises(PoolError, match="there is no call named 'run'"):
        calls.get("run")


def test_a_call_whose_runner_does_not_start_is_not_taken_for_the_next_one(calls: KeptCalls) -> None:
    def refuse() -> str:
        raise OSError("no process")

    calls.begin("run")
    with pytest.raises(OSError, match="no process"):
        calls.add("run", "train", "me", refuse)
    assert calls.get("run").state == "lost"
    version = calls.version
    calls.give_up("run")
    assert calls.version != version
    with pytest.raises(PoolError, match="there is no call named 'run'"):
        calls.get("run")

    calls.begin("run")
    calls.add("run", "train", "me", lambda: "job")
    assert calls.get("run").state == "queued"
