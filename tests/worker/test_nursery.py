"""Executors are forked from the agent's nursery, and are as if they had started as programs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import psutil
import pytest

import skyward as sky
from skyward import kernel
from skyward.worker import nursery

pytestmark = pytest.mark.skipif(not kernel.IS_LINUX, reason="a nursery takes Linux")

NURSERY = "skyward.worker.nursery"
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
        (nursery,) = [each for each in agent.children() if NURSERY in each.cmdline()]
        with pytest.raises(sky.WorkerDiedError, match="exit status 3"):
            die() >> compute
        again = told_of_itself() >> compute

        nursery.kill()
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
        ended = [each.pid for each in agent.children() if each.status() == psutil.STATUS_ZOMBIE]
        assert set(ended) <= {nursery.pid}
    eventually(lambda: not agent.is_running())
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_variable_that_counts_at_the_start_counts() -> None:
    code = "print(hash('hashed'))"
    variables = {**os.environ, "PYTHONHASHSEED": "7"}
    said = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True)
    image = sky.Image(env={"PYTHONHASHSEED": "7"})
    with sky.Compute(image=image, options=sky.Options(console=False)) as compute:
        assert own_hash() >> compute == int(said.stdout)


def nurseries() -> list[psutil.Process]:
    return [each for each in psutil.Process().children() if NURSERY in each.cmdline()]


def test_a_nursery_that_stands_still_is_given_up(
    monkeypatch: pytest.MonkeyPatch, eventually: Callable[..., None]
) -> None:
    monkeypatch.setattr(nursery, "_PATIENCE_SECONDS", 0.2)
    there = nursery.Nursery(NURSERY)
    eventually(nurseries)
    (child,) = nurseries()
    child.suspend()
    try:
        birth = nursery.Birth(NURSERY, dict(os.environ), "/", [])
        assert there.fork(birth, []) is None
        assert there.ended
        assert there.fork(birth, []) is None
    finally:
        child.kill()
        child.wait()


def test_many_executors_and_large_environments_start() -> None:
    """A description that is too large for a message between the two starts as a program."""
    image = sky.Image(env={"GIVEN": "x" * 100_000, "MORE": "y" * 100_000})
    worker = sky.Worker(concurrency=20)
    with sky.Compute(worker=worker, image=image, options=sky.Options(console=False)) as compute:
        every = sky.gather(*[told_of_itself() for _ in range(40)]) >> compute
        assert {len(each["given"]) for each in every} == {100_000}
        assert len({psutil.Process(each["pid"]).ppid() for each in every}) == 1
