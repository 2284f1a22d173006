"""What every provider that asks for several machines at once has from its allocation.

The stand-in asks nobody: a test says when machines come, for which nodes, and what goes wrong.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

import pytest

from skyward.errors import PoolError, PoolStartError
from skyward.providers import Order
from skyward.providers import allocation as shared
from skyward.providers.allocation import SharedAllocation
from skyward.testing import plain_request


class Stand:
    """A machine that is only its node's number, and how often the node was ordered."""

    def __init__(self, node: int, order: int) -> None:
        self.node, self.order = node, order
        self.id = f"{node}.{order}"


class Engine(SharedAllocation[Any]):
    """Does what the test says, and notes what it was asked."""

    def __init__(self, at_once: Iterable[int] = range(100)) -> None:
        super().__init__("pool")
        self.asked: list[list[int]] = []
        self.done: list[str] = []
        self.at_once = set(at_once)
        """The nodes that have their machines as soon as they are asked for."""
        self.problem: Exception | None = None
        """What the next request raises."""
        self.stuck: PoolError | None = None
        """What `remove` and `shrink` raise."""
        self.answers = asyncio.Event()
        """Whether a request, or a removal, is answered."""
        self.answers.set()
        self.removing = False

    async def ask(self, nodes: Sequence[int]) -> None:
        self.asked.append(list(nodes))
        await self.answers.wait()
        await asyncio.sleep(0)
        if self.problem is not None:
            problem, self.problem = self.problem, None
            raise problem
        for node in self.at_once.intersection(nodes):
            self.come(node)

    def come(self, node: int) -> None:
        self.give(node, Stand(node, len(self.asked)))

    async def shrink(self, gone: Sequence[int]) -> None:
        if self.stuck is not None:
            raise self.stuck
        self.done.append(f"without {', '.join(map(str, gone))}")

    async def remove(self) -> None:
        self.removing = True
        await self.answers.wait()
        if self.stuck is not None:
            raise self.stuck
        self.done.append("removed")

    async def cancelled(self, node: int) -> None:
        self.done.append(f"nobody waits for {node}")


def order(node: int, tell: Callable[[str], None] = lambda _: None) -> Order:
    return Order("pool", node, plain_request(), tell=tell)


def together(engine: Engine, *nodes: int) -> list[asyncio.Task[Any]]:
    """Order these nodes at the same time, as a pool that starts does."""
    engine.expect(nodes)
    return [asyncio.create_task(engine.get(order(node))) for node in nodes]


async def turn(until: Callable[[], object]) -> None:
    """Let the others work until a condition holds."""
    async with asyncio.timeout(30):
        while not until():
            await asyncio.sleep(0.001)


Scenario = Callable[[Engine], Coroutine[Any, Any, None]]


def play(scenario: Scenario, engine: Engine | None = None) -> Engine:
    used = engine or Engine()

    async def whole() -> None:
        await scenario(used)
        await used.close()
        # Nothing goes on after the end.
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(whole())
    return used


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "GATHER_SECONDS", 0.0)
    monkeypatch.setattr(shared, "REORDER_SECONDS", 0.05)


def test_nodes_that_start_together_are_asked_for_once() -> None:
    async def scenario(engine: Engine) -> None:
        tasks = together(engine, 2, 0, 1)
        assert [machine.node for machine in await asyncio.gather(*tasks)] == [2, 0, 1]

    assert play(scenario).asked == [[0, 1, 2]]


def test_a_slow_order_is_waited_for_and_one_that_does_not_come_is_not() -> None:
    async def scenario(engine: Engine) -> None:
        engine.expect([0, 1, 2])
        first = asyncio.create_task(engine.get(order(0)))
        await asyncio.sleep(0.01)
        assert engine.asked == []
        engine.expect_no_more(1)
        second = asyncio.create_task(engine.get(order(2)))
        await asyncio.gather(first, second)

    assert play(scenario).asked == [[0, 2]]


@pytest.mark.parametrize("turns", range(4))
def test_a_node_that_is_expected_while_others_are_gathered_is_waited_for(turns: int) -> None:
    async def scenario(engine: Engine) -> None:
        first = asyncio.create_task(engine.get(order(0)))
        for _ in range(turns):
            if not engine.asked:
                await asyncio.sleep(0)
        if not engine.asked:
            engine.expect([1])
            await asyncio.sleep(0.01)
            assert engine.asked == []
        await asyncio.gather(first, engine.get(order(1)))

    play(scenario)


def test_what_was_asked_for_in_vain_is_asked_for_again_and_no_more() -> None:
    async def scenario(engine: Engine) -> None:
        tasks = together(engine, 0, 1)
        await tasks[0]
        engine.ask_again()
        await turn(lambda: len(engine.asked) > 1)
        engine.come(1)
        await tasks[1]

    assert play(scenario, Engine(at_once=[0])).asked == [[0, 1], [1]]


