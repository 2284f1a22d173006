"""The records of kept pools, in a folder that machines may share."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

import skyward as sky
from skyward.cli.main import sky as command
from skyward.compute import reach
from skyward.nodes import records
from skyward.nodes.occupancy import occupancy
from skyward.worker import detached

from .conftest import QUIET


@pytest.fixture(scope="module")
def bench(home: Path) -> Iterator[str]:
    with sky.Compute(name="bench", keep=True, options=QUIET):
        pass
    yield "bench"
    sky.attach("bench").down(force=True)


def test_a_pool_of_another_machine_is_left_alone(bench: str) -> None:
    record = records.read(bench)
    there = [msgspec.structs.replace(node, hostname="elsewhere") for node in record.nodes]
    records.write(msgspec.structs.replace(record, nodes=there))
    try:
        assert occupancy(records.read(bench)).state == "kept, out of reach"
        with pytest.raises(sky.errors.PoolError, match="it is kept on elsewhere, and this is"):
            sky.attach(bench)
        refused = CliRunner().invoke(command, ["down", bench])
        assert "it is kept on elsewhere" in refused.stderr
        assert bench in records.names()
    finally:
        records.write(record)


def test_the_folder_of_an_agent_is_not_for_cleaners(bench: str) -> None:
    folder = os.open(records.read(bench).nodes[0].machine, os.O_RDONLY)
    try:
        with pytest.raises(BlockingIOError):
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(folder)


def test_an_odd_file_beside_the_records_is_passed_over(bench: str) -> None:
    odd = records.folder() / "a b.json"
    odd.write_text("?")
    try:
        assert bench in CliRunner().invoke(command, ["ps"]).output
    finally:
        odd.unlink()


def test_down_without_a_name_leaves_a_pool_whose_record_cannot_be_read(
    bench: str, home: Path
) -> None:
    good = records.path_of(bench).read_bytes()
    records.path_of(bench).write_text("{half")
    try:
        assert "nothing was left behind" in CliRunner().invoke(command, ["down"]).output
    finally:
        records.path_of(bench).write_bytes(good)
    assert [each for each in home.glob("sky-*") if detached.running(each)]


def test_force_takes_the_lock_from_whoever_has_it(bench: str) -> None:
    with (
        reach(bench) as pool,
        pool.lock(),
        pytest.raises(sky.errors.PoolError, match="is changing it"),
    ):
        pool.lock()
    with reach(bench) as pool, pool.lock(), pool.lock(force=True):
        pass


def test_a_command_that_runs_counts_as_use(home: Path, eventually: Callable[..., None]) -> None:
    with sky.Compute(name="brief", keep=0.5, options=QUIET):
        command = reach("brief").service(0, "exec")
    agent = records.read("brief").nodes[0].pid
    with command, reach("brief") as pool, pool.head() as head:
        eventually(lambda: not head.ask("who")["clients"])
        assert head.ask("who")["idle"] == 0.0
        os.kill(agent, 0)
    eventually(lambda: not detached.running(Path(records.read("brief").nodes[0].machine)))
    with pytest.raises(sky.errors.PoolError, match="its machines are gone"):
        sky.attach("brief")


def test_an_agent_that_has_ended_does_not_run_though_nobody_reaps_it(tmp_path: Path) -> None:
    # As in a container whose first process is the user's script: `sky down` would never end.
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        mark = detached.start_mark(process.pid)
        (tmp_path / detached.PID).write_text(f"{process.pid} {mark}\n")
        assert detached.running(tmp_path) == process.pid
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not detached.running(tmp_path)
