"""Tracing on a worker: a function runs below the span of its call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def below(carrier: dict[str, str]) -> Iterator[None]:
    """Make the call's span the current one, if the worker has OpenTelemetry."""
    try:
        # Imported here: only calls of programs with traces need it.
        from opentelemetry import context, propagate
    except ImportError:
        yield
        return
    token = context.attach(propagate.extract(carrier))
    try:
        yield
    finally:
        context.detach(token)
