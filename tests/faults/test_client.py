"""A client that is killed, interrupted or forked: its workers end, its next call works."""

from __future__ import annotations

import fcntl
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import termios
import textwrap
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path

import psutil
import pytest

import skyward as sky

from ..conftest import PATIENCE, only_in_all, other_case

Eventually = Callable[..., None]

PRELUDE = """
import os, signal, sys, threading, time
import skyward as sky

@sky.function
def sleeps(path=None):
    try:
        if path:
            open(path, "w").close()
        time.sleep(600)
    finally:
        if path:
            os.rename(path, path + ".ended")

@sky.function
def never(path):
    open(path, "w").close()
    time.sleep(600)
    yield 1

@sky.function
def echo(value):
    return value

@sky.function
def agent():
    return os.getppid()

def say(*words):
    print(*words, flush=True)

def running(path):
    while not os.path.exists(path):
        time.sleep(0.01)

quiet = sky.Options(console=False)
"""


class Script:
    """A client in a process of its own, with a folder and a mark of its own."""

    def __init__(self, folder: Path, body: str, *arguments: str) -> None:
        self.mark = uuid.uuid4().hex
        # Sockets need short paths, shorter than pytest's.
        self.private = Path(tempfile.mkdtemp(prefix="skyc-", dir="/tmp"))
        script = folder / "script.py"
        script.write_text(PRELUDE + textwrap.dedent(body))
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore::DeprecationWarning", str(script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "SKYWARD_TEST_CLIENT": self.mark,
                "XDG_RUNTIME_DIR": str(self.private),
                "TMPDIR": str(self.private),
            },
        )
        self.said: list[str] = []
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self.errors = ""
        self._readers = [
            threading.Thread(target=self._read_out),
            threading.Thread(target=self._read_errors),
        ]
        for reader in self._readers:
            reader.start()

    def _read_out(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line.rstrip("\n"))
        self._lines.put(None)

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.errors += line

    def hears(self, words: str, seconds: float = PATIENCE) -> str:
        """The next line that begins with these words."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                line = None
            if line is None:
                pytest.fail(f"never heard {words!r}, only {self.said}\n{self.errors}")
            self.said.append(line)
            if line.startswith(words):
                return line

    def interrupt(self) -> None:
        """Ctrl-C."""
        self.process.send_signal(signal.SIGINT)

    def workers(self) -> list[int]:
        """Agents and executors it has started that still live."""
        found = []
        for process in psutil.process_iter(["cmdline"]):
            command = process.info["cmdline"] or ()
            if not any("skyward.worker" in part for part in command):
                continue
            try:
                mine = process.environ().get("SKYWARD_TEST_CLIENT") == self.mark
                if mine and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process.pid)
            except (psutil.Error, OSError):
                continue
        return found

    def left(self) -> list[str]:
        """What it has left in its folder for temporary things."""
        return sorted(os.listdir(self.private))

    def lets_go(self) -> int:
        """Let it end, and return how."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(PATIENCE)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for pid in self.workers():
            os.kill(pid, signal.SIGKILL)
        for reader in self._readers:
            reader.join()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()
        shutil.rmtree(self.private, ignore_errors=True)


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Callable[..., Script]]:
    """Runs scripts, and ends what is left of them."""
    scripts: list[Script] = []

    def start(body: str, *arguments: str) -> Script:
        scripts.append(Script(tmp_path, body, *arguments))
        return scripts[-1]

    yield start
    for script in scripts:
        script.end()


# Deaths of the client.


