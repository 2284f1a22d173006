"""The page's server: who may look, what they get, and that nothing is left of it."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

import skyward as sky
from skyward import page
from skyward.page import metrics
from skyward.page.hub import BATCHES_WAITING, Hub, Viewer
from skyward.page.pool import CALLS_A_TIME, ROWS_KEPT, ShownPool
from skyward.page.server import UNPROVEN_MAX, PageServer
from skyward.worker.task_board import BUCKETS

from ..conftest import PATIENCE, Eventually


@sky.function
def double(x: int) -> int:
    print(f"doubling {x}")
    return 2 * x


@sky.function
def fail() -> None:
    raise ValueError("<script>alert(1)</script>")


@sky.function
def wait_for(path: str) -> None:
    import os

    while not os.path.exists(path):
        time.sleep(0.01)


@pytest.fixture(scope="module")
def compute() -> Iterator[sky.Compute]:
    with sky.Compute(nodes=2, name="shown", options=sky.Options(console=False)) as compute:
        yield compute


@pytest.fixture(scope="module")
def url(compute: sky.Compute) -> str:
    return compute.ui()


def get(url: str, path: str = "", **headers: str) -> tuple[int, dict[str, str], str]:
    """The status, headers and text of an answer; `path` replaces that of the URL."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=100)
    connection.request("GET", path or f"{parts.path}?{parts.query}", headers=headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, {key.lower(): value for key, value in answer.getheaders()}, text


class Stream:
    """A plain client of the page's stream."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=100)
        self._connection.request("GET", f"/stream?{parts.query}")
        self._answer = self._connection.getresponse()
        assert self._answer.status == 200
        self.kind = self._answer.getheader("Content-Type")

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while line := self._answer.readline():
            if line.startswith(b"data: "):
                yield from json.loads(line[6:])

    def close(self) -> None:
        self._answer.close()
        self._connection.close()


def shown(stream: Stream) -> Iterator[dict[str, Any]]:
    """What a stream tells after the pool: what was there before comes with it, not as a change."""
    told = iter(stream)
    assert next(message for message in told if message.get("name") == "shown")
    return told


@pytest.fixture
def stream(url: str) -> Iterator[Stream]:
    stream = Stream(url)
    yield stream
    stream.close()


# Who may look.


def test_the_page_needs_nothing_from_elsewhere(url: str) -> None:
    status, headers, text = get(url)
    assert status == 200
    assert headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in headers["content-security-policy"]
    assert headers["cache-control"] == "no-store"
    assert headers["referrer-policy"] == "no-referrer"
    assert "access-control-allow-origin" not in headers
    addresses = set(re.findall(r"https?://[^\s\"'%]+", text))
    assert addresses == {"http://www.w3.org/2000/svg"}, "a namespace, which nobody fetches"
    token = urlsplit(url).query.removeprefix("token=")
    assert token not in text


@pytest.mark.parametrize("path", ["/", "/stream", "/metrics", "/?token=", "/?token=wrong"])
def test_without_the_token_there_is_nothing(url: str, path: str) -> None:
    status, _, text = get(url, path)
    assert (status, text) == (
        403,
        "the address lacks its token; open the one that was printed\n",
    )


def test_a_name_that_leads_here_by_a_trick_is_refused(url: str) -> None:
    port = urlsplit(url).port
    for host in ("evil.example", f"evil.example:{port}", "", "[::1"):
        status, _, text = get(url, Host=host)
        assert (status, text) == (421, "this server has another name\n")
    assert get(url, Host=f"localhost:{port}")[0] == 200
    assert get(url, Host="localhost:8080")[0] == 200, "as `ssh -L 8080:127.0.0.1:PORT` has it"


def test_what_cannot_be_read_is_refused_wherever_the_server_listens(url: str) -> None:
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname or "", parts.port or 0), timeout=100) as client:
        client.sendall(b"GET http://[::1/ HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert client.makefile().readline() == "HTTP/1.1 400 Bad Request\n"
    near, everywhere = object.__new__(PageServer), object.__new__(PageServer)
    near._host, everywhere._host = "127.0.0.1", "0.0.0.0"
    for server in (near, everywhere):
        assert server.serves("127.0.0.1:80")
        assert not server.serves("[::1")
    assert everywhere.serves("10.0.0.7:80")
    assert not near.serves("10.0.0.7:80")


def test_other_paths_and_methods_are_refused(url: str) -> None:
    query = urlsplit(url).query
    assert get(url, f"/etc/passwd?{query}")[0] == 404
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=100)
    connection.request("POST", f"/?{query}", body="x")
    assert connection.getresponse().status == 501
    connection.close()


def test_a_crowd_without_the_token_takes_few_threads_and_ends_no_open_page(
    compute: sky.Compute, url: str, stream: Stream, eventually: Eventually
) -> None:
    """They say one byte each, and then nothing."""
    told = shown(stream)

    def answering() -> int:
        return sum("process_request_thread" in each.name for each in threading.enumerate())

    parts, before = urlsplit(url), answering()
    crowd = []
    for _ in range(3 * UNPROVEN_MAX):
        crowd.append(socket.create_connection((parts.hostname or "", parts.port or 0), timeout=100))
        crowd[-1].sendall(b"G")
    eventually(lambda: answering() - before <= UNPROVEN_MAX, what="the end of the oldest")
    assert get(url)[0] == 200
    assert crowd[0].recv(1) == b""
    for each in crowd:
        each.close()
    eventually(lambda: answering() <= before, what="the end of the crowd")
    double(4321) >> compute
    assert any("doubling 4321" in json.dumps(each) for each in told), "who has the token stays"


def test_a_port_in_use_is_refused_with_the_next_step() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            sky.errors.ConfigurationError, match=rf"port {port}: .*; give another port"
        ):
            PageServer(Hub(), port=port)


# What they get.


def test_a_stream_begins_with_the_pools_and_goes_on_with_what_happens(
    compute: sky.Compute, stream: Stream
) -> None:
    assert stream.kind == "text/event-stream; charset=utf-8"
    told = iter(stream)
    assert next(told)["type"] == "hello"
    pool = next(message for message in told if message.get("name") == "shown")
    assert (pool["provider"], [row[:2] for row in pool["nodes"]]) == (
        "local",
        [[0, "ready"], [1, "ready"]],
    )
    began = time.time()
    double(21) >> compute
    ended: list[list[Any]] = []
    lines: list[list[Any]] = []
    for message in told:
        if message["type"] == "changes":
            # Calls of other tests may end only now.
            ended += [each for each in message["ended"] if each[1] == "double"]
            lines += [each for each in message["lines"] if each[5] == "double"]
        if ended and lines:
            break
    _, name, node, worker, start, end, how, _ = ended[0]
    assert (name, worker, how) == ("double", 0, "ok")
    assert node in (0, 1)
    assert began - 1 < start <= end < time.time() + 1
    assert [line[3:6] for line in lines] == [["stdout", "doubling 21", "double"]]


def test_the_nodes_are_measured_while_somebody_looks(stream: Stream) -> None:
    # A node of a busy machine may answer too late for a sample, and is in the next one.
    samples = (message for message in stream if message["type"] == "sample")
    sample = next(each for each in samples if len(each["usage"]) == 2)
    assert [row[0] for row in sample["usage"]] == [0, 1]
    _, cpu, used, total, incoming, outgoing, gpus, received, sent = sample["usage"][0]
    assert 0 <= cpu <= 100
    assert 0 < used < total
    assert incoming >= 0
    assert outgoing >= 0
    assert min(received, sent) >= 0
    assert isinstance(gpus, list)


def test_one_who_comes_later_gets_what_was_logged_and_the_load_so_far(
    compute: sky.Compute, url: str, stream: Stream
) -> None:
    told = shown(stream)
    sky.log(later=0.5, step=3)
    rows = next(m["numbers"] for m in told if m["type"] == "changes" and m["numbers"])
    assert rows == [["later", None, None, 0, [[3, 0.5]], [3, 0.5]]]
    measured = next(m for m in told if m["type"] == "sample" and len(m["usage"]) == 2)
    late = Stream(url)
    messages = iter(late)
    pool = next(message for message in messages if message["type"] == "pool")
    assert rows[0] in pool["numbers"]
    samples = [next(messages)]
    while samples[-1]["time"] < measured["time"]:
        samples.append(next(messages))
    late.close()
    assert {sample["type"] for sample in samples} == {"sample"}
    assert [row[0] for row in samples[-1]["usage"]] == [0, 1]


NODE = shutil.which("node")
MARKS = """
const pairs = [[0, 1], [-3, 7], [0.9999999999999999, 1], [0.3, 0.1 + 0.2], [-1e-17, 0], [5, 5],
  [0, 0], [1e300, 1e300], [0, 5e-324], [0, 1e-323], [-1.7e308, 1.7e308], [1e12, 1e12 + 2],
  [Infinity, -Infinity]];
const marks = (logs) => pairs.map(([low, high]) => ticks(...bounds(low, high, logs)));
console.log(JSON.stringify([marks(false), marks(true)]));
"""


@pytest.mark.skipif(NODE is None, reason="needs Node.js: apt-get install nodejs")
def test_a_plot_has_few_marks_however_near_its_values_are() -> None:
    assert NODE is not None
    text = Path(page.__file__).with_name("page.html").read_text("utf-8")
    ours = re.findall(r"^function (?:ticks|bounds)\(.*?^}$", text, re.DOTALL | re.MULTILINE)
    run = [NODE, "-e", "\n".join(ours) + MARKS]
    told = subprocess.run(run, capture_output=True, text=True, timeout=PATIENCE, check=True).stdout
    plain, logs = json.loads(told)
    assert plain[:3] == [[0, 0.5, 1], [0, 5], [0.5, 1, 1.5]]
    for marks in (*plain, *logs):
        assert len(marks) <= 6
        assert marks == sorted(set(marks))


def test_samples_are_kept_within_bounds() -> None:
    pool = ShownPool("p-1", "p", "local")
    for number in range(1000):
        pool.keep_samples([{"time": number, "usage": [[node] for node in range(20)]}])
    kept = [sample["time"] for sample in pool.samples]
    assert kept == list(range(1000 - ROWS_KEPT // 20, 1000))


def test_a_call_that_runs_is_shown_to_one_who_comes_later(
    compute: sky.Compute, url: str, tmp_path: Any
) -> None:
    running = wait_for(str(tmp_path / "go")) > compute
    early = Stream(url)
    next(each for each in early if "wait_for" in names_of_running(each))
    late = Stream(url)
    pool = next(message for message in late if message["type"] == "pool")
    early.close()
    late.close()
    (tmp_path / "go").touch()
    running.result()
    assert names_of_running(pool) == ["wait_for"]


def names_of_running(message: dict[str, Any]) -> list[str]:
    """Of a snapshot, or of changes."""
    return [call[1] for call in (*message.get("running", ()), *message.get("started", ()))]


def test_metrics_are_in_the_format_of_prometheus(
    compute: sky.Compute, url: str, eventually: Any
) -> None:
    double(1) >> compute
    with pytest.raises(ValueError, match="alert"):
        fail() >> compute
    token = urlsplit(url).query.removeprefix("token=")
    line = re.compile(r'[a-z_]+\{([a-z_]+="([^"\\\n]|\\.)*",?)*\} [-+0-9.e]+|# (HELP|TYPE) .+')

    def measured() -> dict[str, float]:
        status, headers, text = get(url, "/metrics", Authorization=f"Bearer {token}")
        assert status == 200
        assert headers["content-type"].startswith("text/plain; version=0.0.4")
        assert [each for each in text.splitlines() if not line.fullmatch(each)] == []
        found = dict(re.findall(r"^(\w+\{[^}]*\}) (\S+)$", text, re.MULTILINE))
        return {re.sub(r',?id="[\w-]+"', "", key): float(value) for key, value in found.items()}

    stats = compute.stats()
    failed = 'skyward_calls_total{pool="shown",outcome="failed"}'
    counted = 'skyward_call_seconds_bucket{pool="shown",le="+Inf"}'
    # What the client and the nodes have counted comes every few seconds.
    eventually(lambda: (now := measured()).get(failed) == stats.failed and now[counted] >= 2)
    plain = measured()
    assert plain['skyward_calls_total{pool="shown",outcome="succeeded"}'] == stats.succeeded
    assert plain['skyward_nodes{pool="shown",state="ready"}'] == 2
    assert 0 <= plain['skyward_node_cpu_ratio{pool="shown",node="1"}'] <= 1
    assert plain['skyward_node_memory_bytes{pool="shown",node="0",kind="total"}'] > 1 << 20


# Nothing without bounds, and nothing left.


def test_a_viewer_that_is_too_slow_is_dropped() -> None:
    viewer = Viewer()
    assert all(viewer.put("[]") for _ in range(BATCHES_WAITING))
    assert not viewer.put("[]")
    assert viewer.next(1) is None


def test_of_many_calls_a_part_is_told_and_those_that_were_told_before() -> None:
    pool = ShownPool("p", "p", "local")
    pool.join("1")
    pool.take("1", {"type": "client", "nodes": [[0, "ready", "", None, 0, ""]]})
    tasks = [[f"1.0.{n}", "f", 0, n + 100.0, n + 101.0, "ok", "", ""] for n in range(1000)]
    runs = [*tasks[0][:4], None, "running", "", ""]
    pool.take("1", {"type": "node", "node": 0, "tasks": [runs], "fresh": True})
    assert [call[0] for call in pool.news()[0]["started"]] == ["0:1.0.0"]
    pool.take("1", {"type": "node", "node": 0, "tasks": tasks})
    (changes,) = pool.news()
    assert changes["skipped"] == 999 - CALLS_A_TIME
    assert [call[0] for call in changes["ended"][:2]] == ["0:1.0.0", f"0:1.0.{1000 - CALLS_A_TIME}"]
    assert not pool.running


def test_a_node_that_is_lost_loses_its_calls_and_stays_counted() -> None:
    pool = ShownPool("p", "p", "local")
    pool.join("1")
    row = [0, "ready", "", None, 0, ""]
    pool.take("1", {"type": "client", "nodes": [row]})
    totals = {"begun": 9, "succeeded": 8, "failed": 0, "cancelled": 0, "call_seconds": 2.0}
    totals |= {"buckets": [8, *[0] * len(BUCKETS)]}
    task = ["1.0.9", "f", 0, 100.0, None, "running", "", ""]
    told = {"type": "node", "node": 0, "fresh": True, "tasks": [task], "totals": totals}
    pool.take("1", told)
    pool.take("1", {"type": "client", "nodes": [[0, "lost", *row[2:]]]})
    pool.take("1", told)
    assert not pool.running, "an agent that is gone tells nothing more"
    pool.take("1", {"type": "client", "nodes": [row]})
    pool.take("1", told | {"tasks": [], "totals": totals | {"begun": 1}})
    pool.sample()
    sample = pool.latest()
    assert sample is not None
    assert (sample["submitted"], sample["buckets"][0], sample["call_seconds"]) == (10, 16, 4.0)


def test_too_many_pages_are_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skyward.page.hub.VIEWERS_MOST", 0)
    status, _, text = get(url, f"/stream?{urlsplit(url).query}")
    assert (status, text) == (503, "too many pages are open; close one\n")


def threads() -> set[threading.Thread]:
    names = ("skyward-page-server", "skyward-door")
    return {thread for thread in threading.enumerate() if thread.name in names}


def test_nobody_looks_means_no_events(eventually: Any) -> None:
    # A page elsewhere on this machine may look at all pools of the user.
    with sky.Compute(options=sky.Options(console=False)) as compute:
        pool, hub = compute._open_fleet, Hub(own=True)
        listened = len(pool.events._sinks)
        viewers = [hub.join(), hub.join()]
        eventually(lambda: len(pool.events._sinks) == listened + 1)
        hub.leave(viewers[0])
        assert len(pool.events._sinks) == listened + 1
        hub.leave(viewers[1])
        eventually(lambda: len(pool.events._sinks) == listened)
        assert not hub.pools
        assert hub._thread is None


def test_metrics_that_are_asked_for_at_once_have_the_pool(compute: sky.Compute) -> None:
    """Also while its nodes have not answered yet: a page is served as soon as there is a pool."""
    hub = Hub(own=True)
    hub.hold()
    names = [pool["name"] for pool, _ in hub.measure()]
    hub.close()
    assert names == ["shown"]


def test_a_pool_that_is_closed_is_watched_no_more(eventually: Any) -> None:
    hub = Hub(own=True)
    with sky.Compute(options=sky.Options(console=False)) as compute:
        pool = compute._open_fleet
        viewer = hub.join()
        eventually(lambda: pool.id in hub.pools)
    assert not pool.events.listened
    eventually(lambda: pool.id not in hub.pools)
    hub.leave(viewer)
    assert viewer not in hub._viewers


def test_a_page_ends_with_its_pool() -> None:
    before = threads()
    with sky.Compute(options=sky.Options(console=False)) as compute:
        url = compute.ui()
        assert compute.ui() == url
        stream = Stream(url)
        told = iter(stream)
        assert next(message for message in told if message["type"] == "pool")
    kinds = [message["type"] for message in told]
    stream.close()
    assert "gone" in kinds
    with pytest.raises(ConnectionRefusedError):
        get(url)
    with pytest.raises(sky.errors.PoolClosedError, match="is closed; its page ended with it"):
        compute.ui()
    # Those of earlier tests may end meanwhile.
    assert not threads() - before


def test_the_documentation_names_every_metric() -> None:
    page = (Path(__file__).parents[2] / "docs" / "page.md").read_text()
    assert not [name for name in metrics._FAMILIES if f"`{name}`" not in page]


def test_a_process_of_another_version_is_passed_over() -> None:
    near, far = socket.socketpair()
    with far:
        far.sendall(b'[{"kind": 1}]\n')
    Hub()._read("its number", near)
    assert near.fileno() == -1, "its connection is closed"
