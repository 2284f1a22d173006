"""A node's state: which moves there are, what each method does, and how long it waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, get_args

import pytest

import skyward as sky
from skyward.events import EventStream
from skyward.nodes.host import CUT_TRIES
from skyward.nodes.node import (
    BOUGHT_IN_VAIN,
    LOST_SECONDS,
    MOVES,
    RETRY_PAUSES,
    START_ATTEMPTS,
    Node,
    Roster,
    State,
)


class Clock:
    """A clock that stands still until it is set."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class StillHost:
    """A host that does nothing."""

    may_return = True
    made = False
    was_bought = False

    def looks_dead(self) -> bool:
        return False

    def stop(self, seconds: float) -> Future[None]:
        ended: Future[None] = Future()
        ended.set_result(None)
        return ended


class BoughtHost(StillHost):
    """A host whose machine was bought."""

    was_bought = True


def node_on(host: type[StillHost], clock: Clock) -> Node:
    """A node of a fleet that has such hosts."""
    fleet: Any = SimpleNamespace(
        roster=Roster(),
        events=EventStream(),
        prospects=SimpleNamespace(expect=lambda index: None),
        new_host=lambda index, lost: host(),
        spec=SimpleNamespace(options=SimpleNamespace(orphan_timeout=60.0)),
    )
    first: Any = host()
    return Node(3, first, fleet, clock)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def node(clock: Clock) -> Node:
    return node_on(StillHost, clock)


def lost(node: Node) -> None:
    """Lose a node that has served."""
    node.become_ready(0)
    node.lose("gone")


REACH: dict[State, Callable[[Node], Any]] = {
    "starting": lambda node: None,
    "ready": lambda node: node.become_ready(0),
    "reconnecting": lambda node: (node.become_ready(0), node.disconnect()),
    "reclaimed": lambda node: (node.become_ready(0), node.reclaim("no more spot")),
    "draining": lambda node: node.drain(),
    "lost": lost,
    "failed": lambda node: node.fail(RuntimeError("broken"), retry=False),
    "stopped": lambda node: node.stop(),
}
"""How a new node gets into each state."""

METHODS: dict[str, tuple[Callable[[Node], Any], dict[State, State]]] = {
    "become_ready": (lambda node: node.become_ready(0), {"starting": "ready"}),
    "disconnect": (lambda node: node.disconnect(), {"ready": "reconnecting"}),
    "reconnect": (lambda node: node.reconnect(), {"reconnecting": "ready"}),
    "drain": (
        lambda node: node.drain(),
        dict.fromkeys(
            ("starting", "ready", "reconnecting", "reclaimed", "lost", "failed"), "draining"
        ),
    ),
    "lose": (
        lambda node: node.lose("gone"),
        {"starting": "failed", "ready": "lost", "reconnecting": "lost", "reclaimed": "lost"},
    ),
    "fail": (
        lambda node: node.fail(RuntimeError("broken"), retry=True),
        dict.fromkeys(("starting", "ready", "reconnecting", "reclaimed", "lost"), "failed"),
    ),
    "reclaim": (
        lambda node: node.reclaim("no more spot"),
        dict.fromkeys(("ready", "reconnecting"), "reclaimed"),
    ),
    "start_again": (
        lambda node: node.start_again(),
        {"lost": "starting", "failed": "starting"},
    ),
}
"""What each method does, by the state it finds; in any other it does nothing and says so."""


@pytest.mark.parametrize("state", get_args(State))
@pytest.mark.parametrize("method", METHODS)
def test_a_method_changes_the_state_only_from_where_it_may(
    node: Node, method: str, state: State
) -> None:
    REACH[state](node)
    assert node.state == state
    act, moves = METHODS[method]
    happened = bool(act(node))
    assert happened == (state in moves)
    assert node.state == moves.get(state, state)


@pytest.mark.parametrize("state", get_args(State))
def test_any_node_can_be_stopped_and_a_stopped_one_stays_so(node: Node, state: State) -> None:
    REACH[state](node)
    node.stop()
    assert node.state == "stopped"
    assert node.settled.is_set()
    assert MOVES["stopped"] == frozenset()


def test_every_move_of_a_method_is_in_the_table() -> None:
    for _, moves in METHODS.values():
        for before, after in moves.items():
            assert after in MOVES[before] or (before, after) == ("starting", "failed")


def test_a_node_that_cannot_be_reached_after_a_loss_waits_to_return(node: Node) -> None:
    assert node.await_return() is None, "it has never served"
    lost(node)
    node.start_again()
    assert node.await_return() == 1.0
    assert node.state == "lost"


def test_a_node_that_is_lost_again_and_again_fails_for_good(node: Node) -> None:
    for attempt in range(1, START_ATTEMPTS + 1):
        node.begin_start()
        node.become_ready(0)
        assert node.lose("gone")
        assert node.state == ("failed" if attempt == START_ATTEMPTS else "lost")
        node.start_again() if attempt < START_ATTEMPTS else None
    assert node.retries.at is None
    assert not node.is_expected


def test_a_machine_that_is_taken_back_is_no_fault_of_its_node(node: Node) -> None:
    for _ in range(3 * START_ATTEMPTS):
        node.begin_start()
        node.become_ready(0)
        node.reclaim("no more spot")
        assert node.is_expected
        assert node.lose("gone")
        assert node.state == "lost"
        node.start_again()


