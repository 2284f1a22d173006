"""`sky.log`: the user's own numbers, from tasks and from the client, to pages and to trackers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import skyward as sky
from skyward import events, functions
from skyward.calls.dispatch import CallTeller
from skyward.compute import PoolListeners
from skyward.events import Curve, Curves, Event, EventStream, NumbersLogged, as_dict
from skyward.wire import messages
from skyward.wire.frames import META_LIMIT
from skyward.wire.messages import Logged
from skyward.worker.output import ROWS_WAITING, VALUES_WAITING, NumberLog

from .conftest import PATIENCE, only_in_all


@sky.function
def train(steps: int, name: str) -> int:
    for step in range(steps):
        sky.log({name: step / 2}, step=step)
    return steps


@sky.function
def count(times: int, name: str) -> None:
    for _ in range(times):
        sky.log({name: 1})


@pytest.fixture
def told(pool: sky.Compute) -> Any:
    """What is logged in the pool, as it comes."""
    found: list[NumbersLogged] = []

    def take(event: Event) -> None:
        if isinstance(event, NumbersLogged):
            found.append(event)

    events = pool._open_fleet.events
    events.add(take)
    yield found
    events.remove(take)


def curves(pool: sky.Compute, name: str) -> dict[Any, list[tuple[int, float]]]:
    """The points of a name, by node."""
    rows = pool._open_fleet.dispatcher.teller.curves.news({})
    return {place and place[0]: points for each, place, _, points, _ in rows if each == name}


def test_numbers_of_a_task_are_there_in_order_when_it_has_returned(
    pool: sky.Compute, told: list[NumbersLogged]
) -> None:
    assert pool.run(train(500, "ordered"), on=1) == 500
    assert [event.step for event in told] == list(range(500))
    assert told[7].values == {"ordered": 3.5}
    assert (told[7].node, told[7].worker, told[7].name, told[7].rank) == (1, 0, "train", None)
    assert curves(pool, "ordered")[1] == [(step, step / 2) for step in range(500)]


def test_numbers_arrive_while_the_task_runs(
    pool: sky.Compute, told: list[NumbersLogged], tmp_path: Path, eventually: Any
) -> None:
    @sky.function
    def wait() -> None:
        from tests.waiting import wait_for

        sky.log(live=1)
        wait_for(tmp_path / "seen")

    running = wait() > pool
    eventually(lambda: told)
    (tmp_path / "seen").touch()
    running.result()


def test_a_broadcast_has_a_curve_for_each_rank(
    pool: sky.Compute, told: list[NumbersLogged]
) -> None:
    train(3, "everywhere") @ pool
    assert set(curves(pool, "everywhere")) == {0, 1}
    assert {(event.node, event.rank) for event in told} == {(0, 0), (1, 1)}


def test_numbers_that_arrive_when_the_broadcast_ends_are_taken() -> None:
    class Ending(SimpleNamespace):
        """A task whose broadcast is over as soon as somebody has looked."""

        @property
        def together(self) -> Any:
            found, self.left = self.left, ()
            return found

    task = Ending(name="trains", left=[])
    task.left.append(task)
    lane: Any = SimpleNamespace(node=0, worker=0, tasks={7: task})
    taken: list[Any] = []
    tracking: Any = SimpleNamespace(take=taken.extend)
    CallTeller(EventStream("pool"), tracking).logged(Logged([(7, 0, {"loss": 1.0})]), lane)
    assert len(taken) == 1


def test_without_a_step_each_name_counts(pool: sky.Compute, told: list[NumbersLogged]) -> None:
    pool.run(count(2, "counted"), on=0)
    pool.run(count(2, "counted"), on=0)
    # The pool is active: it was entered last.
    sky.log(mine=1, step=7)
    sky.log(mine=1)
    assert [event.step for event in told] == [0, 1, 2, 3, 7, 8]
    assert (told[-1].node, told[-1].worker, told[-1].call) == (None, None, 0)


def test_a_thread_of_a_task_logs_for_the_task(pool: sky.Compute, told: list[NumbersLogged]) -> None:
    @sky.function
    def learn() -> None:
        thread = threading.Thread(target=sky.log, kwargs={"threaded": 1})
        thread.start()
        thread.join()

    learn() >> pool
    assert told[0].name.endswith("learn")


def test_a_process_that_a_task_forks_logs_nothing_and_breaks_nothing(pool: sky.Compute) -> None:
    @sky.function
    def fork() -> int:
        child = os.fork()
        if not child:
            code = 1
            try:
                sky.log(child=1)
                code = 7
            finally:
                os._exit(code)
        sky.log(parent=1)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert fork() >> pool == 7
    assert curves(pool, "parent")
    assert not curves(pool, "child")


@pytest.fixture
def outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pool is active, though the tests share one."""
    monkeypatch.setattr(functions, "active_compute", lambda: None)


