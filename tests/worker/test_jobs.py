"""The jobs that an agent keeps: programs and calls, their records, and disks that are full."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from skyward.cli.jobs import job_row
from skyward.errors import PoolError
from skyward.worker import jobs, output_log
from skyward.worker.config import AgentConfig
from skyward.worker.jobs import Job, Jobs
from skyward.worker.program import RunningProgram
from skyward.worker.services.jobs import ends

from ..conftest import PATIENCE


@pytest.fixture
def kept(config: AgentConfig) -> Iterator[Jobs]:
    kept = Jobs(config)
    yield kept
    kept.close()


def run(kept: Jobs, name: str, *command: str) -> Job:
    return kept.start(kept.begin(name), list(command))


def call(kept: Jobs, name: str, *runner: str) -> Job:
    command = list(runner) or ["sleep", "600"]
    return kept.start(kept.begin(name, "call"), command, by="me", function="train")


def test_a_long_output_loses_its_beginning_and_says_so(
    kept: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "OUTPUT_KEPT", 8000)
    job = run(kept, "loud", "seq", "1", "100000")
    assert kept.ran(job.id).code == 0
    log = Path(job.folder, "output")
    size = sum(each.stat().st_size for each in log.iterdir())
    assert 8000 <= size < 4 * 8000
    position, data = everything(log)
    assert position > 500_000
    assert data.endswith(b"\n99999\n100000\n")
    assert data[: data.index(b"\n")].isdigit()


def everything(log: Path) -> tuple[int, bytes]:
    begin, data = output_log.read(log, 0, 1 << 20)
    end = begin + len(data)
    while more := output_log.read(log, end, 1 << 20)[1]:
        data, end = data + more, end + len(more)
    return begin, data


def test_a_job_is_found_by_its_id_before_another_by_its_name(kept: Jobs) -> None:
    for name in ("fit", "fit-1"):
        run(kept, name, "true")
    assert kept.get("fit-1").id == "fit-1"
    assert kept.get("fit-1-2").id == "fit-1-2"
    assert kept.get("fit").id == "fit-1"


def test_only_so_many_ended_jobs_of_a_kind_are_kept(
    kept: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "KEPT", 2)
    other = kept.start(kept.begin("plugin", "daemon"), ["true"])
    for _ in range(4):
        kept.ran(run(kept, "one", "true").id)
    assert [each.id for each in kept.all(("script",))] == ["one-3", "one-4"]
    kept.ran(other.id)
    assert [each.id for each in kept.all(("daemon",))] == ["plugin-1"]


def test_a_job_whose_agent_has_ended_is_lost_for_the_next_agent(config: AgentConfig) -> None:
    before = Jobs(config)
    run(before, "fit", "sleep", "600")
    before.close()

    (found,) = Jobs(config).all()

    assert found.state == "lost"
    assert found.problem == "it ended with the node's agent, which was killed or stopped"


def test_lost_jobs_have_run_until_their_agent_ended(config: AgentConfig) -> None:
    for name, began, changed in (("loud-1", 1000.0, 1060.0), ("silent", 1040.0, 1040.0)):
        folder = Path(config.folder, "jobs", name)
        (folder / "output").mkdir(parents=True)
        job = Job(name, "script", ["train"], began, str(folder))
        (folder / "job.json").write_bytes(msgspec.json.encode(job))
        for each in (folder / "job.json", folder / "output", folder):
            os.utime(each, (changed, changed))

    assert {each.id: each.took for each in Jobs(config).all()} == {"loud-1": 60.0, "silent": 20.0}
    assert {each.id: each.took for each in Jobs(config).all()} == {"loud-1": 60.0, "silent": 20.0}


def test_a_program_that_starts_keeps_nobody_waiting_who_looks_at_jobs(
    kept: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[bool] = []

    class SlowProgram(RunningProgram):
        def __init__(self, *args: Any) -> None:
            with ThreadPoolExecutor(1) as other:
                found.append(other.submit(lambda: kept.working).result(PATIENCE))
            super().__init__(*args)

    monkeypatch.setattr(jobs, "RunningProgram", SlowProgram)
    call(kept, "run")
    kept.find_or_start("page", "page", ["sleep", "600"])
    assert found == [True, True]


def test_a_call_that_was_cancelled_does_not_run_though_its_runner_was_not_told(
    kept: Jobs,
) -> None:
    class Gone:
        def send(self, *args: object) -> None:
            raise BrokenPipeError

    call(kept, "run")
    (runner,) = kept.all(("runner",))
    assert kept.serve(Gone(), runner.id)  # type: ignore[arg-type]
    kept.cancel("run")
    assert kept.get("run").state == "queued"

    kept.end(runner.id)

    assert kept.get("run").state == "cancelled"
    assert not [each for each in kept.all(("runner",)) if each.state == "running"]


def test_calls_whose_next_runner_does_not_start_are_told(
    kept: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Orders:
        def send(self, *args: object) -> None: ...

    call(kept, "run")
    (runner,) = kept.all(("runner",))
    assert kept.serve(Orders(), runner.id)  # type: ignore[arg-type]

    def refuse(*args: object) -> None:
        raise OSError("no room")

    monkeypatch.setattr(jobs, "RunningProgram", refuse)
    kept.end(runner.id)
    problem = "the process that runs calls could not be started: no room"
    assert (kept.get("run").state, kept.get("run").problem) == ("lost", problem)


def test_jobs_that_serve_others_are_listed_too(kept: Jobs) -> None:
    run(kept, "fit", "true")
    kept.find_or_start("page", "page", ["{python}", "-P", "-m", "skyward.page.server", "runs"])
    command = "sleep 300 & sleep 600"
    daemon = kept.start(kept.begin("plugin", "daemon"), ["/bin/sh", "-c", command])
    call(kept, "run")
    assert [each.id for each in kept.all()] == ["fit-1", "page-1", "plugin-1", "run"]
    shown = [(kind, command) for _, kind, *_, command in map(job_row, kept.all())]
    served = ("page", "skyward.page.server runs")
    assert shown[1:] == [served, ("daemon", "sleep 300 & sleep 600"), ("call", "train")]
    with pytest.raises(PoolError, match="plugin-1 is a plugin's, which needs it"):
        kept.cancel("plugin-1")
    kept.end(daemon.id)


def test_what_a_plugins_command_leaves_behind_goes_on_until_it_is_ended(kept: Jobs) -> None:
    command = "echo started; sleep 600 & echo $! > pid"
    job = kept.start(kept.begin("plugin", "daemon"), ["/bin/sh", "-c", command])
    assert kept.ran(job.id).code == 0
    assert (kept.get(job.id).state, kept.last_words(job)) == ("running", "started")
    assert not kept.is_running(job.id)
    assert not kept.working
    kept.close()
    assert kept.get(job.id).state == "running", "plugins end theirs"
    kept.end(job.id)
    assert kept.get(job.id).state == "done"


def test_a_job_whose_folder_cannot_be_made_is_not_there(kept: Jobs, tmp_path: Path) -> None:
    (tmp_path / "jobs").write_text("no folder")
    with pytest.raises(OSError):
        kept.begin("run", "call")
    assert not kept.working

    (tmp_path / "jobs").unlink()
    kept.begin("run", "call")
    assert kept.working


def test_an_end_that_cannot_be_written_is_told_all_the_same(kept: Jobs) -> None:
    job = call(kept, "run")
    Path(job.folder, "job.json").unlink()
    Path(job.folder, "job.json").mkdir()  # nothing can be renamed to it
    kept.report("run", "failed", "no room", streams=False)

    assert (kept.get("run").state, kept.get("run").problem) == ("failed", "no room")
    kept.forget("run")
    with pytest.raises(PoolError, match="there is no call named 'run'"):
        kept.get("run", "call")


def test_a_call_whose_runner_does_not_start_is_not_there(kept: Jobs) -> None:
    with pytest.raises(PoolError, match="there is no program 'nothing'"):
        call(kept, "run", "nothing")
    with pytest.raises(PoolError, match="there is no call named 'run'"):
        kept.get("run", "call")
    assert call(kept, "run").state == "queued"


def test_a_call_that_is_sent_again_waits_for_what_becomes_of_the_first_time(kept: Jobs) -> None:
    with ThreadPoolExecutor() as threads:
        for is_cut in (True, False):
            first = kept.begin("run", "call", "mine")
            again = threads.submit(kept.begin, "run", "call", "mine")
            with pytest.raises(PoolError, match="a call named 'run' is being submitted"):
                kept.begin("run", "call", "another's")
            assert not again.done()
            if is_cut:
                kept.give_up(first)
                later = again.result(PATIENCE)
                assert later is not first
                assert not kept.is_there(later)
                kept.give_up(later)
            else:
                kept.start(first, ["sleep", "600"], function="train")
                assert again.result(PATIENCE) is first


def test_a_job_that_is_given_up_twice_is_not_a_later_one_of_its_name(kept: Jobs) -> None:
    job = kept.begin("run", "call")
    kept.give_up(job)
    later = kept.begin("run", "call")
    kept.give_up(job)
    assert kept.working
    assert Path(later.folder).is_dir()


def test_a_call_whose_runner_does_not_come_up_is_lost(kept: Jobs) -> None:
    assert call(kept, "run", "sh", "-c", "echo no torch").kind == "call"
    kept.ran("run")
    problem = "the process that runs calls did not come up; it wrote:\nno torch"
    assert (kept.get("run").state, kept.get("run").problem) == ("lost", problem)


def test_what_came_of_a_call_can_be_read_once_the_call_is_reported(kept: Jobs) -> None:
    job = call(kept, "run")
    result = Path(job.folder, "result")
    result.mkdir()
    jobs.new_result(Path(job.folder)).write_bytes(b"items")
    kept.report("run", "running", "", streams=False)
    assert output_log.read(result, 0, 10) == (0, b"")
    kept.report("run", "running", "", streams=True)
    assert output_log.read(result, 0, 10) == (0, b"items")
    kept.report("run", "done", "", streams=False)
    assert output_log.read(result, 0, 10) == (0, b"items")
    assert kept.get("run").state == "done"


def test_a_call_whose_result_cannot_be_renamed_has_failed(kept: Jobs) -> None:
    job = call(kept, "run")
    new = jobs.new_result(Path(job.folder))
    new.with_suffix("").mkdir(parents=True)
    new.write_bytes(b"value")
    kept.report("run", "done", "", streams=False)
    assert kept.get("run").state == "failed"
    assert kept.get("run").problem.startswith("its result could not be written: ")


def test_ends_of_calls_are_told_once_and_also_that_one_is_gone(kept: Jobs) -> None:
    caller: Any = SimpleNamespace(node=SimpleNamespace(jobs=kept), looks=lambda: repeat(None))
    call(kept, "long")
    told = ends(caller)
    assert next(told) == ([], ())
    for name in ("short", "gone"):
        call(kept, name)
        kept.report(name, "done", "", streams=False)
    kept.report("long", "running", "", streams=True)
    kept.forget("gone")
    assert next(told) == (["long", "short"], ())
    kept.forget("short")
    assert next(told) == (["short"], ())
    kept.report("long", "done", "", streams=False)
    kept.forget("long")
    call(kept, "long")
    assert next(told) == (["long"], ()), "that one is another call"
    told.close()