def test_machines_come_in_any_order_and_twice() -> None:
    async def scenario(engine: Engine) -> None:
        tasks = together(engine, 0, 1)
        await turn(lambda: engine.asked)
        engine.come(1)
        engine.come(1)
        engine.come(7)  # Nobody has ordered it.
        assert (await tasks[1]).node == 1
        assert not tasks[0].done()
        engine.come(0)
        assert (await tasks[0]).node == 0

    play(scenario, Engine(at_once=()))


def test_a_machine_that_another_node_has_is_given_to_nobody_else() -> None:
    async def scenario(engine: Engine) -> None:
        first, second = together(engine, 0, 1)
        await turn(lambda: engine.asked)
        machine = Stand(0, 1)
        engine.give(0, machine)
        engine.give(1, machine)
        assert await first is machine
        with pytest.raises(
            PoolStartError, match=r"node 1: the provider gave it 0\.1, which node 0"
        ):
            await second

        again = asyncio.create_task(engine.get(order(1)))
        await turn(lambda: len(engine.asked) == 2)
        engine.come(1)
        assert (await again).node == 1

    play(scenario, Engine(at_once=()))


def test_what_the_request_raises_every_node_is_told() -> None:
    async def scenario(engine: Engine) -> None:
        engine.problem = PoolStartError("the queue is closed")
        told = await asyncio.gather(*together(engine, 0, 1), return_exceptions=True)
        assert [str(each) for each in told] == ["the queue is closed"] * 2
        # The next order is another request.
        assert (await engine.get(order(0))).order == 2

    engine = play(scenario)
    assert engine.asked == [[0, 1], [0]]
    assert engine.done == ["removed"]


def test_a_node_that_is_refused_leaves_the_others_their_machines() -> None:
    async def scenario(engine: Engine) -> None:
        tasks = together(engine, 0, 1)
        await tasks[0]
        engine.refuse([0, 1], PoolStartError("its image is missing"))
        with pytest.raises(PoolStartError, match="its image is missing"):
            await tasks[1]
        assert sorted(engine.wanted) == [0]

    assert play(scenario, Engine(at_once=[0])).done == ["without 1"]


def test_nodes_that_wait_too_long_are_given_up_together() -> None:
    async def scenario(engine: Engine) -> None:
        engine.timeout = 0.05
        engine.answers.clear()
        tasks = together(engine, 0, 1, 2)
        await turn(lambda: engine.asked and not engine.wanted)
        # They come after they were given up.
        engine.answers.set()
        told = await asyncio.gather(*tasks, return_exceptions=True)
        assert str(told[2]) == "node 2: no machine came within 0 s"
        assert not engine.wanted

    assert play(scenario).done == ["removed"]


def test_what_cannot_be_removed_is_noted_on_the_problem() -> None:
    async def scenario(engine: Engine) -> None:
        engine.timeout = 0.01
        engine.stuck = PoolError("job 7 could not be cancelled")
        with pytest.raises(PoolStartError) as told:
            await engine.get(order(0))
        assert told.value.leaves_machine
        assert told.value.__notes__ == ["job 7 could not be cancelled"]

    play(scenario, Engine(at_once=()))


def test_an_order_that_is_cancelled_before_the_request_is_forgotten() -> None:
    async def scenario(engine: Engine) -> None:
        engine.expect([0, 1])
        task = asyncio.create_task(engine.get(order(0)))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        assert not engine.wanted
        await engine.get(order(1))

    engine = play(scenario)
    assert engine.asked == [[1]]
    assert engine.done == []


def test_an_order_that_is_cancelled_after_the_request_is_settled() -> None:
    async def scenario(engine: Engine) -> None:
        (task,) = together(engine, 0)
        await turn(lambda: engine.asked)
        task.cancel()
        await asyncio.wait({task})
        engine.come(0)  # After it was given up.
        assert 0 in engine.wanted  # `find` has it, and whoever removes it releases the node.
        await engine.release(0)

    assert play(scenario, Engine(at_once=())).done == ["nobody waits for 0", "removed"]


def test_a_request_can_tell_for_which_nodes_nobody_waits_any_more() -> None:
    async def scenario(engine: Engine) -> None:
        engine.answers.clear()
        tasks = together(engine, 0, 1)
        await turn(lambda: engine.asked)
        tasks[0].cancel()
        await turn(lambda: engine.wanted[0].is_given_up)
        assert not engine.wanted[1].is_given_up
        assert not engine.done  # Whether there is a machine is not known yet.
        engine.answers.set()
        await asyncio.wait(tasks)
        assert tasks[0].cancelled()
        assert tasks[1].result().node == 1

    assert play(scenario).done == ["nobody waits for 0"]


def test_an_order_that_is_cancelled_and_then_refused_leaves_nothing() -> None:
    async def scenario(engine: Engine) -> None:
        engine.answers.clear()
        (task,) = together(engine, 0)
        await turn(lambda: engine.asked)
        task.cancel()
        await turn(lambda: engine.wanted[0].is_given_up)
        engine.problem = PoolStartError("the queue is closed")
        engine.answers.set()
        await asyncio.wait({task})
        assert task.cancelled()
        assert not engine.wanted

    assert play(scenario).done == ["removed"]


