"""The keeper: makes a pool stay, and keeps its record true while this client uses it."""

from __future__ import annotations

import concurrent.futures
import contextlib
import getpass
import os
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable
from typing import TYPE_CHECKING

import msgspec

from skyward.errors import PoolError, PoolStartError
from skyward.nodes import keeping
from skyward.nodes.journal import Journal
from skyward.nodes.keeping import KeptNode, KeptPool
from skyward.nodes.spec import PoolSpec
from skyward.wire.identity import (
    KEPT_LIFETIME,
    LIFETIME,
    Authority,
    Credentials,
    SavedAuthority,
)
from skyward.wire.messages import Keep, Members
from skyward.worker.kept_jobs import JOB

if TYPE_CHECKING:
    from skyward.nodes.node import Node

COMMAND_LENGTH = 200


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


class PoolKeeper:
    """Owns the record of one pool in this process."""

    def __init__(
        self,
        make: Callable[[list[KeptNode]], KeptPool],
        begun: KeptPool | None,
        tell_head: Callable[[Members], bool],
    ) -> None:
        """`make` makes the pool's first record; `begun` is the record of a pool that stays.

        `tell_head` tells the agent of the first node, and returns whether it can be reached.
        """
        self._make, self._tell_head = make, tell_head
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

    def begin(self, nodes: Iterable[Node]) -> None:
        """Write the record, and then let the nodes stay."""
        with self._lock:
            serving = [node for node in nodes if node.serves]
            record = self._make([each for each in map(_facts, serving) if each is not None])
            with keeping.changing(record.name):
                keeping.write(record, new=not _is_stopped(record.name))
            self._begun = record
            for node in serving:
                self._let_stay(node, record)
        concurrent.futures.wait([node.host.after_start() for node in serving])

    def add(self, node: Node) -> None:
        """Let a node stay that has come to a pool that stays."""
        with self._lock:
            facts, record = _facts(node), self._begun
            if record is None or facts is None:
                return
            self._ended.pop(node.index, None)
            if record.node(facts.index) != facts:
                self._change([facts], [])
            elif self._untold:
                self._tell_changes(self._written() or record)
            self._let_stay(node, record)
        concurrent.futures.wait([node.host.after_start()])

    def remove(self, nodes: Iterable[Node]) -> None:
        """Take nodes off the record that leave the pool."""
        with self._lock:
            if self._begun is not None:
                self._change([], [node.index for node in nodes])

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
    async def starting(self, index: int) -> AsyncIterator[KeptPool | None]:
        """Be the only client on this machine that starts a node; yields the record as it is then.

        None, if the pool does not stay or has ended.
        """
        begun = self._begun
        if begun is None:
            yield None
            return
        async with keeping.starting(begun.name, index):
            yield self._written()

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

    def _change(self, added: list[KeptNode], removed: list[int]) -> None:
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
        self._tell_changes(record)

    def _tell_changes(self, record: KeptPool) -> None:
        """Tell the head: who looks at the pool from elsewhere has another copy of the record."""
        there = {node.index: msgspec.to_builtins(node) for node in record.nodes}
        came = [there[index] for index in sorted(self._untold & there.keys())]
        if self._tell_head(Members(came, sorted(self._untold - there.keys()))):
            self._untold = set()

    @staticmethod
    def _let_stay(node: Node, record: KeptPool) -> None:
        node.host.keep()
        node.tell(Keep(record.idle))


def _is_stopped(name: str) -> bool:
    try:
        return keeping.read(name).stopped
    except PoolError:
        return False


def _facts(node: Node) -> KeptNode | None:
    return node.host.facts(node.index)


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