@pytest.mark.usefixtures("outside")
def test_outside_of_a_pool_there_is_nothing_to_do() -> None:
    assert train.local(3, "alone") == 3


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (3, 3.0),
        (True, 1.0),
        (np.float32(0.5), 0.5),
        (np.array([2]), 2.0),
        (torch.tensor(0.25, requires_grad=True), 0.25),
        (Fraction(1, 4), 0.25),
        (math.inf, math.inf),
    ],
)
def test_what_is_one_number_is_taken(value: Any, number: float) -> None:
    assert functions._number("loss", value) == number


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sky.log(), r"sky.log\(\) got no number; write sky.log\(loss=0.3, step=7\)"),
        (
            lambda: sky.log(dict.fromkeys(map(str, range(1001)), 1)),
            r"sky.log\(\) got 1001 numbers, and takes 1000 in a call; log fewer",
        ),
        (lambda: sky.log(loss=[1, 2]), r"loss=\[1, 2\]\): this list is not one number"),
        (lambda: sky.log(loss="0.3"), "loss='0.3'.: this str is not one number"),
        (lambda: sky.log(loss=None), "this NoneType is not one number"),
        (lambda: sky.log(loss=torch.ones(2, 3)), r"this Tensor of shape \(2, 3\) .*loss.mean\(\)"),
        (lambda: sky.log(big=10**400), "this int is not one number that a curve can have"),
        (lambda: sky.log({"": 1}), "a name is text of 1 to 200 characters"),
        (lambda: sky.log({3: 1}), "a name is text"),  # type: ignore[dict-item]
        (lambda: sky.log(loss=1, step=0.5), r"step=0.5\): give a whole number"),
        (lambda: sky.log(loss=1, step=2**60), "at most 2\\*\\*53"),
    ],
)
def test_what_is_no_number_is_refused_with_the_next_step(call: Any, message: str) -> None:
    with pytest.raises(sky.errors.ConfigurationError, match=message):
        call()


def test_why_an_element_cannot_be_had_is_the_cause() -> None:
    class Lost:
        def item(self) -> float:
            raise RuntimeError("the device is gone")

        __repr__ = item  # type: ignore[assignment]

    with pytest.raises(sky.errors.ConfigurationError, match="this Lost is not one") as refused:
        sky.log(loss=Lost())
    assert str(refused.value.__cause__) == "the device is gone"


# Bounds.


