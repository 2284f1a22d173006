"""The simulated world's own parts; `make simulate` runs seeds."""

from __future__ import annotations

from pathlib import Path

import pytest
from greenlet import getcurrent

from .simulation import defect
from .simulation.kernel import pipe
from .simulation.modules import Machinery
from .simulation.runner import Outcome, about


def test_every_old_defect_can_be_put_back(tmp_path: Path) -> None:
    defect.copy_sources(tmp_path)
    assert len(defect.names()) >= 10
    for name in defect.names():
        defect.put_back(name, tmp_path, "--check")


def test_a_history_is_shortened_to_what_is_about_the_failure() -> None:
    told = [
        "  0.1 client-1000: futures 81520001",
        "  0.2 agent-1001: starts -P -m skyward.worker.executor as 1002",
        "  0.3 world: FAULT 0.0: stop agent-1001",
        "  0.4 client-1000: prints [node 0] call 81520003 try 1 line 0",
        "  0.5 client-1000: prints [node 1] call 93330001 try 1 line 0",
        *(f"  {each}.0 client-1000: prints the last" for each in range(10)),
    ]
    outcome = Outcome(1, "pool", "call 81520003 began 2 times with 0 retries", told)
    shown = about(outcome)
    assert shown[0] == "(2 lines of its history are left out)"
    assert shown[1:4] == [told[0], told[2], told[3]]
    assert shown[4:] == told[5:]


def test_a_defect_counts_as_found_only_when_a_seed_failed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert defect.find("pending", ["--seeds", "none"]) == 1
    assert (
        "pending: nothing is known: the seeds ended with exit status 2" in capsys.readouterr().out
    )


def test_threads_that_write_to_one_file_wait_for_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machinery = Machinery()
    kernel, process = machinery.kernel, machinery.nobody
    # The threads use the modules of this process, and its folder.
    monkeypatch.setattr(kernel, "enter", lambda process: None)
    kernel.hub, kernel.pauses = getcurrent(), 2.0
    reading, writing = pipe(kernel)
    process.put(5, writing)
    files = []

    def write(name: int) -> None:
        for at in range(20):
            files[0].write(b"%d %d\n" % (name, at))
            files[0].flush()

    def begin() -> None:
        files.append(machinery.open(5, "wb"))
        for name in range(3):
            kernel.thread(process, lambda name=name: write(name))

    kernel.thread(process, begin)
    kernel.run(lambda: not process.threads)
    lines = reading.read(10_000).splitlines()
    assert lines != sorted(lines)
    assert sorted(lines) == sorted(b"%d %d" % (name, at) for name in range(3) for at in range(20))
