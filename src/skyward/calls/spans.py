"""Spans: calls as those of OpenTelemetry, in programs that have set it up."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, Tracer, TracerProvider

MODULE = "opentelemetry.trace"

_kept: tuple[TracerProvider, Tracer] | None = None
"""The program's provider and its tracer for calls: to make one takes longer than to use it."""


class CallTrace:
    """The spans of one call: the call itself, and below it queued, sent and run.

    A task that is given to a worker again, after a loss or because the first was busy, has these
    spans again.
    """

    def __init__(self, tracer: Tracer, span: Span, context: Context) -> None:
        self._tracer, self._span, self._context = tracer, span, context
        self._queued: Span | None = tracer.start_span("queued", context=context)
        self._sent: Span | None = None
        self._run: Span | None = None
        self.carrier: dict[str, str] = {}
        """What the worker needs so that spans of the function are below "run"."""

    def given(self, node: int, worker: int) -> None:
        """Note that a worker was given the call."""
        from opentelemetry import propagate, trace

        self._end_parts()
        where = {"skyward.node": node, "skyward.worker": worker}
        self._span.set_attributes(where)
        self._sent = self._tracer.start_span("sent", context=self._context, attributes=where)
        self._run = self._tracer.start_span("run", context=self._context, attributes=where)
        self.carrier = {}
        propagate.inject(self.carrier, trace.set_span_in_context(self._run, self._context))

    def sent(self) -> None:
        """Note that the call and its arguments have been sent."""
        sent, self._sent = self._sent, None
        if sent is not None:
            sent.end()

    def end(self, seconds: float, problem: str) -> None:
        """End the call's spans; `seconds` is how long the function ran."""
        from opentelemetry.trace import Status, StatusCode

        if self._run is not None:
            self._run.set_attribute("skyward.seconds", seconds)
        for span in (self._run, self._span):
            if span is not None and problem:
                span.set_status(Status(StatusCode.ERROR, problem))
        self._end_parts()
        self._span.end()

    def _end_parts(self) -> None:
        for span in (self._queued, self._sent, self._run):
            if span is not None:
                span.end()
        self._queued = self._sent = self._run = None


def begin(name: str, call: int, pool: str) -> CallTrace | None:
    """The trace of a call that is made now, below the caller's span.

    None unless the program has imported OpenTelemetry and given it a provider: a program that uses
    no traces pays for a look at `sys.modules`, and for one at the provider if a library of its has
    imported OpenTelemetry.
    """
    if MODULE not in sys.modules or (tracer := _tracer()) is None:
        return None
    from opentelemetry import context, trace

    span = tracer.start_span(
        name,
        kind=trace.SpanKind.CLIENT,
        attributes={"skyward.pool": pool, "skyward.call": call, "code.function.name": name},
    )
    if not span.get_span_context().is_valid:
        return None
    return CallTrace(tracer, span, trace.set_span_in_context(span, context.get_current()))


def _tracer() -> Tracer | None:
    """The tracer of the program's provider; None if the program has set none."""
    global _kept
    from opentelemetry import trace

    provider = trace.get_tracer_provider()
    if isinstance(provider, trace.ProxyTracerProvider):
        return None
    if _kept is None or _kept[0] is not provider:
        _kept = provider, provider.get_tracer("skyward")
    return _kept[1]
