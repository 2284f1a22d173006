"""Breakpoints where nobody can type, or where nobody asked for a debugger: a clear error."""

from __future__ import annotations

import builtins
import concurrent.futures
import fcntl
import linecache
import multiprocessing
import os
import queue
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import skyward as sky
from skyward.calls.debuggers import DebuggerDesk, DebuggerSession, source_of
from skyward.console.prompts import WOKEN, AskingPrompt, open_prompt
from skyward.wire.messages import DebuggerHears, DebuggerSays
from skyward.worker.task_debugger import DebuggerConsole

QUIET = sky.Options(console=False)


@pytest.fixture(scope="module")
def compute() -> Iterator[sky.Compute]:
    with sky.Compute(options=QUIET) as compute:
        yield compute


@pytest.fixture
def wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYWARD_DEBUGGER", "1")


@sky.function
def stops() -> str:
    value = 3
    breakpoint()  # noqa: T100
    return f"went on with {value}"


@sky.function
def fails() -> None:
    raise ValueError("on purpose")


def typing(*lines: str) -> object:
    """A person who types in a notebook's page, as its kernel sees it."""
    left = list(lines)

    def ask(prompt: str = "") -> str:
        assert prompt == "(Pdb) "
        return left.pop(0)

    return ask


def test_a_breakpoint_needs_no_variable(
    compute: sky.Compute, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SKYWARD_DEBUGGER", raising=False)
    monkeypatch.setattr(builtins, "input", typing("value = 5", "c"))
    assert stops() >> compute == "went on with 5"


def test_a_breakpoint_does_not_wait_for_a_pipe_that_nobody_may_fill(
    compute: sky.Compute, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SKYWARD_DEBUGGER", raising=False)
    mine, theirs = os.pipe()
    try:
        with open(mine, encoding="utf-8") as silent:
            monkeypatch.setattr("sys.stdin", silent)
            with pytest.raises(
                sky.errors.DebuggerError,
                match="no terminal; start it in one, or set SKYWARD_DEBUGGER=1",
            ):
                stops() >> compute
    finally:
        os.close(theirs)


def test_a_breakpoint_where_debuggers_are_off_says_so(
    compute: sky.Compute, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKYWARD_DEBUGGER", "0")
    with pytest.raises(
        sky.errors.DebuggerError,
        match=r"breakpoint\(\) at .*test_no_terminal\.py:\d+ in stops: SKYWARD_DEBUGGER=0 in .* "
        "leave it out, and the breakpoint opens pdb",
    ):
        stops() >> compute


@pytest.mark.usefixtures("wanted")
def test_a_client_without_a_terminal_says_so(
    compute: sky.Compute, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open("/dev/null", encoding="utf-8") as nowhere:
        monkeypatch.setattr("sys.stdin", nowhere)
        with pytest.raises(sky.errors.DebuggerError, match="the call has no terminal; start it in"):
            stops() >> compute
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(sky.errors.DebuggerError, match="has no terminal; start it in one, or take"):
        stops() >> compute


@pytest.mark.usefixtures("wanted")
def test_a_notebook_asks_in_its_page(
    compute: sky.Compute, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(builtins, "input", typing("p value * 2", "value = 5", "c"))
    assert stops() >> compute == "went on with 5"
    assert re.search(r"stops on node 0: pdb(.*\n)*-> return (.*\n)*6\n", capfd.readouterr().out)


CELL = "/cells/of/a/notebook/1.py"
"""A file that is nowhere, as those of cells."""
TEXT = """
def in_a_cell(fails):
    value = 3
    if fails:
        raise ValueError("in a cell")
    breakpoint()
    return value
"""


@pytest.fixture
def in_a_cell(monkeypatch: pytest.MonkeyPatch) -> sky.Function[..., int]:
    """A function of a cell."""
    lines = TEXT.splitlines(keepends=True)
    monkeypatch.setitem(linecache.cache, CELL, (len(TEXT), None, lines, CELL))
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(TEXT, CELL, "exec"), names)
    made: sky.Function[..., int] = sky.function(names["in_a_cell"])
    return made


@pytest.mark.usefixtures("wanted")
def test_source_that_is_not_on_the_node_is_shown(
    compute: sky.Compute,
    in_a_cell: sky.Function[..., int],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(builtins, "input", typing("l", "ll", "w", "c"))
    assert in_a_cell(False) >> compute == 3
    shown = capfd.readouterr().out
    assert shown.count("-> return value") == 2  # at the stop and in `w`
    assert shown.count("    value = 3") == 2  # in `l` and in `ll`


@pytest.mark.usefixtures("wanted")
def test_source_that_is_not_on_the_node_is_shown_after_a_failure(
    compute: sky.Compute,
    in_a_cell: sky.Function[..., int],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(ValueError, match="in a cell") as raised:
        in_a_cell(True) >> compute
    assert 'raise ValueError("in a cell")' in raised.value.__notes__[0]
    monkeypatch.setattr(builtins, "input", typing("l", "q"))
    sky.post_mortem(compute)
    assert '-> raise ValueError("in a cell")' in capfd.readouterr().out


def test_only_code_of_the_client_is_shown(tmp_path: Path) -> None:
    private = tmp_path / "private.py"
    private.write_text("secret = 1\n")
    linecache.getlines(str(private))  # as a traceback would
    assert source_of(str(private)) == ""
    assert "def test_only_code" in source_of(__file__)


def test_a_worker_gets_source_only_for_a_task_that_is_in_a_debugger() -> None:
    told: queue.SimpleQueue[DebuggerHears] = queue.SimpleQueue()
    lane: Any = SimpleNamespace(tell=told.put)
    nothing: Any = None
    desk = DebuggerDesk(nothing, nothing)
    texts = []
    for number in (6, 7):
        desk._sessions = [DebuggerSession(lane, number, "f", None, reads_pipe=False)]
        desk.heard(lane, None, DebuggerSays(7, "source", __file__))
        answer = told.get(timeout=200)
        assert (answer.task, answer.event, answer.file) == (7, "source", __file__)
        texts.append(answer.text)
    assert texts[0] == ""
    assert "is_in_a_debugger" in texts[1]


def test_a_late_source_is_not_taken_for_another_file() -> None:
    nothing: Any = lambda *_: None
    job: Any = SimpleNamespace(run=SimpleNamespace(task=7))
    console = DebuggerConsole(job, nothing, nothing, nothing)
    console.hear(DebuggerHears(7, "source", "of the first", "first.py"))
    console.hear(DebuggerHears(7, "source", "of the second", "second.py"))
    assert console.source_of("second.py") == "of the second"


@pytest.mark.usefixtures("wanted")
def test_a_notebook_whose_page_cannot_ask_says_so(
    compute: sky.Compute, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(prompt: str = "") -> str:
        raise RuntimeError("this frontend does not support input requests")

    monkeypatch.setattr(builtins, "input", refuses)
    with pytest.raises(
        sky.errors.DebuggerError, match="does not support input requests; run the code"
    ):
        stops() >> compute


@pytest.mark.usefixtures("wanted")
def test_a_defect_of_the_debugger_is_the_calls_error_and_the_next_one_works(
    compute: sky.Compute, monkeypatch: pytest.MonkeyPatch
) -> None:
    def defect(**_: object) -> None:
        raise ValueError("filedescriptor out of range in select()")

    with monkeypatch.context() as patch:
        patch.setattr("skyward.calls.debuggers.open_prompt", defect)
        with pytest.raises(
            sky.errors.DebuggerError, match="failed in the client: ValueError: filedesc"
        ):
            stops() >> compute
    monkeypatch.setattr(builtins, "input", typing("c"))
    assert stops() >> compute == "went on with 3"
    forever = sky.function(timeout=0.2)(lambda: threading.Event().wait(60))
    with pytest.raises(sky.TaskTimeoutError):
        forever() >> compute


def test_a_prompt_waits_on_any_descriptor() -> None:
    """`select.select` takes none above 1023."""
    mine, theirs = os.pipe()
    high = fcntl.fcntl(mine, fcntl.F_DUPFD, 1500)
    try:
        os.write(theirs, b"x")
        assert AskingPrompt(input).wait(high, asking=False) == (WOKEN, "")
    finally:
        for each in (mine, theirs, high):
            os.close(each)


@pytest.mark.usefixtures("wanted")
def test_tasks_on_threads_have_debuggers_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtins, "input", typing("value = 1", "c", "value = 1", "c"))
    worker = sky.Worker(concurrency=2, executor="thread")
    with sky.Compute(worker=worker, options=QUIET) as compute:
        futures = [stops() > compute for _ in range(2)]
        assert [future.result(60) for future in futures] == ["went on with 1"] * 2


@pytest.mark.usefixtures("wanted")
def test_a_call_in_the_debugger_can_be_cancelled(
    compute: sky.Compute, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: queue.SimpleQueue[sky.Future[str]] = queue.SimpleQueue()

    def cancels(prompt: str = "") -> str:
        # The debugger may ask before the caller has the future.
        assert made.get().cancel()
        return "p value"

    monkeypatch.setattr(builtins, "input", cancels)
    future = stops() > compute
    made.put(future)
    with pytest.raises(concurrent.futures.CancelledError):
        future.result(60)
    monkeypatch.setattr(builtins, "input", typing("c"))
    assert stops() >> compute == "went on with 3"


@pytest.mark.usefixtures("wanted")
def test_a_process_that_the_task_started_is_told_apart(compute: sky.Compute) -> None:
    @sky.function
    def forks() -> str:
        def child() -> None:
            try:
                breakpoint()  # noqa: T100
            except sky.errors.DebuggerError as problem:
                told.put(str(problem))

        context = multiprocessing.get_context("fork")
        told = context.SimpleQueue()
        process = context.Process(target=child)
        process.start()
        text: str = told.get()
        process.join()
        return text

    assert "in a process that the task started" in forks() >> compute


@pytest.mark.usefixtures("wanted")
def test_python_s_own_switch_turns_breakpoints_off() -> None:
    image = sky.Image(env={"PYTHONBREAKPOINT": "0"})
    with sky.Compute(image=image, options=QUIET) as compute:
        assert stops() >> compute == "went on with 3"


def test_post_mortem_needs_the_variable_a_pool_and_a_failure(
    monkeypatch: pytest.MonkeyPatch, compute: sky.Compute
) -> None:
    monkeypatch.delenv("SKYWARD_DEBUGGER", raising=False)
    with pytest.raises(
        sky.errors.DebuggerError, match="set SKYWARD_DEBUGGER=1 before you make the call"
    ):
        sky.post_mortem(compute)
    with sky.Compute(options=QUIET) as fresh:
        # Frames of a failure hold memory: only who asks for them has them kept.
        with pytest.raises(ValueError, match="on purpose"):
            fails() >> fresh
        monkeypatch.setenv("SKYWARD_DEBUGGER", "1")
        with pytest.raises(sky.errors.DebuggerError, match="no call has failed on this pool since"):
            sky.post_mortem(fresh)
        with pytest.raises(
            sky.errors.ConfigurationError, match=r"node=7.*workers are \[\(0, 0\)\]"
        ):
            sky.post_mortem(fresh, node=7)
        with pytest.raises(ValueError, match="on purpose"):
            fails() >> fresh
        sky.function(lambda: 1)() >> fresh
        with pytest.raises(sky.errors.DebuggerError, match="this worker keeps no failed task"):
            sky.post_mortem(fresh)


def test_a_notebook_is_known_by_its_own_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtins, "input", typing())
    assert isinstance(open_prompt(), AskingPrompt)
