"""The owner of shared state: memory, deadlines and leases; and what happens when it is lost."""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import skyward as sky
from skyward.state.link import LocalLink, StateConnection, StateOperation
from skyward.state.owner import FULL, Asked, Owner, Session
from skyward.state.shared import _release
from skyward.wire.channel import Channel, next_part
from skyward.wire.messages import Question
from skyward.worker.services.state import StateServer

from ..conftest import Eventually, other_case


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
    owner, session = Owner(limit=2000), Recorded()
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
    owner, session = Owner(), Recorded()
    for what, arguments in (("fly", ()), ("set", ()), ("__init__", ()), ("set", (1, 2, 3, 4))):
        session.ask(owner, "dict", what, *arguments)
        assert "sky.dict 'x' has no such operation" in session.answers[-1][2]


def test_a_process_that_is_gone_holds_and_awaits_nothing() -> None:
    owner, gone, there = Owner(), Recorded(), Recorded()
    gone.ask(owner, "lock", "acquire", 30.0)
    gone.ask(owner, "queue", "get", wait=None)
    gone.ask(owner, "barrier", "wait", wait=None)
    there.ask(owner, "lock", "acquire", 30.0, wait=None)
    assert not there.answers
    owner.leave(gone, ended=True)
    assert there.answers.pop() == (1, (2, True), ""), "the lock, and that it was abandoned"
    assert there.ask(owner, "queue", "put", b"kept") is True
    assert there.ask(owner, "queue", "get") == [b"kept"]
    assert "ended" in there.ask(owner, "barrier", "wait", wait=None)


def pass_by(seconds: float, silent: Session) -> None:
    """Let so much time pass, for all that is known of a process."""
    silent.heard -= seconds
    for lock in silent.holds:
        lock.granted -= seconds


def test_a_silent_holder_loses_its_lock_after_its_lease() -> None:
    owner, silent, there = Owner(), Recorded(), Recorded()
    token, _ = silent.ask(owner, "lock", "acquire", 30.0)
    pass_by(29, silent)
    owner.free_leases(silent)
    assert there.ask(owner, "lock", "acquire", 30.0) is None
    pass_by(2, silent)
    owner.free_leases(silent)
    assert there.ask(owner, "lock", "acquire", 30.0) == (2, True)
    assert silent.ask(owner, "lock", "release", token) is False


def test_the_lease_of_a_lock_begins_when_its_holder_gets_it() -> None:
    owner, first, silent = Owner(), Recorded(), Recorded()
    token, _ = first.ask(owner, "lock", "acquire", 30.0)
    silent.ask(owner, "lock", "acquire", 30.0, wait=None)
    pass_by(5, silent)
    first.ask(owner, "lock", "release", token)
    pass_by(29, silent)
    owner.free_leases(silent)
    assert first.ask(owner, "lock", "acquire", 30.0) is None
    pass_by(2, silent)
    owner.free_leases(silent)
    assert first.ask(owner, "lock", "acquire", 30.0) == (3, True)


def test_deadlines_end_waits_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("skyward.state.owner.time", SimpleNamespace(monotonic=lambda: now))
    owner, session = Owner(), Recorded()
    for seconds in (2.0, 1.0, 60.0):
        session.ask(owner, "queue", "get", wait=seconds)
    assert owner.expire() == 1.0
    assert session.answers == []
    now = 110.0
    assert owner.expire() == 50.0
    assert [number for number, *_ in session.answers] == [2, 1]
    assert len(session.waiters) == 1


def test_waits_for_a_deleted_object_are_refused() -> None:
    owner, session, other = Owner(), Recorded(), Recorded()
    for kind, what, arguments in (
        ("queue", "get", ()),
        ("event", "wait", ()),
        ("lock", "acquire", (30.0,)),
    ):
        other.ask(owner, "lock", "acquire", 30.0)
        session.ask(owner, kind, what, *arguments, wait=None)
        other.ask(owner, kind, "delete")
        assert f"sky.{kind} 'x' was deleted" in session.answers[-1][2]