@pytest.mark.parametrize(
    ("rows", "names"), [(3 * ROWS_WAITING, 1), (3 * VALUES_WAITING // 1000, 1000)]
)
def test_a_task_that_logs_faster_than_the_client_takes_does_not_wait(rows: int, names: int) -> None:
    sent: list[Logged] = []
    go = threading.Event()

    def send(message: Logged) -> None:
        assert go.wait(PATIENCE)
        sent.append(message)

    log = NumberLog(lambda: None, send)
    values = dict.fromkeys(map(str, range(names)), 1.0)
    for step in range(rows):
        log.take(values, step)
    go.set()
    log.flush()
    log.take(values, -1)
    log.flush()
    steps = [step for message in sent for _, step, _ in message.rows]
    assert steps[:-1] == sorted(steps[:-1])
    assert steps[-1] == -1
    left_out = sum(message.left_out for message in sent)
    assert left_out > 0
    assert len(steps) + left_out == rows + 1


def test_wide_rows_are_sent_in_messages_that_may_be_sent() -> None:
    sent: list[Logged] = []
    log = NumberLog(lambda: None, sent.append)
    longest = "\N{MATHEMATICAL ITALIC SMALL ALPHA}" * (functions.NAME_MOST - 3)
    values = {f"{longest}{number:03}": 1.0 for number in range(functions.NAMES_MOST)}
    for step in range(25):
        log.take(values, step)
    log.flush()
    assert [step for message in sent for _, step, _ in message.rows] == list(range(25))
    assert max(len(messages.encode(message)) for message in sent) < META_LIMIT // 2


@given(st.integers(1, 5000))
def test_a_curve_of_any_length_is_drawn_whole(length: int) -> None:
    curve = Curve()
    for step in range(length):
        curve.add(step, step / 2)
    steps = [step for step, _ in curve.points]
    assert len(steps) <= events.POINTS
    assert steps == list(range(0, length, curve.stride))
    assert curve.last == (length - 1, (length - 1) / 2)


@given(st.lists(st.integers(0, 1500), max_size=5))
def test_what_is_told_in_parts_is_the_curve(parts: list[int]) -> None:
    every, told, mirror = Curves(), {}, []  # type: ignore[var-annotated]
    for part in parts:
        for value in range(part):
            every.add(None, {"loss": value}, None)
        for _, _, start, points, _ in every.news(told):
            mirror[start:] = points
    assert mirror == [points for *_, points, _ in every.news({})][-1] if any(parts) else not mirror
    assert every.news(told) == []


def test_a_pool_keeps_so_many_curves_and_still_counts_the_others() -> None:
    every = Curves()
    for number in range(3 * events.CURVES):
        every.add(None, {f"curve {number}": 1}, None)
    for name in ("curve 0", f"curve {3 * events.CURVES - 1}"):
        assert [every.add(None, {name: 1}, None) for _ in range(3)] == [1, 2, 3]
    assert [every.add((0, worker), {"loss": 1}, None) for worker in (0, 1, 0)] == [0, 0, 1]
    assert len(every.news({})) == events.CURVES
    assert every.left_out == 2 * events.CURVES + 2


def test_json_has_values_that_are_no_numbers_as_text() -> None:
    values = {"a": math.nan, "b": -math.inf, "c": 0.5}
    event = NumbersLogged(1.0, "p", 3, values, None, None, 0, "", None)
    text = json.dumps(as_dict(event), allow_nan=False)
    assert json.loads(text)["values"] == {"a": "NaN", "b": "-Infinity", "c": 0.5}


# Trackers.


class Run:
    """What Skyward uses of a run of Weights & Biases."""

    id = "run-1"

    def __init__(self) -> None:
        self.logged: list[dict[str, float]] = []
        self.defined: list[tuple[str, str]] = []

    def define_metric(self, name: str, step_metric: str) -> None:
        self.defined.append((name, step_metric))

    def log(self, values: dict[str, float]) -> None:
        if "bad" in values:
            raise RuntimeError("no such metric")
        self.logged.append(values)


def test_a_run_has_the_numbers_of_a_call_that_has_returned(
    pool: sky.Compute, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run()
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=run))  # type: ignore[arg-type]
    train(2, "tracked") @ pool
    first = [each for each in run.logged if "tracked" in each]
    assert first == [{"tracked": 0.0, "sky/step": 0}, {"tracked": 0.5, "sky/step": 1}]
    assert sum("rank1/tracked" in each for each in run.logged) == 2
    assert set(run.defined) == {("tracked", "sky/step"), ("rank1/tracked", "sky/step")}
    sky.log(mine=3, step=9)
    assert run.logged[-1] == {"mine": 3.0, "sky/step": 9}
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=None))  # type: ignore[arg-type]
    train(2, "tracked") >> pool
    assert len(run.logged) == 5


@pytest.mark.usefixtures("outside")
def test_outside_of_a_pool_a_run_has_the_numbers_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run()
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=run))  # type: ignore[arg-type]
    train.local(2, "by hand")
    assert [each["by hand"] for each in run.logged] == [0.0, 0.5]


