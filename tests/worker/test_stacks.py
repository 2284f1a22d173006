"""Stacks: where every worker is, also one that hangs in C code."""

from __future__ import annotations

import importlib
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import skyward as sky
from skyward.nodes.stacks import Stacks, node_stacks
from skyward.wire.channel import ServiceConnection
from skyward.worker import inspection

from ..conftest import Eventually

QUIET = sky.Options(console=False)


@pytest.fixture(scope="module")
def pool() -> Iterator[sky.Compute]:
    with sky.Compute(nodes=2, options=QUIET) as compute:
        yield compute


@pytest.fixture
def compute(pool: sky.Compute, eventually: Eventually) -> sky.Compute:
    """With both workers at rest: a test before this one may have had one killed."""
    eventually(lambda: [each.tasks for each in pool.stacks()] == [(), ()])
    return pool


@sky.function
def waits_for(file: str, marker: str) -> None:
    Path(marker).touch()
    while not Path(file).exists():
        time.sleep(0.01)


def test_a_worker_shows_its_task_and_the_line_that_it_is_at(
    compute: sky.Compute, tmp_path: Path, eventually: Eventually
) -> None:
    running = compute.submit(waits_for(f"{tmp_path}/go", f"{tmp_path}/there"), on=1)
    eventually((tmp_path / "there").exists)
    idle, busy = compute.stacks()
    (tmp_path / "go").touch()
    running.result()

    assert (idle.node, idle.worker, idle.tasks) == (0, 0, ())
    assert (busy.node, busy.worker, busy.answered) == (1, 0, True)
    (thread,) = [each for each in busy.threads if each.task]
    assert thread.task == "waits_for"
    assert 0 < thread.seconds < 60
    assert thread.user_frames[0].function == "waits_for"
    assert thread.user_frames[0].source in (
        "while not Path(file).exists():",
        "time.sleep(0.01)",
    )
    assert "waits_for for" in str(busy)
    assert f'File "{__file__}"' in str(busy)
    assert "executor.py" not in str(busy), "Skyward's own frames are folded"
    assert "executor.py" in busy.text(everything=True)
    assert ": idle" in str(idle)
    assert str(Stacks([idle, busy])).startswith("node 0 worker 0 (pid")


def test_an_import_is_shown_without_the_frames_of_the_import_system(
    compute: sky.Compute, tmp_path: Path, eventually: Eventually
) -> None:
    (tmp_path / "imports_slowly.py").write_text(
        "import pathlib, time\n"
        "here = pathlib.Path(__file__).parent\n"
        "(here / 'there').touch()\n"
        "while not (here / 'go').exists(): time.sleep(0.01)\n"
    )

    @sky.function
    def imports(folder: str) -> None:
        sys.path.append(folder)
        importlib.import_module("imports_slowly")

    running = compute.submit(imports(str(tmp_path)), on=1)
    eventually((tmp_path / "there").exists)
    busy = compute.stacks()[1]
    (tmp_path / "go").touch()
    running.result()
    assert "imports_slowly.py" in str(busy)
    assert "<frozen importlib" not in str(busy)
    assert "<frozen importlib" in busy.text(everything=True)


def test_a_worker_that_holds_the_interpreter_in_c_code_shows_its_stack_too(
    compute: sky.Compute, tmp_path: Path, eventually: Eventually
) -> None:
    @sky.function
    def backtracks(marker: str) -> None:
        Path(marker).touch()
        # Takes hours; the regular expression engine never lets another thread run.
        re.match(r"(a+)+$", "a" * 40 + "b")

    running = compute.submit(backtracks(f"{tmp_path}/there"), on=0)
    eventually((tmp_path / "there").exists)
    stacks, _ = compute.stacks()
    running.cancel()
    # Its process, which answers nothing, is killed; other tests look at the next one.
    eventually(lambda: [each.tasks for each in compute.stacks()] == [(), ()])

    assert not stacks.answered
    (thread,) = [each for each in stacks.threads if each.task]
    assert thread.task.endswith("backtracks")
    assert [frame.function for frame in thread.user_frames] == ["backtracks", "match"]
    assert "C code holds the interpreter" in str(stacks)


def test_every_thread_of_a_task_is_shown_by_its_name(
    compute: sky.Compute, tmp_path: Path, eventually: Eventually
) -> None:
    @sky.function
    def starts_a_thread(file: str, marker: str) -> None:
        loader = threading.Thread(target=waits_for.local, args=(file, marker), name="loader")
        loader.start()
        loader.join()

    running = compute.submit(starts_a_thread(f"{tmp_path}/go", f"{tmp_path}/there"), on=0)
    eventually((tmp_path / "there").exists)
    text = str(compute.stacks()[0])
    (tmp_path / "go").touch()
    running.result()
    assert re.search(r"thread loader:\n    File .*, in waits_for", text), text
    assert "in starts_a_thread" in text


def test_tasks_on_threads_are_told_apart(tmp_path: Path, eventually: Eventually) -> None:
    worker = sky.Worker(concurrency=2, executor="thread")
    with sky.Compute(worker=worker, options=QUIET) as compute:
        there = [f"{tmp_path}/{name}" for name in "ab"]
        running = [compute.submit(waits_for(f"{tmp_path}/go", each)) for each in there]
        eventually(lambda: all(Path(each).exists() for each in there))
        (stacks,) = compute.stacks()
        (tmp_path / "go").touch()
        for each in running:
            each.result()
    assert [name for _, name, _ in stacks.tasks] == ["waits_for"] * 2
    names = {thread.name for thread in stacks.threads if thread.task}
    assert names == {"skyward-task-0", "skyward-task-1"}


def test_threads_of_an_agent_may_be_the_first_to_read_what_workers_answer() -> None:
    """msgspec looks at a struct when it is first read, and a second thread finds half of it."""
    program = """if True:
    import threading
    from skyward.worker import inspection, stacks

    def amid() -> type:
        thread = threading.Thread(target=read)
        thread.start()
        thread.join()
        return int

    def read() -> None:
        list(stacks._answers(b'{"number": 1, "teller": 2, "threads": [[3, "main", []]]}'))

    inspection.amid = amid
    inspection.ChildThread.__annotations__["ident"] = "amid()"
    read()
    """
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_signal_that_user_code_has_taken_is_not_sent(
    compute: sky.Compute, tmp_path: Path, eventually: Eventually
) -> None:
    @sky.function
    def takes_the_signal(marker: str, number: int) -> None:
        signal.signal(number, signal.SIG_DFL)
        Path(marker).touch()
        re.match(r"(a+)+$", "a" * 40 + "b")

    there = tmp_path / "there"
    running = compute.submit(takes_the_signal(str(there), inspection.DUMP), on=0)
    eventually(there.exists)
    stacks, _ = compute.stacks()
    running.cancel()
    assert f"user code has taken the signal {inspection.DUMP}" in stacks.problem
    assert stacks.tasks[0][1].endswith("takes_the_signal")


def test_a_node_that_does_not_answer_is_named() -> None:
    def refuses(node: int, name: str) -> ServiceConnection:
        raise sky.NodeLostError(f"the agent of node {node} cannot be reached: gone")

    (told,) = node_stacks(3, refuses)
    assert str(told) == "node 3: the agent of node 3 cannot be reached: gone"

    ending = threading.Event()

    def hangs(node: int, name: str) -> ServiceConnection:
        ending.wait()
        raise sky.NodeLostError("gone")

    (told,) = node_stacks(4, hangs, seconds=0.05)
    ending.set()
    assert str(told) == "node 4: its agent did not answer in 0.05 s"
