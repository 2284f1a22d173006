"""The journal: which machines pools have made, written down before they are made.

It is a small SQLite file in the user's state directory (or `SKYWARD_STATE`), so that what a killed
process left behind can be found and removed: `sky ps` and `sky down` work from it.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sqlite3
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import platformdirs
import psutil

from skyward.errors import PoolStartError

_SCHEMA = """
create table if not exists pools (
    id text primary key, name text not null, provider text not null, arguments text not null,
    host text not null, pid integer not null, began real not null, created real not null,
    price real
);
create table if not exists machines (
    pool text not null references pools (id) on delete cascade, node integer not null,
    id text, address text, created real not null,
    primary key (pool, node)
);
"""
_BUSY_SECONDS = 30.0

ClientState = Literal["running", "gone", "elsewhere"]


@dataclass(frozen=True, slots=True)
class MachineRecord:
    """A machine that was made, or was about to be."""

    node: int
    id: str | None
    """None when the pool's process did not live to hear that it was made."""
    address: str | None
    created: float


@dataclass(frozen=True, slots=True)
class PoolRecord:
    """A pool that has machines somewhere, and the process that made them."""

    id: str
    name: str
    provider: str
    arguments: Mapping[str, Any]
    host: str
    pid: int
    began: float
    created: float
    price: float | None
    machines: tuple[MachineRecord, ...]

    @property
    def client(self) -> ClientState:
        """Whether the process that made it still runs, as far as this host can tell."""
        if self.host != socket.gethostname():
            return "elsewhere"
        return "running" if _began(self.pid) == self.began else "gone"

    @property
    def cost(self) -> float | None:
        """What its machines have cost so far, in US dollars, where that is known."""
        if self.price is None:
            return None
        return sum((time.time() - each.created) / 3600 * self.price for each in self.machines)


class Journal:
    """The user's journal; any number of processes may write to it."""

    def __init__(self, path: Path | None = None) -> None:
        state = os.environ.get("SKYWARD_STATE") or platformdirs.user_state_dir("skyward")
        self.path = path or Path(state) / "journal.sqlite"

    def open_pool(
        self, pool: str, name: str, provider: str, arguments: Mapping[str, Any], price: float | None
    ) -> None:
        """A pool of this process is about to make machines."""
        pid = os.getpid()
        values = (pool, name, provider, json.dumps(dict(arguments)), socket.gethostname(), pid)
        with self._connected() as database:
            database.execute(
                "insert into pools values (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (*values, _began(pid), time.time(), price),
            )

    def intend(self, pool: str, node: int) -> None:
        """A machine is about to be made for a node."""
        with self._connected() as database:
            database.execute(
                "insert or replace into machines values (?, ?, null, null, ?)",
                (pool, node, time.time()),
            )

    def made(self, pool: str, node: int, machine: str, address: str) -> None:
        """The machine is there."""
        with self._connected() as database:
            database.execute(
                "update machines set id = ?, address = ? where pool = ? and node = ?",
                (machine, address, pool, node),
            )

    def gone(self, pool: str, node: int) -> None:
        """Nothing of a node's machine is left."""
        with self._connected() as database:
            database.execute("delete from machines where pool = ? and node = ?", (pool, node))

    def close_pool(self, pool: str) -> None:
        """Nothing of a pool is left; what still has machines stays on record."""
        with self._connected() as database:
            database.execute(
                "delete from pools where id = ? "
                "and not exists (select 1 from machines where pool = pools.id)",
                (pool,),
            )

    def forget(self, pool: str) -> None:
        """Whatever is left of a pool, nobody is to look after it any more."""
        with self._connected() as database:
            database.execute("delete from pools where id = ?", (pool,))

    def pools(self) -> list[PoolRecord]:
        """Everything on record, oldest first."""
        if not self.path.exists():
            return []
        with self._connected() as database:
            rows = database.execute("select * from pools order by created").fetchall()
            return [self._record(database, row) for row in rows]

    @staticmethod
    def _record(database: sqlite3.Connection, row: tuple[Any, ...]) -> PoolRecord:
        pool, name, provider, arguments, host, pid, began, created, price = row
        machines = database.execute(
            "select node, id, address, created from machines where pool = ? order by node", (pool,)
        ).fetchall()
        return PoolRecord(
            id=pool,
            name=name,
            provider=provider,
            arguments=json.loads(arguments),
            host=host,
            pid=pid,
            began=began,
            created=created,
            price=price,
            machines=tuple(MachineRecord(*machine) for machine in machines),
        )

    @contextlib.contextmanager
    def _connected(self) -> Iterator[sqlite3.Connection]:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            database = sqlite3.connect(self.path, timeout=_BUSY_SECONDS)
            try:
                with database:
                    database.execute("pragma foreign_keys = on")
                    database.executescript(_SCHEMA)
                    yield database
            finally:
                database.close()
        except (OSError, sqlite3.Error) as problem:
            raise PoolStartError(
                f"the journal {self.path} cannot be used: {problem}; without it, machines could "
                "be left behind unnoticed: make it writable, or set SKYWARD_STATE to a folder"
            ) from problem


class NoJournal(Journal):
    """Stands in for the journal where machines end with the client: it writes nothing."""

    def open_pool(
        self, pool: str, name: str, provider: str, arguments: Mapping[str, Any], price: float | None
    ) -> None:
        """Write nothing."""

    def intend(self, pool: str, node: int) -> None:
        """Write nothing."""

    def made(self, pool: str, node: int, machine: str, address: str) -> None:
        """Write nothing."""

    def gone(self, pool: str, node: int) -> None:
        """Write nothing."""

    def close_pool(self, pool: str) -> None:
        """Write nothing."""


def _began(pid: int) -> float:
    """When a process began: a number that is used again names another one."""
    try:
        return float(psutil.Process(pid).create_time())
    except psutil.Error:
        return 0.0