@pytest.mark.usefixtures("outside")
def test_outside_of_a_pool_a_run_that_fails_is_reported_once_and_breaks_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run()
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=run))  # type: ignore[arg-type]
    monkeypatch.setattr(events, "_failed", set())
    for _ in range(2):
        sky.log(bad=1)
    sky.log(good=1)
    assert [each["good"] for each in run.logged] == [1.0]
    assert capsys.readouterr().err == (
        "skyward: Weights & Biases failed at sky.log: RuntimeError('no such metric'); it gets the "
        "next numbers, and further failures are not reported\n"
    )


class Store:
    """What Skyward uses of MLflow; batches are written when `go` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.active = ""
        self.go = threading.Event()
        self.written: list[tuple[str, str]] = []
        fluent = SimpleNamespace(_get_latest_active_run=self._run)
        entities = SimpleNamespace(Metric=lambda *values: values)
        for name, module in {
            "mlflow": SimpleNamespace(MlflowClient=lambda: self),
            "mlflow.entities": entities,
            "mlflow.tracking.fluent": fluent,
        }.items():
            monkeypatch.setitem(sys.modules, name, module)  # type: ignore[arg-type]

    def _run(self) -> Any:
        return SimpleNamespace(info=SimpleNamespace(run_id=self.active)) if self.active else None

    def log_batch(self, run: str, metrics: list[tuple[Any, ...]]) -> None:
        assert self.go.wait(PATIENCE)
        self.written += [(run, metric[0]) for metric in metrics]


def test_the_client_does_not_wait_and_numbers_go_to_the_run_of_their_time(
    pool: sky.Compute, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(monkeypatch)
    for store.active in ("first", "second"):
        sky.log(mine=1)
        sky.log(other=1)
    store.active = ""
    sky.log(late=1)
    assert not store.written
    store.go.set()
    pool._open_fleet.dispatcher.teller.tracking.drain()
    assert store.written == [
        (run, name) for run in ("first", "second") for name in ("mine", "other")
    ]


def test_a_tracker_that_hangs_is_waited_for_once_until_it_goes_on(
    monkeypatch: pytest.MonkeyPatch, eventually: Any
) -> None:
    monkeypatch.setattr(events, "PATIENCE", 0.01)
    store, notes = Store(monkeypatch), []  # type: ignore[var-annotated]
    store.active = "run"
    tracking = events.Tracking(notes.append)
    event = NumbersLogged(1.0, "p", 3, {"loss": 1}, None, None, 0, "", None)
    tracking.take([event])
    tracking.drain()
    assert notes == [
        "MLflow hangs: it has taken nothing for 0.01 s, and nobody waits for it until it goes on"
    ]
    monkeypatch.setattr(events, "PATIENCE", PATIENCE)
    tracking.take([event])
    # Without a wait: nothing else lets the store go on.
    tracking.drain()
    assert not store.written
    store.go.set()
    eventually(lambda: len(store.written) == 2)
    tracking.take([event])
    tracking.close()
    assert len(store.written) == 3
    assert len(notes) == 1


def test_output_alone_does_not_wait_for_trackers(
    pool: sky.Compute, monkeypatch: pytest.MonkeyPatch
) -> None:
    drained: list[None] = []
    tracking = pool._open_fleet.dispatcher.teller.tracking
    monkeypatch.setattr(tracking, "drain", lambda: drained.append(None))
    sky.function(print)("hello") >> pool
    assert not drained
    train(1, "waited") >> pool
    assert drained


def test_async_for_waits_for_trackers_beside_the_event_loop(
    pool: sky.Compute, monkeypatch: pytest.MonkeyPatch
) -> None:
    @sky.function
    def learn() -> Iterator[int]:
        sky.log(streamed=1)
        yield 1

    waits, go = threading.Event(), threading.Event()

    def drain() -> None:
        waits.set()
        assert go.wait(PATIENCE)

    monkeypatch.setattr(pool._open_fleet.dispatcher.teller.tracking, "drain", drain)

    async def taken(flow: Any) -> list[int]:
        waits.clear()
        go.clear()
        found = []

        async def take() -> None:
            async for item in flow:
                found.append(item)

        for _ in range(2):
            # One who is cancelled meanwhile loses nothing.
            taking = asyncio.create_task(take())
            await asyncio.to_thread(waits.wait, PATIENCE)
            waits.clear()
            taking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await taking
        go.set()
        await take()
        return found

    async def main() -> list[list[int]]:
        # Opening the stream waits for trackers, too, if it has logged by then.
        go.set()
        mapped = pool.map(train, [1], ["mapped"])
        calls = sky.gather(train(2, "gathered"), stream=True, ordered=False)
        return [await taken(each) for each in (learn() >> pool, mapped, calls >> pool)]

    assert asyncio.run(main()) == [[1], [1], [2]]


def test_a_tracker_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with (
        pytest.raises(sky.errors.ConfigurationError, match="pip install tensorboard"),
        sky.Compute(options=sky.Options(tensorboard="runs")),
    ):
        pass


def test_a_client_that_attaches_needs_no_tracker_of_the_pools_maker(
    pool: sky.Compute, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    opened, notes = pool._open_fleet, []  # type: ignore[var-annotated]
    options = replace(opened.spec.options, tensorboard="runs")
    monkeypatch.setattr(opened, "spec", replace(opened.spec, options=options))
    monkeypatch.setattr(opened.console, "note", notes.append)
    PoolListeners(opened, None, attached=True).close()
    assert len(notes) == 1
    assert "pip install tensorboard" in notes[0]


TRACKED = """
import os, sys
import skyward as sky

