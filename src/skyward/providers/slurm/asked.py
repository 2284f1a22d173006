"""A job that was asked for: the nodes of the pool that it is for, and what became of them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from skyward.providers import Order
from skyward.providers.slurm.machine import SlurmMachine


@dataclass(eq=False)
class AskedJob:
    """One job, as one event loop sees it."""

    nodes: list[int] = field(default_factory=list)
    orders: dict[int, Order] = field(default_factory=dict)
    waiting: dict[int, asyncio.Future[SlurmMachine]] = field(default_factory=dict)
    id: str = ""
    is_closed: bool = False
    """Whether it takes no more nodes."""
    submitted: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it is known whether there is a job."""
    released: set[int] = field(default_factory=set)
    hosts: dict[int, str] = field(default_factory=dict)
    has_run: bool = False
    is_given_up: bool = False
    """Whether nobody will order its nodes again."""
    is_cancelled: bool = False
    """Whether the pool itself has cancelled it."""
    following: asyncio.Task[None] | None = None
    giving_up: asyncio.Task[None] | None = None
    settling: asyncio.Task[None] | None = None
    """The task that gives nodes back, unless it has begun."""

    @property
    def is_being_given_up(self) -> bool:
        """Whether it is being cancelled because it did not run in time."""
        return self.giving_up is not None and not self.giving_up.done()

    @property
    def is_complete(self) -> bool:
        """Whether all nodes have been ordered that are to come together."""
        return all(order.together <= self.orders.keys() for order in self.orders.values())

    def add(self, order: Order) -> asyncio.Future[SlurmMachine]:
        """Have the job include a node, and give what will be the node's machine."""
        self.orders[order.node] = order
        self.released.discard(order.node)
        if order.node not in self.nodes:
            self.nodes.append(order.node)
        found = self.waiting.get(order.node)
        if found is None or found.done():
            found = self.waiting[order.node] = asyncio.get_running_loop().create_future()
        return found

    def fail(self, problem: BaseException) -> None:
        """Tell every node that waits that it will not have a machine."""
        for future in self.waiting.values():
            if not future.done():
                future.set_exception(problem)
                future.exception()  # Nobody may be waiting for it any more.
