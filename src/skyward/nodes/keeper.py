"""The keeper: makes a pool stay, and keeps its record true while this client uses it.

Of the clients of a pool that stays, one starts a lost node, wherever they are. An agent that is
left decides which: the first of the nodes that a client can reach. If there is none, a client knows
only of those on its own machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import os
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import Any

import msgspec

from skyward.errors import PoolError, PoolStartError, SkywardError
from skyward.nodes import keeping
from skyward.nodes.journal import Journal
from skyward.nodes.keeping import KeptNode, KeptPool
from skyward.nodes.provider_loop import connecting
from skyward.nodes.spec import PoolSpec
from skyward.wire.asking import ServiceConnection
from skyward.wire.identity import (
    KEPT_LIFETIME,
    LIFETIME,
    Authority,
    Credentials,
    SavedAuthority,
)
from skyward.wire.messages import Members
from skyward.worker.jobs import JOB

COMMAND_LENGTH = 200
LOOK_SECONDS = 0.2
ANSWER_SECONDS = 10.0
"""How long an agent may take to answer; after that, the next node's agent is asked."""
LONGEST_SECONDS = 1800.0
"""How long another client may take to start a node: it may wait in a queue for the machine."""

Agents = Callable[[], Mapping[int, Callable[[], ServiceConnection]]]
"""How to ask each of the agents that are connected, by the indexes of their nodes."""


def identity() -> dict[str, str]:
    """Who this client is, for the other clients of a pool."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):
        user = str(os.getuid())
    if job := os.environ.get(JOB):
        command = f"job {job}"
    else:
        command = " ".join([os.path.basename(sys.executable or "python"), *sys.argv])
    return {
        "user": user,
        "host": socket.gethostname(),
        "pid": str(os.getpid()),
        "command": command[:COMMAND_LENGTH],
    }


class StartLease:
    """The right to start one node, and what others have told of its last start."""

    def __init__(
        self, node: int, connection: ServiceConnection | None = None, facts: Any = None
    ) -> None:
        self._node, self._connection = node, connection
        self.last: KeptNode | None = msgspec.convert(facts, KeptNode) if facts else None
        """The node as the client has told that started it last; None if none did."""
        self.record: KeptPool | None = None
        """The pool's record as it is now; None if the pool does not stay or has ended."""

    async def tell(self, facts: KeptNode | None) -> None:
        """Tell those who wait what the node is now."""
        if self._connection is None or facts is None:
            return
        # If the agent is lost, too, its node is started next, and so are those who asked it.
        with contextlib.suppress(SkywardError, OSError, EOFError):
            told = msgspec.to_builtins(facts)
            await _asked(self._connection, "started", node=self._node, facts=told)


class PoolKeeper:
    """Owns the record of one pool in this process.

    `tell_head` of its methods tells the agent of the first node, and returns whether it can be
    reached.
    """

    def __init__(self, begun: KeptPool | None) -> None:
        """`begun` is the record of a pool that stays."""
        self._lock = threading.Lock()
        self._begun = begun
        self._ended: dict[int, str] = {}
        """The nodes that others have ended, and who did."""
        self._untold: set[int] = set()
        """The nodes that have changed while the head could not be reached."""

    @property
    def begun(self) -> KeptPool | None:
        """The record as this client knows it; None while the pool does not stay yet."""
        return self._begun

    def begin(self, record: KeptPool) -> None:
        """Write the record of a pool that stays from now on."""
        with self._lock:
            with keeping.changing(record.name):
                keeping.write(record, new=not _is_stopped(record.name))
            self._begun = record

    def add(self, facts: KeptNode, tell_head: Callable[[Members], bool]) -> KeptPool | None:
        """Have a node on the record of a pool that stays; None if the pool does not."""
        with self._lock:
            record = self._begun
            if record is None:
                return None
            self._ended.pop(facts.index, None)
            if record.node(facts.index) != facts:
                self._change([facts], [], tell_head)
            elif self._untold:
                self._tell_changes(self._written() or record, tell_head)
            return record

    def remove(self, indexes: Iterable[int], tell_head: Callable[[Members], bool]) -> None:
        """Take nodes off the record that leave the pool."""
        with self._lock:
            if self._begun is not None:
                self._change([], indexes, tell_head)

    def note_end(self, index: int, by: str) -> None:
        """Note that somebody ends a node: an imported record would not say so."""
        self._ended[index] = by

    def check_expected(self, index: int) -> None:
        """Refuse a node that the pool no longer has, by its record: another client has ended it."""
        if self._begun is None:
            return
        if index in self._ended:
            raise PoolStartError(
                f"node {index} was ended by {self._ended[index]}; `sky ps` shows what there is"
            )
        record = self._written()
        if record is None or record.node(index) is None:
            raise PoolStartError(
                f"node {index} was taken out of the pool, or the pool has ended; `sky ps` shows "
                "what there is"
            )

    @contextlib.asynccontextmanager
    async def starting(
        self, index: int, agents: Agents, waits: Callable[[], bool]
    ) -> AsyncIterator[StartLease]:
        """Be the only client that starts a node, on this machine and as far as agents can say so.

        A new pool needs no lease. `waits` says whether the node is still to be started.
        """
        begun = self._begun
        if begun is None:
            yield StartLease(index)
            return
        async with keeping.starting(begun.name, index):
            record = self._written()
            async with leased(index, agents, waits) as lease:
                lease.record = record
                yield lease

    def _written(self) -> KeptPool | None:
        """The record as other clients see it; None if the pool has ended."""
        assert self._begun is not None
        try:
            found = keeping.read(self._begun.name)
        except PoolError:
            return None
        return found if found.id == self._begun.id else None

    def forget(self) -> None:
        """Remove the record: the pool has ended."""
        with self._lock:
            record, self._begun = self._begun, None
        if record is not None:
            keeping.forget(record.name, record.id)

    def _change(
        self, added: list[KeptNode], removed: Iterable[int], tell_head: Callable[[Members], bool]
    ) -> None:
        assert self._begun is not None
        with keeping.changing(self._begun.name):
            try:
                record = keeping.read(self._begun.name)
            except PoolError:
                # Another client has ended the pool.
                return
            if record.id != self._begun.id:
                return
            gone = {*removed, *(node.index for node in added)}
            left = [node for node in record.nodes if node.index not in gone]
            record.nodes = sorted([*left, *added], key=lambda node: node.index)
            keeping.write(record)
            self._begun = record
        self._untold |= gone
        self._tell_changes(record, tell_head)

    def _tell_changes(self, record: KeptPool, tell_head: Callable[[Members], bool]) -> None:
        """Tell the head: who looks at the pool from elsewhere has another copy of the record."""
        there = {node.index: msgspec.to_builtins(node) for node in record.nodes}
        came = [there[index] for index in sorted(self._untold & there.keys())]
        if tell_head(Members(came, sorted(self._untold - there.keys()))):
            self._untold = set()


