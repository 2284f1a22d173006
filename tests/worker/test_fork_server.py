"""Executors are forked by the agent's fork server, and are like those that start as programs."""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import psutil
import pytest

import skyward as sky
from skyward import kernel
from skyward.worker import fork_server

pytestmark = pytest.mark.skipif(not kernel.IS_LINUX, reason="a fork server takes Linux")

SERVER = "skyward.fork_server"
EXECUTOR = "skyward.worker.executor"


@sky.function
def told_of_itself() -> dict[str, Any]:
    return {
        "pid": os.getpid(),
        "leads": os.getpid() == os.getsid(0) == os.getpgid(0),
        "main": sys.modules["__main__"].__name__,
        "input": sys.stdin.read(),
        "given": os.environ.get("GIVEN"),
        "folder": os.getcwd(),
        "ignored": signal.getsignal(signal.SIGHUP),
        "files": len(os.listdir("/proc/self/fd")),
    }


@sky.function
def die() -> None:
    os._exit(3)


@sky.function
def own_hash() -> int:
    return hash("hashed")


def agent_of(pid: int) -> psutil.Process:
    agent = psutil.Process(pid).parent()
    assert agent is not None
    assert "skyward.worker.agent" in agent.cmdline()
    return agent


def test_a_forked_executor_is_like_one_that_started_as_a_program(
    eventually: Callable[..., None],
) -> None:
    image = sky.Image(env={"GIVEN": "to tasks"})
    with sky.Compute(image=image, options=sky.Options(console=False)) as compute:
        forked = told_of_itself() >> compute
        assert psutil.Process(forked["pid"]).cmdline() == [sys.executable, "-m", EXECUTOR]
        agent = agent_of(forked["pid"])
        (server,) = [each for each in agent.children() if SERVER in each.cmdline()]
        with pytest.raises(sky.WorkerDiedError, match="exit status 3"):
            die() >> compute
        again = told_of_itself() >> compute

        server.kill()
        with pytest.raises(sky.WorkerDiedError, match="exit status 3"):
            die() >> compute
        program = told_of_itself() >> compute
        assert psutil.Process(program["pid"]).cmdline() == [sys.executable, "-P", "-m", EXECUTOR]
        assert agent_of(program["pid"]) == agent
        assert program.pop("main") == "__main__"
        assert forked.pop("main") == again.pop("main") == EXECUTOR
        pids = {each.pop("pid") for each in (forked, again, program)}
        assert len(pids) == 3
        assert forked == again == program
        assert not any(each.status() == psutil.STATUS_ZOMBIE for each in agent.children())
    eventually(lambda: not agent.is_running())
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_variable_that_counts_at_the_start_counts() -> None:
    code = "print(hash('hashed'))"
    variables = {**os.environ, "PYTHONHASHSEED": "7"}
    said = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True)
    image = sky.Image(env={"PYTHONHASHSEED": "7"})
    with sky.Compute(image=image, options=sky.Options(console=False)) as compute:
        assert own_hash() >> compute == int(said.stdout)


def main() -> None:
    """What a forked process runs here."""
    os.write(int(os.environ["TELLS"]), str(random.random()).encode())


def requested(numbers: list[int], **variables: str) -> fork_server.ForkRequest:
    return fork_server.ForkRequest(__name__, {**os.environ, **variables}, "/", numbers)


def servers() -> list[psutil.Process]:
    return [each for each in psutil.Process().children() if SERVER in each.cmdline()]


def test_a_server_that_stands_still_is_ended_before_it_starts_what_it_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, eventually: Callable[..., None]
) -> None:
    monkeypatch.setattr(fork_server, "_PATIENCE_SECONDS", 0.2)
    there = fork_server.ForkServer(__name__)
    eventually(servers)
    (child,) = servers()
    child.suspend()
    assert there.fork(requested([]), []) is None
    assert not psutil.pid_exists(child.pid)
    assert there.fork(requested([]), []) is None
    there.end()


def test_forked_processes_take_any_descriptors_and_draw_numbers_of_their_own() -> None:
    """An agent with many executors raises its limit of descriptors when the server is there."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    reading, writing = os.pipe()
    high = soft // 2
    # The server begins with this limit.
    resource.setrlimit(resource.RLIMIT_NOFILE, (high, hard))
    there = fork_server.ForkServer(__name__)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    try:
        said = set()
        for number in (high + 1, high + 2):
            forked = there.fork(requested([number], TELLS=str(number)), [writing])
            assert forked is not None
            assert forked.wait(60) == 1
            said.add(os.read(reading, 100))
        assert len(said) == 2
    finally:
        there.end()
        os.close(reading)
        os.close(writing)


def test_variables_that_are_no_text_and_ignored_children_do_not_matter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GIVEN", "Jos\udce9")
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with sky.Compute(options=sky.Options(console=False)) as compute:
            assert sky.function(os.environb.get)(b"GIVEN") >> compute == b"Jos\xe9"
            with pytest.raises(sky.WorkerDiedError, match="exit status 3"):
                die() >> compute
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_executors_with_large_environments_start() -> None:
    """A description that is too large for a message between the two starts as a program."""
    image = sky.Image(env={"GIVEN": "x" * 100_000} | {f"MORE{n}": "y" * 100_000 for n in range(10)})
    worker = sky.Worker(concurrency=4)
    with sky.Compute(worker=worker, image=image, options=sky.Options(console=False)) as compute:
        every = sky.gather(*[told_of_itself() for _ in range(8)]) >> compute
        assert {len(each["given"]) for each in every} == {100_000}
        assert len({psutil.Process(each["pid"]).ppid() for each in every}) == 1
        (pid, *_) = (each["pid"] for each in every)
        assert psutil.Process(pid).cmdline() == [sys.executable, "-P", "-m", EXECUTOR]
