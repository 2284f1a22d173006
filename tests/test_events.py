"""Events: what a pool tells of itself, to a callback and to a log of JSON lines."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import skyward as sky
from skyward.events import (
    NAMES,
    CallCancelled,
    CallEnded,
    CallEvent,
    CallFailed,
    CallFinished,
    CallStarted,
    CallSubmitted,
    DeviceEvent,
    Event,
    EventListener,
    EventsDropped,
    EventStream,
    NodeEvent,
    NodeReady,
    NodeStarting,
    NodeStopped,
    OutputWritten,
    PoolClosed,
    PoolReady,
    PoolStarted,
    Transferred,
    as_dict,
)


@sky.function
def greet(name: str) -> str:
    print(f"hello {name}\nand welcome")
    return name


@sky.function
def fail() -> None:
    raise ValueError("no such thing")


@sky.function
def nap(seconds: float) -> None:
    time.sleep(seconds)


@sky.function
def items() -> Iterator[int]:
    yield from range(3)


@sky.function
def length(data: bytes) -> bytes:
    return data + b"!"


def of(kind: type[Event], seen: list[Event]) -> list[Event]:
    return [event for event in seen if isinstance(event, kind)]


@pytest.fixture(scope="module")
def told() -> tuple[list[Event], set[str]]:
    """The events of a pool that made one call of each kind, and the threads that told of them."""
    seen: list[Event] = []
    threads = set()

    def take(event: Event) -> None:
        seen.append(event)
        threads.add(threading.current_thread().name)

    with sky.Compute(name="told", options=sky.Options(console=False), on_event=take) as compute:
        greet("Ada") >> compute
        with pytest.raises(ValueError, match="no such thing"):
            fail() >> compute
        assert list(items() >> compute) == [0, 1, 2]
        length(bytes(1 << 20)) >> compute
        slow = nap(60) > compute
        while not any(isinstance(e, CallStarted) and e.name == "nap" for e in list(seen)):
            time.sleep(0.01)
        slow.cancel()
    return seen, threads


def test_a_pool_tells_of_its_start_and_end(told: tuple[list[Event], set[str]]) -> None:
    seen, _ = told
    assert isinstance(seen[0], PoolStarted)
    assert (seen[0].pool, seen[0].provider, seen[0].nodes) == ("told", "local", 1)
    assert {event.phase for event in of(NodeStarting, seen)} >= {"starting", "connecting"}  # type: ignore[attr-defined]
    assert len(of(NodeReady, seen)) == len(of(PoolReady, seen)) == len(of(NodeStopped, seen)) == 1
    assert isinstance(seen[-1], PoolClosed)
    assert [event.time for event in seen] == sorted(event.time for event in seen)


def test_a_call_tells_where_it_ran_and_how_long(told: tuple[list[Event], set[str]]) -> None:
    seen, _ = told
    first = [event for event in seen if getattr(event, "call", 0) == 1]
    assert [type(event) for event in first] == [
        CallSubmitted,
        CallStarted,
        OutputWritten,
        OutputWritten,
        CallFinished,
    ]
    finished = first[-1]
    assert isinstance(finished, CallFinished)
    assert (finished.name, finished.node, finished.worker) == ("greet", 0, 0)
    assert 0 < finished.seconds < 60


def test_every_line_of_output_is_an_event(told: tuple[list[Event], set[str]]) -> None:
    lines = [(e.text, e.stream, e.name) for e in told[0] if isinstance(e, OutputWritten)]
    assert lines == [("hello Ada", "stdout", "greet"), ("and welcome", "stdout", "greet")]


def test_failed_and_cancelled_calls_are_told_apart(told: tuple[list[Event], set[str]]) -> None:
    (failed,) = of(CallFailed, told[0])
    assert isinstance(failed, CallFailed)
    assert (failed.name, failed.error) == ("fail", "ValueError: no such thing")
    assert [e.name for e in told[0] if isinstance(e, CallCancelled)] == ["nap"]


def test_a_stream_is_a_call_that_ends_once(told: tuple[list[Event], set[str]]) -> None:
    assert [e.name for e in told[0] if isinstance(e, CallFinished)] == ["greet", "items", "length"]


def test_large_arguments_and_results_are_transfers(told: tuple[list[Event], set[str]]) -> None:
    moved = [(e.direction, e.bytes >> 20) for e in told[0] if isinstance(e, Transferred)]
    assert moved == [("sent", 1), ("received", 1)]


def test_the_callback_runs_on_a_thread_of_its_own(told: tuple[list[Event], set[str]]) -> None:
    assert told[1] == {"skyward-events"}
    assert not [each for each in threading.enumerate() if each.name == "skyward-events"]


def test_a_failing_callback_is_reported_once_and_breaks_nothing(
    capfd: pytest.CaptureFixture[str],
) -> None:
    def take(event: Event) -> None:
        raise RuntimeError("broken listener")

    options = sky.Options(console=False)
    with sky.Compute(options=options, on_event=take) as compute:
        assert greet("Bob") >> compute == "Bob"
    said = capfd.readouterr().err
    assert said.count("on_event failed at PoolStarted: RuntimeError('broken listener')") == 1


def test_a_slow_listener_misses_events_and_is_told_how_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("skyward.events.WAITING_MOST", 10)
    busy, go = threading.Event(), threading.Event()
    seen: list[Event] = []
    notes: list[str] = []

    def take(event: Event) -> None:
        seen.append(event)
        busy.set()
        assert go.wait(60)

    listener = EventListener("on_event", take, notes.append)
    stream = EventStream("slow")
    stream.add(listener.take)
    stream.emit(CallSubmitted, 0, "f")
    assert busy.wait(60)
    for number in range(1, 31):
        stream.emit(CallSubmitted, number, "f")
    go.set()
    listener.close()
    kept = [event.call for event in seen if isinstance(event, CallSubmitted)]
    assert kept == list(range(11)), "in order, and those that came first"
    assert [event.count for event in seen if isinstance(event, EventsDropped)] == [20]
    assert notes == [
        "on_event is too slow: 20 events were dropped; have it do less, or put events into a "
        "queue of its own"
    ]


def test_nobody_listens_unless_asked() -> None:
    stream = EventStream("quiet")
    assert not stream.listened
    stream.add(print)
    assert stream.listened
    stream.remove(print)
    assert not stream.listened


def test_a_callback_must_be_callable() -> None:
    with pytest.raises(
        sky.errors.ConfigurationError, match=r"on_event=3\): give a function that takes"
    ):
        sky.Compute(on_event=3)  # type: ignore[arg-type]


def test_the_log_has_one_json_object_per_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "events.jsonl"
    monkeypatch.setenv("SKYWARD_LOG", str(log))
    with sky.Compute(name="logged", options=sky.Options(console=False)) as compute:
        greet("Eve") >> compute
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert lines[0]["event"] == "pool_started"
    assert lines[-1]["event"] == "pool_closed"
    (finished,) = [line for line in lines if line["event"] == "call_finished"]
    assert finished["pool"] == "logged"
    assert (finished["name"], finished["node"]) == ("greet", 0)
    monkeypatch.delenv("SKYWARD_LOG")
    missing = tmp_path / "missing" / "log"
    with (
        pytest.raises(sky.errors.ConfigurationError, match="cannot be written: No such file"),
        sky.Compute(options=sky.Options(console=False, log=str(missing))),
    ):
        pass


def test_an_event_as_json_has_its_kind_and_fields() -> None:
    event = CallFinished(1.5, "train", 7, "step", 0, 1, 0.25)
    assert as_dict(event) == {
        "event": "call_finished",
        "time": 1.5,
        "pool": "train",
        "call": 7,
        "name": "step",
        "node": 0,
        "worker": 1,
        "seconds": 0.25,
    }


def test_the_documentation_names_every_event() -> None:
    page = (Path(__file__).parents[1] / "docs" / "page.md").read_text()
    assert not [kind.__name__ for kind in NAMES if f"`{kind.__name__}`" not in page]


def test_events_that_are_alike_have_a_parent_which_is_no_event_itself() -> None:
    ends = {kind for kind in NAMES if issubclass(kind, CallEnded)}
    assert ends == {CallFinished, CallFailed, CallCancelled}
    assert not {Event, NodeEvent, CallEvent, CallEnded, DeviceEvent} & set(NAMES)
    assert len(set(NAMES.values())) == len(NAMES), "each name stands for one class"
    assert repr(NodeStopped(1.0, "train", 3)) == "NodeStopped(time=1.0, pool='train', node=3)"
