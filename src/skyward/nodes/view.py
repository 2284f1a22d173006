"""A view: a node as the user sees it."""

from __future__ import annotations

from dataclasses import dataclass

from skyward.nodes.node import Node, State


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node as the user sees it."""

    node: int
    state: State
    address: str
    accelerator: str | None
    accelerators: int
    running: tuple[str, ...]
    """The names of the tasks on the node."""


def view_of(node: Node) -> NodeView:
    """The node as it is now."""
    return NodeView(
        node.index,
        node.state,
        node.host.address,
        node.host.accelerator,
        node.host.accelerators,
        tuple(task.name for lane in node.lanes.values() for task in lane.load.started()),
    )
