"""The owner of shared state: memory, deadlines and leases; and what happens when it is lost."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

import skyward as sky
from skyward.state.owned import KINDS
from skyward.state.owner import FULL, Asked, Owner, Session

from ..conftest import Eventually


class Recorded(Session):
    """A process whose answers a test reads."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: list[tuple[int, Any, str]] = []

    def answer(
        self, number: int, value: Any = None, problem: str = "", *, more: bool = False
    ) -> None:
        self.answers.append((number, value, problem))

    def ask(self, owner: Owner, kind: str, what: str, *arguments: Any, wait: Any = False) -> Any:
        """Ask, and return the answer; None if it does not come at once."""
        number = len(self.answers) + len(self.waiters) + 1
        asked = Asked(self, number, wait is not False, None if wait is False else wait)
        owner.perform(asked, kind, "x", what, list(arguments), {"parties": 2})
        return next((value for n, value, _ in self.answers if n == number), None)


def test_what_does_not_fit_is_refused_and_what_is_removed_makes_room() -> None:
    owner, session = Owner(KINDS, limit=2000), Recorded()
    session.ask(owner, "dict", "set", b"a", bytes(1000))
    assert session.ask(owner, "dict", "set", b"b", bytes(1000)) == FULL
    assert "has its 0 MB" in session.answers[-1][2]
    assert session.ask(owner, "queue", "put", bytes(1000)) == FULL
    # In the place of another value it fits, and after each way to remove one.
    session.ask(owner, "dict", "set", b"a", bytes(1100))
    for remove in (("pop", b"a"), ("popitem",), ("clear",), ("delete",)):
        session.ask(owner, "dict", *remove)
        assert session.ask(owner, "dict", "set", b"a", bytes(1100)) is None
    session.ask(owner, "dict", "clear")
    assert session.ask(owner, "queue", "put", bytes(1000)) is True
    assert session.ask(owner, "queue", "get") == [bytes(1000)]
    assert session.ask(owner, "set", "add", bytes(1000)) is True
    assert session.ask(owner, "set", "pop") == bytes(1000)
    assert session.ask(owner, "dict", "set", b"a", bytes(1000)) is None


def test_what_the_owner_does_not_know_is_refused() -> None:
    owner, session = Owner(KINDS), Recorded()
    for what, arguments in (("fly", ()), ("set", ()), ("__init__", ()), ("set", (1, 2, 3, 4))):
        session.ask(owner, "dict", what, *arguments)
        assert "sky.dict 'x' has no such operation" in session.answers[-1][2]


def test_a_process_that_is_gone_holds_and_awaits_nothing() -> None:
    owner, gone, there = Owner(KINDS), Recorded(), Recorded()
    gone.ask(owner, "lock", "acquire", 30.0)
    gone.ask(owner, "queue", "get", wait=None)
    gone.ask(owner, "barrier", "wait", wait=None)
    there.ask(owner, "lock", "acquire", 30.0, wait=None)
    assert not there.answers
    owner.leave(gone)
    assert there.answers.pop() == (1, (2, True), ""), "the lock, and that it was abandoned"
    assert there.ask(owner, "queue", "put", b"kept") is True
    assert there.ask(owner, "queue", "get") == [b"kept"]
    assert "ended" in there.ask(owner, "barrier", "wait", wait=None)


def test_a_silent_holder_loses_its_lock_after_its_lease() -> None:
    owner, silent, there = Owner(KINDS), Recorded(), Recorded()
    token, _ = silent.ask(owner, "lock", "acquire", 30.0)
    silent.heard -= 29
    owner.free_leases(silent)
    assert there.ask(owner, "lock", "acquire", 30.0) is None
    silent.heard -= 2
    owner.free_leases(silent)
    assert there.ask(owner, "lock", "acquire", 30.0) == (2, True)
    assert silent.ask(owner, "lock", "release", token) is False


def test_deadlines_end_waits_in_their_order(eventually: Eventually) -> None:
    owner, session = Owner(KINDS), Recorded()
    for seconds in (0.02, 0.01, 60.0):
        session.ask(owner, "queue", "get", wait=seconds)
    eventually(lambda: owner.expire() is not None and len(session.answers) == 2)
    assert [number for number, *_ in session.answers] == [2, 1]
    assert len(session.waiters) == 1


def test_waits_for_a_deleted_object_are_refused() -> None:
    owner, session, other = Owner(KINDS), Recorded(), Recorded()
    for kind, what, arguments in (
        ("queue", "get", ()),
        ("event", "wait", ()),
        ("lock", "acquire", (30.0,)),
    ):
        other.ask(owner, "lock", "acquire", 30.0)
        session.ask(owner, kind, what, *arguments, wait=None)
        other.ask(owner, kind, "delete")
        assert f"sky.{kind} 'x' was deleted" in session.answers[-1][2]


@sky.function
def agent() -> int:
    return os.getppid()


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_a_lost_owner_is_an_error_once_and_then_the_objects_are_new(
    eventually: Eventually, transport: Any, nothing_left: None
) -> None:
    options = sky.Options(console=False)
    with sky.Compute(sky.Local(transport=transport), nodes=2, options=options) as compute:
        counter, other = sky.counter("n"), sky.counter("m")
        counter.set(41)
        other.set(1)
        assert compute.run(_adds(), on=1) == 42
        waiting = compute.submit(_waits(), on=1)
        eventually(lambda: waiting.running())
        old = compute.run(agent(), on=0)
        os.kill(old, signal.SIGKILL)
        with pytest.raises(sky.StateLostError, match=r"<sky.queue 'never'> cannot be reached"):
            waiting.result(30)
        with pytest.raises(sky.StateLostError, match=r"<sky.counter 'n'> cannot be .*gone"):
            while True:
                counter.add()
        eventually(lambda: [node.state for node in compute.nodes] == ["ready", "ready"])
        # It has been told, so it goes on with what is there; the other handle is told now.
        assert counter.add() == 1
        with pytest.raises(sky.StateLostError, match=r"<sky.counter 'm'>"):
            _ = other.value
        assert other.value == 0
        # A handle of the process that lives on, and one of the new node.
        assert compute.run(_adds(), on=1) == 2
        assert compute.run(_adds(), on=0) == 3


@sky.function
def _adds() -> int:
    return sky.counter("n").add()


@sky.function
def _waits() -> None:
    sky.queue("never").get()


def test_nodes_without_a_network_between_them_say_so() -> None:
    options = sky.Options(console=False, cluster=False)
    with sky.Compute(nodes=2, options=options) as compute:
        assert sky.counter("n").add() == 1
        assert compute.run(_adds(), on=0) == 2
        with pytest.raises(sky.StateLostError, match=r"node 1 cannot reach node 0.*cluster=False"):
            compute.run(_adds(), on=1)


def test_a_closed_pool_has_no_state() -> None:
    with sky.Compute(options=sky.Options(console=False)) as compute:
        counter = sky.counter("n", on=compute)
        counter.add()
    with pytest.raises(sky.PoolClosedError):
        counter.add()


def test_a_child_of_a_task_makes_a_connection_of_its_own() -> None:
    @sky.function
    def forks() -> int:
        counter = sky.counter("n")
        counter.add()
        child = os.fork()
        if not child:
            try:
                counter.add()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        return counter.add()

    with sky.Compute(options=sky.Options(console=False)) as compute:
        assert forks() >> compute == 3
