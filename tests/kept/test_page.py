"""Kept pools on the page: their nodes, and the calls of all clients."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import skyward as sky
from skyward import kernel
from skyward.compute import reach
from skyward.compute.workbench.jobs import start_script
from skyward.nodes import records
from skyward.nodes.kept import PoolKeeper
from skyward.nodes.records import KeptNode, KeptPool
from skyward.page import door, metrics
from skyward.page import hub as hubs
from skyward.page import watch as watches
from skyward.page.hub import Hub, Viewer
from skyward.page.pool import KEPT, Message, ShownPool
from skyward.page.watch import KnownNodes
from skyward.wire.messages import Members

from ..conftest import PATIENCE
from .conftest import QUIET, Script


@sky.function
def three() -> int:
    return 3


@sky.function
def say() -> None:
    print("said")


@sky.function
def fail() -> None:
    raise ValueError("no luck")


@sky.function(retries=0)
def die() -> None:
    os._exit(3)


@pytest.fixture(scope="module")
def kept(home: Path) -> Iterator[str]:
    # A page shows all pools of a name, also those of another run of these tests.
    name = f"stays-{os.getpid()}"
    with sky.Compute(name=name, nodes=2, keep=True, options=QUIET):
        pass
    yield name
    sky.attach(name).down()


@contextlib.contextmanager
def shown(name: str) -> Iterator[Iterator[dict[str, Any]]]:
    """What a page of the pool is told."""
    gathered = Hub([name])
    viewer = gathered.join()

    def messages() -> Iterator[dict[str, Any]]:
        while (batch := viewer.next(PATIENCE)) is not None:
            assert batch, "nothing was told"
            yield from json.loads(batch)

    yield messages()
    gathered.leave(viewer)
    gathered.close()


@pytest.fixture
def told(kept: str) -> Iterator[Iterator[dict[str, Any]]]:
    with shown(kept) as messages:
        yield messages


def test_a_pool_without_a_client_shows_its_nodes(kept: str, told: Iterator[dict[str, Any]]) -> None:
    pool = next(message for message in told if message["type"] == "pool")
    assert (pool["name"], [row[:2] for row in pool["nodes"]]) == (
        kept,
        [[0, "ready"], [1, "ready"]],
    )
    sample = next(message for message in told if message["type"] == "sample")
    assert sample["pool"] == pool["pool"]
    assert [row[0] for row in sample["usage"]] == [0, 1]
    assert all(0 < row[2] < row[3] for row in sample["usage"])


def after(told: Iterator[dict[str, Any]], wanted: Callable[[dict[str, Any]], Any]) -> Any:
    """What `wanted` returns for the first message for which it returns something."""
    deadline = time.monotonic() + PATIENCE
    for message in told:
        if (found := wanted(message)) or time.monotonic() > deadline:
            break
    assert found, "it was not told"
    return found


def ended_call(name: str) -> Callable[[dict[str, Any]], list[Any] | None]:
    return lambda message: next(
        (call for call in message.get("ended", ()) if call[1] == name), None
    )


def test_calls_of_every_client_are_shown_with_the_client(
    kept: str, script: Script, told: Iterator[dict[str, Any]]
) -> None:
    pool = next(message for message in told if message["type"] == "pool")
    clients = dict(pool["clients"])

    def noted(message: dict[str, Any]) -> dict[str, Any]:
        clients.update(message.get("clients", {}))
        return message

    told = map(noted, told)
    other = script(f"""
        @sky.function
        def from_afar():
            print("far away")
        with sky.attach({kept!r}) as compute:
            from_afar() >> compute
            sys.stdin.readline()
    """)
    far = after(told, ended_call("from_afar"))
    with sky.attach(kept) as compute:
        assert three() >> compute == 3
        near = after(told, ended_call("three"))
        with pytest.raises(ValueError, match="no luck"):
            fail() >> compute
        failed = after(
            told, lambda message: [n for n in message.get("notes", ()) if n["name"] == "fail"]
        )
    other.communicate("\n", timeout=PATIENCE)
    assert near[6:8] == ["ok", near[7]]
    assert far[2:4] in ([0, 0], [1, 0])
    assert clients[near[7]]["pid"] == str(os.getpid())
    assert clients[far[7]]["pid"] == str(other.pid)
    assert failed[0]["error"] == "ValueError: no luck"


def test_what_happened_before_somebody_looked_is_shown(
    kept: str, told: Iterator[dict[str, Any]]
) -> None:
    with sky.attach(kept) as compute:
        say() @ compute
    gathered = Hub([kept])
    viewer = gathered.join()
    try:
        pool = next(
            message
            for batch in iter(lambda: viewer.next(PATIENCE), None)
            for message in json.loads(batch or "[]")
            if message["type"] == "pool"
        )
        measured = wait_for_metrics(gathered, kept)
    finally:
        gathered.leave(viewer)
        gathered.close()
    assert sorted(call[2] for call in pool["ended"] if call[1] == "say") == [0, 1]
    # Those of a job are told with its id.
    lines = [line for line in pool["lines"] if line[5] == "say" and not line[7]]
    assert sorted((line[1], line[4]) for line in lines) == [(0, "said"), (1, "said")]
    assert {line[6] for line in lines} <= pool["clients"].keys()
    assert len(pool["workers"]) == 2
    assert 'outcome="failed"' in measured
    counted = re.findall(r"skyward_call_seconds_count\{[^}]*\} (\d+)", measured)
    ended = re.findall(r'skyward_calls_total\{[^}]*outcome="(?:succ|fail)\w+"\} (\d+)', measured)
    assert len(counted) == 1, "a pool is counted once"
    assert int(counted[0]) == sum(map(int, ended)) >= 2


def wait_for_metrics(gathered: Hub, name: str) -> str:
    while f'pool="{name}"' not in (text := metrics.text(gathered.measure())):
        time.sleep(0.05)
    return text


def test_a_client_here_adds_what_only_it_knows(kept: str, told: Iterator[dict[str, Any]]) -> None:
    alone = next(message for message in told if message["type"] == "pool")
    with sky.attach(kept) as compute:
        assert three() >> compute == 3
        sample = next(m for m in told if m["type"] == "sample" and m["sent"])
        assert sample["pool"] == alone["pool"]
        assert sample["succeeded"] >= 1
        sky.log(loss=0.5)
        changes = next(m for m in told if m["type"] == "changes" and m["numbers"])
        assert changes["pool"] == alone["pool"]
        row = ["loss", None, None, 0, [[0, 0.5]], [0, 0.5], str(os.getpid())]
        assert changes["numbers"] == [row]
        # One who comes while the client is there gets it, too.
        with shown(kept) as later:
            rows = next(m["numbers"] for m in later if m.get("numbers"))
        assert rows == [row]


def test_a_job_is_shown_with_its_output(
    kept: str, tmp_path: Path, told: Iterator[dict[str, Any]]
) -> None:
    place = tmp_path / "hello.py"
    place.write_text("print('hello from a job')\n")
    assert next(message for message in told if message["type"] == "pool")
    with reach(kept) as pool:
        started = start_script(pool, 0, place)
    lines: list[list[Any]] = []
    states: set[str] = set()

    def noted(message: dict[str, Any]) -> bool:
        lines.extend(line for line in message.get("lines", ()) if line[7] == started)
        states.update(job["state"] for job in message.get("jobs", ()) if job["id"] == started)
        return bool(lines) and "done" in states

    assert after(told, noted)
    assert [line[1:5] for line in lines] == [[0, None, "stdout", "hello from a job"]]


def test_a_call_by_name_is_shown_with_its_state_and_its_output(
    kept: str, told: Iterator[dict[str, Any]]
) -> None:
    assert next(message for message in told if message["type"] == "pool")
    lines: list[list[Any]] = []
    states: list[str] = []

    def noted(message: dict[str, Any]) -> bool:
        lines.extend(line for line in message.get("lines", ()) if line[7] == "run-7")
        states.extend(job["state"] for job in message.get("jobs", ()) if job["id"] == "run-7")
        return bool(lines) and "done" in states

    with sky.attach(kept) as compute:
        compute.submit(say(), name="run-7").result(PATIENCE)
        assert after(told, noted)
        assert [line[4:6] for line in lines] == [["said", "say"]]
        compute.forget("run-7")
        assert after(told, lambda message: "jobs" in message and "run-7" not in names_of(message))


def test_two_viewers_share_one_watch_of_a_pool(kept: str, told: Iterator[dict[str, Any]]) -> None:
    first = next(message for message in told if message["type"] == "pool")
    gathered = Hub([kept])
    viewers = [gathered.join() for _ in range(2)]
    try:
        for viewer in viewers:
            pool = after(heard(viewer), lambda message: message["type"] == "pool" and message)
            assert (pool["pool"], pool["nodes"]) == (first["pool"], first["nodes"])
        assert names_of_threads().count("skyward-node-watch") == 2 * 2, "of two nodes, and `told`"
        gathered.leave(viewers[0])
        with sky.attach(kept) as compute:
            assert three() >> compute == 3
            assert after(heard(viewers[1]), ended_call("three"))[6] == "ok"
    finally:
        gathered.close()
    assert names_of_threads().count("skyward-node-watch") == 2


def heard(viewer: Viewer) -> Iterator[dict[str, Any]]:
    while (batch := viewer.next(PATIENCE)) is not None:
        assert batch, "nothing was told"
        yield from json.loads(batch)


def names_of(message: dict[str, Any]) -> list[str]:
    return [job["id"] for job in message["jobs"]]


def names_of_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate()]


def test_a_call_whose_worker_dies_is_not_shown_as_running(
    kept: str, told: Iterator[dict[str, Any]]
) -> None:
    assert next(message for message in told if message["type"] == "pool")
    with sky.attach(kept) as compute, pytest.raises(sky.WorkerDiedError):
        die() >> compute
    assert after(told, ended_call("die"))[6] == "lost"


def row(node: int, state: str = "ready") -> list[Any]:
    return [node, state, f"10.0.0.{node}", None, 0, ""]


def kept_pool(*nodes: int) -> ShownPool:
    pool = ShownPool("p", "p", "local", kept=True)
    pool.join(KEPT)
    pool.take(KEPT, {"type": "client", "nodes": [row(node) for node in nodes]})
    return pool


def test_a_client_is_heard_before_and_after_its_pool_is_kept(home: Path) -> None:
    hub = Hub(["new"])
    about = {"type": "pool", "name": "new", "provider": "local", "kept": True}
    curve = ["loss", None, None, 0, [[0, 0.5]], [0, 0.5]]
    client = {"type": "client", "pool": "abc"}
    sample = {"own": {}, "waiting": 3, "sent": 100, "devices": []}
    hub.hear("12", about | {"pool": "abc"})
    hub.hear("12", client | {"nodes": [row(0, "starting"), row(1)], "numbers": [curve]})
    hub.hear("12", about | {"pool": "xyz", "name": "another"})
    assert list(hub.pools) == ["abc"]
    pool = hub.pools["abc"]
    (told,) = pool.news()
    assert told["numbers"] == [[*curve, "12"]]
    hub.hear(KEPT, about | {"pool": "abc"})
    hub.hear(KEPT, client | {"price": [None, 0.0], "nodes": [row(1, "connecting")]})
    hub.hear("12", client | {"nodes": [row(0)], "sample": sample, "notes": [{"event": "x"}]})
    hub.hear("12", {"type": "node", "pool": "abc", "node": 1, "workers": 7})
    (told,) = pool.news()
    assert told["nodes"] == [
        [0, "stopped", "", None, 0, ""],
        [1, "stopped", "", None, 0, ""],
        row(1, "connecting"),
    ], "the nodes are those of the record"
    assert (told["notes"], pool.workers) == ([{"event": "x"}], [])
    pool.sample()
    hub.hear("12", {"type": "gone", "pool": "abc"})
    pool.sample()
    assert [(each["sent"], each["waiting"]) for each in pool.samples] == [(100, 3), (100, 0)]
    hub.hear(KEPT, {"type": "gone", "pool": "abc"})
    assert not hub.pools


def report(*tasks: list[Any], fresh: bool = False) -> tuple[int, dict[str, Any]]:
    return 0, {"tasks": list(tasks)} | ({"fresh": True} if fresh else {})


def told_of(pool: ShownPool, *reports: tuple[int, dict[str, Any]]) -> Message:
    for node, told in reports:
        pool.take(KEPT, {"type": "node", "node": node} | told)
    (changes,) = pool.news()
    return changes


def test_an_agent_that_begins_again_is_not_told_twice() -> None:
    pool = kept_pool(0)
    over = ["1.0.1", "f", 0, 100.0, 101.0, "failed", "a", "ValueError: x"]
    runs, also = ["1.0.2", "g", 0, 102.0, None, "running", "a", ""], ["2.0.1", "h", 0, 103.0]
    told_of(pool, report(over, runs, [*also, None, "running", "b", ""], fresh=True))
    again = told_of(pool, report(over, [*also, None, "running", "b", ""], fresh=True))
    assert [(call[0], call[6]) for call in again["ended"]] == [("0:1.0.2", "lost")]
    assert again["notes"] == []
    shown = pool.snapshot()
    assert [call[0] for call in shown["running"]] == ["0:2.0.1"]
    # A node that was started again counts from one again.
    anew = told_of(pool, report(["1.0.1", "f", 0, 500.0, 501.0, "ok", "c", ""], fresh=True))
    assert [call[0] for call in anew["ended"]] == ["0:2.0.1", "0:1.0.1"]


def test_a_node_that_was_replaced_is_another_one() -> None:
    state = kept_pool(0, 1, 2)
    runs = ["1.0.2", "g", 0, 102.0, None, "running", "a", ""]
    known = {"tasks": [runs], "workers": 1}
    first = told_of(
        state, *((n, known | {"clients": {"a": {"since": 50.0 + n}}}) for n in range(3))
    )
    assert first["clients"] == {"a": {"since": 50.0}}
    rows = [row(1, "stopped"), row(2, "stopped"), row(1, "connecting"), row(3, "connecting")]
    state.take(KEPT, {"type": "client", "nodes": rows})
    told = told_of(state)
    assert [(call[0], call[6]) for call in told["ended"]] == [
        ("1:1.0.2", "lost"),
        ("2:1.0.2", "lost"),
    ]
    assert told["workers"] == [[0, 0]]
    assert list(state.nodes) == [0, 1, 3]


def test_the_head_is_told_of_nodes_that_came_and_left() -> None:
    nodes = [KeptNode(n, "unix:/a", 1, "here", f"10.0.0.{n}", 0, None, "m") for n in range(3)]
    replaced = msgspec.structs.replace(nodes[1], address="10.0.0.9")
    known = KnownNodes()
    known.write(nodes)
    known.tell({1: replaced, 2: None, 3: msgspec.structs.replace(nodes[0], index=3)})
    assert [(node.index, node.address) for node in known.nodes] == [
        (0, "10.0.0.0"),
        (1, "10.0.0.9"),
        (3, "10.0.0.0"),
    ]


def test_the_record_has_newer_facts_than_a_head_that_was_away() -> None:
    first, second, third = (
        KeptNode(1, "unix:/a", 1, "here", f"10.0.0.{n}", 0, None, "m") for n in range(3)
    )
    known = KnownNodes()
    known.write([first])
    known.tell({1: second})
    assert known.nodes == [second]
    known.write([third])
    assert known.nodes == [third]
    # The head is there again, and another node has left.
    known.tell({1: second, 2: None})
    assert known.nodes == [third]
    known.tell({1: None, 2: None})
    assert known.nodes == []
    known.tell({1: second})
    assert known.nodes == [second]


@pytest.mark.parametrize(
    ("function", "shown"),
    [
        ("train (run-7)", ["train", "run-7"]),
        ("partial(f)", ["partial(f)", ""]),
        ("train", ["train", ""]),
    ],
)
def test_only_a_call_by_name_is_taken_for_one(function: str, shown: list[str]) -> None:
    told = told_of(kept_pool(0), (0, {"lines": [[1.0, 0, 1, "x", function, "a", ""]]}))
    line = told["lines"][0]
    assert [line[5], line[7]] == shown


@pytest.mark.skipif(not kernel.IS_LINUX, reason="elsewhere, sockets are files")
def test_a_socket_whose_name_is_no_text_hides_no_pools() -> None:
    with socket.socket(socket.AF_UNIX) as strange, socket.socket(socket.AF_UNIX) as own:
        strange.bind(b"\0strange-\xff-%d" % os.getpid())
        address = f"{door.own_address()}-test"
        own.bind(address)
        own.listen()
        assert address in door.addresses()


def test_a_look_around_that_fails_is_not_the_last(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    looks = threading.Semaphore(0)

    def fail() -> list[str]:
        looks.release()
        raise ValueError("no sockets today")

    monkeypatch.setattr(hubs, "addresses", fail)
    monkeypatch.setattr(hubs, "LOOK_SECONDS", 0.01)
    gathered = Hub()
    viewer = gathered.join()
    try:
        assert all(looks.acquire(timeout=PATIENCE) for _ in range(3))
    finally:
        gathered.leave(viewer)
    assert capsys.readouterr().err.count("ValueError: no sockets today") == 1


def test_a_provider_that_does_not_answer_keeps_nobody_from_ending(
    home: Path, monkeypatch: pytest.MonkeyPatch, eventually: Any
) -> None:
    asked, answers = threading.Semaphore(0), threading.Event()

    class Silent:
        def __init__(self, record: KeptPool) -> None:
            asked.release()
            answers.wait(PATIENCE)
            raise sky.errors.PoolError("it does not answer")

    monkeypatch.setattr(watches, "ReachedPool", Silent)
    monkeypatch.setattr(hubs, "LOOK_SECONDS", 0.01)
    far = KeptPool("far", "far", "local", {}, 0.0, 0.0, None, None, None, None, "", [])
    records.write(far)
    try:
        hub = Hub(["far"])
        hub.join()
        assert asked.acquire(timeout=PATIENCE)
        before = names_of_threads().count("skyward-kept")
        hub.close()
        assert names_of_threads().count("skyward-kept") == before, "it still waits"
        # When the pool is gone, nothing is left of its watch.
        hub = Hub(["far"])
        hub.join()
        assert asked.acquire(timeout=PATIENCE)
        records.forget("far")
        answers.set()
        eventually(lambda: not hub._kept)
        hub.close()
    finally:
        answers.set()
        records.forget("far")


def test_a_head_that_was_away_is_told_what_has_changed(home: Path) -> None:
    nodes = [KeptNode(n, "unix:/a", 1, "here", f"10.0.0.{n}", 0, None, "m") for n in range(3)]
    record = KeptPool("p", "away", "local", {}, 0.0, 0.0, None, None, None, None, "", nodes)
    records.write(record)
    told, reached = [], False

    def tell(message: Members) -> bool:
        told.append(message)
        return reached

    keeper = PoolKeeper(record)
    keeper.remove([2], tell)
    assert [each.index for each in records.read("away").nodes] == [0, 1]
    reached = True
    keeper.add(nodes[0], tell)
    assert told == [Members([], [2])] * 2
    keeper.add(nodes[0], tell)
    assert len(told) == 2
    records.forget("away")
