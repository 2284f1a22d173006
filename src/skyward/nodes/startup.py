"""Start-up: brings a node from its request to its connected agent, and handles failures."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass

import msgspec

from skyward.calls.dispatch import Dispatcher
from skyward.calls.loop import Loop
from skyward.calls.prospects import Prospects
from skyward.console import Console
from skyward.errors import (
    NodeLostError,
    PoolStartError,
    SkywardError,
    UnavailableError,
)
from skyward.events import EventStream, NodeStarting
from skyward.nodes import provider_loop
from skyward.nodes.briefing import Briefing
from skyward.nodes.contact import Approach, Contacts, connecting
from skyward.nodes.failures import may_pass
from skyward.nodes.host import Host
from skyward.nodes.journal import Journal
from skyward.nodes.keeper import PoolKeeper
from skyward.nodes.keeping import KeptNode, KeptPool
from skyward.nodes.ledger import Ledger
from skyward.nodes.node import RETURN_SECONDS, Node
from skyward.nodes.preparing import Preparer
from skyward.nodes.reaching import found_machines
from skyward.nodes.roster import Roster
from skyward.nodes.spec import PoolSpec
from skyward.nodes.starts import StartLease, Starts
from skyward.providers import Machine, Order
from skyward.wire.channel import Channel
from skyward.wire.frames import Frame
from skyward.wire.identity import Credentials, node_name
from skyward.wire.messages import Hello
from skyward.wire.versions import check_compatible, my_versions

ENDING_SECONDS = 0.1
ENDING_TRIES = 20
"""How often the client tries an agent of this machine that ends the connection at once."""
CLOSE_SECONDS = 30.0
"""How long the end of a pool waits for what its provider still does."""


@dataclass(frozen=True, slots=True)
class Callbacks:
    """The functions that are called for frames of an agent, and for the end of its connection."""

    frame: Callable[[Node, Frame], None]
    """Called with a frame from the agent."""
    ended: Callable[[Node, Channel, BaseException], None]
    """Called when the connection has ended."""


class Startup:
    """Starts nodes, each in a coroutine of its own on the providers' loop."""

    def __init__(
        self,
        pool_id: str,
        spec: PoolSpec,
        roster: Roster,
        loop: Loop,
        dispatcher: Dispatcher,
        prospects: Prospects,
        console: Console,
        journal: Journal,
        ledger: Ledger,
        briefing: Briefing,
        contacts: Contacts,
        preparer: Preparer,
        credentials: Credentials | None,
        callbacks: Callbacks,
        events: EventStream,
        *,
        client: str,
        adopting: Mapping[int, tuple[KeptNode, Machine]],
        keeper: PoolKeeper,
        starts: Starts,
        deliver: Callable[[Node], None] | None,
    ) -> None:
        """`client` is the tenant that this client is.

        `adopting` are the nodes of a pool that stays, `keeper` has its record, and `starts` says
        which of its clients starts a node. `deliver` gives a node its files before it gets tasks;
        None if there are none.
        """
        self._client, self._keeper, self._starts = client, keeper, starts
        self._adopting = dict(adopting)
        self._id, self._spec, self._roster = pool_id, spec, roster
        self._loop, self._dispatcher, self._prospects = loop, dispatcher, prospects
        self._console, self._journal, self._ledger = console, journal, ledger
        self._briefing, self._contacts, self._preparer = briefing, contacts, preparer
        self._credentials = credentials
        self._callbacks = callbacks
        self._events, self._deliver = events, deliver
        self._versions = my_versions()
        self._told_out_of_reach: set[Node] = set()
        self._allocation = spec.provider.allocate(pool_id)

    def new_nodes(self, indexes: Iterable[int]) -> list[Node]:
        """New nodes; their starts have not begun."""
        together = frozenset(indexes)
        self._allocation.expect(together)
        return [
            Node(
                index,
                self._host(index, together=together),
                self._roster.lock,
                events=self._events,
            )
            for index in sorted(together)
        ]

    def _host(
        self, index: int, lost: Host | None = None, together: frozenset[int] = frozenset()
    ) -> Host:
        return Host(
            self._spec.provider,
            self._allocation,
            Order(
                self._id,
                index,
                self._spec.request,
                tell=lambda reason: self._phase(index, reason),
                note=self._console.note,
                name=self._spec.name,
                together=together,
            ),
            self._journal,
            phase=lambda phase: self._phase(index, phase),
            note=self._console.note,
            lost=lost,
            ledger=self._ledger,
        )

    def _phase(self, index: int, phase: str) -> None:
        self._console.phase(index, phase)
        self._events.emit(NodeStarting, index, phase)

    def start(self, node: Node) -> None:
        """Begin to start a new node."""
        self._prospects.expect(node.index)
        node.launch(self._launch)

    def start_again(self, node: Node) -> None:
        """Begin to start a lost or failed node on a new host, unless the node leaves the pool."""
        with self._roster.lock:
            # Without the lock, `close` might stop only the old host.
            if self._roster.closed or not node.start_again(
                lambda lost: self._host(node.index, lost)
            ):
                return
            self._prospects.expect(node.index)
            node.launch(self._launch)

    def _launch(self, node: Node) -> Future[None]:
        starting = provider_loop.submit(self._bring_up(node))
        starting.add_done_callback(_show_failure)
        return starting

    async def _bring_up(self, node: Node) -> None:
        try:
            self._phase(node.index, "starting")
            removal = node.begin_start()
            if removal is not None:
                await asyncio.wait([asyncio.wrap_future(removal)])
            host = node.host
            if await self._adopted(node, host):
                return
            # Of several clients that have lost a node, one starts it, and the others find it.
            async with self._keeper.starting(node.index) as record, self._lease(node) as lease:
                if record is not None and await self._adopted_from(record, lease, node, host):
                    return
                if host.may_return:
                    self._phase(node.index, "creating")
                await host.prepare()
                await host.start(self._briefing.agent_config(node, self._dispatcher.packer.cap))
                self._phase(node.index, "connecting")
                await asyncio.wrap_future(
                    connecting.submit(self._connect, node, host, self._deliver)
                )
                if record is not None:
                    await asyncio.wrap_future(connecting.submit(self._keeper.add, node))
                    await lease.tell(host.facts(node.index))
        except Exception as problem:
            # Any exception of a provider: nothing else would notice that the node never starts.
            await asyncio.wrap_future(connecting.submit(self._start_failed, node, problem))
        finally:
            self._allocation.expect_no_more(node.index)

    async def _adopted(self, node: Node, host: Host) -> bool:
        """Whether the node's agent runs already, in a pool that stays, and is connected now.

        If it was lost and is known to be gone, the node has to be started anew.
        """
        first = self._adopting.pop(node.index, None)
        found = first or host.former
        if found is None:
            return False
        if first is None:
            self._keeper.check_expected(node.index)
        try:
            await self._adopt(node, host, *found)
        except (OSError, EOFError, PoolStartError) as problem:
            if not await _is_over(host, problem):
                raise
            if first is not None:
                raise PoolStartError(f"node {node.index}: its agent is gone ({problem})") from None
            return False
        return True

    def _lease(self, node: Node) -> contextlib.AbstractAsyncContextManager[StartLease]:
        """The lease to start a node of a pool that stays; a new pool needs none."""
        if self._keeper.begun is None:
            return contextlib.nullcontext(StartLease(node.index, None, None))
        return self._starts.lease(node)

    async def _adopted_from(
        self, record: KeptPool, lease: StartLease, node: Node, host: Host
    ) -> bool:
        """Whether another client has started the node meanwhile, and its agent is connected now."""
        former = host.former
        if lease.last is not None and (former is None or lease.last != former[0]):
            # A client on another machine, whose record this one does not see.
            others = [each for each in record.nodes if each.index != node.index]
            record = msgspec.structs.replace(record, nodes=[*others, lease.last])
        recorded = record.node(node.index)
        if former is not None:
            self._keeper.check_expected(node.index)
        if recorded is None or (former is not None and recorded == former[0]):
            return False
        machines = await asyncio.wrap_future(
            connecting.submit(found_machines, record, self._spec.provider)
        )
        found = machines.get(node.index)
        if found is None:
            return False
        try:
            await self._adopt(node, host, *found)
        except (OSError, EOFError, PoolStartError) as problem:
            if not await _is_over(host, problem):
                raise
            return False
        return True

    async def _adopt(self, node: Node, host: Host, kept: KeptNode, machine: Machine) -> None:
        tries = ENDING_TRIES
        while True:
            await host.adopt(kept, machine)
            try:
                # It has its files: another client gave them to it.
                await asyncio.wrap_future(connecting.submit(self._connect, node, host, None))
                return
            except (ConnectionResetError, BrokenPipeError, EOFError):
                # An agent that was killed a moment ago: soon nobody listens there.
                tries -= 1
                if host.may_return or not tries:
                    raise
            await asyncio.sleep(ENDING_SECONDS)

    def _connect(self, node: Node, host: Host, deliver: Callable[[Node], None] | None) -> None:
        control, welcome = Approach(
            host.routes.choose(host.endpoint),
            Hello(
                self._id,
                "control",
                versions=self._versions,
                pid=os.getpid(),
                client=self._client,
            ),
            self._credentials,
            node_name(self._id, node.index),
            host.routes.dial,
            gone="its agent is gone",
        ).attempt()
        if not node.connect(control):
            control.close()
            raise PoolStartError(f"node {node.index} was stopped while it started")
        self._told_out_of_reach.discard(node)
        self._contacts.watch_node(node, control)
        for warning in check_compatible(self._versions, welcome.versions, f"node {node.index}"):
            self._console.note(warning)
        self._phase(node.index, "starting workers")
        if deliver is None:
            self._preparer.node_up(node)
        self._loop.watch(
            control,
            lambda frame: self._callbacks.frame(node, frame),
            lambda problem: self._callbacks.ended(node, control, problem),
        )
        if deliver is not None:
            deliver(node)
            self._preparer.node_up(node)

    def _start_failed(self, node: Node, problem: Exception) -> None:
        out_of_reach = isinstance(problem, (OSError, EOFError))
        if isinstance(problem, SkywardError):
            failure: Exception = problem
        elif out_of_reach:
            failure = PoolStartError(
                f"node {node.index} cannot be reached: {problem}; see that its machine is up, "
                "and that this one may connect to it"
            )
        else:
            failure = PoolStartError(
                f"node {node.index} did not start: {problem!r}; this is a defect of its provider"
            )
            failure.__cause__ = problem
            self.give_up(node, failure, may_help=False)
            return
        if not (out_of_reach and self.await_return(node, failure)):
            self.give_up(node, failure)

    def await_return(self, node: Node, failure: Exception) -> bool:
        """Whether a lost node that is out of reach will be tried again."""
        pause = None if self._roster.closed else node.await_return()
        if pause is None:
            return False
        if node not in self._told_out_of_reach:
            self._told_out_of_reach.add(node)
            self._console.note(
                f"node {node.index} is out of reach: {failure}; it is tried again for "
                f"{RETURN_SECONDS / 60:g} minutes"
            )
        self._phase(node.index, "out of reach")
        self._loop.later(pause, lambda: self.start_again(node))
        return True

    def close(self) -> None:
        """End what the provider still does for the pool, after its last node."""
        with contextlib.suppress(TimeoutError):
            provider_loop.submit(self._allocation.close()).result(CLOSE_SECONDS)

    def give_up(self, node: Node, failure: BaseException, *, may_help: bool = True) -> None:
        """Give a start up; a node that has never been ready is started again later.

        So is a node whose machine the provider does not have at the moment. Without `may_help`,
        waiting is in vain, whatever the failure is.
        """
        may_come = isinstance(failure, UnavailableError)
        may_help = may_help and may_pass(failure)
        with self._roster.lock:
            is_missed = not self._roster.closed and not node.leaves
            served = node.lost_since is not None
            if served and is_missed:
                failure = PoolStartError(
                    f"node {node.index} was lost and did not come back: {failure}"
                )
            first = node.retries.failed == 0
            failed = node.fail(failure, retry=may_come or not node.joined, may_help=may_help)
            # Under the same lock: a caller who sees the failure may call again at once.
            given_up = node.retries.at is None
            awaits_call = failed and self._awaits_call()
            control, lanes = node.release()
        if control is not None:
            self._loop.forget(control)
        for lane in lanes:
            self._loop.forget(lane.channel)
            self._dispatcher.lose(
                lane, lambda task: NodeLostError(f"{task.name} lost node {node.index}: {failure}")
            )
        node.remove_machine()
        if any(lane.preparation.begun for lane in lanes):
            self._preparer.regroup()
        if not failed:
            return
        failure = node.failure or failure
        self._console.phase(node.index, "failed")
        if given_up:
            self.tell_given_up(node, failure)
        if awaits_call:
            self._console.note(f"no node could be started: {failure}; the next call tries again")
            self._dispatcher.fail_waiting(failure)
        elif not given_up and self._roster.serves and first:
            self.tell_retry(node)
        self._dispatcher.fail_unrunnable()
        self._preparer.node_failed()

    def _awaits_call(self) -> bool:
        """Whether only the user can help the pool; then its nodes are tried again at a call."""
        with self._roster.lock:
            nodes = self._roster.nodes
            if self._roster.closed or not self._roster.serves or any(n.is_coming for n in nodes):
                return False
            waiting = [node for node in nodes if node.is_expected]
            for node in waiting:
                node.await_call()
            return bool(waiting)

    def tell_given_up(self, node: Node, failure: BaseException) -> None:
        """Tell the user, and the tasks that wait, that a node will not be started again."""
        if not self._roster.closed:
            self._console.note(str(failure))
        self._prospects.fail(node.index, failure, alike=node.retries.exhausted)

    def tell_retry(self, node: Node) -> None:
        """Tell the user once that a node is missing and will be started again."""
        self._console.note(
            f"node {node.index} could not be started: {node.failure}; it is tried again, "
            "less and less often"
        )


async def _is_over(host: Host, problem: Exception) -> bool:
    """Whether a failure to connect says that the agent has ended, or its machine has."""
    if isinstance(problem, (ConnectionRefusedError, FileNotFoundError)):
        return True
    return await host.is_over()


def _show_failure(starting: Future[None]) -> None:
    """Show an error of Skyward itself: nobody else looks at it."""
    if not starting.cancelled() and (problem := starting.exception()) is not None:
        traceback.print_exception(problem, file=sys.stderr)
