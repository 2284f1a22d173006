"""Losing the network costs time and nothing else: results are right, and every task runs once."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import skyward as sky
from skyward.nodes.node import SILENCE_SECONDS

from ..conftest import only_in_all, other_case
from .network import OUTAGE_SECONDS

MIB = 1 << 20
LONG = 600.0
"""An `orphan_timeout` that no test waits for: what ends in time has not ended by that one."""
Eventually = Callable[..., None]


@sky.function
def tallied(file: str, value: Any, seconds: float = 0.0) -> Any:
    """The value, once a line in the file says that this ran."""
    with open(file, "a") as lines:
        lines.write(f"{os.getpid()}\n")
    time.sleep(seconds)
    return value


@sky.function
def counting(file: str, count: int, pause: float) -> Iterator[int]:
    with open(file, "a") as lines:
        lines.write(f"{os.getpid()}\n")
    for number in range(count):
        time.sleep(pause)
        yield number


@sky.function
def summed(numbers: Iterator[Any]) -> int:
    return sum(int(np.sum(number)) for number in numbers)


@sky.function
def total(values: Any) -> int:
    return int(values.sum())


@sky.function
def ones(count: int) -> Any:
    return np.ones(count, np.uint8)


@sky.function
def talks(lines: int, pause: float) -> int:
    for number in range(lines):
        print(f"line {number}")
        time.sleep(pause)
    return lines


@sky.function
def pid() -> int:
    return os.getpid()


@sky.function
def lasts(file: str, seconds: float, _: bytes = b"") -> None:
    Path(file, "begun").touch()
    time.sleep(seconds)
    Path(file, "done").touch()


@sky.function(timeout=0.5)
def soon_given_up(file: str) -> None:
    time.sleep(600)
    Path(file, "done").touch()


def slowly(numbers: int, pause: float) -> Iterator[int]:
    for number in range(numbers):
        time.sleep(pause)
        yield number


def runs(file: Path) -> int:
    return len(file.read_text().splitlines()) if file.exists() else 0


def test_a_reset_during_a_task_goes_unnoticed(
    far: Any, tmp_path: Path, eventually: Eventually
) -> None:
    file = tmp_path / "runs"
    future = tallied(str(file), 7, 0.5) > far.pool
    eventually(lambda: runs(file) == 1)
    for _ in range(3):
        far.cut()
        time.sleep(0.05)
    assert future.result(60) == 7
    assert runs(file) == 1


def test_streams_go_on_where_they_were_cut(far: Any, tmp_path: Path) -> None:
    file = tmp_path / "runs"
    cutter = threading.Timer(0.3, far.cut)
    cutter.start()
    assert list(counting(str(file), 60, 0.01) >> far.pool) == list(range(60))
    assert summed(slowly(60, 0.01)) >> far.pool == sum(range(60))
    for number in counting(str(file), 60, 0.0) >> far.pool:
        if number == 20:
            far.cut()
    assert number == 59
    assert runs(file) == 2


@pytest.mark.parametrize("seed", range(2))
def test_large_transfers_go_on_where_they_were_cut(far: Any, seed: int) -> None:
    choose = random.Random(seed)
    values = np.frombuffer(choose.randbytes(24 * MIB), np.uint8)
    network = far.networks[0]
    for _ in range(2):
        cuts = network.cuts
        network.cut_after(choose.randrange(12 * MIB) for _ in range(3))
        returned = far.pool.run(tallied(os.devnull, values), on=0)
        network.cut_after([])
        assert np.array_equal(returned, values)
        assert network.cuts - cuts == 3
        values = values[::-1].copy()


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=other_case) for n in (1, 2))])
def test_whatever_is_cut_wherever_every_task_runs_once(far: Any, tmp_path: Path, seed: int) -> None:
    choose = random.Random(seed)
    before = sum(network.cuts for network in far.networks.values())
    for network in far.networks.values():
        # A pair of connections costs some 12 KB itself, and may be cut as well.
        network.cut_after(choose.randrange(500, 400_000) for _ in range(15))
    files = [tmp_path / f"{number}" for number in range(40)]
    arrays = [np.frombuffer(choose.randbytes(choose.randrange(300_000)), np.uint8) for _ in files]
    stream_file, broadcast_file = tmp_path / "stream", tmp_path / "broadcast"
    futures = [
        tallied(str(file), array, choose.random() / 50) > far.pool
        for file, array in zip(files, arrays, strict=True)
    ]
    shared = np.frombuffer(choose.randbytes(2 * MIB), np.uint8)
    assert all(np.array_equal(v, shared) for v in tallied(str(broadcast_file), shared) @ far.pool)
    assert list(counting(str(stream_file), 200, 0.0) >> far.pool) == list(range(200))
    items = [choose.randbytes(choose.randrange(100_000)) for _ in range(20)]
    expected = sum(int(np.frombuffer(item, np.uint8).sum()) for item in items)
    assert summed(np.frombuffer(item, np.uint8) for item in items) >> far.pool == expected
    for future, array in zip(futures, arrays, strict=True):
        assert np.array_equal(future.result(60), array)
    for network in far.networks.values():
        network.cut_after([])
    assert sum(network.cuts for network in far.networks.values()) - before >= 8
    assert [runs(file) for file in files] == [1] * len(files)
    assert (runs(stream_file), runs(broadcast_file)) == (1, 2)


@only_in_all
def test_a_silent_network_is_noticed_told_of_and_survived(
    far_pool: Any,
    tmp_path: Path,
    eventually: Eventually,
    nothing_left: None,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Slow: the silence must be long enough to be noticed."""
    with far_pool(nodes=2, orphan_timeout=LONG) as far:
        where = [pid() >> far.pool for _ in range(8)]
        running = tallied(str(tmp_path / "first"), "here", 5.0) > far.pool
        eventually(lambda: runs(tmp_path / "first") == 1)
        both = {n for n in (0, 1) if far.pool.nodes[n].running}
        (node,) = both
        other = 1 - node
        assert far.pool.nodes[node].state == "ready"
        with far.networks[node].hold():
            eventually(
                lambda: far.pool.nodes[node].state == "reconnecting",
                SILENCE_SECONDS + 20,
                "the notice",
            )
            assert far.pool.nodes[other].state == "ready"
            # What was not sent yet goes where it can.
            started = time.monotonic()
            elsewhere = {pid() >> far.pool for _ in range(6)}
            assert time.monotonic() - started < 60
            assert len(elsewhere) == 1
            assert not running.done()
        assert running.result(60) == "here"
        eventually(lambda: far.pool.nodes[node].state == "ready", 60)
        assert runs(tmp_path / "first") == 1
        assert set(where) >= elsewhere
        assert {pid() >> far.pool for _ in range(8)} == set(where)
    said = capfd.readouterr().err
    assert said.count(f"node {node}: connection lost, reconnecting") == 1


