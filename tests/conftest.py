"""What every test may use: a pool, a way to wait for things, and proof that nothing is left."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
import re
import shutil
import signal
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import psutil
import pytest

import skyward as sky
from skyward import console
from skyward.device.build import CompilerError

RUN = uuid.uuid4().hex
"""In the environment of every worker this test run starts, however deep below it."""
MARK = "SKYWARD_TEST_RUN"
WORKER = re.compile(r"^skyward\.(device\.)?worker\b")

PATIENCE = 200.0
"""How long a test waits for what must come: other runs of tests may share the machine."""
Eventually = Callable[..., None]

ALL = bool(os.environ.get("SKYWARD_TEST_ALL"))
"""Whether everything is tested, as `make test-all` does: also what takes long and rarely fails."""
only_in_all = pytest.mark.skipif(not ALL, reason="takes long and rarely fails: make test-all")
other_case = pytest.mark.skipif(not ALL, reason="another case of a test that runs: make test-all")
Sharing = Callable[[sky.Compute], contextlib.AbstractContextManager[sky.Compute]]

_shared_pools: list[sky.Compute] = []

# A machine that stands still for a moment says nothing about the code: no limit on one example.
hypothesis.settings.register_profile("skyward", deadline=None, max_examples=100 if ALL else 12)
hypothesis.settings.load_profile("skyward")

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # As a shell starts what is to run in the background; but the tests press Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def has_compiler() -> bool:
    """Whether the torch device's core can be compiled here; tests of the device skip otherwise."""
    return bool(os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """Look for garbage in what tests make, and never in all that is imported for them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Shuffle folders, files, classes and tests, each where it is, as `SKYWARD_TEST_ORDER` says.

    A file has the same order alone as among others. Then pytest itself puts together what shares
    a fixture with arguments.
    """
    if order := os.environ.get("SKYWARD_TEST_ORDER"):
        items.sort(key=lambda item: [_shuffled(order, node.nodeid) for node in item.listchain()])


def _shuffled(order: str, name: str) -> bytes:
    return hashlib.sha256(f"{order} {name}".encode()).digest()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Iterator[None]:
    with _skipping_without_compiler():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    with _skipping_without_compiler():
        return (yield)


@contextlib.contextmanager
def _skipping_without_compiler() -> Iterator[None]:
    try:
        yield
    except CompilerError as problem:
        if has_compiler():
            raise
        pytest.skip(str(problem))


def worker_processes(mark: str = RUN) -> list[psutil.Process]:
    """The live agents and executors that descend from this test run."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if not any(WORKER.search(part) for part in process.info["cmdline"] or ()):
            continue
        try:
            environment = process.environ()
            if environment.get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def _of_shared_pools() -> set[int]:
    """Agents that outlive a test on purpose, with all below them."""
    pids: set[int] = set()
    for compute in _shared_pools:
        for node in compute._open_fleet.nodes:
            pids.add(node.host.agent_pid)
    return pids


@pytest.fixture(autouse=True, scope="session")
def _marked() -> Iterator[None]:
    """Mark this run's workers, and give them folders of their own to leave things in."""
    folder = tempfile.mkdtemp(prefix="skyt-", dir="/tmp")
    shapes = tempfile.mkdtemp(prefix="skyt-shapes-", dir="/tmp")
    before = dict(os.environ)
    # What workers answer here is nothing for the user's own sessions, nor the other way around.
    os.environ.update({MARK: RUN, "XDG_RUNTIME_DIR": folder, "SKYWARD_SHAPES": shapes})
    yield
    os.environ.clear()
    os.environ.update(before)
    shutil.rmtree(shapes, ignore_errors=True)
    left = os.listdir(folder)
    shutil.rmtree(folder, ignore_errors=True)
    assert not left, f"folders were left behind: {left}"


def wait_until(
    condition: Callable[[], object], seconds: float = PATIENCE, what: str = "the condition"
) -> None:
    """Return as soon as the condition holds; fail loudly when it does not in time.

    `seconds` are what it should take at most on a machine that has nothing else to do.
    """
    seconds = max(seconds, PATIENCE)
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"{what} did not come true within {seconds:g} s")
        time.sleep(0.01)


@pytest.fixture
def eventually() -> Eventually:
    """Wait for a condition, with a deadline: `eventually(lambda: future.running())`."""
    return wait_until


@pytest.fixture
def nothing_left(eventually: Eventually) -> Iterator[None]:
    """After the test, no worker process of it lives and none of its folders exists."""
    folder = Path(os.environ["XDG_RUNTIME_DIR"])
    before = set(os.listdir(folder))
    yield

    def strays() -> list[str]:
        kept = _of_shared_pools()
        try:
            return [
                f"{process.pid} {process.cmdline()}"
                for process in worker_processes()
                if process.pid not in kept and process.ppid() not in kept
            ]
        except psutil.Error:
            return ["one that is just ending"]

    try:
        eventually(lambda: not strays(), 20, "the end of its workers")
    except pytest.fail.Exception as late:
        late.add_note(f"still there: {strays()}")
        raise
    if not _shared_pools:
        eventually(
            lambda: set(os.listdir(folder)) <= before, 30, "the removal of temporary folders"
        )


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cancelled call may end by itself though the machine stands still for a while.

    Yet not for the 20 s or more that functions of the tests wait by themselves: one that was never
    told to end is killed before, and found out.
    """
    monkeypatch.setattr("skyward.calls.dispatch.CANCEL_GRACE", 15.0)


@contextlib.contextmanager
def _shared(compute: sky.Compute) -> Iterator[sky.Compute]:
    with compute:
        _shared_pools.append(compute)
        try:
            yield compute
        finally:
            _shared_pools.remove(compute)


@pytest.fixture(scope="session")
def sharing() -> Sharing:
    """Enter a pool that outlives a test on purpose: `with sharing(sky.Compute(...)) as pool`."""
    return _shared


@pytest.fixture(scope="module")
def pool(sharing: Sharing) -> Iterator[sky.Compute]:
    """Two nodes, shared by the tests of a module."""
    with sharing(sky.Compute(nodes=2, options=sky.Options(console=False))) as compute:
        yield compute


@pytest.fixture(scope="module")
def threads(sharing: Sharing) -> Iterator[sky.Compute]:
    """One node, one process, four tasks at a time; shared by the tests of a module."""
    worker = sky.Worker(concurrency=4, executor="thread")
    with sharing(sky.Compute(worker=worker, options=sky.Options(console=False))) as compute:
        yield compute


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have consoles show lines as if no other test's pool ran, whose name would be shown."""
    monkeypatch.setattr(console, "_of_pools", set())


@pytest.fixture
def printed() -> Iterator[list[sky.Output]]:
    """What tasks wrote while the test ran."""
    lines: list[sky.Output] = []
    with sky.redirect_output(lines.append):
        yield lines
