"""The task board: what an agent reads of the tasks of a child, and what its history keeps."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from skyward.wire.messages import Failure, Missing, Result
from skyward.worker.node_log import LogReader, NodeLog, Visits
from skyward.worker.services.activity import _Look
from skyward.worker.task_board import CANCELLED, FAILED, OK, RUNNING, TaskBoard, board_file

RETURNED = Result(1, 0.0, None)


@pytest.fixture
def ends() -> Iterator[tuple[TaskBoard, TaskBoard]]:
    """The board as a child writes it, and as its agent reads it."""
    descriptor = board_file(2)
    child, agent = TaskBoard(descriptor, 2), TaskBoard(descriptor, 2)
    os.close(descriptor)
    yield child, agent
    child.close()
    agent.close()


def executor_of(board: TaskBoard, number: int = 7) -> Any:
    stacks = SimpleNamespace(tasks=board)
    return SimpleNamespace(number=number, worker=3, stacks=stacks, is_past=False)


def test_the_agent_reads_what_runs_and_how_it_ended(ends: tuple[TaskBoard, TaskBoard]) -> None:
    child, agent = ends
    child.rings[0].begin(11, "train")
    child.rings[1].begin(12, "x" * 300)
    assert [(task.task, task.outcome) for task in agent.running()] == [(11, RUNNING), (12, RUNNING)]
    child.rings[0].end(RETURNED)
    child.rings[1].end(Failure(12, 0.0, "ValueError", "é" * 300, [], None, False))
    assert agent.running() == []
    first, second = agent.kept()
    assert (first.name, first.outcome, first.error) == ("train", OK, "")
    assert second.name == "x" * 120
    assert second.outcome == FAILED
    assert second.error.startswith("ValueError: éé")
    totals = agent.totals()
    assert (totals.begun, totals.succeeded, totals.failed, sum(totals.buckets)) == (2, 1, 1, 2)


def test_a_task_that_is_sent_again_counts_once(ends: tuple[TaskBoard, TaskBoard]) -> None:
    child, agent = ends
    ring = child.rings[0]
    ring.begin(1, "train")
    ring.end(Missing(1, [], [], True))
    ring.begin(1, "train")
    ring.end(RETURNED)
    first, second = agent.kept()
    assert (first.outcome, second.outcome) == (CANCELLED, OK)
    assert "sends it again" in first.error
    totals = agent.totals()
    assert (totals.begun, totals.succeeded, totals.lost, totals.cancelled) == (1, 1, 0, 0)


def test_a_watch_tells_a_part_of_many_tasks_and_all_numbers(
    ends: tuple[TaskBoard, TaskBoard],
) -> None:
    child, agent = ends
    log, visits, executor = NodeLog(), Visits(), executor_of(agent)
    visits.begin("ann", {"user": "ann"})
    watch = LogReader(log, 5)
    ring = child.rings[0]
    ring.begin(1, "slow")
    (told,) = watch.news([(executor, visits)])
    assert (told.id, told.ended, told.client) == ("7.0.1", None, "ann")
    assert watch.news([(executor, visits)]) == []
    for task in range(2, 1000):
        ring.end(RETURNED)
        ring.begin(task, "quick")
    news = watch.news([(executor, visits)])
    assert [(task.number, task.ended is None) for task in news] == [
        (1, False),
        *((number, False) for number in (995, 996, 997, 998)),
        (999, True),
    ]
    assert log.totals([executor]).begun == 999
    log.close()


def test_the_tasks_of_an_executor_that_has_ended_are_kept(
    ends: tuple[TaskBoard, TaskBoard],
) -> None:
    child, agent = ends
    log, visits, executor = NodeLog(), Visits(), executor_of(agent)
    visits.begin("ann", {"user": "ann"})
    watch = LogReader(log, 5)
    child.rings[0].begin(1, "done")
    child.rings[0].end(RETURNED)
    child.rings[0].begin(2, "cut_off")
    assert [task.ended is None for task in watch.news([(executor, visits)])] == [False, True]
    visits.begin("bob", {})
    log.add(executor, visits)
    (lost,) = watch.news([(executor, visits)])
    assert (lost.name, lost.outcome, lost.client) == ("cut_off", "lost", "ann")
    assert watch.news([]) == []
    totals = log.totals([executor])
    assert (totals.begun, totals.succeeded, totals.lost, totals.running) == (2, 1, 1, 0)
    assert log.identities() == {"ann": {"user": "ann"}}
    late = LogReader(log, 5).news([])
    assert [task.outcome for task in late] == ["ok", "lost"]
    log.close()


def test_a_node_on_which_nothing_happens_is_looked_at_when_an_executor_is_new(
    ends: tuple[TaskBoard, TaskBoard], tmp_path: Path
) -> None:
    _, board = ends
    log = NodeLog()
    executors: list[Any] = []
    tenants = SimpleNamespace(executors=executors, log=log, clients=[], identities=dict, members={})
    jobs = SimpleNamespace(scripts=0, version=0, all=lambda kinds: [])
    config = SimpleNamespace(folder=tmp_path, workers=1)
    node: Any = SimpleNamespace(tenants=tenants, jobs=jobs, config=config)
    look = _Look(node)
    assert look.is_due
    look.news()
    assert not look.is_due
    executors.append((executor_of(board), Visits()))
    assert look.is_due, "nobody has asked it to tell of changes"
    look.news()
    assert not look.is_due
    log.close()


def test_those_who_ask_at_the_same_time_get_one_measurement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = NodeLog()
    first = log.usage(1)
    monkeypatch.setattr(log.gauge, "read", None)
    second = log.usage(2)
    assert (first.number, second.number) == (1, 2)
    assert (second.cpu_percent, second.memory_used) == (first.cpu_percent, first.memory_used)
    log.close()