@pytest.mark.parametrize(
    ("kind", "what", "arguments"),
    [("queue", "get", ()), ("event", "wait", ()), ("lock", "acquire", (30.0,))],
)
def test_the_owner_forgets_operations_that_are_over(
    kind: str, what: str, arguments: tuple[Any, ...]
) -> None:
    owner, session, holder = Owner(), Recorded(), Recorded()
    holder.ask(owner, "lock", "acquire", 30.0)
    before = _waiters_kept()
    for _ in range(500):
        session.ask(owner, kind, what, *arguments, wait=600.0)
        [(number, waiter)] = session.waiters.items()
        owner.cancel(session, number)
        assert waiter.payload is None
    assert _waiters_kept() - before < 70


def _waiters_kept() -> int:
    # Not `isinstance`, which asks objects of others for their class; one of torch's warns then.
    return sum(issubclass(type(each), Asked) for each in gc.get_objects())


def test_a_queue_deleted_by_another_is_made_anew_with_the_handles_own_size() -> None:
    queue = sky.queue[int]("small", maxsize=1, on=LocalTarget())
    queue.put(1)
    queue.delete()
    queue.put(1)
    assert queue.maxsize == 1
    with pytest.raises(TimeoutError):
        queue.put(2, timeout=0)
    barrier = sky.barrier("one", 1, on=LocalTarget())
    barrier.wait()
    barrier.delete()
    assert barrier.wait() == 0


def test_an_object_that_cannot_be_made_takes_no_room() -> None:
    owner, session = Owner(limit=1000), Recorded()
    for number in range(100):
        owner.perform(Asked(session, number), "barrier", "x", "wait", [], None)
        assert "parties" in session.answers[-1][2]
    assert session.ask(owner, "dict", "set", b"a", bytes(500)) is None


def test_an_interrupted_operation_of_this_process_is_taken_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on = LocalTarget()
    jobs, lock = sky.queue[int]("jobs", on=on), sky.lock("l", on=on)
    jobs.put(1)
    with monkeypatch.context() as patch:
        patch.setattr("skyward.state.link.answered", _interrupts)
        for operation in (jobs.get, jobs.get_nowait, lock.acquire):
            with pytest.raises(KeyboardInterrupt):
                operation()
    assert jobs.get_nowait() == 1
    assert lock.acquire(blocking=False)


def _interrupts(slot: Any) -> Any:
    raise KeyboardInterrupt


class LocalTarget:
    """Has state of this process."""

    link = LocalLink()

    def state_link(self) -> LocalLink:
        return self.link


@pytest.fixture
def connect() -> Iterator[Callable[..., StateConnection]]:
    """Connects processes to one owner."""
    server, connections, threads = StateServer(), [], []

    def serve(channel: Channel) -> None:
        question, _ = next_part(channel)
        server.serve(channel, **question.arguments)
        channel.close()

    def made(who: str, beside: socket.socket | None = None, **more: Any) -> StateConnection:
        mine, its = socket.socketpair()
        for end in (its, beside):
            if end is not None:
                threads.append(threading.Thread(target=serve, args=(Channel(end),), daemon=True))
                threads[-1].start()
        connections.append(StateConnection(Channel(mine), who, True, **more))
        return connections[-1]

    yield made
    for connection in connections:
        connection.close()
    for thread in threads:
        thread.join()
    server.close()


def acquisition(lease: float = 10.0, **more: Any) -> StateOperation:
    return StateOperation("lock", "l", "acquire", (lease,), waits=True, undo=_release, **more)


