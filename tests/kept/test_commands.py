"""`sky up`, `ps`, `attach`, `stop`, `start` and `down` for kept pools."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import skyward as sky
from skyward.cli.main import sky as command
from skyward.compute import without_end
from skyward.nodes import records
from skyward.nodes.records import Journal
from skyward.providers import Capabilities

from ..conftest import PATIENCE
from .conftest import QUIET

Script = Callable[[str], "subprocess.Popen[str]"]


@sky.function
def pid() -> int:
    return os.getpid()


@sky.function
def long() -> None:
    time.sleep(600)


def run(*args: str, code: int = 0) -> Result:
    result = CliRunner().invoke(command, list(args))
    assert result.exit_code == code, result.output
    return result


def documents(*args: str) -> Any:
    return json.loads(run(*args, "--json").stdout)


@pytest.fixture
def bench(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A pool of one node that `sky up` has left running."""
    monkeypatch.chdir(tmp_path)
    assert documents("up", "bench", "--keep", "10min") == {"name": "bench", "nodes": 1}
    yield "bench"
    if "bench" in records.names():
        run("down", "bench", "--force")
    assert Journal().pools() == []
    assert not list(home.glob("sky-*"))


def test_up_leaves_a_pool_that_ps_shows_and_down_ends(bench: str) -> None:
    (shown,) = documents("ps")
    assert (shown["name"], shown["provider"], shown["kept"]) == (bench, "local", True)
    assert shown["state"].startswith("kept, idle for")
    with sky.attach(bench) as compute:
        (shown,) = documents("ps")
        assert shown["state"] == "kept, 1 client"
        assert shown["clients"][0]["pid"] == str(os.getpid())
        assert pid() >> compute
    assert "removed" in run("down", bench).output
    assert documents("ps") == []
    with pytest.raises(sky.errors.PoolError, match="no pool called 'bench' is kept here"):
        sky.attach(bench)


def test_volumes_are_written_back_when_a_client_leaves_and_by_down(
    home: Path, tmp_path: Path
) -> None:
    pytest.importorskip("fsspec", reason="fsspec is not installed")
    bucket, target = tmp_path / "bucket", tmp_path / "at"
    bucket.mkdir()
    volume = sky.Volume(f"file://{bucket}", str(target))

    options = sky.Options(console=False)
    with sky.Compute(name="data", volumes=[volume], keep=600, options=options):
        (target / "first").write_text("1")
    assert (bucket / "first").read_text() == "1"

    (target / "second").write_text("2")
    run("down", "data")
    assert (bucket / "second").read_text() == "2"
    assert not target.exists()


def test_down_says_what_could_not_be_written_back(home: Path, tmp_path: Path) -> None:
    pytest.importorskip("fsspec", reason="fsspec is not installed")
    bucket, target = tmp_path / "bucket", tmp_path / "at"
    bucket.mkdir()
    volume = sky.Volume(f"file://{bucket}", str(target))

    options = sky.Options(console=False)
    with sky.Compute(name="data", volumes=[volume], keep=600, options=options):
        pass
    (target / "new").write_text("new")
    bucket.rmdir()
    bucket.touch()

    said = run("down", "data").stderr
    assert f"data: not written back: node 0: {target}: file://{bucket}" in said
    assert (target / "new").read_text() == "new"


