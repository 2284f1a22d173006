"""OpenTelemetry: a call is a span, and what its function traces is below it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from skyward.calls import spans as call_spans

pytest.importorskip("opentelemetry.sdk")

Spans = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def spans() -> Spans:
    """The spans of a program of its own: a provider cannot be taken out of a process again."""
    program = Path(__file__).with_name("traced.py")
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found: Spans = json.loads(done.stdout.splitlines()[-1])
    return found


def one(spans: list[dict[str, Any]], name: str) -> dict[str, Any]:
    (found,) = [span for span in spans if span["name"] == name]
    return found


def parts(spans: Spans, call: str) -> dict[str, dict[str, Any]]:
    parent = one(spans["here"], call)["id"]
    return {span["name"]: span for span in spans["here"] if span["parent"] == parent}


def test_a_call_is_below_the_callers_span(spans: Spans) -> None:
    job, call = one(spans["here"], "job"), one(spans["here"], "train")
    assert (call["parent"], call["trace"]) == (job["id"], job["trace"])
    assert call["attributes"]["skyward.pool"] == "traced"
    assert call["attributes"]["skyward.node"] == 0
    assert call["status"] == "UNSET"


def test_a_call_was_queued_sent_and_run(spans: Spans) -> None:
    call, below = one(spans["here"], "train"), parts(spans, "train")
    assert set(below) == {"queued", "sent", "run"}
    for part in below.values():
        assert call["start"] <= part["start"] <= part["end"] <= call["end"]
    assert below["queued"]["end"] <= below["run"]["start"]
    assert below["run"]["attributes"]["skyward.seconds"] > 0


def test_a_span_of_the_function_is_below_run(spans: Spans) -> None:
    epoch, run = one(spans["there"], "epoch"), parts(spans, "train")["run"]
    assert (epoch["parent"], epoch["trace"]) == (run["id"], run["trace"])


def test_a_stream_ends_with_its_last_item_and_a_failure_says_why(spans: Spans) -> None:
    assert one(spans["here"], "items")["status"] == "UNSET"
    assert one(spans["here"], "fail")["status"] == "ERROR ValueError: no data"
    assert len([span for span in spans["here"] if span["name"] == "run"]) == 3


def test_a_program_without_traces_makes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, call_spans.MODULE, raising=False)
    assert call_spans.begin("f", 1, "pool") is None


def test_a_program_that_only_imports_opentelemetry_makes_none() -> None:
    code = "import opentelemetry.trace as t; from skyward.calls import spans as o;"
    code += "t.get_tracer = None; assert o.begin('f', 1, 'p') is None"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200)