def test_a_node_that_does_not_start_is_tried_again_after_longer_and_longer(
    node: Node, clock: Clock
) -> None:
    first, longest = RETRY_PAUSES
    pauses = []
    for _ in range(10):
        assert node.fail(RuntimeError("no quota"), retry=True)
        assert node.is_expected
        assert node.retries.at is not None
        pauses.append(node.retries.at - clock.now)
        clock.now = node.retries.at - 0.1
        assert not node.retries.is_due
        clock.now += 0.2
        assert node.retries.is_due
        assert node.start_again()
    assert pauses[:3] == pytest.approx([first, 2 * first, 4 * first])
    assert pauses[-1] == pytest.approx(longest)


def test_a_node_that_came_at_last_begins_with_short_pauses_again(node: Node) -> None:
    for _ in range(4):
        node.fail(RuntimeError("no quota"), retry=True)
        node.start_again()
    assert node.become_ready(0)
    assert node.joined
    assert node.retries.failed == 0
    assert node.failure is None


def test_no_more_machines_are_bought_after_three_that_did_not_become_ready(clock: Clock) -> None:
    node = node_on(BoughtHost, clock)
    for attempt in range(1, BOUGHT_IN_VAIN + 1):
        assert node.fail(RuntimeError("no route"), retry=True)
        assert node.is_expected == (attempt < BOUGHT_IN_VAIN)
        node.start_again() if attempt < BOUGHT_IN_VAIN else None
    assert str(node.failure) == (
        "node 3: 3 machines in a row were bought and did not become ready, so no more are bought; "
        "compute.resize tries again. The last failure: no route"
    )
    clock.now += 10 * RETRY_PAUSES[1]
    assert not node.retries.is_due
    assert node.start_again()
    assert node.fail(RuntimeError("no route"), retry=True)
    assert node.is_expected, "the user's own attempt counts from the beginning"


def test_a_machine_that_became_ready_was_not_bought_in_vain(clock: Clock) -> None:
    node = node_on(BoughtHost, clock)
    for _ in range(2 * BOUGHT_IN_VAIN):
        node.fail(RuntimeError("no route"), retry=True)
        node.start_again()
        assert node.become_ready(0)
        clock.now += 100
        node.lose("gone")
        assert node.state == "lost"
        node.start_again()


def test_a_lost_node_that_is_out_of_reach_buys_no_more_than_three_machines(clock: Clock) -> None:
    node = node_on(BoughtHost, clock)
    lost(node)
    for attempt in range(1, BOUGHT_IN_VAIN + 1):
        node.start_again()
        assert (node.await_return() is None) == (attempt == BOUGHT_IN_VAIN)
    assert node.fail(OSError("no route"), retry=True)
    assert not node.is_expected


def test_a_node_is_started_again_when_its_lost_machine_is_gone(clock: Clock) -> None:
    removal: Future[None] = Future()
    made: list[object] = []

    class Lingering(StillHost):
        def stop(self, seconds: float) -> Future[None]:
            return removal

    class Started(Node):
        async def _finds_agent(self, host: object) -> bool:
            return False

        async def _make_agent(self, host: object) -> None:
            made.append(host)

    fleet: Any = node_on(Lingering, clock)._fleet
    fleet.console = SimpleNamespace(phase=lambda index, phase: None)
    fleet.allocation = SimpleNamespace(expect_no_more=lambda index: None)
    first: Any = Lingering()
    node = Started(3, first, fleet, clock)

    async def turns() -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    async def scenario() -> None:
        life = asyncio.create_task(node.run())
        await turns()
        assert made == [first]
        lost(node)
        assert node.start_again()
        await turns()
        assert made == [first]
        removal.set_result(None)
        await turns()
        assert made == [first, node.host]
        life.cancel()
        await asyncio.wait({life})

    asyncio.run(scenario())


def test_a_node_is_not_lost_because_the_client_stood_still(node: Node, clock: Clock) -> None:
    node.control = SimpleNamespace(resumes=False, connected=True)  # type: ignore[assignment]
    clock.now += LOST_SECONDS + 1
    assert node.why_lost() == "it has stopped answering"
    node.forgive(LOST_SECONDS + 1)
    assert not node.why_lost()
    clock.now += LOST_SECONDS + 1
    assert node.why_lost() == "it has stopped answering"


def test_a_service_of_a_node_without_an_agent_says_what_became_of_the_node(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node.host, "endpoint", "", raising=False)
    roster = Roster()
    roster.add([node])
    with pytest.raises(sky.NodeLostError, match="node 3 has no agent: it is starting; see"):
        roster.service(3, "jobs")
    node.fail(sky.errors.PoolStartError("no machine"), retry=False)
    with pytest.raises(sky.NodeLostError, match="no agent: no machine; see"):
        roster.service(3, "jobs")
    with pytest.raises(sky.errors.ConfigurationError, match=r"node 0 is not there; .* \[3\]"):
        roster.service(0, "jobs")


@pytest.mark.parametrize("answers", [True, False])
def test_a_service_whose_connection_alone_is_silent_is_asked_for_again(
    node: Node, clock: Clock, monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    tries = []

    def connect(name: str, credentials: object) -> str:
        tries.append(name)
        clock.now += 30.0
        if answers:
            node._hear_agent()
        if len(tries) < CUT_TRIES:
            raise sky.NodeLostError("timed out") from TimeoutError("timed out")
        return "the connection"

    monkeypatch.setattr(node.host, "service", connect, raising=False)
    node._fleet.credentials = None
    if answers:
        assert node.service("jobs") == "the connection"  # type: ignore[comparison-overlap]
    else:
        with pytest.raises(sky.NodeLostError, match="timed out"):
            node.service("jobs")
    assert len(tries) == (CUT_TRIES if answers else 1)
