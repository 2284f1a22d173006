"""A client of a thousand nodes: what it does and keeps for each of them does not grow with them."""

from __future__ import annotations

import resource
import socket
import threading
import time
import tracemalloc
import zlib
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import skyward as sky
from skyward import context
from skyward.console.plain import Plain
from skyward.console.terminal import Live, Terminal
from skyward.context import Peer
from skyward.events import EventStream
from skyward.nodes import fleet as fleets
from skyward.nodes.briefing import Briefing
from skyward.nodes.fleet import Fleet, beats_between_pings
from skyward.nodes.node import Node, Roster
from skyward.nodes.records import Journal
from skyward.staff import Staff
from skyward.wire.channel import Channel
from skyward.wire.handshake import CLIENT, Authority, Dialer, context_for
from skyward.wire.link.connections import LinkLost
from skyward.wire.messages import Hello, Message, Ping

from .conftest import only_in_all

NODES = 1000
KIB = 1 << 10


class Told:
    """An agent's connection, which keeps what it is sent."""

    connected = True

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def send(self, message: Message) -> None:
        self.messages.append(message)


def roster_of(count: int, fleet: Any = None) -> tuple[Roster, list[Told]]:
    """Nodes with different addresses, and what their agents are told."""
    roster, told = Roster(), [Told() for _ in range(count)]
    fleet = fleet or SimpleNamespace()
    fleet.roster, fleet.events = roster, EventStream()
    nodes = []
    for index, control in enumerate(told):
        host: Any = SimpleNamespace(
            address=f"10.0.{index // 250}.{index % 250}",
            hostname=f"host{index}",
            accelerators=0,
            accelerator=None,
            endpoint="",
        )
        node = Node(index, host, fleet)
        node.connect(control)  # type: ignore[arg-type]
        nodes.append(node)
    roster.add(nodes)
    return roster, told


def briefing_of(roster: Roster) -> Briefing:
    spec: Any = SimpleNamespace(worker=sky.Worker(), options=sky.Options())
    return Briefing("pool", spec, None, roster, clustered=True)


@only_in_all
def test_the_list_of_peers_is_made_once_for_all_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    roster, told = roster_of(NODES)
    made = []
    compress = zlib.compress
    monkeypatch.setattr(context.zlib, "compress", lambda data: made.append(1) or compress(data))
    briefing_of(roster).tell_all()
    assert len(made) == 1
    texts = [each.compute_pool for agent in told for each in agent.messages]  # type: ignore[attr-defined]
    assert len(texts) == NODES
    assert sum(map(len, texts)) < NODES * 10 * KIB
    last = context.InstanceInfo.from_json(texts[-1])
    assert (last.node, last.node_rank, len(last.peers)) == (999, 999, NODES)
    assert last.peers[-1] == Peer(999, "10.0.3.249")


def test_all_connections_of_a_client_share_one_tls_context() -> None:
    credentials = Authority("pool").issue(CLIENT)
    contexts = {id(context_for(f"tcp:127.0.0.1:{port}", credentials)) for port in range(1, 50)}
    assert len(contexts) == 1


