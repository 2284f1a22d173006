"""A quote: what a pool is about to start, and its price."""

from __future__ import annotations

from skyward.market import money
from skyward.nodes.spec import PoolSpec
from skyward.providers import sells
from skyward.spec import Nodes


def quoted(spec: PoolSpec) -> str:
    """What a pool starts with, and its price if that costs money; may ask the provider.

    Raises `UnavailableError` if a provider that sells machines does not answer.
    """
    count, provider = spec.nodes.desired, spec.provider
    if not sells(provider):
        return f"{_nodes(count)} ({type(provider).__name__.lower()})"
    first = next(iter(provider.offers(spec.request)), None)
    if first is None:
        return f"{_nodes(count)} ({provider.name}); no offer fulfils the request"
    return first.of(count) if count else f"{_nodes(count)}; each will be {first}"


def readiness(there: int, nodes: Nodes, seconds: float, price: float | None) -> str:
    """How many of a pool's nodes are ready, after how long, and what they cost in an hour."""
    if not nodes.desired:
        return f"no nodes yet, up to {nodes.ceiling} when calls come"
    ready, more = _nodes(nodes.desired), ""
    if there != nodes.desired:
        ready, more = f"{there} of {ready}", "; it goes on with the others"
    cost = f", {money(price)} an hour" if price else ""
    return f"{ready} ready in {seconds:.1f} s{cost}{more}"


def without_end(spec: PoolSpec, price: float | None) -> str:
    """The warning that a pool that stays costs money with no end in sight; empty if it does not."""
    if spec.keep != 0 or spec.request.ttl is not None or not sells(spec.provider):
        return ""
    cost = "an unknown price" if price is None else f"{money(price)} an hour"
    return (
        f"{spec.name} stays until `sky down {spec.name}`, at {cost}; ttl=SECONDS ends it in any "
        "case, keep=SECONDS when nobody uses it for so long"
    )


def _nodes(count: int) -> str:
    if not count:
        return "with no nodes"
    return f"{count} node{'s' if count != 1 else ''}"
