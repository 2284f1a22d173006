"""A snapshot: a pool as HTML, as it is at one moment, for notebooks."""

from __future__ import annotations

from collections import Counter

from skyward.console import html
from skyward.console.measures import of_size, size
from skyward.nodes.fleet import Fleet, NodeUsage
from skyward.nodes.node import NodeView
from skyward.nodes.spec import PoolSpec
from skyward.providers import money

SHOWN_NODES = 32
"""Of more nodes, the others are shown as numbers."""
SHOWN_CALLS = 3
USAGE_SECONDS = 0.4
"""How long a snapshot waits for all nodes together to say how busy they are."""
_KINDS = {"ready": "good", "lost": "bad", "failed": "bad"}


def unstarted(name: str, spec: PoolSpec) -> str:
    """A pool that has not been started."""
    count = spec.nodes.desired
    what = f"{type(spec.provider).__name__}, {count} node{'s' if count != 1 else ''}"
    start = html.line(html.muted("start it with"), html.code("compute.start()"))
    return html.block(_head(name, "idle", "not started", what), start)


def snapshot(name: str, fleet: Fleet) -> str:
    """A pool that has been started: its nodes, what they run and how busy they are."""
    provider = type(fleet.spec.provider).__name__
    if fleet.closed:
        return html.block(_head(name, "idle", "closed", provider), _numbers(fleet))
    views = fleet.views()
    shown, others = views[:SHOWN_NODES], views[SHOWN_NODES:]
    usages = fleet.usages([view.node for view in shown], USAGE_SECONDS)
    ready = sum(view.state == "ready" for view in views)
    state = f"{ready} of {len(views)} ready" if ready != len(views) else f"{ready} ready"
    headings = ["node", "state", "address", "runs", "CPU", "memory"]
    has_gpus = any(view.accelerator for view in shown) or any(u.gpus for u in usages.values())
    if has_gpus:
        headings.append("accelerator")
    rows = [_row(view, usages.get(view.node), has_gpus=has_gpus) for view in shown]
    more = ""
    if others:
        counts = Counter(view.state for view in others)
        words = ", ".join(f"{count} {state}" for state, count in counts.items())
        more = html.line(html.muted(f"and {len(others)} more: {words}"))
    head = _head(name, "good" if ready else "busy", state, provider)
    return html.block(head, html.table(headings, rows), more, _numbers(fleet))


def _head(name: str, kind: str, state: str, what: str) -> str:
    return html.line(html.strong(name), html.mark(kind, state), html.muted(what))


def _row(view: NodeView, usage: NodeUsage | None, *, has_gpus: bool) -> list[str]:
    cells = [
        html.plain(str(view.node)),
        html.mark(_KINDS.get(view.state, "busy"), view.state),
        html.code(view.address),
        _runs(view.running),
    ]
    if usage is None:
        cells += [html.muted("–"), html.muted("–")]
    else:
        processors = html.bar(usage.cpu_percent / 100, f"{usage.cpu_percent:.0f}%", width=60)
        part = usage.memory_used / max(1, usage.memory_total)
        words = of_size(usage.memory_used, usage.memory_total)
        cells += [processors, html.bar(part, words, width=60)]
    if has_gpus:
        cells.append(_gpus(view, usage))
    return cells


def _runs(running: tuple[str, ...]) -> str:
    counts = Counter(running)
    names = [name if count == 1 else f"{count} × {name}" for name, count in counts.items()]
    text = ", ".join(names[:SHOWN_CALLS])
    if len(names) > SHOWN_CALLS:
        text += f" and {len(names) - SHOWN_CALLS} more"
    return html.code(text) if text else html.muted("nothing")


def _gpus(view: NodeView, usage: NodeUsage | None) -> str:
    if usage is None or not usage.gpus:
        name = f"{view.accelerators} × {view.accelerator}" if view.accelerator else "none"
        return html.muted(name)
    lines = []
    for gpu in usage.gpus:
        busy = "" if gpu.percent is None else f"{gpu.percent:.0f}%, "
        words = f"{busy}{of_size(gpu.memory_used, gpu.memory_total)}"
        fraction = (gpu.percent or 0.0) / 100
        lines.append(html.line(html.plain(gpu.name), html.bar(fraction, words, width=60)))
    return "".join(lines)


def _numbers(fleet: Fleet) -> str:
    sent, received = fleet.dispatcher.traffic()
    counts = fleet.dispatcher.counts
    # A pool of which only devices are used makes no calls.
    parts = [str(counts)] if counts.submitted else []
    parts.append(f"{size(sent)} sent, {size(received)} received")
    cost, hourly = fleet.ledger.cost, fleet.ledger.hourly_cost
    if cost:
        parts.append(f"{money(cost)} so far" + (f", {money(hourly)} an hour" if hourly else ""))
    return html.line(html.muted(" · ".join(parts)))
