"""Child processes of an agent: how their ends are told."""

from __future__ import annotations

import errno
import fcntl
import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import skyward as sky
from skyward import kernel
from skyward.wire.messages import (
    DeviceDown,
    DeviceUp,
    ExecutorDown,
    ExecutorUp,
    Message,
    OpenDevice,
    Written,
)
from skyward.worker import supervision
from skyward.worker.agent import Agent
from skyward.worker.config import AgentConfig
from skyward.worker.devices import DeviceProcesses, NodeDevices
from skyward.worker.output import PIPE_SIZE
from skyward.worker.process import ending
from skyward.worker.supervision import ExecutorProcess, ExecutorProcesses

from ..conftest import PATIENCE, only_in_all

QUIET = sky.Options(console=False)
REAL_TIME = signal.SIGRTMIN + 1
"""A signal that has no name in Python."""


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (3, "its process ended with exit status 3"),
        (-signal.SIGSEGV, "its process was killed by SIGSEGV (a segmentation fault in C code)"),
        (-signal.SIGKILL, "its process was killed by SIGKILL (killed from outside)"),
        (-signal.SIGTERM, "its process was killed by SIGTERM"),
        (-REAL_TIME, f"its process was killed by signal {int(REAL_TIME)}"),
    ],
)
def test_an_exit_code_is_told_in_words(code: int, words: str) -> None:
    assert ending(code) == words


def test_only_a_kill_is_blamed_on_the_memory_killer() -> None:
    assert "ran out of memory" in ending(-signal.SIGKILL, out_of_memory=True)
    assert "ran out of memory" not in ending(-signal.SIGSEGV, out_of_memory=True)


def test_an_executor_killed_by_a_real_time_signal_is_told(nothing_left: None) -> None:
    @sky.function
    def die() -> None:
        os.kill(os.getpid(), REAL_TIME)
        signal.pause()

    with sky.Compute(options=QUIET) as compute:
        with pytest.raises(sky.WorkerDiedError, match=f"killed by signal {int(REAL_TIME)}"):
            die() >> compute
        assert sky.function(abs)(-1) >> compute == 1


def test_an_agent_ends_when_its_time_to_live_is_over(config: AgentConfig) -> None:
    config.workers, config.compute_pool, config.ttl = 0, [], 0.3
    began = time.monotonic()

    Agent(config).serve()

    assert 0.3 < time.monotonic() - began < config.orphan_timeout


def test_a_device_killed_by_a_real_time_signal_is_told(config: AgentConfig) -> None:
    """Asked of the agent's part alone: the client often notices the broken connection first."""
    told: queue.SimpleQueue[Message] = queue.SimpleQueue()
    devices = DeviceProcesses(config, told.put, queue.SimpleQueue(), NodeDevices())
    devices.open(OpenDevice(1, "cpu"))
    while isinstance(up := told.get(timeout=120), Written):
        pass  # its core is compiled
    assert isinstance(up, DeviceUp)

    os.kill(up.pid, REAL_TIME)

    reason = f"its process was killed by signal {int(REAL_TIME)}"
    assert told.get(timeout=200) == DeviceDown(1, reason)
    devices.close_all()


