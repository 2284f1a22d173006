"""A quote: what a pool is about to start, and its price."""

from __future__ import annotations

from skyward.nodes.spec import PoolSpec
from skyward.providers import sells


def quoted(spec: PoolSpec) -> str:
    """What a pool starts with, and its price if that costs money; may ask the provider.

    Raises `UnavailableError` if a provider that sells machines does not answer.
    """
    count, provider = spec.nodes.desired, spec.provider
    if not sells(provider):
        return f"{number_of_nodes(count)} ({type(provider).__name__.lower()})"
    first = next(iter(provider.offers(spec.request)), None)
    if first is None:
        return f"{number_of_nodes(count)} ({provider.name}), price unknown"
    return first.of(count)


def number_of_nodes(count: int) -> str:
    """So many nodes, in words."""
    return f"{count} node{'s' if count != 1 else ''}"