@pytest.mark.parametrize("verb", ["down", "stop"])
def test_folders_that_were_sent_come_back(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    """Where nodes are on other machines; here, these stand for such nodes."""
    monkeypatch.setattr("skyward.compute.arguments.is_here", lambda provider: False)
    sources = [tmp_path / name for name in ("here", "gone")]
    for source in sources:
        source.mkdir()
        (source / "both").write_text("old")
    volumes = [sky.Volume(str(source), f"{source}-there") for source in sources]
    with sky.Compute(name="data", volumes=volumes, keep=600, options=QUIET):
        pass
    here, gone = sources
    Path(f"{here}-there", "made").write_text("made")
    for place in (here, Path(f"{here}-there")):
        (place / "both").write_text(str(place))
    shutil.rmtree(gone)

    said = run(verb, "data")

    assert (here / "made").read_text() == "made"
    assert "; 1 file brought back" in said.stdout
    assert f"data: not written back: {here / 'both'} stays as it is: it has changed" in said.stderr
    assert f"data: not written back: {gone}: there is no such folder on this machine" in said.stderr
    if verb == "stop":
        run("down", "data")


def test_down_without_a_name_leaves_pools_that_stay_alone(bench: str) -> None:
    assert "nothing was left behind" in run("down").output
    with sky.attach(bench) as compute:
        assert pid() >> compute


def test_down_refuses_while_others_are_attached(bench: str, script: Script) -> None:
    other = script(f"c = sky.attach({bench!r}); print(1, flush=True); input()")
    assert other.stdout is not None
    other.stdout.readline()
    refused = run("down", bench, code=1)
    assert f"process {other.pid}" in refused.stderr
    assert "--force" in refused.stderr
    run("down", bench, "--force")
    _, problems = other.communicate("\n", timeout=PATIENCE)
    assert other.returncode == 0, problems
    assert "Traceback" not in problems


def test_a_script_that_runs_is_not_ended_by_accident(bench: str, tmp_path: Path) -> None:
    path = tmp_path / "fit.py"
    path.write_text("import time; time.sleep(600)")
    job = documents("run", str(path), "--on", bench, "--detach")["id"]
    for verb in ("stop", "down"):
        refused = run(verb, bench, code=1).stderr
        assert f"{bench}: runs {job} of " in refused
        assert "--force" in refused
    with sky.attach(bench) as compute, pytest.raises(sky.errors.PoolError, match=f"runs {job}"):
        compute.down()
    assert documents("jobs", bench)[0]["state"] == "running"
    run("stop", bench, "--force")
    assert documents("ps")[0]["state"] == "stopped"


def test_a_call_by_name_that_runs_is_not_ended_by_accident(bench: str) -> None:
    with sky.attach(bench) as compute:
        compute.resize(2)
        compute.submit(long(), name="steps")
        with pytest.raises(sky.errors.PoolError, match=r"runs the call steps of .*force=True"):
            compute.resize(1)
    assert documents("ps")[0]["state"] == "kept, 1 call by name"
    for verb in ("stop", "down"):
        refused = run(verb, bench, code=1).stderr
        assert f"{bench}: runs the call steps of " in refused
        assert f"end it with `sky cancel {bench} steps`, or pass --force" in refused
    with sky.attach(bench) as compute:
        compute.submit(long(), name="more")
        with pytest.raises(
            sky.errors.PoolError, match=r"runs the calls steps of .*, more of .* NAME`"
        ):
            compute.down()
        compute.resize(1, force=True)
        assert len(compute.nodes) == 1
    run("down", bench, "--force")


def test_a_pool_on_which_a_script_runs_does_not_shrink(bench: str, tmp_path: Path) -> None:
    path = tmp_path / "fit.py"
    path.write_text("import time; time.sleep(600)")
    with sky.attach(bench) as compute:
        compute.resize((1, 2))
        compute.resize(2)
        job = documents("run", str(path), "--on", bench, "--detach")["id"]
        with pytest.raises(sky.errors.PoolError, match=f"{bench}: runs {job} of .*force=True"):
            compute.resize(1)
        assert compute._open_fleet._shrink(lambda count: 1) == 2, "nor for idleness"
        assert len(pid() @ compute) == 2
        with pytest.raises(
            sky.errors.ConfigurationError, match=r"resize\(\(0, 2\)\): .* at least one"
        ):
            compute.resize((0, 2))
        compute.resize(1, force=True)
        assert len(pid() @ compute) == 1
    assert documents("jobs", bench)[0]["state"] == "running"


def test_a_client_with_an_imported_record_does_not_undo_down(
    bench: str, home: Path, script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "bench.key"
    file.write_bytes(records.encode(records.read(bench)))
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("SKYWARD_STATE", str(tmp_path / "elsewhere"))
        run("attach", "--import", str(file))
        other = script(
            f"""
            @sky.function
            def pid():
                return os.getpid()
            c = sky.attach({bench!r})
            print(pid() >> c, flush=True)
            input()
            try:
                pid() >> c
            except sky.SkywardError as problem:
                print(problem)
            """
        )
        assert other.stdout is not None
        other.stdout.readline()
    run("down", bench, "--force")
    out, problems = other.communicate("\n", timeout=PATIENCE)
    assert "node 0 was ended by" in out, problems
    assert f"process {os.getpid()}" in out
    assert not list(home.glob("sky-*"))


def test_a_pool_is_stopped_and_started_again(bench: str, script: Script) -> None:
    killed = script(
        f"""
        from skyward import compute
        from skyward.nodes import occupancy
        occupancy.clean = lambda *_: os.kill(os.getpid(), 9)
        compute.stop_pool({bench!r}, force=False)
        """
    )
    killed.communicate(timeout=PATIENCE)
    assert killed.returncode == -9
    assert documents("ps")[0]["state"] == "stopping"
    assert f"`sky stop {bench}` goes on with it" in run("start", bench, code=1).stderr
    with pytest.raises(sky.errors.PoolError, match="was not stopped as a whole"):
        sky.attach(bench)
    run("stop", bench)
    with pytest.raises(sky.errors.PoolError, match="is stopped; `sky start bench`"):
        sky.attach(bench)
    assert documents("ps")[0]["state"] == "stopped"
    assert "already" in run("stop", bench, code=1).stderr
    assert documents("start", bench) == {"name": bench, "nodes": 1}
    with sky.attach(bench) as compute:
        assert pid() >> compute


def test_a_record_moves_to_another_home_on_the_machine_of_the_pool(
    bench: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "bench.key"
    assert "processes of this machine" in run("attach", bench, "--export", str(file), code=1).stderr
    file.write_bytes(records.encode(records.read(bench)))
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("SKYWARD_STATE", str(tmp_path / "elsewhere"))
        run("attach", "--import", str(file))
        assert [each["name"] for each in documents("ps")] == [bench]
        with sky.attach(bench) as compute:
            compute.resize(2)
            assert len(pid() @ compute) == 2
        assert "is kept already" in run("attach", "--import", str(file), code=1).stderr


def test_down_ends_a_pool_whose_agent_is_gone(bench: str) -> None:
    os.kill(records.read(bench).nodes[0].pid, signal.SIGKILL)
    run("down", bench)
    assert documents("ps") == []


def test_down_ends_a_pool_whose_record_is_damaged(bench: str) -> None:
    records.path_of(bench).write_text("{half")
    with pytest.raises(sky.errors.PoolError, match=r"bench\.json is damaged.*`sky down`"):
        sky.attach(bench)
    run("down", bench, "--yes")
    assert bench not in records.names()


def test_a_pool_that_costs_money_without_end_says_so() -> None:
    class Shop(sky.Local):
        name = "shop"
        capabilities = Capabilities(sells=True)

    compute = sky.Compute(sky.Local(), name="gold", keep=True)
    assert without_end(compute._spec, 2.5) == ""
    from dataclasses import replace

    sold = replace(compute._spec, provider=Shop())
    assert "$2.50 an hour; ttl=SECONDS" in without_end(sold, 2.5)
    assert without_end(replace(sold, keep=60.0), 2.5) == ""