@only_in_all
def test_the_client_hears_that_a_device_compiles_and_why_it_could_not(
    config: AgentConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKYWARD_CACHE", str(tmp_path / "cache"))
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\n[ $# = 1 ] && exit\necho 'error: on purpose' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    told: queue.SimpleQueue[Message] = queue.SimpleQueue()
    devices = DeviceProcesses(config, told.put, queue.SimpleQueue(), NodeDevices())
    devices.open(OpenDevice(1, "cpu"))
    shown: list[Message] = []
    while isinstance(down := told.get(timeout=120), Written):
        shown.append(down)
    devices.close_all()
    what = "the torch device's worker core"
    begun = f"compiling {what}, once for this torch (most often less than a minute)\n"
    assert shown[0] == Written(0, "stderr", begun, False)
    failed = f"{what} was not compiled: CompilerError\n"
    assert shown[-1] == Written(0, "stderr", failed, False)
    assert isinstance(down, DeviceDown)
    assert "error: on purpose" in down.reason


def test_executors_start_a_few_at_a_time(
    config: AgentConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "AT_ONCE", 2)
    config.slots = 3
    told: queue.SimpleQueue[Message] = queue.SimpleQueue()
    starts: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
    executors = ExecutorProcesses(config, told.put, starts)
    try:
        executors.start_all()
        assert len(executors.all()) == 2

        more = starts.get(timeout=PATIENCE)
        assert more is not None
        more()
        assert len(executors.all()) == 3
        ups = [told.get(timeout=PATIENCE) for _ in range(3)]
        assert {each.slot for each in ups if isinstance(each, ExecutorUp)} == {0, 1, 2}
    finally:
        executors.stop_restarting()
        executors.close()


@pytest.mark.parametrize(
    ("memory", "files", "reason"),
    [
        (1e9, 1 << 20, "100 processes take at least 1.68 GB, and it has 1 GB"),
        (1e12, 256, "100 processes take 628 open files of their agent, which may have 256"),
    ],
)
def test_more_processes_than_a_node_can_have_are_refused_before_the_first(
    config: AgentConfig, monkeypatch: pytest.MonkeyPatch, memory: float, files: int, reason: str
) -> None:
    monkeypatch.setattr(supervision, "memory_there", lambda: memory)
    monkeypatch.setattr(kernel, "raise_descriptors", lambda wanted: files)
    config.slots = 100
    told: list[Message] = []
    executors = ExecutorProcesses(config, told.append, queue.SimpleQueue())

    executors.start_all()

    (down,) = told
    assert isinstance(down, ExecutorDown)
    assert not down.restarting
    assert reason in down.reason
    assert "sky.Worker(concurrency=...), or for threads" in down.reason
    assert executors.all() == []


def test_a_machine_that_starts_no_more_processes_is_told(
    config: AgentConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(supervision, "ChildProcess", full)
    config.slots = 3
    told: list[Message] = []

    ExecutorProcesses(config, told.append, queue.SimpleQueue()).start_all()

    (down,) = told
    assert isinstance(down, ExecutorDown)
    assert "after 0 processes no other can start: [Errno 11] Resource" in down.reason


def test_what_an_executor_said_is_told_though_it_ended_before_it_was_told_anything(
    config: AgentConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_to_the_end(*args: Any, **kwargs: Any) -> Any:
        child = start(*args, **kwargs)
        child.wait(PATIENCE)
        return child

    start = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", run_to_the_end)
    monkeypatch.setenv("PYTHONHOME", "/nowhere")
    told: queue.SimpleQueue[Message] = queue.SimpleQueue()

    ExecutorProcesses(config, told.put, queue.SimpleQueue()).start_all()

    down = told.get(timeout=PATIENCE)
    assert isinstance(down, ExecutorDown)
    assert "it did not start: its process ended with exit status 1" in down.reason
    assert "No module named 'encodings'" in down.reason


def test_an_agent_empties_a_pipe_only_if_nobody_reads_it(
    config: AgentConfig, child_of: Callable[[str], Any]
) -> None:
    told: list[Message] = []
    executors = ExecutorProcesses(config, told.append, queue.SimpleQueue())
    read_end, write_end = os.pipe()
    fcntl.fcntl(read_end, fcntl.F_SETPIPE_SZ, PIPE_SIZE)

    def executor(code: str) -> ExecutorProcess:
        stacks: Any = SimpleNamespace(ask=lambda child: None, is_silent=True)
        return ExecutorProcess(0, 0, child_of(code), {"stdout": read_end}, stacks, announced=True)

    slow = executor("import time; time.sleep(1000)")
    os.write(write_end, b"x" * 200_000)
    for second in range(5):
        executors._empty_full_pipes(slow, now=second)
        os.read(read_end, 10_000)
    assert told == []
    slow.stacks.is_silent = False  # its interpreter is free, so its reader waits for the client
    for second in range(6, 30):
        executors._empty_full_pipes(slow, now=second)
    assert told == []
    slow.stacks.is_silent = True
    executors._empty_full_pipes(slow, now=31.0)
    # Long after, as a process that has only begun to wait may still look busy.
    executors._empty_full_pipes(slow, now=41.0)
    assert told == [Written(0, "stdout", "x" * 150_000, False)]

    starved = executor("while True: pass")
    os.write(write_end, b"y" * 100_000)
    for second in range(10):
        executors._empty_full_pipes(starved, now=second)
    assert len(told) == 1
    executors._empty_full_pipes(starved, now=10.0)
    assert len(told) == 2
    os.close(read_end)
    os.close(write_end)


@pytest.fixture
def child_of() -> Iterator[Callable[[str], Any]]:
    """Starts a Python process that has begun to run the code; it is killed after the test."""
    children: list[subprocess.Popen[bytes]] = []

    def start(code: str) -> Any:
        command = [sys.executable, "-c", f"print(flush=True)\n{code}"]
        children.append(subprocess.Popen(command, stdout=subprocess.PIPE))
        assert children[-1].stdout is not None
        children[-1].stdout.readline()
        return children[-1]

    yield start
    for child in children:
        with child:
            child.kill()


def test_last_words_need_no_newline(config: AgentConfig) -> None:
    told: list[Message] = []
    executors = ExecutorProcesses(config, told.append, queue.SimpleQueue())
    outputs = {}
    for name in ("stdout", "stderr"):
        outputs[name], write_end = os.pipe()
        os.write(write_end, f"to {name}".encode())
        os.close(write_end)
    child: Any = None
    stacks: Any = None
    dead = ExecutorProcess(0, 0, child, outputs, stacks, announced=True)

    assert executors._last_words(dead) == "to stdout\nto stderr\n"
    assert told == [Written(0, name, f"to {name}\n", False) for name in outputs]
    for read_end in outputs.values():
        os.close(read_end)