def test_the_holder_of_a_lock_beats_also_after_an_interrupted_acquire(
    connect: Callable[..., StateConnection], monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = connect("one")

    def interrupted(*_: Any) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(StateConnection, "_note_lock", interrupted)
    with pytest.raises(KeyboardInterrupt):
        connection.perform(acquisition())
    token, _ = connection.perform(acquisition(timeout=5.0))
    sent: list[Any] = []
    monkeypatch.setattr(connection.channel, "send", sent.append)
    monkeypatch.setattr(connection, "_beaten_at", 0.0)
    connection.idle()
    monkeypatch.undo()
    assert [question.what for question in sent] == ["beat"]
    assert connection.perform(StateOperation("lock", "l", "release", (token,)))
    monkeypatch.setattr(connection.channel, "send", sent.append)
    monkeypatch.setattr(connection, "_beaten_at", 0.0)
    connection.idle()
    monkeypatch.undo()
    assert len(sent) == 1, "who holds nothing need not be heard"


def test_a_process_whose_connection_broke_keeps_its_lock_for_the_lease() -> None:
    owner, broken, there = Owner(), Recorded(), Recorded()
    broken.process = "p"
    broken.ask(owner, "lock", "acquire", 30.0)
    owner.leave(broken, ended=False)
    pass_by(29, broken)
    for session in owner.absent:
        owner.free_leases(session)
    assert there.ask(owner, "lock", "acquire", 30.0) is None
    pass_by(2, broken)
    for session in owner.absent:
        owner.free_leases(session)
    assert there.ask(owner, "lock", "acquire", 30.0) == (2, True)
    owner.tidy_absent()
    assert not owner.absent


def test_a_process_that_connects_again_has_its_locks(
    connect: Callable[..., StateConnection],
) -> None:
    first, other = connect("one", process="p"), connect("two", process="q")
    token, _ = first.perform(acquisition())
    first.lose("the network broke")
    first.close()
    again = connect("one again", process="p", held=first.held)
    assert other.perform(StateOperation("lock", "l", "owner")) == "one again"
    assert again.perform(StateOperation("lock", "l", "release", (token,)))
    assert other.perform(acquisition()) == [token + 1, False]


@pytest.mark.parametrize("how", ["closes", "dies"])
def test_a_process_that_closes_or_dies_frees_its_locks_at_once(
    connect: Callable[..., StateConnection], how: str
) -> None:
    first, other = connect("one", direct=how == "dies"), connect("two")
    first.perform(acquisition(lease=600.0))
    if how == "dies":
        first.channel.abort()
    else:
        first.close()
    assert other.perform(acquisition(timeout=60.0)) == [2, True]


def test_a_dead_process_with_unread_answers_frees_its_locks_at_once(
    connect: Callable[..., StateConnection],
) -> None:
    """Its end is an error of the connection, and not only the end of what it sends."""
    mine, its = socket.socketpair()
    other = connect("two", beside=its)
    dying = Channel(mine)
    dying.send(Question("begin", {"who": "one", "direct": True}))
    dying.receive()
    acquire = {"of": ("lock", "l"), "with": (600.0,)}
    dying.send(Question("acquire", acquire, 1))
    select.select([mine], [], [], 30)
    dying.close()
    assert other.perform(acquisition(timeout=60.0)) == [2, True]


@sky.function
def agent() -> int:
    return os.getppid()


@pytest.mark.parametrize("transport", ["unix", pytest.param("tcp", marks=other_case)])
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
        with pytest.raises(
            sky.errors.StateLostError, match=r"<sky.queue 'never'> cannot be reached"
        ):
            waiting.result(100)
        with pytest.raises(sky.errors.StateLostError, match=r"<sky.counter 'n'> cannot be .*gone"):
            while True:
                counter.add()
        eventually(lambda: compute.stats().nodes_lost == 1)
        eventually(lambda: [node.state for node in compute.nodes] == ["ready", "ready"])
        # It has been told, so it goes on with what is there; the other handle is told now.
        assert counter.add() == 1
        with pytest.raises(sky.errors.StateLostError, match=r"<sky.counter 'm'>"):
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
        with pytest.raises(
            sky.errors.StateLostError, match=r"node 1 cannot reach node 0.*cluster=False"
        ):
            compute.run(_adds(), on=1)


def test_a_closed_pool_has_no_state() -> None:
    with sky.Compute(options=sky.Options(console=False)) as compute:
        counter = sky.counter("n", on=compute)
        counter.add()
    with pytest.raises(sky.errors.PoolClosedError):
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