def test_an_idle_channel_keeps_hardly_any_memory() -> None:
    pairs = [socket.socketpair() for _ in range(100)]
    frame = Ping(1)
    Channel(pairs[0][0]).send(frame)
    Channel(pairs[0][1]).receive()
    tracemalloc.start()
    try:
        channels = [(Channel(one), Channel(other)) for one, other in pairs]
        for one, other in channels:
            one.send(frame)
            other.receive()
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        for one, other in channels:
            one.close()
            other.close()
    assert used < 200 * 8 * KIB


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The limits of open files, soft and hard; the last one counts, and 10 files are open."""
    monkeypatch.setattr(fleets, "open_files", lambda: 10)
    limits = [(1024, 4096)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, both: limits.append(both))
    return limits


def test_a_node_takes_four_connections_over_a_network() -> None:
    assert fleets.connections(NODES, 1, encrypted=True) == 4 * NODES


def test_the_limit_of_open_files_is_raised_with_room_for_another_pool(
    limit: list[tuple[int, int]],
) -> None:
    fleets.allow_connections(300, 75, dialled=False)
    assert limit == [(1024, 4096)]
    fleets.allow_connections(1000, 250, dialled=False)
    assert limit[-1] == (10 + 2000 + 256, 4096)


def test_connections_that_a_provider_carries_take_two_files_each(
    limit: list[tuple[int, int]],
) -> None:
    fleets.allow_connections(300, 75, dialled=True)
    assert limit[-1] == (10 + 1200 + 256, 4096)


def test_a_limit_that_may_suffice_is_used_to_the_full(limit: list[tuple[int, int]]) -> None:
    fleets.allow_connections(4000, 1000, dialled=True)
    assert limit[-1] == (4096, 4096)


def test_a_limit_that_is_too_low_is_an_error_with_both_numbers(
    limit: list[tuple[int, int]],
) -> None:
    with pytest.raises(
        sky.errors.ConfigurationError, match=r"nodes=2000: .* 8010 open files.* 4096; raise"
    ):
        fleets.allow_connections(8000, 2000, dialled=False)
    assert limit == [(1024, 4096)]


def test_a_system_that_refuses_is_an_error_only_if_the_limit_is_too_low(
    limit: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "setrlimit", refuse)
    fleets.allow_connections(1000, 250, dialled=False)
    with pytest.raises(sky.errors.ConfigurationError, match=r"2010 open files.* 1024; raise"):
        fleets.allow_connections(2000, 500, dialled=False)


def test_the_open_files_of_this_process_are_counted() -> None:
    before = fleets.open_files()
    with socket.socket(), socket.socket():
        assert fleets.open_files() == before + 2
    assert before > 0


PHASES = ("starting", "creating", "connecting", "starting workers", "ready")


def test_a_log_shows_the_start_of_many_nodes_in_tenths(capsys: pytest.CaptureFixture[str]) -> None:
    face = Plain()
    face.begin("starting", NODES)
    for phase in PHASES:
        for node in range(NODES):
            face.phase(node, phase, 1.0)
    face.phase(7, "lost", 2.0)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 12
    assert lines[-2:] == [
        "skyward: 1000 of 1000 nodes ready (1.0 s)",
        "skyward: node 7: lost (2.0 s)",
    ]


def test_a_terminal_shows_many_nodes_in_a_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[bool] = []
    monkeypatch.setattr(Live, "update", lambda *_, refresh: drawn.append(refresh))
    face = Terminal()
    face.begin("starting", NODES)
    try:
        for phase in PHASES[:-1]:
            for node in range(NODES):
                face.phase(node, phase, 1.0)
        for node in range(NODES // 2):
            face.phase(node, "ready", 2.0)
        assert face._table().row_count == 2
        assert sum(drawn) < NODES
    finally:
        face.end("")


def test_a_staff_has_no_more_threads_than_it_may() -> None:
    staff, gate, at_once = Staff("test-staff", most=4), threading.Event(), threading.Barrier(4)

    def work(number: int) -> int:
        if number < 4:
            at_once.wait(100)
        gate.wait(100)
        return number

    futures = [staff.submit(work, number) for number in range(100)]
    assert len([t for t in threading.enumerate() if t.name == "test-staff"]) == 4
    gate.set()
    assert [future.result(100) for future in futures] == list(range(100))


def test_a_staff_without_work_has_no_threads(eventually: Any) -> None:
    staff = Staff("test-idle", most=4)
    assert staff.submit(lambda: 1).result(100) == 1
    eventually(lambda: not [t for t in threading.enumerate() if t.name == "test-idle"])
    assert staff.submit(lambda: 2).result(100) == 2


def test_what_a_staff_does_later_takes_one_thread_until_then() -> None:
    staff, done = Staff("test-later", most=8), threading.Semaphore(0)
    for number in range(50):
        staff.later(0.2 + number / 1000, done.release)
    assert len([t for t in threading.enumerate() if t.name == "test-later"]) == 1
    for _ in range(50):
        assert done.acquire(timeout=100)


def test_what_a_staff_does_later_is_done_at_the_same_time() -> None:
    staff, at_once = Staff("test-together", most=8), threading.Barrier(8)
    done = threading.Semaphore(0)

    def work() -> None:
        at_once.wait(100)
        done.release()

    for _ in range(7):
        staff.later(0.05, work)
    at_once.wait(100)
    for _ in range(7):
        assert done.acquire(timeout=100)


def test_the_only_thread_does_other_work_while_it_waits_for_the_time_of_an_action(
    eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skyward.staff.IDLE_SECONDS", 0.0)
    staff = Staff("test-waiting", most=1)
    staff.later(600, lambda: None)
    eventually(lambda: bool(staff._changed._waiters))  # type: ignore[attr-defined]
    assert staff.submit(lambda: 1).result(200) == 1


def test_a_future_of_a_staff_has_the_exception() -> None:
    with pytest.raises(ZeroDivisionError):
        Staff("test-failing", most=1).submit(lambda: 1 / 0).result(100)


def test_the_nodes_of_a_large_pool_get_heartbeats_in_turn() -> None:
    patience = sky.Options().orphan_timeout
    counts = (1, 250, 500, 1000, 10_000)
    assert [beats_between_pings(count, patience) for count in counts] == [1, 1, 2, 4, 4]
    assert beats_between_pings(NODES, orphan_timeout=4) == 2


def test_nodes_that_come_together_are_made_known_together() -> None:
    """Each of them must be made known to all others."""
    fleet: Any = object.__new__(Fleet)
    roster, _ = roster_of(50, fleet)
    begun, go_on, told = threading.Event(), threading.Event(), []

    def tell_all() -> None:
        told.append(1)
        begun.set()
        go_on.wait(100)

    fleet._briefing = SimpleNamespace(tell_all=tell_all)
    fleet.console = SimpleNamespace(phase=lambda *_: None)
    fleet.executors_on = lambda node: 0
    fleet.keeper = SimpleNamespace(begun=None)
    fleet._joining, fleet._telling = deque(roster.nodes[:1]), threading.Lock()
    first = threading.Thread(target=fleet._tell_joining)
    first.start()
    assert begun.wait(100)
    for node in roster.nodes[1:]:
        fleet._joining.append(node)
        fleet._tell_joining()
    go_on.set()
    first.join(100)
    assert len(told) == 2
    assert {node.state for node in roster.nodes} == {"ready"}


@pytest.mark.parametrize("ending", [False, True])
def test_a_process_that_was_told_to_end_is_not_called_again_and_again(ending: bool) -> None:
    """Or the end of a thousand nodes would be sixteen thousand attempts to connect."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    credentials = Authority("pool").issue(CLIENT)
    dialer = Dialer(f"tcp:127.0.0.1:{port}", Hello("pool", "data"), credentials, "node")
    connections: Any = SimpleNamespace(received=0, ended=False, ending=ending)
    attempts = dialer._again(connections)
    if ending:
        with pytest.raises(LinkLost, match="told to end"):
            next(attempts)
    else:
        assert next(attempts) == 0.02


def test_many_writes_to_the_journal_are_few_transactions(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.sqlite")
    journal.open_pool("pool", "mine", "simulation", {}, None)
    opened: list[int] = []
    connected = journal._connected
    journal._connected = lambda: opened.append(1) or connected()  # type: ignore[method-assign]
    with journal._writing:
        writers = [threading.Thread(target=journal.intend, args=("pool", n)) for n in range(40)]
        for writer in writers:
            writer.start()
        while len(journal._waiting) < 40:
            time.sleep(0.001)
    for writer in writers:
        writer.join()
    assert len(opened) == 1
    (record,) = journal.pools()
    assert [machine.node for machine in record.machines] == list(range(40))


def test_a_write_that_fails_fails_for_everyone_who_waits(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.sqlite")
    journal.path.mkdir()
    for _ in range(2):
        with pytest.raises(sky.errors.PoolStartError, match="cannot be used"):
            journal.intend("pool", 1)
