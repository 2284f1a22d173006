"""A program that traces its calls, and prints the spans of both sides as JSON."""

from __future__ import annotations

import contextlib
import json
from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import skyward as sky


def row(span: ReadableSpan) -> dict[str, Any]:
    assert span.context is not None
    assert span.start_time is not None
    assert span.end_time is not None
    return {
        "name": span.name,
        "trace": span.context.trace_id,
        "id": span.context.span_id,
        "parent": span.parent.span_id if span.parent else None,
        "start": span.start_time,
        "end": span.end_time,
        "attributes": dict(span.attributes or {}),
        "status": f"{span.status.status_code.name} {span.status.description or ''}".strip(),
    }


def recorded() -> InMemorySpanExporter:
    """An exporter that keeps the spans of this process."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    return exporter


@sky.function
def train(x: int) -> list[dict[str, Any]]:
    exporter = recorded()
    with trace.get_tracer("mine").start_as_current_span("epoch"):
        pass
    return [row(span) for span in exporter.get_finished_spans()]


@sky.function
def items() -> Any:
    yield 1
    yield 2


@sky.function
def fail() -> None:
    raise ValueError("no data")


def main() -> None:
    exporter = recorded()
    with sky.Compute(name="traced", options=sky.Options(console=False)) as compute:
        with trace.get_tracer("mine").start_as_current_span("job"):
            there = train(1) >> compute
            list(items() >> compute)
        with contextlib.suppress(ValueError):
            fail() >> compute
    here = [row(span) for span in exporter.get_finished_spans()]
    print(json.dumps({"here": here, "there": there}))


if __name__ == "__main__":
    main()
