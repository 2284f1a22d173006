"""The agent waits for the provider's notice: in a process of its own, started again if it fails."""

from __future__ import annotations

import queue
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from skyward.wire.messages import Message, Reclaim
from skyward.worker import notices
from skyward.worker.notices import Notices

from ..conftest import Eventually, wait_until


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Write a module that processes find; returns its name."""

    def write(code: str) -> str:
        (tmp_path / "the_notice.py").write_text(code)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        return "the_notice"

    return write


def notice_of(name: str) -> Message:
    told: queue.SimpleQueue[Message] = queue.SimpleQueue()
    watching = Notices(name, told.put)
    watching.start()
    try:
        return told.get(timeout=200)
    finally:
        watching.close()


@pytest.mark.parametrize(
    ("said", "notice"),
    [
        ("120 spot interruption", Reclaim(120, "spot interruption")),
        ("7.5", Reclaim(7.5, "no reason was given")),
        ("-3 late", Reclaim(0, "late")),
        ("waiting\\nnan x\\n\\n30 maintenance of the host", Reclaim(30, "maintenance of the host")),
    ],
)
def test_the_notice_is_the_first_line_that_begins_with_a_number(
    module: Callable[[str], str], said: str, notice: Reclaim
) -> None:
    assert notice_of(module(f'print("{said}")')) == notice


def test_a_module_that_fails_is_started_again(
    module: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notices, "PAUSE_SECONDS", 0.01)
    mark = tmp_path / "mark"
    name = module(
        f"import pathlib; mark = pathlib.Path({str(mark)!r})\n"
        "if not mark.exists(): mark.touch(); raise SystemExit('no metadata')\n"
        "print('5 second try')"
    )
    assert notice_of(name) == Reclaim(5, "second try")


def test_the_process_ends_when_the_agent_does(module: Callable[[str], str]) -> None:
    name = module("import time; time.sleep(1000)")
    told: list[Message] = []
    watching = Notices(name, told.append)
    watching.start()
    wait_until(lambda: watching._process is not None)
    process = watching._process
    assert process is not None
    watching.close()
    assert process.poll() is not None
    assert told == []


def test_the_process_ends_when_the_agent_is_killed(
    module: Callable[[str], str], eventually: Eventually
) -> None:
    """The pipe that only the agent holds is then at its end."""
    watching = Notices(module("import time; time.sleep(1000)"), lambda message: None)
    watching.start()
    wait_until(lambda: watching._process is not None)
    process = watching._process
    assert process is not None
    assert process.stdin is not None
    process.stdin.close()
    eventually(lambda: process.poll() is not None or not psutil.pid_exists(process.pid))
    watching.close()


def test_without_a_module_there_is_nothing_to_wait_for() -> None:
    watching = Notices("", lambda message: None)
    watching.start()
    watching.close()
    assert watching._process is None
