"""Prospects: whether a task waits for a node, or fails because none will run it."""

from __future__ import annotations

from dataclasses import dataclass

from skyward.calls.scheduler import Prospects


@dataclass
class Aim:
    """Where a task must run, if that matters."""

    on: int | None = None
    worker: tuple[int, int] | None = None


def expecting(*nodes: int, grouped: bool = False) -> Prospects:
    prospects = Prospects(grouped=grouped)
    prospects.need(len(nodes))
    for node in nodes:
        prospects.expect(node)
    return prospects


def test_a_task_waits_for_any_node_that_is_left() -> None:
    prospects = expecting(0, 1)
    prospects.fail(0, OSError("no route"))
    assert prospects.can_run(Aim())
    prospects.fail(1, OSError("no disk"))
    assert not prospects.can_run(Aim())
    assert prospects.why_not() == "no route; no disk"


def test_a_task_for_one_node_or_worker_waits_for_that_node_alone() -> None:
    prospects = expecting(0, 1)
    prospects.fail(0, OSError("no route"))
    assert not prospects.can_run(Aim(on=0))
    assert not prospects.can_run(Aim(worker=(0, 3)))
    assert prospects.can_run(Aim(on=1))
    assert prospects.can_run(Aim(worker=(1, 3)))
    assert not prospects.can_run(Aim(on=2))


def test_of_a_group_no_worker_runs_without_the_others() -> None:
    prospects = expecting(0, 1, grouped=True)
    assert prospects.can_run(Aim(on=1))
    prospects.fail(0, OSError("no route"))
    assert not prospects.can_run(Aim(on=1))
    assert prospects.why_not() == "its workers are a group, and no route"


def test_a_group_goes_on_without_nodes_that_the_pool_does_not_need() -> None:
    prospects = expecting(0, 1, 2, grouped=True)
    prospects.need(2)
    prospects.fail(2, OSError("no route"))
    assert prospects.can_run(Aim())
    assert not prospects.can_run(Aim(on=2))
    prospects.fail(1, OSError("no disk"))
    assert not prospects.can_run(Aim())


def test_a_node_that_has_left_takes_no_tasks_and_its_failure_counts_no_more() -> None:
    prospects = expecting(0, 1, grouped=True)
    prospects.fail(1, OSError("no route"))
    prospects.leave(1)
    assert prospects.can_run(Aim())
    assert not prospects.can_run(Aim(on=1))
    assert prospects.why_not() == ""
    prospects.fail(1, OSError("it was stopped"))
    assert prospects.can_run(Aim())


def test_a_node_added_again_under_the_same_number_is_expected_again() -> None:
    prospects = expecting(0)
    prospects.fail(0, OSError("no route"))
    prospects.expect(0)
    assert prospects.can_run(Aim(on=0))
    assert prospects.why_not() == ""


def test_a_pool_does_not_grow_into_a_failure_that_every_node_would_have() -> None:
    prospects = expecting(0)
    prospects.grow_up_to(4)
    prospects.fail(0, OSError("three were bought"), alike=True)
    assert not prospects.can_run(Aim())
    prospects.leave(0)
    assert prospects.can_run(Aim())


def test_in_a_pool_without_nodes_that_can_grow_tasks_wait() -> None:
    prospects = expecting()
    assert not prospects.can_run(Aim())
    prospects.grow_up_to(2)
    assert prospects.can_run(Aim())
    assert prospects.can_run(Aim(on=0)), "the first node that there will be"
    assert prospects.can_run(Aim(worker=(0, 0)))
    assert not prospects.can_run(Aim(on=1))
    for node in range(2):
        prospects.expect(node)
        prospects.fail(node, OSError("no route"))
    assert not prospects.can_run(Aim()), "as many as it may have will never run it"
