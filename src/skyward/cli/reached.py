"""Pools that stay, as commands name them: `train`, and a node of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skyward.errors import ConfigurationError

if TYPE_CHECKING:
    from skyward.nodes.reaching import ReachedPool


def reached(name: str) -> ReachedPool:
    """The pool of that name; the caller closes it."""
    # Imported here, as in every command: help and completion need none of it.
    from skyward.compute.attaching import reach

    return reach(name)


def chosen_node(pool: ReachedPool, node: int | None) -> int:
    """A node of the pool; the head if none is given."""
    there = sorted(pool.nodes)
    if not there:
        raise ConfigurationError(f"{pool.record.name} has no node now")
    if node is None:
        return there[0]
    if node not in there:
        listed = ", ".join(map(str, there))
        raise ConfigurationError(f"{pool.record.name} has no node {node}; its nodes are: {listed}")
    return node