def test_nodes_that_are_given_back_together_are_one_change() -> None:
    async def scenario(engine: Engine) -> None:
        await asyncio.gather(*together(engine, 0, 1, 2, 3))
        await asyncio.gather(engine.release(2), engine.release(1))
        await engine.release(3)
        await asyncio.gather(engine.release(0), engine.release(0))

    assert play(scenario).done == ["without 1, 2", "without 3", "removed"]


def test_nodes_are_given_back_after_a_request_and_not_during_it() -> None:
    async def scenario(engine: Engine) -> None:
        await engine.get(order(0))
        engine.answers.clear()
        (task,) = together(engine, 1)
        await turn(lambda: len(engine.asked) > 1)
        release = asyncio.create_task(engine.release(0))
        await asyncio.sleep(0.01)
        assert engine.done == []
        engine.answers.set()
        await asyncio.gather(task, release)

    assert play(scenario).done == ["without 0"]


def test_a_node_that_is_given_back_and_ordered_again_at_once_is_not_given_back() -> None:
    async def scenario(engine: Engine) -> None:
        await asyncio.gather(*together(engine, 0, 1))
        engine.answers.clear()
        (another,) = together(engine, 2)
        await turn(lambda: len(engine.asked) > 1)
        release = asyncio.create_task(engine.release(0))
        await turn(lambda: 0 not in engine.wanted)
        again = asyncio.create_task(engine.get(order(0)))
        await turn(lambda: 0 in engine.wanted)
        engine.answers.set()
        await asyncio.gather(another, release, again)

    engine = play(scenario)
    assert engine.asked == [[0, 1], [2], [0]]
    assert engine.done == []


def test_the_place_of_a_lost_machine_is_kept_for_its_node() -> None:
    async def scenario(engine: Engine) -> None:
        await engine.get(order(0))
        await engine.release(0, lost=True)
        assert (await engine.get(order(0))).order == 2
        await asyncio.sleep(2 * shared.REORDER_SECONDS)
        assert engine.done == []

    play(scenario)


def test_the_place_of_a_lost_machine_outlives_the_nodes_that_are_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared, "REORDER_SECONDS", 600.0)

    async def scenario(engine: Engine) -> None:
        await asyncio.gather(*together(engine, 0, 1))
        await engine.release(1, lost=True)
        await engine.release(0)
        await engine.get(order(1))

    assert play(scenario).done == ["without 0"]


@pytest.mark.parametrize("ends_early", [False, True])
def test_a_place_that_no_node_wants_any_more_is_given_back(ends_early: bool) -> None:
    async def scenario(engine: Engine) -> None:
        await asyncio.gather(*together(engine, 0, 1))
        await engine.release(1, lost=True)
        if not ends_early:
            await turn(lambda: engine.done)

    assert play(scenario).done == ["without 1"]


def test_a_place_that_is_being_given_back_is_waited_for_at_the_end() -> None:
    async def scenario(engine: Engine) -> None:
        await engine.get(order(0))
        engine.answers.clear()
        await engine.release(0, lost=True)
        await turn(lambda: engine.removing)
        asyncio.get_running_loop().call_soon(engine.answers.set)

    assert play(scenario).done == ["removed"]


def test_a_pool_whose_last_machine_was_lost_leaves_nothing() -> None:
    async def scenario(engine: Engine) -> None:
        await asyncio.gather(*together(engine, 0, 1))
        await asyncio.gather(engine.release(0, lost=True), engine.release(1, lost=True))

    assert play(scenario).done == ["removed"]


def test_an_expected_order_that_is_held_up_for_long_holds_up_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared, "EXPECT_SECONDS", 0.01)

    async def scenario(engine: Engine) -> None:
        engine.expect([0, 1])
        await engine.get(order(0))
        await engine.get(order(1))

    assert play(scenario).asked == [[0], [1]]


def test_a_release_that_fails_can_be_tried_again() -> None:
    async def scenario(engine: Engine) -> None:
        await engine.get(order(0))
        engine.stuck = PoolError("no answer")
        with pytest.raises(PoolError, match="no answer"):
            await engine.release(0)
        engine.stuck = None
        await engine.release(0)

    assert play(scenario).done == ["removed"]


def test_a_task_that_fails_is_told_to_those_who_wait() -> None:
    async def failing() -> None:
        raise PoolStartError("the watch ended")

    async def scenario(engine: Engine) -> None:
        (task,) = together(engine, 0)
        await turn(lambda: engine.asked)
        engine.start(failing())
        with pytest.raises(PoolStartError, match="the watch ended"):
            await task

    play(scenario, Engine(at_once=()))


def test_only_nodes_that_wait_are_told_what_for() -> None:
    async def scenario(engine: Engine) -> None:
        said: dict[int, list[str]] = {0: [], 1: []}
        engine.expect(said)
        tasks = [asyncio.create_task(engine.get(order(n, s.append))) for n, s in said.items()]
        await tasks[0]
        engine.tell("in line")
        assert said == {0: [], 1: ["in line"]}
        engine.come(1)
        await tasks[1]

    play(scenario, Engine(at_once=[0]))