def test_what_a_task_prints_meanwhile_arrives_later_and_in_order(
    far: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    cutters = [threading.Timer(0.1 * n, far.cut) for n in range(1, 6)]
    for cutter in cutters:
        cutter.start()
    assert talks(80, 0.01) >> far.pool == 80
    for cutter in cutters:
        cutter.join()
    out = capfd.readouterr().out
    assert [line.split("] ")[1] for line in out.splitlines() if "] line" in line] == [
        f"line {number}" for number in range(80)
    ]


@only_in_all
def test_a_timeout_is_raised_in_time_and_its_cancellation_delivered_later(
    far_pool: Any, tmp_path: Path, eventually: Eventually, nothing_left: None, patient: None
) -> None:
    with far_pool(orphan_timeout=LONG) as far:
        process = pid() >> far.pool
        started = time.monotonic()
        with far.frozen():
            time.sleep(0.1)
            with pytest.raises(sky.TaskTimeoutError, match=r"timeout of 0\.5 s"):
                soon_given_up(str(tmp_path)) >> far.pool
            assert time.monotonic() - started < 60
        assert pid() >> far.pool == process
        assert not (tmp_path / "done").exists()


@other_case
def test_a_task_cancelled_in_an_outage_is_stopped_when_it_is_over(
    far_pool: Any, tmp_path: Path, eventually: Eventually, nothing_left: None
) -> None:
    with far_pool() as far:
        process = pid() >> far.pool
        future = lasts(str(tmp_path), 600) > far.pool
        eventually((tmp_path / "begun").exists)
        far.networks[0].refusing = True
        far.cut()
        time.sleep(0.2)
        assert future.cancel()
        with pytest.raises(CancelledError):
            future.result(60)
        # Longer than a task has to end once it was told: it was not told.
        time.sleep(1.5)
        far.networks[0].refusing = False
        assert (pid() > far.pool).result(60) == process
        assert not (tmp_path / "done").exists()


@pytest.mark.parametrize(
    "argument",
    [pytest.param(b"", id="small"), pytest.param(bytes(64 * MIB), id="large", marks=only_in_all)],
)
def test_ctrl_c_in_an_outage_is_answered_at_once(
    far_pool: Any, tmp_path: Path, nothing_left: None, argument: bytes
) -> None:
    with far_pool(orphan_timeout=LONG) as far:
        assert pid() >> far.pool
        with far.frozen():
            time.sleep(0.1)
            interrupt = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
            interrupt.start()
            started = time.monotonic()
            with pytest.raises(KeyboardInterrupt):
                lasts(str(tmp_path), 600, argument) >> far.pool
            assert time.monotonic() - started < 60
        assert (pid() > far.pool).result(60)
        assert not (tmp_path / "done").exists()


@only_in_all
def test_a_device_and_its_process_outlast_an_outage(
    far_pool: Any, eventually: Eventually, nothing_left: None
) -> None:
    import torch

    with far_pool() as far:
        device = far.pool.device("cpu")
        x = torch.arange(8.0, device=device) + 1
        assert x.sum().item() == 36.0
        far.networks[0].refusing = True
        far.cut()
        eventually(lambda: far.pool.nodes[0].state == "reconnecting")
        for _ in range(100):
            x = x + 1
        time.sleep(1.5)
        far.networks[0].refusing = False
        assert x.sum().item() == 36.0 + 8 * 100
        assert (pid() > far.pool).result(60)


@pytest.mark.parametrize("how", [pytest.param("frozen", marks=other_case), "turned away"])
def test_leaving_a_pool_in_an_outage_does_not_take_long(
    far_pool: Any, tmp_path: Path, eventually: Eventually, nothing_left: None, how: str
) -> None:
    with far_pool(nodes=2, orphan_timeout=LONG) as far:
        futures = [lasts(str(tmp_path), 600) > far.pool for _ in range(2)]
        large = threading.Thread(target=_fails, args=(far.pool,))
        eventually((tmp_path / "begun").exists)
        for network in far.networks.values():
            network.refusing = how == "turned away"
            if how == "turned away":
                network.cut()
            else:
                network._flowing.clear()
        large.start()
        time.sleep(0.3)
        started = time.monotonic()
    assert time.monotonic() - started < 60
    for network in far.networks.values():
        network._flowing.set()
    for future in futures:
        with pytest.raises(sky.errors.PoolClosedError):
            future.result(60)
    large.join(60)
    assert not large.is_alive()


def _fails(pool: Any) -> None:
    with pytest.raises(sky.SkywardError):
        total(np.ones(64 * MIB, np.uint8)) >> pool


@only_in_all
def test_past_the_orphan_timeout_both_ends_give_up_and_say_so(
    far_pool: Any, tmp_path: Path, eventually: Eventually, nothing_left: None
) -> None:
    """Slow: the timeout has to pass."""
    with far_pool(orphan_timeout=3.0) as far:
        executor = psutil.Process(pid() >> far.pool)
        agent = executor.parent()
        future = lasts(str(tmp_path), 600) > far.pool
        eventually((tmp_path / "begun").exists)
        # Nobody else may end the agent.
        machine = far.pool._open_fleet.nodes[0].host
        machine.stop, stop = lambda seconds: None, machine.stop
        started = time.monotonic()
        with contextlib.ExitStack() as stack, far.frozen():
            stack.callback(stop, 0)
            with pytest.raises(
                sky.NodeLostError, match=r"lasts lost node 0: .*no contact for 3 s \(orphan_timeout"
            ):
                future.result(60)
            # The agent hears the last of the client up to a second before the client gives up.
            assert 1 < time.monotonic() - started < 60
            eventually(lambda: not executor.is_running(), 60, "the end of the executor")
            eventually(
                lambda: not agent.is_running() or agent.status() == psutil.STATUS_ZOMBIE,
                60,
                "the end of the agent",
            )
        # A new node has taken its place.
        assert (pid() > far.pool).result(60) != executor.pid


def test_a_dead_agent_is_not_waited_for(
    far_pool: Any, tmp_path: Path, eventually: Eventually, nothing_left: None
) -> None:
    with far_pool() as far:
        future = lasts(str(tmp_path), 600) > far.pool
        eventually((tmp_path / "begun").exists)
        psutil.Process(far.pool._open_fleet.nodes[0].host.agent_pid).kill()
        with pytest.raises(sky.NodeLostError, match="its agent is gone"):
            future.result(60)


@other_case
def test_a_dead_executor_is_reported_as_ever(
    far_pool: Any, tmp_path: Path, eventually: Eventually, nothing_left: None
) -> None:
    with far_pool() as far:
        process = pid() >> far.pool
        future = lasts(str(tmp_path), 600) > far.pool
        eventually((tmp_path / "begun").exists)
        psutil.Process(process).kill()
        with pytest.raises(sky.WorkerDiedError, match="SIGKILL"):
            future.result(60)
        assert (pid() > far.pool).result(60) != process


@only_in_all
@pytest.mark.slow
def test_a_network_that_is_away_during_everything_costs_only_time(
    far_pool: Any, tmp_path: Path, nothing_left: None
) -> None:
    """Slow: the network is away during everything that can be going on at a time."""
    values = np.frombuffer(np.random.default_rng(1).bytes(MIB) * 256, np.uint8)
    worker = sky.Worker(concurrency=6)
    with far_pool(nodes=2, worker=worker) as far:
        outcome: dict[str, Any] = {}

        def run(name: str, action: Callable[[], Any]) -> threading.Thread:
            thread = threading.Thread(target=lambda: outcome.update({name: action()}))
            thread.start()
            return thread

        threads = [
            run("task", lambda: tallied(str(tmp_path / "task"), 1, 8) >> far.pool),
            run("stream", lambda: list(counting(str(tmp_path / "out"), 400, 0.02) >> far.pool)),
            run("fed", lambda: summed(slowly(400, 0.02)) >> far.pool),
            run("up", lambda: total(values) >> far.pool),
            run("down", lambda: (ones(256 * MIB) >> far.pool).sum()),
            run("broadcast", lambda: total(values[: 64 * MIB]) @ far.pool),
        ]
        time.sleep(0.5)
        frozen = [network.freeze(OUTAGE_SECONDS) for network in far.networks.values()]
        for thread in (*frozen, *threads):
            thread.join()
    assert outcome["task"] == 1
    assert runs(tmp_path / "task") == runs(tmp_path / "out") == 1
    assert outcome["stream"] == list(range(400))
    assert outcome["fed"] == sum(range(400))
    assert outcome["up"] == int(values.sum())
    assert outcome["down"] == 256 * MIB
    assert outcome["broadcast"] == [int(values[: 64 * MIB].sum())] * 2