@sky.function
def train():
    for step in range(100):
        sky.log(loss=1 / (step + 1), step=step)

def check(found, *, steps=100):
    assert [step for step, _ in found] == list(range(steps)), found
    assert abs(found[9][1] - 0.1) < 1e-6, found[9]
"""


def tracked(body: str, folder: Path, **variables: str) -> None:
    """Run a script of a user with a tracker; it checks what the tracker has."""
    done = subprocess.run(
        [sys.executable, "-c", TRACKED + textwrap.dedent(body)],
        cwd=folder,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "failed at" not in done.stderr


@only_in_all
def test_tensorboard_reads_what_was_logged(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs tensorboard: make test-all installs it")
    tracked(
        """
        with sky.Compute(nodes=2, options=sky.Options(tensorboard="runs/fit")) as compute:
            train() @ compute

        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        events = EventAccumulator("runs/fit").Reload()
        for name in ("loss", "rank1/loss"):
            check([(each.step, each.value) for each in events.Scalars(name)])
        """,
        tmp_path,
    )


@only_in_all
def test_the_active_run_of_mlflow_has_what_was_logged(tmp_path: Path) -> None:
    pytest.importorskip("mlflow", reason="needs mlflow-skinny: make test-all installs it")
    tracked(
        """
        import mlflow

        mlflow.set_tracking_uri("file:" + os.path.abspath("runs"))
        with sky.Compute() as compute:
            with mlflow.start_run() as run:
                train() >> compute
                sky.log(mine=3)
        with mlflow.start_run() as later:
            sky.log(outside=5)
        client = mlflow.MlflowClient()
        found = client.get_metric_history(run.info.run_id, "loss")
        check(sorted((each.step, each.value) for each in found))
        assert client.get_run(run.info.run_id).data.metrics["mine"] == 3
        assert client.get_run(later.info.run_id).data.metrics == {"outside": 5}
        """,
        tmp_path,
        # The lean package has no database.
        MLFLOW_ALLOW_FILE_STORE="true",
    )


@only_in_all
def test_the_run_of_wandb_has_what_was_logged(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="needs wandb: make test-all installs it")
    tracked(
        """
        import json, wandb

        with sky.Compute(nodes=2) as compute, wandb.init(project="fit") as run:
            train() @ compute
            sky.log(mine=3)
            summary = dict(run.summary)
        assert abs(summary["loss"] - 0.01) < 1e-9 and summary["mine"] == 3, summary
        assert abs(summary["rank1/loss"] - 0.01) < 1e-9, summary
        # 100 steps of two ranks, and one.
        assert summary["_step"] == 200, summary
        """,
        tmp_path,
        WANDB_MODE="offline",
        WANDB_SILENT="true",
    )