@pytest.mark.parametrize(
    ("number", "transport"),
    [
        (signal.SIGKILL, "unix"),
        pytest.param(signal.SIGTERM, "tcp", marks=other_case),
        pytest.param(signal.SIGKILL, "tcp", marks=other_case),
        pytest.param(signal.SIGTERM, "unix", marks=other_case),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_killed_client_leaves_no_process_and_no_folder(
    client: Callable[..., Script],
    eventually: Eventually,
    tmp_path: Path,
    number: signal.Signals,
    transport: str,
) -> None:
    body = """
        with sky.Compute(sky.Local(transport=sys.argv[2]), nodes=2, options=quiet) as compute:
            future = sleeps(sys.argv[1]) > compute
            running(sys.argv[1])
            say("running")
            time.sleep(600)
    """
    script = client(body, str(tmp_path / "task"), transport)
    script.hears("running")
    assert len(script.workers()) >= 4
    assert script.left()
    script.process.send_signal(number)
    # Nobody has waited for the client yet: as a zombie it still has its process id.
    eventually(lambda: not script.workers(), what="the end of all workers")
    eventually(lambda: not script.left(), what=f"the removal of {script.left()}")
    assert script.process.wait(PATIENCE) == -number


@pytest.mark.skipif(sys.platform != "linux", reason="looks into a pipe of another process")
def test_a_client_that_is_killed_before_its_agent_has_answered_leaves_no_folder(
    client: Callable[..., Script], eventually: Eventually
) -> None:
    script = client("sky.Compute(options=quiet).start()")
    found: list[int] = []
    eventually(lambda: found.extend(script.workers()) or found, what="the agent")
    agent = found[0]
    os.kill(agent, signal.SIGSTOP)
    with open(f"/proc/{agent}/fd/0", "rb", buffering=0) as given:
        eventually(lambda: unread(given) or ignores_hangup(agent), what="its configuration")
    script.process.kill()
    script.process.wait(PATIENCE)
    os.kill(agent, signal.SIGCONT)
    eventually(lambda: not script.workers(), what="the end of the agent")
    assert not script.left()


def unread(pipe: FileIO) -> int:
    """How many bytes nobody has read yet."""
    found = fcntl.ioctl(pipe, termios.FIONREAD, bytes(4))
    return int.from_bytes(found, sys.byteorder)


def ignores_hangup(agent: int) -> bool:
    """Whether it has read its configuration: the next thing that it does."""
    status = Path(f"/proc/{agent}/status").read_text()
    ignored = int(re.findall(r"^SigIgn:\s*(\w+)", status, re.MULTILINE)[0], 16)
    return bool(ignored >> (signal.SIGHUP - 1) & 1)


@pytest.mark.parametrize(
    ("last", "status", "within"),
    [
        pytest.param("raise LookupError('unhandled')", 1, True, id="exception"),
        pytest.param("sys.exit(5)", 5, False, id="entered-only-sys.exit"),
        pytest.param("os._exit(6)", 6, True, id="os._exit", marks=other_case),
        pytest.param("raise KeyboardInterrupt", -signal.SIGINT, True, id="KeyboardInterrupt"),
        pytest.param("sys.exit(5)", 5, True, id="sys.exit", marks=other_case),
        pytest.param("os._exit(6)", 6, False, id="entered-only-os._exit", marks=other_case),
    ],
)
def test_a_client_that_ends_amid_a_task_leaves_nothing(
    client: Callable[..., Script],
    eventually: Eventually,
    tmp_path: Path,
    last: str,
    status: int,
    within: bool,
) -> None:
    if within:
        body = f"""
            with sky.Compute(options=quiet) as compute:
                future = sleeps(sys.argv[1]) > compute
                running(sys.argv[1])
                {last}
        """
    else:
        body = f"""
            compute = sky.Compute(options=quiet).__enter__()
            future = sleeps(sys.argv[1]) > compute
            running(sys.argv[1])
            {last}
        """
    script = client(body, str(tmp_path / "task"))
    assert script.process.wait(PATIENCE) == status, script.errors
    eventually(lambda: not script.workers(), what="the end of all workers")
    eventually(lambda: not script.left(), what=f"the removal of {script.left()}")
    if "LookupError" in last:
        assert "LookupError: unhandled" in script.errors


# Ctrl-C.


@pytest.mark.parametrize(
    "moment",
    [0.0, *(pytest.param(each, marks=other_case) for each in (0.05, 0.15, 0.3)), 0.5],
)
def test_ctrl_c_while_a_pool_starts_takes_it_down(
    client: Callable[..., Script], eventually: Eventually, moment: float
) -> None:
    """Whatever the start was doing at that moment; the pause only spreads the moments.

    Left alone, the start would take longer than a test may.
    """
    body = """
        import contextlib

        @contextlib.contextmanager
        def slow(info):
            time.sleep(600)
            yield

        plugin = sky.Plugin.create("slow").with_around_process(slow)
        compute = sky.Compute(nodes=2, plugins=[plugin], options=quiet)
        try:
            say("starting")
            with compute:
                time.sleep(600)
        except KeyboardInterrupt:
            say("interrupted", compute)
        sys.stdin.read()
    """
    script = client(body)
    script.hears("starting")
    time.sleep(moment)
    script.interrupt()
    script.hears("interrupted")
    # It lives on: what is gone was taken down, not orphaned.
    eventually(lambda: not script.workers(), what="the end of all workers")
    eventually(lambda: not script.left(), what=f"the removal of {script.left()}")
    assert script.lets_go() == 0
    assert script.errors == ""


def test_ctrl_c_during_a_call_cancels_it_and_the_next_call_works(
    client: Callable[..., Script], eventually: Eventually, tmp_path: Path
) -> None:
    body = """
        import skyward.calls.dispatch

        skyward.calls.dispatch.CANCEL_GRACE = 100.0  # so long until a process would be killed
        with sky.Compute(options=quiet) as compute:
            threading.Thread(target=lambda: (running(sys.argv[1]), say("running"))).start()
            try:
                sleeps(sys.argv[1]) >> compute
            except KeyboardInterrupt:
                say("interrupted")
            assert echo(1) >> compute == 1
            say("next", compute.stats().workers_died)
        say("left")
    """
    script = client(body, str(tmp_path / "task"))
    script.hears("running")
    script.interrupt()
    script.hears("interrupted")
    assert script.hears("next") == "next 0"
    assert (tmp_path / "task.ended").exists()
    script.hears("left")
    assert script.lets_go() == 0
    assert script.errors == ""


def test_ctrl_c_in_any_way_of_waiting_leaves_a_pool_that_works(
    client: Callable[..., Script], tmp_path: Path
) -> None:
    body = """
        ways = {
            "broadcast": lambda: sleeps(path) @ compute,
            "gather": lambda: sky.gather(*[sleeps(path)] * 5) >> compute,
            "stream": lambda: next(sky.gather(*[sleeps(path)] * 5, stream=True) >> compute),
            "map": lambda: next(compute.map(sleeps, [path] * 5)),
            "future": lambda: (sleeps(path) > compute).result(),
        }
        with sky.Compute(options=quiet) as compute:
            for way, call in ways.items():
                path = os.path.join(sys.argv[1], way)
                told = threading.Thread(target=lambda: (running(path), say("running", way)))
                told.start()
                try:
                    call()
                except KeyboardInterrupt:
                    say("interrupted", way)
                told.join()
                if way != "future":  # a future is not cancelled by not waiting for it
                    assert echo(1) >> compute == 1
                say("next", way)
        sys.stdin.read()
    """
    script = client(body, str(tmp_path))
    for way in ("broadcast", "gather", "stream", "map", "future"):
        script.hears(f"running {way}")
        script.interrupt()
        script.hears(f"interrupted {way}")
        script.hears(f"next {way}")
    assert script.lets_go() == 0, script.errors
    assert script.errors == ""


def test_a_ctrl_c_just_before_a_wait_begins_ends_it(
    client: Callable[..., Script], tmp_path: Path
) -> None:
    """As one that another thread gets: Python notes it, and the wait is not ended by itself."""
    body = """
        ways = {
            "call": lambda: sleeps(path) >> compute,
            "broadcast": lambda: sleeps(path) @ compute,
            "gather": lambda: sky.gather(*[sleeps(path)] * 5) >> compute,
            "stream": lambda: next(sky.gather(*[sleeps(path)] * 5, stream=True) >> compute),
            "any order": lambda: next(
                sky.gather(*[sleeps(path)] * 5, stream=True, ordered=False) >> compute
            ),
            "generator": lambda: next(never(path) >> compute),
            "future": lambda: (sleeps(path) > compute).result(),
        }

        def interrupt():
            running(path)
            time.sleep(0.1)
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)

        with sky.Compute(options=quiet) as compute:
            for way, call in ways.items():
                path = os.path.join(sys.argv[1], way)
                threading.Thread(target=interrupt).start()
                try:
                    call()
                except KeyboardInterrupt:
                    say("interrupted", way)
                if way != "future":
                    assert echo(1) >> compute == 1
        sys.stdin.read()
    """
    script = client(body, str(tmp_path))
    for way in ("call", "broadcast", "gather", "stream", "any order", "generator", "future"):
        script.hears(f"interrupted {way}")
    assert script.lets_go() == 0, script.errors
    assert script.errors == ""


@other_case
def test_ctrl_c_while_a_large_argument_is_on_its_way_leaves_a_pool_that_works(
    client: Callable[..., Script], tmp_path: Path
) -> None:
    """The worker stands still, so that the argument cannot get through before the Ctrl-C."""
    body = """
        @sky.function
        def executor():
            return os.getpid()

        @sky.function
        def length(value):
            return len(value)

        with sky.Compute(options=quiet) as compute:
            pid = executor() >> compute
            large = os.urandom(64 << 20)
            os.kill(pid, signal.SIGSTOP)
            say("sending")
            try:
                length(large) >> compute
            except KeyboardInterrupt:
                say("interrupted")
            os.kill(pid, signal.SIGCONT)
            assert echo(1) >> compute == 1
            assert length(large) >> compute == len(large)
            say("next")
    """
    script = client(body)
    script.hears("sending")
    time.sleep(0.3)  # less than it takes to give a stopped worker up
    script.interrupt()
    script.hears("interrupted")
    script.hears("next")
    assert script.lets_go() == 0
    assert script.errors == ""


@pytest.mark.parametrize(
    ("transport", "call"),
    [
        pytest.param("unix", "assert echo(count) >> compute == count", marks=other_case),
        pytest.param("unix", "assert echo(count) @ compute == [count] * 2", marks=other_case),
        ("unix", "assert total(array) >> compute == count * len(array)"),
        pytest.param(
            "tcp", "assert total(array) >> compute == count * len(array)", marks=other_case
        ),
    ],
    ids=["call", "broadcast", "shared-memory", "tcp"],
)
def test_ctrl_c_at_any_moment_of_a_call_leaves_a_pool_that_works(
    client: Callable[..., Script], transport: str, call: str
) -> None:
    """Hundreds of them, wherever they strike; the caller's own data changes in between."""
    body = f"""
        import random
        import numpy as np

        @sky.function
        def total(values):
            return int(values.sum())

        def strike(*_):
            global armed  # once for each time we are ready for it, never in our own `except`
            if armed:
                armed = False
                raise KeyboardInterrupt

        def storm():
            while not calm.wait(0.002 + random.random() * 0.01):
                signal.raise_signal(signal.SIGINT)

        signal.signal(signal.SIGINT, strike)
        calm, armed = threading.Event(), False
        array = np.zeros(200_000, np.int64)
        count = interrupts = 0
        with sky.Compute(sky.Local(transport={transport!r}), nodes=2, options=quiet) as compute:
            assert total(array) @ compute == [0, 0]
            weather = threading.Thread(target=storm)
            weather.start()
            until = time.monotonic() + 1.0
            while time.monotonic() < until or interrupts < 20:
                try:
                    armed = True
                    while time.monotonic() < until or interrupts < 20:
                        count += 1
                        array[:] = count
                        {call}
                except KeyboardInterrupt:
                    interrupts += 1
            armed = False
            calm.set()
            weather.join()
            say("calm", count, interrupts)
            array[:] = 7
            assert total(array) @ compute == [7 * len(array)] * 2
            say("works")
        sys.stdin.read()
    """
    script = client(body)
    script.hears("calm")
    script.hears("works")
    assert script.lets_go() == 0, script.errors
    assert script.errors == ""


@pytest.mark.parametrize(
    "times", [pytest.param(1, marks=other_case), 2, pytest.param(3, marks=other_case)]
)
def test_ctrl_c_during_shutdown_makes_it_quick_and_leaves_nothing(
    client: Callable[..., Script], eventually: Eventually, times: int
) -> None:
    """The agents stand still, so that an orderly shutdown would take longer than a test may."""
    body = """
        from skyward.nodes.fleet import Fleet

        def close(pool, seconds, orderly=Fleet.close):
            for pid in agents:
                os.kill(pid, signal.SIGSTOP)
            say("leaving")
            orderly(pool, 600.0)

        Fleet.close = close
        compute = sky.Compute(nodes=2, options=quiet)
        try:
            with compute:
                agents = agent() @ compute
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # one may come after all is done
            say("interrupted")
        def threads():
            own = {t.name for t in threading.enumerate() if t.name.startswith("skyward")}
            return sorted(own - {"skyward-providers"})  # one loop for all pools of the process
        until = time.monotonic() + 60  # a thread without work ends after a second
        while threads() and time.monotonic() < until:
            time.sleep(0.05)
        say("threads", threads())
        sys.stdin.read()
    """
    script = client(body)
    script.hears("leaving")
    time.sleep(0.2)  # to find the shutdown on its way
    for _ in range(times):
        script.interrupt()
        time.sleep(0.02)
    script.hears("interrupted")
    assert not script.workers()
    assert not script.left()
    assert script.hears("threads") == "threads []"
    assert script.lets_go() == 0
    assert script.errors == ""


# Forks.


def test_a_forked_child_is_told_that_the_pool_is_not_its_own(pool: sky.Compute) -> None:
    @sky.function
    def echo(value: int) -> int:
        return value

    assert echo(1) >> pool == 1
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            try:
                echo(2) >> pool
            except sky.errors.PoolClosedError as problem:
                os.write(write, f"run: {problem}\n".encode())
            try:
                echo(2) >> sky
            except sky.errors.PoolClosedError as problem:
                os.write(write, f"sky: {problem}\n".encode())
            pool.close()
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as answers:
        heard = answers.read().splitlines()
    assert os.waitpid(child, 0)[1] == 0
    assert heard == [
        "run: this pool belongs to the process that made it; a forked child must make its own",
        "sky: no Compute is active here: `>> sky` works inside a `with sky.Compute()` block, and "
        "in scripts that `sky run` runs",
    ]
    assert echo(3) >> pool == 3
    assert echo(4) @ pool == [4, 4]


@only_in_all
def test_a_forked_child_may_have_a_pool_of_its_own_and_its_end_spares_the_parents(
    client: Callable[..., Script], eventually: Eventually
) -> None:
    body = """
        with sky.Compute(options=quiet) as compute:
            assert echo(1) >> compute == 1
            child = os.fork()
            if not child:
                with sky.Compute(options=quiet) as own:
                    assert echo(2) >> own == 2
                sys.exit(7)  # through atexit, with the parent's pool still in a `with` of ours
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            say("child", status)
            assert echo(3) >> compute == 3
        say("left")
    """
    script = client(body)
    assert script.hears("child") == "child 7"
    script.hears("left")
    assert script.lets_go() == 0
    assert script.errors == ""
    eventually(lambda: not script.workers(), what="the end of all workers")
    assert not script.left()
