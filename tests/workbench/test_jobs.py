"""Jobs: they go on without a client, their output is kept, and their end is known."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

import skyward as sky
from skyward.compute.workbench import jobs
from skyward.compute.workbench.jobs import JobOutput
from skyward.errors import PoolError
from skyward.nodes.fleet import Fleet
from skyward.worker.jobs import Job

Eventually = Callable[..., None]


@pytest.fixture
def running(pool: sky.Compute) -> Fleet:
    return pool._open_fleet


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Write a script in a folder of its own, which is the working directory."""
    monkeypatch.chdir(tmp_path)

    def write(text: str) -> Path:
        path = tmp_path / "train.py"
        path.write_text(text)
        return path

    return write


def output_of(pool: Fleet, job: str, tail: int | None = None) -> tuple[bytes, Job]:
    with contextlib.closing(JobOutput(pool, 0, job, tail=tail)) as output:
        data = b"".join(part for _, part in output.parts())
    assert output.job is not None
    return data, output.job


def first_line(parts: Iterator[tuple[int, bytes]]) -> tuple[bytes, bytes]:
    """The first line, and what came with it; Python writes a line's end apart from its text."""
    data = b""
    while b"\n" not in data:
        data += next(parts)[1]
    line, _, rest = data.partition(b"\n")
    return line, rest


def test_a_script_runs_with_its_modules_and_arguments(
    running: Fleet, script: Callable[[str], Path], tmp_path: Path
) -> None:
    (tmp_path / "settings.py").write_text("RATE = 3")
    (tmp_path / "nets").mkdir()
    (tmp_path / "nets" / "__init__.py").write_text("from nets.deep import DEPTH")
    (tmp_path / "nets" / "deep.py").write_text("DEPTH = 7")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "large.bin").write_bytes(b"x")
    path = script(
        "import os, sys, pathlib, nets, settings\n"
        "print(settings.RATE * nets.DEPTH, *sys.argv[1:], os.environ['WHO'])\n"
        "print(sorted(each.name for each in pathlib.Path(__file__).parent.iterdir()))\n"
        "sys.exit(4)"
    )

    job = jobs.start_script(running, 0, path, ["--epochs", "2"], environment={"WHO": "ann"})
    data, ended = output_of(running, job)

    assert data.decode().splitlines() == [
        "21 --epochs 2 ann",
        "['__pycache__', 'nets', 'settings.py', 'train.py']",
    ]
    assert (ended.id, ended.state, ended.code) == (job, "failed", 4)
    assert job.startswith("train-")


def test_output_is_shown_again_by_id_by_name_and_by_its_last_lines(
    running: Fleet, script: Callable[[str], Path]
) -> None:
    first = jobs.start_script(running, 0, script("print('one')"), name="again")
    output_of(running, first)
    second = jobs.start_script(running, 0, script("for i in range(9): print(i)"), name="again")

    assert output_of(running, second)[1].state == "done"
    assert output_of(running, "again", tail=2)[0] == b"7\n8\n"
    assert output_of(running, first)[0] == b"one\n"
    assert [each.id for each in jobs.jobs_of(running, 0)][-2:] == [first, second]


def test_a_job_goes_on_while_nobody_looks_and_is_followed_again(
    running: Fleet, script: Callable[[str], Path], tmp_path: Path
) -> None:
    path = script(
        "import pathlib, time\n"
        "print('began')\n"
        f"while not pathlib.Path({str(tmp_path)!r}, 'go').exists(): time.sleep(0.01)\n"
        "print('ended')"
    )
    job = jobs.start_script(running, 0, path)
    with contextlib.closing(JobOutput(running, 0, job)) as output:
        assert first_line(output.parts()) == (b"began", b"")
    assert jobs.look_at(running, 0, job).state == "running"
    (tmp_path / "go").touch()

    assert output_of(running, job)[0] == b"began\nended\n"


def test_a_cancelled_job_can_clean_up_and_leaves_nothing(
    running: Fleet, script: Callable[[str], Path]
) -> None:
    path = script(
        "import subprocess, time\n"
        "try:\n"
        "    print(subprocess.Popen(['sleep', '600'], start_new_session=True).pid)\n"
        "    time.sleep(600)\n"
        "except KeyboardInterrupt: print('saved')\n"
        "raise SystemExit(1)"
    )
    job = jobs.start_script(running, 0, path)
    with contextlib.closing(JobOutput(running, 0, job)) as output:
        parts = output.parts()
        pid = int(first_line(parts)[0])
        jobs.cancel(running, 0, job)
        assert b"".join(data for _, data in parts) == b"saved\n"

    assert output.job is not None
    assert (output.job.state, output.job.code) == ("cancelled", 1)
    assert not psutil.pid_exists(pid)
    assert jobs.cancel(running, 0, job).state == "cancelled"


def test_a_job_that_a_signal_ended_has_the_exit_code_of_a_shell(
    running: Fleet, script: Callable[[str], Path]
) -> None:
    job = jobs.start_script(running, 0, script("import os; os.kill(os.getpid(), 2)"))
    ended = output_of(running, job)[1]
    assert (ended.state, ended.code) == ("failed", 130)


def test_several_jobs_run_at_once(running: Fleet, script: Callable[[str], Path]) -> None:
    path = script("import os, sys; print(os.environ['SKYWARD_JOB']); sys.stdin.read()")
    started = [jobs.start_script(running, 0, path, name=f"at.once{n}") for n in range(3)]

    for job in started:
        assert output_of(running, job)[0].decode().strip() == job


def test_a_job_that_is_not_there_is_named_with_those_that_are(running: Fleet) -> None:
    with pytest.raises(PoolError, match="no job 'nope'; the pool's jobs are: "):
        jobs.look_at(running, 0, "nope")
    with pytest.raises(PoolError, match="no job 'nope'"):
        output_of(running, "nope")


def test_names_and_commands_that_cannot_be_are_refused(running: Fleet) -> None:
    with pytest.raises(PoolError, match=r"cannot be called '\.\./x'"):
        jobs.start(running, 0, "../x", ["true"])
    with pytest.raises(PoolError, match="no program 'treu'"):
        jobs.start(running, 0, "x", ["treu"])
    with pytest.raises(sky.errors.ConfigurationError, match=r"there is no script nowhere\.py"):
        jobs.start_script(running, 0, Path("nowhere.py"))


def test_a_job_ends_with_a_killed_agent(
    script: Callable[[str], Path], eventually: Eventually
) -> None:
    path = script("import os, time; print(os.getpid()); time.sleep(600)")
    with sky.Compute(options=sky.Options(console=False)) as compute:
        pool = compute._open_fleet
        with pool.service(0, "about") as about:
            facts = about.ask("facts")
        job = jobs.start_script(pool, 0, path)
        with contextlib.closing(JobOutput(pool, 0, job)) as output:
            parts = output.parts()
            pid = int(first_line(parts)[0])
            os.kill(facts["pid"], signal.SIGKILL)
            with pytest.raises(sky.NodeLostError, match="agent of node 0 is gone, and its jobs"):
                list(parts)
        eventually(lambda: not psutil.pid_exists(pid))