@contextlib.asynccontextmanager
async def leased(
    index: int, agents: Agents, waits: Callable[[], bool]
) -> AsyncIterator[StartLease]:
    """Be the only client that starts a node, as far as an agent is left to say so."""
    async with contextlib.AsyncExitStack() as held:
        deadline = time.monotonic() + LONGEST_SECONDS
        silent: set[int] = set()
        found = None
        while found is None:
            asked = {each: ask for each, ask in agents().items() if each not in silent}
            if not asked or not waits() or time.monotonic() > deadline:
                found = StartLease(index)
                break
            first = next(iter(asked))
            try:
                found = await _granted(
                    index, asked[first], held, lambda: waits() and time.monotonic() < deadline
                )
            except TimeoutError:
                silent.add(first)
            except (SkywardError, OSError, EOFError):
                # The agent that was asked is gone.
                await asyncio.sleep(LOOK_SECONDS)
        yield found


async def _granted(
    index: int,
    agent: Callable[[], ServiceConnection],
    held: contextlib.AsyncExitStack,
    waits: Callable[[], bool],
) -> StartLease:
    """Wait for the lease that an agent grants to one client after the other."""
    opening = connecting.submit(agent)
    try:
        connection = await asyncio.wait_for(asyncio.wrap_future(opening), ANSWER_SECONDS)
    except (TimeoutError, asyncio.CancelledError):
        opening.add_done_callback(_close_late)
        raise
    held.callback(_close, connection)
    while True:
        told = await _asked(connection, "start", node=index)
        if told["granted"] or not waits():
            return StartLease(index, connection, told["facts"])
        await asyncio.sleep(LOOK_SECONDS)


async def _asked(connection: ServiceConnection, what: str, **arguments: Any) -> Any:
    asked = connecting.submit(connection.ask, what, **arguments)
    try:
        return await asyncio.wait_for(asyncio.wrap_future(asked), ANSWER_SECONDS)
    except TimeoutError:
        # Frees the thread that waits for the answer.
        connection.channel.abort()
        raise


def _close_late(opening: Future[ServiceConnection]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        _close(opening.result())


def _close(connection: ServiceConnection) -> None:
    with contextlib.suppress(OSError):
        connection.close()


def _is_stopped(name: str) -> bool:
    try:
        return keeping.read(name).stopped
    except PoolError:
        return False


def authority_of(pool: str, spec: PoolSpec, record: KeptPool | None) -> Authority:
    """The authority of a pool: a new one, or that of its record."""
    if record is not None and record.authority is not None:
        return Authority(pool, SavedAuthority(*record.authority))
    return Authority(pool, lifetime=LIFETIME if spec.keep is None else KEPT_LIFETIME)


def new_record(
    pool: str,
    spec: PoolSpec,
    authority: Authority | None,
    client: Credentials | None,
    hourly_cost: float | None,
    nodes: list[KeptNode],
) -> KeptPool:
    """The first record of a pool that stays; `client` are its client's credentials."""
    saved = authority.save() if authority is not None else None
    ttl = spec.request.ttl
    return KeptPool(
        id=pool,
        name=spec.name,
        provider=spec.provider.name,
        arguments=dict(spec.provider.describe()),
        created=time.time(),
        idle=spec.keep or 0.0,
        ends=None if ttl is None else time.time() + ttl,
        hourly_cost=hourly_cost,
        authority=(saved.certificate, saved.key) if saved else None,
        credentials=(client.authority, client.certificate, client.key) if client else None,
        spec=spec.recorded,
        nodes=nodes,
    )


def note_pool(journal: Journal, record: KeptPool) -> None:
    """Have the journal know a pool that stays and was made on another machine."""
    if any(pool.id == record.id for pool in journal.pools()):
        return
    cost = record.hourly_cost
    price = cost / len(record.nodes) if cost is not None and record.nodes else None
    journal.open_pool(record.id, record.name, record.provider, record.arguments, price)
    for node in record.nodes:
        journal.intend(record.id, node.index)
        journal.made(record.id, node.index, node.machine, node.address, price, record.created)
