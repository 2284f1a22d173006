"""The allocation of providers that ask for several machines at once, in one job or one purchase.

The nodes of a pool that start together order their machines one by one. The allocation gathers the
orders of a moment, has the provider ask once, and hands the machines out as they come, in any
order. It gathers the nodes that are given back as well, keeps the places of lost machines for a
while, and gives up nodes that have waited too long.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic

from skyward.errors import PoolError, PoolStartError
from skyward.providers import Allocation, M, Order

GATHER_SECONDS = 0.05
"""How long nodes that are given back wait for others that are given back as well."""
EXPECT_SECONDS = 30.0
"""How long nodes that have been ordered wait for the next one of those that are expected."""
REORDER_SECONDS = 10.0
"""How long the place of a lost machine is kept: its node is ordered again at once."""


@dataclass(eq=False)
class WantedMachine(Generic[M]):
    """A node that has been ordered, and what will be its machine."""

    order: Order
    machine: asyncio.Future[M] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    asked: bool = False
    """Whether the provider may have been asked for it."""
    is_given_up: bool = False
    """Whether nobody waits for it any more, also while the provider is being asked."""

    @property
    def waits(self) -> bool:
        """Whether the node has neither a machine nor a reason why there is none."""
        return not self.machine.done()

    @property
    def has_machine(self) -> bool:
        """Whether the node has got its machine."""
        done = self.machine.done() and not self.machine.cancelled()
        return done and self.machine.exception() is None

    def refuse(self, problem: BaseException) -> None:
        """Tell the node, if it waits, why it has no machine."""
        if self.waits:
            self.machine.set_exception(problem)
            self.machine.exception()  # Nobody may be waiting for it any more.


class SharedAllocation(Allocation[M]):
    """The machines of one pool, which its provider makes several at a time.

    A provider says in a subclass how to `ask` for nodes, how to `shrink` to those that are left,
    how to `remove` everything, and what exists (`find`). One whose machines have nothing in common
    says instead how to `release` one node.
    """

    timeout: float | None = None
    """How many seconds a node waits for its machine."""

    def __init__(self, pool: str) -> None:
        self.pool = pool
        self.wanted: dict[int, WantedMachine[M]] = {}
        """The nodes that were ordered here, and not given back."""
        self.others: set[int] = set()
        """The nodes of the pool that other clients have ordered, as far as they are known."""
        self.closed = False
        self._expected: set[int] = set()
        self._arrived = asyncio.Event()
        self._asking: asyncio.Task[None] | None = None
        self._changing = asyncio.Lock()
        """Held while the provider is asked, or gets nodes back."""
        self._released: set[int] = set()
        self._releasing: asyncio.Task[None] | None = None
        self._lost: set[int] = set()
        """The nodes that lost their machines, and whose places are kept for a while."""
        self._tasks: set[asyncio.Task[Any]] = set()

    # What the provider does.

    async def ask(self, nodes: Sequence[int]) -> None:
        """Ask for machines for these nodes, once, and see that `give` or `refuse` follows for each.

        May return before the machines are there. What it raises, all nodes that wait are told.
        """
        raise NotImplementedError

    async def shrink(self, gone: Sequence[int]) -> None:
        """Give the machines of these nodes back, and wait for their end; `nodes` has the rest."""
        raise NotImplementedError

    async def remove(self) -> None:
        """Remove everything of the pool, and wait for its end: no node is left."""
        raise NotImplementedError

    def late(self, order: Order, seconds: float) -> PoolStartError:
        """Why a node that has waited so long has no machine, and what the user can do."""
        return PoolStartError(f"node {order.node}: no machine came within {seconds:.0f} s")

    async def cancelled(self, node: int) -> None:
        """Do what is needed when nobody waits any more for a node that was asked for.

        Without this, the machine stays, and `find` has it.
        """

    # What the pool does.

    def expect(self, nodes: Iterable[int]) -> None:
        """Ask for these nodes together."""
        self._expected.update(nodes)

    def expect_no_more(self, node: int) -> None:
        """Ask for the others without this node."""
        self._expected.discard(node)
        self._arrived.set()

    async def get(self, order: Order) -> M:
        """A machine for a node, asked for together with those of other nodes."""
        node = order.node
        wanted = self.wanted[node] = WantedMachine[M](order)
        self.others.discard(node)
        self._released.discard(node)
        self._lost.discard(node)
        self.expect_no_more(node)
        self._ask_soon()
        try:
            async with asyncio.timeout(self.timeout) as limit:
                return await asyncio.shield(wanted.machine)
        except asyncio.CancelledError:
            if self.wanted.get(node) is wanted:
                # If the machine cannot be given back, who cancels looks for it, and `sky down`.
                with contextlib.suppress(PoolError):
                    await self._settle(node, wanted)
            raise
        except Exception as failure:
            problem = failure
            if limit.expired() and self.timeout is not None:
                problem = self.late(order, self.timeout)
            await self._give_up(node, wanted, problem)
            if problem is failure:
                raise
        raise problem

    def give(self, node: int, machine: M) -> None:
        """Hand a machine out to the node that it is for, unless another node has it."""
        wanted = self.wanted.get(node)
        if wanted is None or not wanted.waits:
            return
        for other, each in self.wanted.items():
            if each.has_machine and each.machine.result().id == machine.id:
                wanted.refuse(
                    PoolStartError(
                        f"node {node}: the provider gave it {machine.id}, which node {other} has; "
                        "its next start asks for another"
                    )
                )
                return
        wanted.machine.set_result(machine)

    def refuse(self, nodes: Iterable[int], problem: BaseException) -> None:
        """Tell nodes that wait why they have no machine."""
        for node in list(nodes):
            if node in self.wanted:
                self.wanted[node].refuse(problem)

    @property
    def nodes(self) -> list[int]:
        """All nodes that the provider is to have machines for."""
        return sorted(self.wanted.keys() | self.others)

    @property
    def waiting(self) -> list[int]:
        """The nodes that wait for their machines."""
        return sorted(node for node, wanted in self.wanted.items() if wanted.waits)

    def tell(self, what: str) -> None:
        """Tell the nodes that wait what they wait for."""
        for node in self.waiting:
            self.wanted[node].order.tell(what)

    async def release(self, node: int, *, lost: bool = False) -> None:
        """Give a node's machine back, together with those of other nodes.

        The place of a machine that is `lost` is kept for a while: its node is ordered again, and a
        provider that replaces machines by itself does so.
        """
        wanted = self.wanted.pop(node, None)
        self.others.discard(node)
        if wanted is not None and wanted.waits:
            wanted.machine.cancel()
        if lost and not self.closed:
            self._lost.add(node)
            self._begin(self._release_later(node))
            return
        self._released.add(node)
        if self._releasing is None:
            self._releasing = self._begin(self._release())
        await asyncio.shield(self._releasing)

    async def close(self) -> None:
        """Give back the places that were kept for lost machines, and end all tasks."""
        self.closed = True
        lost, self._lost = self._lost, set()
        with contextlib.suppress(PoolError):
            await asyncio.gather(*map(self.release, lost))
        if self._asking is not None:
            self._asking.cancel()
        # Nobody else waits for a place whose time was over a moment ago.
        if self._releasing is not None:
            await asyncio.wait({self._releasing})
        async with self._changing:
            pass
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Begin a task that ends with the allocation; if it fails, all nodes that wait fail."""
        task = self._begin(work)
        task.add_done_callback(self._check)
        return task

    def _begin(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # Who waits for the task has it.

    def _check(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (problem := task.exception()) is not None:
            self.refuse(self.wanted, problem)

    def ask_again(self) -> None:
        """Ask for the nodes that wait once more: what they were asked for with is gone."""
        for wanted in self.wanted.values():
            wanted.asked = wanted.asked and not wanted.waits
        self._ask_soon()

    def _ask_soon(self) -> None:
        if self._asking is None or self._asking.done():
            self._asking = self.start(self._ask())

    async def _ask(self) -> None:
        """Ask for the nodes that were ordered, when all that are expected have been."""
        while True:
            while self._expected:
                self._arrived.clear()
                try:
                    await asyncio.wait_for(self._arrived.wait(), EXPECT_SECONDS)
                except TimeoutError:
                    # Another client may be starting the node, for as long as that takes.
                    self._expected.clear()
            # Nodes that nobody expected may come together all the same, such as lost ones.
            await asyncio.sleep(GATHER_SECONDS)
            if self._expected:
                continue
            async with self._changing:
                nodes = sorted(node for node, wanted in self.wanted.items() if not wanted.asked)
                if not nodes:
                    return
                for node in nodes:
                    self.wanted[node].asked = True
                try:
                    await self.ask(nodes)
                except Exception as problem:
                    self.refuse(nodes, problem)

    async def _settle(self, node: int, wanted: WantedMachine[M]) -> None:
        """After a cancelled `get`, forget a node that nobody was asked for, or that was refused."""
        if not wanted.asked:
            del self.wanted[node]
            return
        wanted.is_given_up = True
        async with self._changing:
            pass  # Whether there is a machine is known after the request.
        if self.wanted.get(node) is not wanted:
            return
        if wanted.waits or wanted.has_machine:
            wanted.machine.cancel()
            await self.cancelled(node)
        else:
            await self.release(node)

    async def _give_up(self, node: int, wanted: WantedMachine[M], problem: Exception) -> None:
        """Leave nothing of a node without a machine; what fails now is noted on the problem."""
        if self.wanted.get(node) is not wanted:
            return
        wanted.refuse(problem)
        try:
            if wanted.asked:
                await self.release(node)
            else:
                del self.wanted[node]
        except PoolError as failure:
            if isinstance(problem, PoolStartError):
                problem.leaves_machine = True
            if str(failure) not in getattr(problem, "__notes__", ()):
                problem.add_note(str(failure))  # Once, if several nodes have one problem.

    async def _release(self) -> None:
        # The other nodes of the pool may be released as well.
        await asyncio.sleep(GATHER_SECONDS)
        async with self._changing:
            gone, self._released, self._releasing = sorted(self._released), set(), None
            if not gone:
                return  # All of them were ordered again.
            if self.nodes or self._lost:
                await self.shrink(gone)
            else:
                await self.remove()

    async def _release_later(self, node: int) -> None:
        await asyncio.sleep(REORDER_SECONDS)
        if node in self._lost:
            self._lost.discard(node)
            # Where it fails, `sky down` finds what is left.
            with contextlib.suppress(PoolError):
                await self.release(node)
