"""The debugger of a task on the caller's terminal: pdb as one knows it, one rank at a time."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import skyward as sky

from ..conftest import PATIENCE, Eventually, other_case

CTRL_C, CTRL_D = "\x03", "\x04"


class Person:
    """Somebody at a terminal, on which the script of scenes runs."""

    def __init__(self, **settings: str) -> None:
        self._mine, theirs = pty.openpty()
        os.set_blocking(self._mine, False)
        self.seen = self.all_seen = ""
        paths = f"{Path(sky.__file__).parents[1]}"
        self.script = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("scenes.py"))],
            env={**os.environ, "SKYWARD_DEBUGGER": "", "PYTHONPATH": paths, "TERM": "dumb"}
            | settings,
            preexec_fn=lambda: os.login_tty(theirs),
        )
        os.close(theirs)

    def sees(self, pattern: str, seconds: float = PATIENCE) -> re.Match[str]:
        """Wait until something is on the screen, and look only at what follows from then on."""
        deadline = time.monotonic() + seconds
        while (found := re.search(pattern, self.seen)) is None:
            assert time.monotonic() < deadline, f"{pattern!r} is not in {self.seen!r}"
            with contextlib.suppress(BlockingIOError):
                text = os.read(self._mine, 65536).decode(errors="replace").replace("\r", "")
                self.seen += text
                self.all_seen += text
            time.sleep(0.005)
        self.seen = self.seen[found.end() :]
        return found

    def types(self, text: str) -> None:
        os.write(self._mine, text.encode())

    def plays(self, scene: str) -> None:
        self.sees(r"scene\? ")
        self.types(f"{scene}\n")

    def leaves(self) -> None:
        self.plays("over")
        assert self.script.wait(PATIENCE) == 0
        os.close(self._mine)


@pytest.fixture(scope="module")
def person() -> Iterator[Person]:
    somebody = Person()
    try:
        yield somebody
        somebody.leaves()
    finally:
        somebody.script.kill()
        somebody.script.wait()


def test_a_breakpoint_opens_pdb_with_the_stack_of_the_user(person: Person) -> None:
    person.plays("steps")
    person.sees(r"steps on node \d: pdb")
    person.sees(r"scenes\.py\(\d+\)doubled\(\)\n-> once_more = twice \+ 1\n\(Pdb\) ")
    person.types("p twice\n")
    person.sees(r"\n8\n\(Pdb\) ")
    person.types("w\n")
    stack = person.sees(r"(?s)w\n(.*)\(Pdb\) ")[1]
    assert re.findall(r"\)(\w+)\(\)", stack) == ["steps", "doubled"], "no frame of Skyward's"
    person.types("n\nn\n")
    person.sees(r"printed by the task\n(.*\n)*-> return once_more\n\(Pdb\) ")
    person.types("twice = 0; once_more = 77\n")
    person.sees(r"\(Pdb\) ")
    person.types("c\n")
    person.sees(r"result 77\n")


def test_stepping_out_of_a_function_ends_with_the_task(person: Person) -> None:
    person.plays("steps")
    person.sees(r"\(Pdb\) ")
    person.types("r\n")
    person.sees(r"--Return--(.*\n)*.*\(Pdb\) ")
    person.types("n\n")
    person.sees(r"steps\(\)(.*\n)*.*\(Pdb\) ")
    person.types("n\n")
    person.sees(r"result 9\n")


def test_breakpoints_set_in_pdb_are_met_and_end_with_the_task(person: Person) -> None:
    person.plays("steps")
    person.sees(r"\(Pdb\) ")
    person.types("b doubled\n")
    person.sees(r"Breakpoint \d+ at")
    person.types("c\n")
    person.sees(r"-> print\((.*\n)*.*\(Pdb\) ")
    person.types("c\n")
    person.sees(r"result 9\n")
    person.plays("steps")
    person.sees(r"-> once_more(.*\n)*.*\(Pdb\) ")
    person.types("c\n")
    person.sees(r"result 9\n")


def test_q_ends_the_call_as_in_pdb(person: Person) -> None:
    person.plays("quitting")
    person.sees(r"\(Pdb\) ")
    person.types("q\n")
    person.sees("the call was ended")


def test_the_end_of_input_ends_the_call_as_in_pdb(person: Person) -> None:
    person.plays("quitting")
    person.sees(r"\(Pdb\) ")
    person.types(CTRL_D)
    person.sees("the call was ended")


def test_ctrl_c_gives_a_new_prompt_and_ends_a_command_that_runs(
    person: Person, tmp_path: Path, eventually: Eventually
) -> None:
    person.plays("steps")
    person.sees(r"\(Pdb\) ")
    person.types(f"p tw{CTRL_C}")
    person.sees(r"--KeyboardInterrupt--\n\(Pdb\) ")
    # The terminal shows what is typed long before it runs.
    runs = tmp_path / "runs"
    person.types(f"import threading\np open({str(runs)!r}, 'w') and threading.Event().wait()\n")
    eventually(runs.exists)
    person.types(CTRL_C)
    person.sees(r"\*\*\* KeyboardInterrupt\n\(Pdb\) ")
    person.types("p twice\n")
    person.sees(r"\n8\n\(Pdb\) ")
    person.types("c\n")
    person.sees(r"result 9\n")


def test_after_the_debugger_ctrl_c_cancels_a_call_again(
    person: Person, tmp_path: Path, eventually: Eventually
) -> None:
    marker = tmp_path / "there"
    person.plays(f"cancelled {marker}")
    eventually(marker.exists)
    person.types(CTRL_C)
    person.sees("Ctrl-C cancelled the call")


@other_case
def test_the_time_in_the_debugger_is_not_counted_by_timeouts(person: Person) -> None:
    person.plays("limited")
    person.sees(r"\(Pdb\) ")
    person.types("import time; time.sleep(2.5)\n")
    person.sees(r"\(Pdb\) ")
    person.types("c\n")
    person.sees("result in time\n")
    assert float(person.sees(r"scene played ([\d.]+)")[1]) >= 2.5


def test_ranks_of_a_broadcast_take_turns_and_say_who_waits(person: Person) -> None:
    person.plays("ranked")
    first = person.sees(r"ranked on node (\d): pdb(.*\n)*.*\(Pdb\) ")[1]
    second = {"0": "1", "1": "0"}[first]
    waits = f"ranked on node {second} waits in line: ranked on node {first} is in the debugger"
    if waits not in person.all_seen:
        person.sees(waits)
    person.types("p rank\n")
    person.sees(rf"\n{first}\n\(Pdb\) ")
    person.types("c\n")
    person.sees(rf"ranked on node {second}: pdb(.*\n)*.*\(Pdb\) ")
    person.types("p rank\nc\n")
    person.sees(rf"\n{second}\n")
    person.sees(r"result \[0, 1\]\n")


def test_a_future_that_meets_a_breakpoint_opens_pdb_too(person: Person) -> None:
    person.plays("future")
    person.sees(r"\(Pdb\) ")
    person.types("c\n")
    person.sees(r"result 11\n")


def test_post_mortem_opens_the_frames_of_the_call_that_failed(person: Person) -> None:
    person.plays("failing")
    person.sees("failed: no 42")
    person.sees(r"post_mortem on node \d: pdb")
    person.sees(r'-> raise ValueError\(f"no {secret}"\)\n\(Pdb\) ')
    person.types("p secret, number\n")
    person.sees(r"\(42, 6\)\n\(Pdb\) ")
    person.types("q\n")
    person.sees("scene played")


def test_with_failures_a_call_that_fails_opens_pdb_by_itself() -> None:
    somebody = Person(SKYWARD_DEBUGGER="failures")
    try:
        somebody.plays("failing")
        somebody.sees(r"fails on node \d: pdb(.*\n)*ValueError: no 42(.*\n)*.*\(Pdb\) ")
        somebody.types("p number\n")
        somebody.sees(r"\n6\n\(Pdb\) ")
        somebody.types("c\n")
        somebody.sees("failed: no 42")
        somebody.sees(r"post_mortem on node \d: pdb(.*\n)*.*\(Pdb\) ")
        somebody.types("q\n")
        somebody.leaves()
    finally:
        somebody.script.kill()
        somebody.script.wait()
