"""The items of calls by name, on their way to the disk of the head and from there to a client."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import skyward as sky
from skyward.calls.task import Failed, Streaming
from skyward.compute import named
from skyward.compute.named import AGAIN_SECONDS, NamedCalls
from skyward.compute.runner import CallRunner, NamedRun, Settled, write_items
from skyward.errors import NodeLostError, WorkerDiedError
from skyward.wire.channel import Channel, ServiceConnection
from skyward.worker import output_log
from skyward.worker.jobs import Job

from ..conftest import PATIENCE

CALL = Job("slow", "call", ["count"], 0.0, "")


class Clock:
    """The time, which passes only while somebody sleeps."""

    now = 1.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += AGAIN_SECONDS


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(named, "time", clock)
    return clock


@pytest.fixture
def calls() -> NamedCalls:
    return NamedCalls(SimpleNamespace(closed=False, head=0, record=None))  # type: ignore[arg-type]


def test_a_slow_generator_may_be_cut_off_any_number_of_times(
    calls: NamedCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Agent:
        opened = 0

        def send(self, what: str, **arguments: Any) -> None: ...

        def next_part(self) -> Any:
            if self.opened < 5:
                raise sky.NodeLostError("cut")
            ended = Job("slow", "call", ["count"], 0.0, "", "", "failed", problem="after five")
            return SimpleNamespace(more=False, value=ended), bytearray()

    agent = Agent()

    @contextlib.contextmanager
    def asking() -> Iterator[Any]:
        agent.opened += 1
        yield agent

    monkeypatch.setattr(calls, "_asking", asking)
    with pytest.raises(sky.errors.PoolError, match="slow has no result: after five"):
        next(calls._items(CALL, 0))


def test_a_head_that_stays_out_of_reach_is_an_error(
    calls: NamedCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = []

    def asking() -> Any:
        tries.append(1)
        raise sky.NodeLostError("out of reach")

    monkeypatch.setattr(calls, "_asking", asking)
    with pytest.raises(sky.NodeLostError, match="out of reach"):
        next(calls._items(CALL, 0))
    assert len(tries) == 3


def test_an_item_is_on_the_disk_before_the_next_one_is_asked_for(tmp_path: Path) -> None:
    class Items:
        """A stream that ends after three items."""

        asked = 0

        def next_item(self) -> object:
            assert path.stat().st_size >= self.asked * 10_000
            self.asked += 1
            return ((memoryview(bytes(10_000)), [], []),) if self.asked < 4 else None

        def close(self) -> None: ...

    path = tmp_path / "stream-0"
    with path.open("wb") as file:
        write_items(file, Items())  # type: ignore[arg-type]
    assert path.stat().st_size >= 30_000


def test_a_call_whose_output_cannot_be_written_fails_alone(tmp_path: Path) -> None:
    (tmp_path / "output").write_text("no folder")
    state, problem = NamedRun(None, "full", tmp_path, str).run()  # type: ignore[arg-type]
    assert state == "failed"
    assert problem.startswith("its output could not be written: ")


class Untaken:
    """A stream whose items nobody takes."""

    closed = False

    def close(self) -> None:
        self.closed = True


class StreamingTask:
    """A task whose worker answers with a stream."""

    load = None

    def __init__(self) -> None:
        self.stream = Untaken()

    def wait(self) -> Streaming:
        return Streaming(lambda: self.stream)  # type: ignore[arg-type, return-value]


def test_a_stream_whose_file_cannot_be_opened_is_closed(tmp_path: Path) -> None:
    fleet = SimpleNamespace(dispatcher=SimpleNamespace(flush_output=lambda task: None))
    (tmp_path / "stream-0").write_text("no folder")
    task: Any = StreamingTask()
    NamedRun(fleet, "full", tmp_path, str)._settled(0, task, (0, 0))  # type: ignore[arg-type]
    assert task.stream.closed


def test_a_stream_whose_result_cannot_be_written_is_not_told(tmp_path: Path) -> None:
    told: list[str] = []
    run = NamedRun(None, "full", tmp_path, told.append)  # type: ignore[arg-type]
    task: Any = StreamingTask()
    run._tasks = [task]
    (tmp_path / "result").write_text("no folder")
    run._answered(0, Settled(0, 0, task.wait()))
    assert told == []
    (tmp_path / "result").unlink()
    run._unwritten = None
    run._answered(0, Settled(0, 0, task.wait()))
    assert told == ["full"]


def test_a_broadcast_that_is_cancelled_before_it_runs_again_has_a_result(tmp_path: Path) -> None:
    run = NamedRun(None, "again", tmp_path, str)  # type: ignore[arg-type]
    died = Failed.because(WorkerDiedError("x"))
    run._ranks = SimpleNamespace(why_again=lambda: died.problem)  # type: ignore[assignment]
    run._tasks = [SimpleNamespace()]  # type: ignore[list-item]
    run.cancelled = True
    run._answered(0, Settled(0, 0, died))
    assert not (tmp_path / "result").exists(), "all ranks run again"
    (answer,) = run._run([(0, 0)], run._tasks)
    assert isinstance(answer, Failed)
    assert (tmp_path / "result").exists()


def test_a_call_that_ends_because_its_agent_is_gone_has_no_result(tmp_path: Path) -> None:
    """Whether its tasks fail before the runner knows that the agent is gone, or after."""
    ours, theirs = socket.socketpair()
    with theirs, contextlib.closing(ServiceConnection(Channel(ours))) as agent:
        runner = CallRunner(None, agent, tmp_path)  # type: ignore[arg-type]
        before, after = (
            NamedRun(None, name, tmp_path / name, str)  # type: ignore[arg-type]
            for name in ("before", "after")
        )
        runner._runs = {"before": before, "after": after}
        before._tasks = [SimpleNamespace()]  # type: ignore[list-item]
        (tmp_path / "before").mkdir()
        before._answered(0, Settled(0, 0, Failed.because(NodeLostError("its agent is gone"))))
        theirs.shutdown(socket.SHUT_WR)

        with pytest.raises(EOFError):
            runner.serve()
        runner._run(after)

        theirs.settimeout(PATIENCE)
        assert theirs.recv(1) == b"", "nothing was reported"
    for name in ("before", "after"):
        assert output_log.read(tmp_path / name / "result", 0, 100) == (0, b"")
