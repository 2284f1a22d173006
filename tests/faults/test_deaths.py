"""Processes that die, stand still or are killed under a task: noticed, named, replaced."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

import skyward as sky
from skyward.nodes.node import Node, Roster
from skyward.wire import messages
from skyward.wire.frames import Frame
from skyward.wire.messages import ExecutorDown, ExecutorUp

from ..conftest import PATIENCE, only_in_all, other_case

SOON = 50.0
"""Within 2 s by design; the rest is for a busy machine."""

Eventually = Callable[..., None]


@sky.function
def process_id() -> int:
    return os.getpid()


@sky.function
def parent_id() -> int:
    return os.getppid()


@sky.function
def exits(status: int) -> None:
    os._exit(status)


@sky.function
def kills(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(60)


@sky.function
def segfaults() -> None:
    import ctypes
    import faulthandler

    faulthandler.disable()
    ctypes.string_at(0)


@sky.function
def sleeps(seconds: float) -> str:
    time.sleep(seconds)
    return "slept"


@sky.function
def echo(value: int) -> int:
    return value


def dies_soon(future: sky.Future[object], kind: type[Exception]) -> Exception:
    """The error of a call whose process was just hit, which must come at once."""
    began = time.monotonic()
    with pytest.raises(kind) as caught:
        future.result(timeout=PATIENCE)
    assert time.monotonic() - began < SOON
    return caught.value


# The executor.


@pytest.mark.parametrize(
    ("fatal", "words"),
    [
        (exits(3), ["exit status 3", "os._exit"]),
        (exits(0), ["exit status 0"]),
        (kills(signal.SIGKILL), ["SIGKILL", "killed from outside"]),
        (kills(signal.SIGTERM), ["SIGTERM"]),
        (kills(signal.SIGABRT), ["SIGABRT", "an abort in C code"]),
        (segfaults(), ["SIGSEGV", "a segmentation fault in C code"]),
    ],
    ids=["os._exit(3)", "os._exit(0)", "SIGKILL", "SIGTERM", "SIGABRT", "segfault"],
)
def test_a_process_that_dies_is_named_and_replaced(
    pool: sky.Compute, fatal: sky.Pending[None], words: list[str]
) -> None:
    began = time.monotonic()
    with pytest.raises(sky.WorkerDiedError) as caught:
        pool.run(fatal, on=1)
    assert time.monotonic() - began < SOON
    message = str(caught.value)
    assert f"{fatal.function.name} lost its worker on node 1" in message
    for word in words:
        assert word in message
    assert pool.run(echo(7), on=1) == 7
    assert [node.state for node in pool.nodes] == ["ready", "ready"]


def test_the_other_node_goes_on_while_one_process_dies(pool: sky.Compute) -> None:
    before = pool.run(process_id(), on=0)
    with pytest.raises(sky.WorkerDiedError):
        pool.run(exits(1), on=1)
    assert pool.run(process_id(), on=0) == before


def test_system_exit_is_an_error_of_the_task_and_not_of_its_process(pool: sky.Compute) -> None:
    @sky.function
    def leaves(status: object) -> None:
        sys.exit(status)  # type: ignore[arg-type]

    before = pool.run(process_id(), on=0)
    with pytest.raises(sky.RemoteError) as caught:
        pool.run(leaves("enough"), on=0)
    assert caught.value.type_name == "SystemExit"
    assert "SystemExit: enough (the function called sys.exit; the worker goes on)" in str(
        caught.value
    )
    assert pool.run(process_id(), on=0) == before


@pytest.fixture
def memory_cgroup() -> Iterator[Path]:
    """A cgroup whose members may use 192 MiB."""
    if os.getuid() != 0:
        pytest.skip("making a memory cgroup needs root")
    name = f"skyward-test-{os.getpid()}"
    first, second = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError):
        if (first / "memory.limit_in_bytes").exists():
            group, limit = first / name, "memory.limit_in_bytes"
            swap = "memory.memsw.limit_in_bytes"
        elif "memory" in (second / "cgroup.subtree_control").read_text().split():
            group, limit, swap = second / name, "memory.max", "memory.swap.max"
        else:
            pytest.skip("no memory controller for the test to use")
        group.mkdir()
        (group / limit).write_text(str(192 << 20))
        with contextlib.suppress(OSError):
            (group / swap).write_text("0" if group.parent == second else str(192 << 20))
        yield group
        for _ in range(100):
            with contextlib.suppress(OSError):
                group.rmdir()
                return
            time.sleep(0.05)
        pytest.fail(f"{group} could not be removed")
    pytest.skip("the kernel or the container refuses to make a memory cgroup")


def test_a_process_killed_for_memory_is_said_to_have_used_too_much(
    pool: sky.Compute, memory_cgroup: Path
) -> None:
    @sky.function
    def hungry(procs: str) -> int:
        with open(procs, "w") as members:
            members.write(str(os.getpid()))
        eaten = []
        while True:
            eaten.append(bytearray(b"x") * (16 << 20))

    with pytest.raises(sky.WorkerDiedError) as caught:
        pool.run(hungry(str(memory_cgroup / "cgroup.procs")), on=1)
    assert "SIGKILL (the machine ran out of memory; use less" in str(caught.value)
    assert pool.run(echo(7), on=1) == 7


def test_a_process_that_is_stopped_is_killed_and_replaced(
    pool: sky.Compute, eventually: Eventually
) -> None:
    pid = pool.run(process_id(), on=1)
    future = pool.submit(sleeps(60), on=1)
    eventually(lambda: future.running())
    os.kill(pid, signal.SIGSTOP)
    problem = dies_soon(future, sky.WorkerDiedError)
    assert "its process was stopped by a signal (SIGSTOP) and did not answer" in str(problem)
    assert pool.run(process_id(), on=1) != pid


@only_in_all
def test_a_process_that_is_stopped_only_for_a_moment_goes_on(
    pool: sky.Compute, eventually: Eventually
) -> None:
    pid = pool.run(process_id(), on=1)
    future = pool.submit(sleeps(1.5), on=1)
    eventually(lambda: future.running())
    os.kill(pid, signal.SIGSTOP)
    eventually(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    os.kill(pid, signal.SIGCONT)
    assert future.result(timeout=PATIENCE) == "slept"


def test_the_last_words_of_a_dying_process_are_forwarded(
    pool: sky.Compute, eventually: Eventually
) -> None:
    @sky.function
    def asserts() -> None:
        """Fails as C code does: words and death in one breath."""
        import ctypes

        print("so far so good")
        libc = ctypes.PyDLL(None)
        libc["__assert_fail"](b"the tensor fits", b"kernel.cpp", 42, b"launch")

    lines: list[sky.Output] = []
    with sky.redirect_output(lines.append):
        with pytest.raises(sky.WorkerDiedError, match="SIGABRT"):
            pool.run(asserts(), on=1)
        eventually(lambda: any("Assertion" in line for line in lines), what="the last words")
    (last,) = [line for line in lines if "Assertion" in line]
    assert "kernel.cpp:42: launch: Assertion `the tensor fits' failed." in last
    assert (last.stream, last.node) == ("stderr", 1)


def test_a_child_process_of_a_dead_task_does_not_live_on(
    pool: sky.Compute, tmp_path: Path, eventually: Eventually
) -> None:
    @sky.function
    def forks(path: str) -> None:
        import subprocess

        child = subprocess.Popen(["sleep", "600"])
        Path(path).write_text(str(child.pid))
        os._exit(1)

    with pytest.raises(sky.WorkerDiedError):
        forks(str(tmp_path / "pid")) >> pool
    child = int((tmp_path / "pid").read_text())
    eventually(
        lambda: (
            not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE
        ),
        what="the end of the child",
    )


def test_every_worker_process_may_die_in_one_broadcast(pool: sky.Compute) -> None:
    with pytest.raises(sky.BroadcastError) as caught:
        exits(3) @ pool
    assert [type(problem) for problem in caught.value.exceptions] == [sky.WorkerDiedError] * 2
    assert echo(1) @ pool == [1, 1]


# Tasks beside and behind a dying one.


def test_of_many_tiny_tasks_only_the_one_that_kills_its_process_fails(pool: sky.Compute) -> None:
    @sky.function
    def tiny(number: int) -> int:
        if number == 700:
            os._exit(9)
        return number

    futures = [tiny(number) > pool for number in range(1500)]
    failed = {}
    for number, future in enumerate(futures):
        try:
            assert future.result(timeout=PATIENCE) == number
        except sky.WorkerDiedError as problem:
            failed[number] = str(problem)
    assert list(failed) == [700]
    assert "exit status 9" in failed[700]


@pytest.mark.parametrize("transport", ["unix", pytest.param("tcp", marks=other_case)])
def test_results_on_their_way_when_a_process_dies_are_not_lost_nor_made_twice(
    transport: str, tmp_path: Path
) -> None:
    """Large results take time to read, so the news of the death overtakes them."""
    import numpy as np

    @sky.function
    def weighs(number: int, folder: str) -> np.ndarray:
        if number >= 0:
            with open(os.path.join(folder, str(number)), "a") as log:
                log.write("x")
        if number == 40:
            os._exit(9)
        return np.full(300_000, number % 256, np.uint8)

    provider = sky.Local(transport=transport)  # type: ignore[arg-type]
    with sky.Compute(provider, options=sky.Options(console=False)) as compute:
        for _ in range(60):  # so that the pool learns how short they are, and sends ahead
            weighs(-1, "") >> compute
        futures = [weighs(number, str(tmp_path)) > compute for number in range(60)]
        failed = [number for number, future in enumerate(futures) if future.exception(PATIENCE)]
        assert failed == [40]
        values = [future.result()[-1] for number, future in enumerate(futures) if number != 40]
        assert values == [number for number in range(60) if number != 40]
    assert len(list(tmp_path.iterdir())) == 60
    assert [path.name for path in tmp_path.iterdir() if path.read_text() != "x"] == []


def test_a_process_that_is_gone_is_not_given_up_while_its_results_come() -> None:
    """They may take longer than a second, over a slow link or on a busy machine."""
    timers: list[Callable[[], None]] = []
    lost: list[str] = []
    loop = SimpleNamespace(later=lambda seconds, action: timers.append(action))
    fleet: Any = SimpleNamespace(roster=Roster(), loop=loop)
    node: Any = Node(0, None, fleet)  # type: ignore[arg-type]
    node.lose_executor = lambda lane, reason: lost.append(reason)
    channel = SimpleNamespace(bytes_received=0, exhausted=False)
    lane = SimpleNamespace(pid=7, lost=False, channel=channel, process_ended=lambda reason: None)
    node.lanes[0, 0] = lane
    node._executor_down(ExecutorDown(0, 0, 7, "killed", restarting=True))
    channel.bytes_received = 10
    timers.pop()()
    assert lost == []
    timers.pop()()
    assert lost == ["killed"]


def test_an_executor_takes_the_place_of_the_one_before_it_when_that_one_is_lost() -> None:
    """The tasks of the one before it would be forgotten: nobody would fail them or try again."""
    fleet: Any = SimpleNamespace(roster=Roster(), loop=SimpleNamespace(later=lambda *_: None))
    node: Any = Node(0, None, fleet)  # type: ignore[arg-type]
    channel = SimpleNamespace(bytes_received=0, exhausted=False)
    before, after = (
        SimpleNamespace(
            pid=pid, worker=0, slot=0, lost=False, channel=channel, process_ended=lambda _: None
        )
        for pid in (7, 8)
    )
    up = ExecutorUp(0, 0, 8, "unix:/there")
    node._executor_up = lambda up: None  # It would connect.

    def hear(message: messages.Message) -> None:
        node._hear(Frame(message.KIND, messages.encode(message), None, 0))

    hear(ExecutorUp(0, 0, 7, "unix:/there"))
    assert node.add_lane(before)
    hear(ExecutorDown(0, 0, 7, "killed", restarting=True))
    hear(up)
    assert node._awaits_place(up)
    assert node.remove_lane(before)
    assert not node._awaits_place(up)
    assert node.add_lane(after)
    # One that has ended before it was connected takes no other's place.
    assert not node.add_lane(before)
    assert node.lanes == {(0, 0): after}


def test_a_node_whose_worker_cannot_run_is_replaced_when_the_last_results_have_come() -> None:
    """With the node, its connections are read no more."""
    timers: list[Callable[[], None]] = []
    replaced: list[str] = []
    loop = SimpleNamespace(later=lambda seconds, action: timers.append(action))
    fleet: Any = SimpleNamespace(roster=Roster(), loop=loop)
    node: Any = Node(0, None, fleet)  # type: ignore[arg-type]
    node._state = "ready"
    node._replace = replaced.append
    node.lanes[0, 0] = SimpleNamespace(pid=7, end_reason="killed")
    node._executor_down(ExecutorDown(0, 0, 9, "it did not start", restarting=False))
    timers.pop()()
    assert replaced == []
    node.lanes.clear()
    timers.pop()()
    assert replaced == ["worker 0 cannot run: it did not start"]


# Retries.


@pytest.mark.parametrize("death", ["os._exit", "SIGKILL"])
def test_retries_run_the_call_again_when_its_process_dies(
    pool: sky.Compute, tmp_path: Path, death: str
) -> None:
    @sky.function(retries=2)
    def third_time_lucky(path: str) -> int:
        with open(path, "a") as log:
            log.write("x")
        tries = os.path.getsize(path)
        if tries < 3:
            if death == "SIGKILL":
                os.kill(os.getpid(), signal.SIGKILL)
            os._exit(1)
        return tries

    before = pool.stats().retried
    assert third_time_lucky(str(tmp_path / "tries")) >> pool == 3
    assert pool.stats().retried == before + 2


def test_retries_end_with_the_death_of_the_last_try(pool: sky.Compute, tmp_path: Path) -> None:
    @sky.function(retries=1)
    def hopeless(path: str) -> None:
        with open(path, "a") as log:
            log.write("x")
        os._exit(1)

    with pytest.raises(sky.WorkerDiedError, match="hopeless lost its worker"):
        hopeless(str(tmp_path / "tries")) >> pool
    assert (tmp_path / "tries").read_text() == "xx"


def test_an_exception_of_the_users_own_is_never_retried(pool: sky.Compute, tmp_path: Path) -> None:
    @sky.function(retries=5)
    def fails(path: str, kind: str) -> None:
        with open(path, "a") as log:
            log.write("x")
        if kind == "exit":
            sys.exit(1)
        raise ConnectionError("my own")

    for kind, expected in (("raise", ConnectionError), ("exit", sky.RemoteError)):
        with pytest.raises(expected):
            fails(str(tmp_path / kind), kind) >> pool
        assert (tmp_path / kind).read_text() == "x"


def test_a_generator_that_dies_tells_its_consumer(pool: sky.Compute) -> None:
    @sky.function
    def counts() -> Iterator[int]:
        yield 1
        yield 2
        time.sleep(0.2)
        os._exit(3)

    stream = iter(counts() >> pool)
    assert [next(stream), next(stream)] == [1, 2]
    with pytest.raises(sky.WorkerDiedError, match="exit status 3"):
        next(stream)


# The agent, and with it the node. These have pools of their own: each loses a node for good.


@pytest.fixture
def own() -> Iterator[sky.Compute]:
    """A pool to break."""
    with sky.Compute(nodes=2, options=sky.Options(console=False)) as compute:
        yield compute


@pytest.mark.parametrize("transport", ["unix", pytest.param("tcp", marks=other_case)])
def test_a_killed_node_is_noticed_at_once_and_replaced(
    eventually: Eventually, transport: str
) -> None:
    provider = sky.Local(transport=transport)  # type: ignore[arg-type]
    with sky.Compute(provider, nodes=2, options=sky.Options(console=False)) as compute:
        agent = compute.run(parent_id(), on=1)
        executor = compute.run(process_id(), on=1)
        future = compute.submit(sleeps(60), on=1)
        eventually(lambda: future.running())
        os.kill(agent, signal.SIGKILL)
        problem = dies_soon(future, sky.NodeLostError)
        assert "sleeps lost node 1: its agent is gone" in str(problem)
        # The call waits for the node that takes its place.
        assert compute.run(parent_id(), on=1) != agent
        assert compute.run(echo(1), on=0) == 1
        eventually(lambda: not psutil.pid_exists(executor), what="the end of its executor")
        assert compute.stats().nodes_lost == 1
        # Its workers get calls a moment before it counts as ready.
        eventually(lambda: [node.state for node in compute.nodes] == ["ready", "ready"])


@only_in_all
def test_a_node_that_stands_still_is_given_up_and_replaced(
    own: sky.Compute, eventually: Eventually
) -> None:
    agent = own.run(parent_id(), on=1)
    future = own.submit(sleeps(60), on=1)
    eventually(lambda: future.running())
    os.kill(agent, signal.SIGSTOP)
    problem = dies_soon(future, sky.NodeLostError)
    assert "sleeps lost node 1: it has stopped answering" in str(problem)
    assert own.run(parent_id(), on=1) != agent
    eventually(lambda: not psutil.pid_exists(agent), what="the end of the stopped agent")


def test_retries_run_the_call_again_when_its_node_is_lost(own: sky.Compute, tmp_path: Path) -> None:
    @sky.function(retries=1)
    def survives(path: str) -> int:
        with open(path, "a") as log:
            log.write("x")
        tries = os.path.getsize(path)
        if tries < 2:
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(60)
        return tries

    assert survives(str(tmp_path / "tries")) >> own == 2


@only_in_all
def test_a_broadcast_waits_for_the_node_that_replaces_a_lost_one(own: sky.Compute) -> None:
    agents = parent_id() @ own
    os.kill(agents[0], signal.SIGKILL)
    # The executor may still answer, or the loss strike in the middle; then it is whole again.
    again = agents
    while again[0] == agents[0]:
        with contextlib.suppress(sky.BroadcastError):
            again = parent_id() @ own
    assert again[1] == agents[1]


def test_a_generator_whose_node_is_lost_tells_its_consumer(own: sky.Compute) -> None:
    @sky.function
    def counts() -> Iterator[int]:
        yield os.getppid()
        time.sleep(60)
        yield 2

    stream = iter(own.run(counts(), on=1))
    os.kill(next(stream), signal.SIGKILL)
    with pytest.raises(sky.NodeLostError, match="its agent is gone"):
        next(stream)


def test_a_node_whose_worker_cannot_be_started_any_more_is_replaced(
    own: sky.Compute, eventually: Eventually
) -> None:
    """Its executors have nowhere to listen: a call for it would wait for ever."""
    agent, executor = own.run(parent_id(), on=1), own.run(process_id(), on=1)
    machine: Any = own._open_fleet.nodes[1].host._machine
    folder = Path(machine.id)
    shutil.rmtree(folder)
    folder.write_text("")
    os.kill(executor, signal.SIGKILL)

    eventually(lambda: own.stats().nodes_lost == 1, what="the loss")
    assert own.run(parent_id(), on=1) != agent
    folder.unlink(missing_ok=True)


def lose_node(compute: sky.Compute, eventually: Eventually, node: int = 0) -> None:
    """Kill a node once it is ready, and wait until that is noticed."""
    eventually(lambda: compute.nodes[node].state == "ready", what="a ready node")
    before = compute.stats().nodes_lost
    os.kill(compute.run(parent_id(), on=node), signal.SIGKILL)
    eventually(lambda: compute.stats().nodes_lost == before + 1, what="the loss")


def test_a_node_that_keeps_dying_is_given_up_and_calls_are_told(
    own: sky.Compute, eventually: Eventually
) -> None:
    for _ in range(3):
        lose_node(own, eventually, node=1)
    with pytest.raises(sky.NodeLostError) as caught:
        own.run(echo(1), on=1)
    # Sent while the loss was being dealt with, or after it.
    assert re.search(
        r"echo (has nowhere to run: node 1 was lost|lost node 1): its agent is gone;.* enter a new",
        str(caught.value),
    )
    assert "enter a new Compute" in str(caught.value)
    with pytest.raises(sky.BroadcastError) as group:
        echo(1) @ own
    assert [outcome.ok for outcome in group.value.outcomes] == [True, False]
    assert echo(1) >> own == 1, "the other node goes on"


@only_in_all
def test_a_node_that_served_long_enough_is_replaced_any_number_of_times(
    monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    monkeypatch.setattr("skyward.nodes.node.STEADY_SECONDS", 0.0)
    with sky.Compute(options=sky.Options(console=False)) as compute:
        for _ in range(4):
            lose_node(compute, eventually)
        assert echo(1) >> compute == 1


def test_a_pool_closed_while_it_replaces_a_node_leaves_nothing(
    eventually: Eventually, nothing_left: None
) -> None:
    with sky.Compute(options=sky.Options(console=False)) as compute:
        agent = parent_id() >> compute
        os.kill(agent, signal.SIGKILL)
        eventually(lambda: compute.nodes[0].state != "ready", SOON, "the loss of the node")


def test_tasks_on_threads_of_one_process_die_together(tmp_path: Path) -> None:
    worker = sky.Worker(concurrency=2, executor="thread")
    with sky.Compute(worker=worker, options=sky.Options(console=False)) as compute:

        @sky.function
        def meets(path: str, number: int) -> int:
            Path(path, str(number)).touch()
            while len(os.listdir(path)) < 2:
                time.sleep(0.01)
            if number == 1:
                os._exit(5)
            time.sleep(60)
            return number

        futures = [meets(str(tmp_path), number) > compute for number in range(2)]
        for future in futures:
            assert "exit status 5" in str(dies_soon(future, sky.WorkerDiedError))
        assert echo(1) >> compute == 1
