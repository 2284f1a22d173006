"""The page in a real browser: Chromium, headless."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

import skyward as sky
from skyward.page.hub import Viewer
from skyward.page.server import PageServer

from .chromium import PROGRAM, Chromium

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="needs Chromium: apt-get install chromium")


@sky.function
def speak(text: str) -> None:
    print(text)


@sky.function
def learn(steps: int) -> None:
    for step in range(steps):
        sky.log({"loss": 1 / (step + 1), "<b>bold</b>": float("nan")}, step=step)


@sky.function
def fail() -> None:
    raise ValueError("<b>not bold</b>")


@pytest.fixture(scope="module")
def chromium() -> Iterator[Chromium]:
    with Chromium() as chromium:
        yield chromium
        # Chromium itself reports the connection that a test has cut.
        own = [each for each in chromium.problems if "Failed to load resource" not in each]
        assert own == [], "the page reports no problem of its own"


@pytest.fixture(scope="module")
def compute() -> Iterator[sky.Compute]:
    with sky.Compute(nodes=2, name="browsed", options=sky.Options(console=False)) as compute:
        yield compute


@pytest.fixture
def opened(chromium: Chromium, compute: sky.Compute) -> Chromium:
    """The page of the pool, opened anew: other tests leave the tab at other pages."""
    chromium.show(1280, 900)
    chromium.open(compute.ui())
    chromium.until("document.querySelectorAll('#nodes tr').length === 2")
    return chromium


def shown(selector: str) -> str:
    return f"document.querySelector({json.dumps(selector)}).innerText"


def test_the_page_shows_nodes_and_their_load(opened: Chromium) -> None:
    opened.until(f"{shown('#link')} === 'live'")
    assert opened.value(shown("#pools")).split() == ["browsed", "local"]
    opened.until(f"{shown('#nodes')}.includes('%')")
    first = opened.value(shown("#nodes tr")).split()
    assert first[:3] == ["0", "ready", "127.0.0.1"]


def test_what_a_call_prints_and_raises_is_shown_as_text(
    opened: Chromium, compute: sky.Compute
) -> None:
    speak("<img src=x onerror=alert(1)>") >> compute
    with pytest.raises(ValueError, match="not bold"):
        fail() >> compute
    opened.until(f"{shown('#output')}.includes('<img src=x onerror=alert(1)>')")
    opened.until(f"{shown('#notes')}.includes('fail failed on node')")
    opened.until(f"{shown('#notes')}.includes('<b>not bold</b>')")
    assert opened.value("document.querySelectorAll('#output img, #notes b').length") == 0
    opened.until("hits.some(h => h[4][1] === 'speak')")


def test_what_is_logged_is_drawn_by_node(opened: Chromium, compute: sky.Compute) -> None:
    learn(50) @ compute
    sky.log(mine=0.25)
    ours = "[...document.querySelectorAll('#numbers .plot')].filter(p => p.dataset.key !== 'kept')"
    opened.until(f"{ours}.length === 3")
    drawn = f"{ours}.map(p => p.querySelector('canvas').ariaLabel)"
    assert opened.value(drawn) == [
        "loss: 0.02 at step 49, 2 curves",
        "<b>bold</b>: NaN at step 49, 2 curves",
        "mine: 0.25 at step 0",
    ]
    loss = shown("#numbers [data-key=loss] ul")
    assert opened.value(loss).split("\n") == ["node 0", "node 1"]
    # More steps, and further ones than there is room for, change the same curve.
    learn(3000) @ compute
    opened.until(f"{drawn}[0].includes('at step 2999')")
    assert opened.value("pools.get(chosen).numbers.get('loss').size") == 2
    points = "[...pools.get(chosen).numbers.get('loss').values()].map(c => c.points.length)"
    assert max(opened.value(points)) <= 1000
    opened.value("$('logscale').click()")
    assert opened.value("$('logscale').ariaPressed") == "true"


def test_load_is_drawn_over_time_and_again_when_the_page_is_opened_again(
    opened: Chromium, compute: sky.Compute
) -> None:
    sky.log(kept=1)
    titles = "[...document.querySelectorAll('#load h3 span')].map(e => e.textContent)"
    opened.until("pools.get(chosen).load.length >= 2")
    opened.until(f"{titles}.includes('Calls a second')")
    assert opened.value(titles)[:2] == ["CPU", "Memory"]
    opened.open(compute.ui())
    opened.until("pools.size && pools.get(chosen).load.length >= 2")
    opened.until("document.querySelector('#numbers [data-key=kept]') !== null")


def test_everything_can_be_reached_with_the_keyboard(opened: Chromium) -> None:
    ids = (
        "[...document.querySelectorAll('button, select, input, [tabindex=\"0\"]')]"
        ".filter(e => e.offsetParent).map(e => e.tabIndex)"
    )
    assert set(opened.value(ids)) == {0}
    opened.value("document.querySelector('[data-span=\"30\"]').focus()")
    opened.ask("Input.dispatchKeyEvent", type="keyDown", key="Enter", text="\r")
    opened.ask("Input.dispatchKeyEvent", type="keyUp", key="Enter")
    opened.until("span === 30")


def test_a_phone_needs_no_sideways_scrolling(opened: Chromium) -> None:
    opened.show(390, 844)
    opened.until("innerWidth === 390")
    assert opened.value("document.documentElement.scrollWidth") <= 390
    opened.show(1280, 900)


def test_dark_is_dark(opened: Chromium) -> None:
    colour = "getComputedStyle(document.body).backgroundColor"
    light = opened.value(colour)
    opened.show(1280, 900, dark=True)
    dark = opened.until(f"{colour} !== {json.dumps(light)} && {colour}")
    assert sum(map(int, dark[4:-1].split(","))) < 150
    opened.show(1280, 900)


class Thousand:
    """A hub with one pool of a thousand nodes."""

    def __init__(self) -> None:
        self._viewers: list[Viewer] = []

    def told(self, *messages: dict[str, Any]) -> Viewer:
        """A new viewer, which is told that."""
        self._viewers.append(Viewer())
        self._viewers[-1].put(json.dumps(messages))
        return self._viewers[-1]

    def join(self) -> Viewer:
        nodes = [[n, "ready", f"10.0.{n >> 8}.{n & 255}", None, 0, ""] for n in range(1000)]
        running = [[n, "step", n, 0, time.time()] for n in range(1000)]
        pool = {"type": "pool", "pool": "p", "name": "large", "provider": "local", "workers": []}
        pool |= {"nodes": nodes, "running": running, "ended": [], "lines": [], "notes": []}
        gpu = ["NVIDIA H200", 50.0, 1 << 36, 1 << 37]
        usage = [[n, n / 10, 1 << 30, 1 << 34, 0.0, 0.0, [gpu], 0, 0] for n in range(1000)]
        numbers = ("submitted", "succeeded", "failed", "cancelled", "retried", "nodes_lost")
        sample: dict[str, Any] = dict.fromkeys((*numbers, "waiting", "sent", "received"), 0)
        sample |= {"type": "sample", "pool": "p", "time": time.time(), "usage": usage}
        sample |= {"devices": [], "cost": 12.5, "hourly_cost": 98.3}
        hello = {"type": "hello", "time": time.time(), "pid": 1}
        return self.told(hello, pool, sample)

    def leave(self, viewer: Viewer) -> None:
        viewer.put(None)

    def close(self) -> None:
        for viewer in self._viewers:
            self.leave(viewer)


def test_a_thousand_nodes_are_a_map_and_the_hundred_busiest(chromium: Chromium) -> None:
    server = PageServer(Thousand())
    try:
        chromium.open(server.url)
        chromium.until("document.querySelectorAll('#nodes tr').length === 100")
        assert chromium.value(shown("#nodenote")) == "the 100 busiest of 1000; filter for others"
        assert chromium.value("document.getElementById('grid').height") > 20
        drawn = chromium.value(
            "[...document.querySelectorAll('#load canvas')].map(c => c.ariaLabel)"
        )
        assert drawn[:4] == [
            "CPU: 50 %, 2 curves",
            "Memory: 6 %, 2 curves",
            "GPU: 50 %, 2 curves",
            "GPU memory: 50 %, 2 curves",
        ]
        assert chromium.value(shown("#loadnote")) == "the mean and the highest of all nodes"
        chromium.value(
            "$('nodefilter').value = '17'; $('nodefilter').dispatchEvent(new Event('input'))"
        )
        assert chromium.value(shown("#nodes tr")).split()[:2] == ["17", "ready"]
        assert chromium.value("document.querySelectorAll('#nodes tr').length") == 1
        took = "(() => { const t = performance.now(); dirty = true; draw(); return"
        assert chromium.value(f"{took} performance.now() - t; }})()") < 1000
    finally:
        server.close()


class Shared(Thousand):
    """A hub with a kept pool, which two clients use at once."""

    def join(self) -> Viewer:
        now = time.time()
        who = {"user": "ann", "host": "<i>desk</i>", "pid": "11", "command": "python /a/train.py"}
        clients = {"a1": {**who, "since": now}, "b2": {**who, "pid": "12", "since": now}}
        job = {"id": "sweep-1", "state": "failed", "code": 3, "began": now, "took": 2.0}
        job |= {"by": "ann@desk", "command": ["/usr/bin/python3", "/j/sweep.py", "--fast"]}
        ended = [["0:1", "embed", 0, 0, now - 5, now - 4, "ok", "a1"]]
        running = [["0:2", "embed", 0, 0, now - 2, None, None, "b2"]]
        pool = {"type": "pool", "pool": "p", "name": "shared", "provider": "local"}
        pool |= {"nodes": [[0, "ready", "", None, 0, ""]], "workers": [[0, 0], [1, 0]]}
        pool |= {"running": running, "ended": ended, "lines": [], "notes": []}
        call = {"id": "run-7", "state": "queued", "code": None, "began": now - 9, "took": 1.0}
        call |= {"by": "bob@desk", "command": ["fit"], "kind": "call", "problem": ""}
        pool |= {"clients": clients, "jobs": [call, job]}
        lines = [[now, 0, None, "stdout", "trial 1", "", "ann@desk", "sweep-1"]]
        lines += [[now, 0, 0, "stdout", "epoch 2", "fit", "b2", "run-7"]]
        changes = {"type": "changes", "pool": "p", "started": [], "skipped": 0, "nodes": []}
        changes |= {"ended": [], "lines": lines, "notes": []}
        rows = [["loss", 0, 0, 0, [[0, 1.5]], [0, 1.5], each] for each in ("11", "12")]
        changes |= {"numbers": [*rows, ["loss", None, None, 0, [[0, 2.5]], [1, 3.5], "11"]]}
        hello = {"type": "hello", "time": now, "pid": 1}
        return self.told(hello, pool, changes)


def test_a_kept_pool_shows_whose_calls_and_jobs_there_are(chromium: Chromium) -> None:
    server = PageServer(Shared())
    try:
        chromium.open(server.url)
        chromium.until("document.querySelectorAll('#clients tr').length === 2")
        assert chromium.value("document.querySelectorAll('#pools button').length") == 1
        first, second = chromium.value(shown("#clients")).splitlines()
        assert first.split("\t")[:2] == ["ann@<i>desk</i> 11", "python train.py"]
        assert (first.split("\t")[3], second.split("\t")[3]) == ("0", "1")
        # What has not ended comes first.
        call, job = (row.split("\t") for row in chromium.value(shown("#jobs")).splitlines())
        assert (call[:3], call[4]) == (["run-7", "queued", "bob@desk"], "fit()")
        assert job == ["sweep-1", "failed 3", "ann@desk", "2.0 s", "sweep.py --fast"]
        words = ["sweep-1", "trial", "1", "run-7", "epoch", "2"]
        assert chromium.value(shown("#output")).split() == words
        chromium.value(
            "$('outnode').value = 'job run-7'; $('outnode').dispatchEvent(new Event('change'))"
        )
        assert chromium.value(shown("#output")).split() == ["run-7", "epoch", "2"]
        # A lane for each client of a worker, and one for the worker that nobody uses.
        chromium.until("new Set(hits.map(h => h[1])).size === 2")
        # Numbers of two clients, and what one has logged itself.
        curves = ["client of 11", "node 0 of 11", "node 0 of 12"]
        assert chromium.value(shown("#numbers .plot ul")).split("\n") == curves
        # Counts begin again with a node or a device that was started again.
        many = {"type": "sample", "pool": "p", "time": 1.0, "usage": [], "waiting": 0}
        many |= {"succeeded": 90, "failed": 0, "sent": 9000, "received": 9000, "cost": 0}
        many |= {"devices": [{"device": 0, "kind": "cpu", "node": 0, "operations": 70, "waits": 7}]}
        few = many | {"time": 2.0, "succeeded": 2, "sent": 20, "received": 20}
        few |= {"devices": [{"device": 0, "kind": "cpu", "node": 0, "operations": 3, "waits": 1}]}
        chromium.value(f"take({json.dumps(many)}); take({json.dumps(few)}); dirty = true; draw()")
        assert chromium.value(shown("#figures")).count("0 B/s") == 2
        assert "-" not in chromium.value(shown("#figures")) + chromium.value(shown("#devices"))
    finally:
        server.close()


def test_a_page_whose_server_comes_back_goes_on_by_itself(chromium: Chromium) -> None:
    first = PageServer(Thousand())
    port, token = first._server.server_port, first.token
    chromium.open(first.url)
    chromium.until(f"{shown('#link')} === 'live'")
    first.close()
    chromium.until(f"{shown('#link')} === 'connection lost, trying again'")
    second = PageServer(Thousand(), port=port)
    second._token = token
    try:
        chromium.until(f"{shown('#link')} === 'live'")
    finally:
        second.close()
