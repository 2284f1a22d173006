"""Records of pools in the user's state directory (or `SKYWARD_STATE`).

The record of a kept pool has all that another client needs to attach to it: a JSON file of mode
0600 with the pool's keys. Whoever can read it can use the pool.

The journal has the machines of all pools, each written down before it is made: a small SQLite file.
`sky ps` and `sky down` read it to find and remove the machines that a killed process left behind.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import fcntl
import json
import os
import re
import socket
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from skyward.errors import ConfigurationError, PoolError, PoolStartError
from skyward.providers import state_folder

FORMAT = 1
LOOK_SECONDS = 0.05
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class KeptNode(msgspec.Struct, frozen=True):
    """What a client needs to know of a node whose agent runs."""

    index: int
    endpoint: str
    """Where the agent listens: one place, or several separated by spaces."""
    pid: int
    hostname: str
    address: str
    accelerators: int
    accelerator: str | None
    machine: str
    """The provider's name for the machine."""


class KeptPool(msgspec.Struct):
    """A kept pool."""

    id: str
    name: str
    provider: str
    arguments: dict[str, Any]
    created: float
    idle: float
    """After how many seconds without a client the pool ends by itself; 0 if it does not."""
    ends: float | None
    """When its time to live is over."""
    hourly_cost: float | None
    authority: tuple[str, str] | None
    """The certificate and the key of the pool's authority; None if its sockets are this user's, and
    in the record for processes on the pool's own nodes."""
    credentials: tuple[str, str, str] | None
    """The client's credentials."""
    spec: str
    """The rest of the pool's specification, pickled."""
    nodes: list[KeptNode]
    stopped: bool = False
    """Whether `sky stop` has ended its agents, for `sky start` to start them again."""
    format: int = FORMAT
    count: int = 0
    """How many nodes it had when it was stopped."""
    ending: list[KeptNode] = []
    """The nodes that `sky stop` or `sky down` ends, until it has: also if it was killed."""
    inside: bool = False
    """Whether the record is for processes on the pool's own nodes."""
    keys: dict[str, str] = {}
    """The provider's own keys of the pool: only in a record that goes to another machine."""
    home: str = ""
    """The home folder of the user who exported the record: the same paths are elsewhere there."""

    @property
    def head(self) -> int:
        """The first node, whose agent knows the clients."""
        return min((node.index for node in self.nodes), default=0)

    def node(self, index: int) -> KeptNode | None:
        """The node of that index."""
        return next((node for node in self.nodes if node.index == index), None)


# Made now: msgspec ends the process if two threads are the first to read a struct that has others.
_records = msgspec.json.Decoder(KeptPool)


def folder() -> Path:
    """The folder of the records; it need not exist yet."""
    return state_folder() / "pools"


def check_name(name: str) -> None:
    """Refuse a name that cannot be the name of a record."""
    if not _NAME.fullmatch(name):
        raise ConfigurationError(
            f"a kept pool cannot be called {name!r}: use letters, digits, '.', '_' and '-', "
            "64 at most"
        )


def path_of(name: str) -> Path:
    """The file of a pool's record."""
    check_name(name)
    return folder() / f"{name}.json"


def names() -> list[str]:
    """The names of all pools that have a record; other files of the folder are passed over."""
    return sorted(path.stem for path in folder().glob("*.json") if _NAME.fullmatch(path.stem))


def damaged() -> list[str]:
    """The names of the pools whose records cannot be read."""
    found = []
    for name in names():
        try:
            read(name)
        except PoolError:
            found.append(name)
    return found


def read(name: str) -> KeptPool:
    """The record of a pool; `PoolError` if there is none, or if it cannot be read."""
    path = path_of(name)
    try:
        return decode(path.read_bytes(), str(path))
    except FileNotFoundError:
        there = ", ".join(names())
        raise PoolError(
            f"no pool called {name!r} is kept here; "
            + (f"there are: {there}" if there else "`sky up NAME` or Compute(keep=True) makes one")
        ) from None
    except OSError as problem:
        raise PoolError(f"the record {path} cannot be read: {problem}") from problem


def decode(data: bytes, where: str) -> KeptPool:
    """The record in these bytes."""
    try:
        record = _records.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as problem:
        raise PoolError(
            f"the record {where} is damaged: {problem}; `sky down` with the pool's name ends what "
            "is left of it"
        ) from problem
    if record.format != FORMAT:
        raise PoolError(
            f"the record {where} has format {record.format}, this Skyward reads {FORMAT}; use the "
            "version that made the pool"
        )
    return record


def encode(record: KeptPool) -> bytes:
    """The bytes of a record."""
    return msgspec.json.format(msgspec.json.encode(record), indent=1)


def write(record: KeptPool, *, new: bool = False) -> None:
    """Write a record in one piece; with `new`, refuse to replace one."""
    path = path_of(record.name)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(encode(record))
            file.flush()
            os.fsync(file.fileno())
        if new:
            os.link(temporary, path)
        else:
            temporary.replace(path)
    except FileExistsError:
        raise exists(record.name) from None
    except OSError as problem:
        raise PoolStartError(
            f"the record {path} cannot be written: {problem}; without it, nobody could attach: "
            "make it writable, or set SKYWARD_STATE to a folder"
        ) from problem
    finally:
        temporary.unlink(missing_ok=True)


def exists(name: str) -> ConfigurationError:
    """The error for a second pool of the same name."""
    return ConfigurationError(
        f"a pool called {name!r} is kept already; sky.attach({name!r}) uses it, and "
        f"`sky down {name}` ends it"
    )


def forget(name: str, pool: str | None = None) -> None:
    """Remove the record of a pool; if `pool` is given, only if the record is of that one."""
    path = path_of(name)
    if not path.exists():
        return
    # The lock's file stays: whoever waits for it would have the lock of a file that is gone.
    with changing(name):
        with contextlib.suppress(PoolError):
            if pool is not None and path.exists() and read(name).id != pool:
                return
        path.unlink(missing_ok=True)


def forget_damaged(name: str) -> None:
    """Remove the record of a pool if nobody can read it."""
    if not _NAME.fullmatch(name) or not path_of(name).exists():
        return
    try:
        read(name)
    except PoolError:
        path_of(name).unlink(missing_ok=True)


def find(pool: str) -> KeptPool | None:
    """The record of the pool with that id."""
    for name in names():
        with contextlib.suppress(PoolError):
            record = read(name)
            if record.id == pool:
                return record
    return None


@contextlib.contextmanager
def changing(name: str) -> Iterator[None]:
    """Keep other processes of this machine from changing the record meanwhile."""
    path = path_of(name).with_suffix(".lock")
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.asynccontextmanager
async def starting(name: str, node: int) -> AsyncIterator[None]:
    """Keep other clients on this machine from starting the same node meanwhile."""
    # Not the record's lock: a machine may take minutes, and the record changes meanwhile.
    path = path_of(name).with_suffix(f".{node}.lock")
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with contextlib.ExitStack() as held:
        while True:
            file = held.enter_context(path.open("a"))
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Its last holder has removed the file, if it is nowhere any more.
                if os.fstat(file.fileno()).st_nlink:
                    break
            held.close()
            await asyncio.sleep(LOOK_SECONDS)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def pickled(parts: Mapping[str, Any]) -> str:
    """Parts of a specification, as the record has them."""
    import cloudpickle

    return base64.b64encode(cloudpickle.dumps(dict(parts))).decode("ascii")


def unpickled(record: KeptPool) -> dict[str, Any]:
    """The parts of the specification that `pickled` was given."""
    import pickle

    try:
        found: dict[str, Any] = pickle.loads(base64.b64decode(record.spec))
    except Exception as problem:
        raise PoolError(
            f"the record of {record.name} cannot be used here: {type(problem).__name__}: "
            f"{problem}; attach with the Skyward and the plugins that made the pool"
        ) from problem
    return found


# The journal.


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
_ADDED = (
    ("pools", "spent", "real not null default 0"),
    ("pools", "unpriced", "integer not null default 0"),
    ("machines", "price", "real"),
    ("machines", "unpriced", "integer not null default 0"),
)
"""Columns that the tables of earlier versions do not have."""
_BUSY_SECONDS = 30.0
_making = threading.Lock()

ClientState = Literal["running", "gone", "elsewhere"]
Values = tuple[Any, ...] | dict[str, Any]
"""What a statement's question marks, or its names, stand for."""


@dataclass(frozen=True, slots=True)
class MachineRecord:
    """A machine that was made, or that the client was about to make."""

    node: int
    id: str | None
    """None if the client ended before it learned that the machine was made."""
    address: str | None
    created: float
    """When the machine was made; until then, when the client was about to make it."""
    price: float | None = None
    """The machine's own price for an hour, if it is known."""
    unpriced: bool = False
    """Whether nobody knows the machine's price; without this and a price, it is the pool's."""


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
    """The price of a machine for an hour, until the machine itself has one."""
    machines: tuple[MachineRecord, ...]
    spent: float = 0.0
    """What the machines cost that are gone."""
    unpriced: int = 0
    """How many machines are gone whose price nobody knows."""

    @property
    def client(self) -> ClientState:
        """Whether the process that made the pool runs; "elsewhere" if that was on another host."""
        if self.host != socket.gethostname():
            return "elsewhere"
        return "running" if _began(self.pid) == self.began else "gone"

    @property
    def cost(self) -> float | None:
        """The cost of the pool's machines so far, in US dollars; None if a price is unknown."""
        prices = self._prices()
        if prices is None or self.unpriced:
            return None
        if self.price is None and not prices:
            return self.spent or None
        now = time.time()
        # The clock may have jumped back since.
        hours = [max(0.0, now - each.created) / 3600 for each in self.machines]
        return self.spent + sum(h * price for h, price in zip(hours, prices, strict=True))

    @property
    def cost_is_upper_bound(self) -> bool:
        """Whether machines that count may be gone: without their client, some end themselves."""
        return self.client != "running" and bool(self.machines)

    @property
    def hourly_cost(self) -> float | None:
        """The cost of the machines that are there, for an hour; None if a price is unknown."""
        prices = self._prices()
        return None if prices is None or (self.price is None and not prices) else sum(prices)

    def _prices(self) -> list[float] | None:
        """The price of each machine; None if one is unknown."""
        prices = [
            self.price if each.price is None and not each.unpriced else each.price
            for each in self.machines
        ]
        known = [price for price in prices if price is not None]
        return known if len(known) == len(prices) else None


@dataclass(slots=True, eq=False)
class _Write:
    statements: tuple[tuple[str, Values], ...]
    done: bool = False
    problem: PoolStartError | None = None


class Journal:
    """The user's journal; any number of processes may write to it."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or state_folder() / "journal.sqlite"
        self._waiting: list[_Write] = []
        self._adding, self._writing = threading.Lock(), threading.Lock()

    def _write(self, *statements: tuple[str, Values]) -> None:
        """Execute statements; what several threads write at once is one transaction.

        The disk takes milliseconds for a transaction, and a thousand nodes start together.
        """
        write = _Write(statements)
        with self._adding:
            self._waiting.append(write)
        with self._writing:
            if not write.done:
                with self._adding:
                    together, self._waiting = self._waiting, []
                try:
                    with self._connected() as database:
                        for statement, values in (s for each in together for s in each.statements):
                            database.execute(statement, values)
                except PoolStartError as problem:
                    for each in together:
                        each.problem = problem
                finally:
                    for each in together:
                        each.done = True
        if write.problem is not None:
            raise PoolStartError(str(write.problem)) from write.problem.__cause__

    def open_pool(
        self, pool: str, name: str, provider: str, arguments: Mapping[str, Any], price: float | None
    ) -> None:
        """Note that a pool of this process is about to make machines."""
        pid = os.getpid()
        values = (pool, name, provider, json.dumps(dict(arguments)), socket.gethostname(), pid)
        self._write(
            (
                "insert or ignore into pools values (?, ?, ?, ?, ?, ?, ?, ?, ?, 0, 0)",
                (*values, _began(pid), time.time(), price),
            )
        )

    def intend(self, pool: str, node: int) -> None:
        """Note that the client is about to make a machine for a node, in place of one it had."""
        self._write(
            self._spent(pool, node),
            (
                "insert or replace into machines values (?, ?, null, null, ?, null, 0)",
                (pool, node, time.time()),
            ),
        )

    def made(
        self,
        pool: str,
        node: int,
        machine: str,
        address: str | None,
        price: float | None = None,
        created: float | None = None,
    ) -> None:
        """Note that a node's machine was made, and its price for an hour; None if it is unknown.

        `created` says when, if not now. A machine that was noted before keeps its time.
        """
        created = time.time() if created is None else created
        self._write(
            (
                "update machines set id = :machine, address = :address, price = :price, "
                "unpriced = :price is null, "
                "created = case when id is :machine then created else :created end "
                "where pool = :pool and node = :node",
                {
                    "machine": machine,
                    "address": address,
                    "price": price,
                    "created": created,
                    "pool": pool,
                    "node": node,
                },
            )
        )

    def gone(self, pool: str, node: int) -> None:
        """Note that nothing of a node's machine is left; the pool keeps what it has cost."""
        self._write(
            self._spent(pool, node),
            ("delete from machines where pool = ? and node = ?", (pool, node)),
        )

    @staticmethod
    def _spent(pool: str, node: int) -> tuple[str, Values]:
        """The statement that adds what a node's machine has cost to what the pool has spent."""
        return (
            "update pools set spent = spent + coalesce(("
            "select max(0, :now - created) / 3600 * coalesce(machines.price, pools.price) "
            "from machines where pool = :pool and node = :node and machines.id is not null "
            "and not machines.unpriced), 0), "
            "unpriced = unpriced + coalesce(("
            "select machines.unpriced from machines where pool = :pool and node = :node), 0) "
            "where id = :pool",
            {"now": time.time(), "pool": pool, "node": node},
        )

    def close_pool(self, pool: str) -> None:
        """Remove a pool from the journal, unless it still has machines there."""
        self._write(
            (
                "delete from pools where id = ? "
                "and not exists (select 1 from machines where pool = pools.id)",
                (pool,),
            )
        )

    def has_machines(self, pool: str) -> bool:
        """Whether a machine of a pool may still be there."""
        with self._connected() as database:
            found = database.execute("select 1 from machines where pool = ?", (pool,)).fetchone()
            return found is not None

    def forget(self, pool: str) -> None:
        """Remove a pool and its machines from the journal, whatever is left of them."""
        self._write(("delete from pools where id = ?", (pool,)))

    def pools(self) -> list[PoolRecord]:
        """All pools in the journal, oldest first."""
        if not self.path.exists():
            return []
        with self._connected() as database:
            rows = database.execute("select * from pools order by created").fetchall()
            return [self._record(database, row) for row in rows]

    @staticmethod
    def _record(database: sqlite3.Connection, row: tuple[Any, ...]) -> PoolRecord:
        pool, name, provider, arguments, host, pid, began, created, price, spent, unpriced = row
        machines = database.execute(
            "select node, id, address, created, price, unpriced from machines "
            "where pool = ? order by node",
            (pool,),
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
            machines=tuple(
                MachineRecord(node, machine, address, since, cost, bool(unknown))
                for node, machine, address, since, cost, unknown in machines
            ),
            spent=spent,
            unpriced=unpriced,
        )

    @contextlib.contextmanager
    def _connected(self) -> Iterator[sqlite3.Connection]:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            _make_private(self.path)
            database = sqlite3.connect(self.path, timeout=_BUSY_SECONDS)
            try:
                with database:
                    database.execute("pragma foreign_keys = on")
                    database.executescript(_SCHEMA)
                    _add_columns(database)
                    yield database
            finally:
                database.close()
        except (OSError, sqlite3.Error) as problem:
            raise PoolStartError(
                f"the journal {self.path} cannot be used: {problem}; without it, machines could "
                "be left behind unnoticed: make it writable, or set SKYWARD_STATE to a folder"
            ) from problem


def _make_private(path: Path) -> None:
    """Keep others from reading the journal: what describes a provider may hold secrets."""
    # Closing a file drops the locks of SQLite's other connections in this process, so that only
    # the thread that makes the file opens it here.
    with _making:
        if not path.exists():
            path.touch(mode=0o600)
        elif path.stat().st_mode & 0o077:
            # It may belong to another user, who has shared it.
            with contextlib.suppress(PermissionError):
                path.chmod(0o600)


def _add_columns(database: sqlite3.Connection) -> None:
    for table, column, kind in _ADDED:
        if column in _columns(database, table):
            continue
        try:
            database.execute(f"alter table {table} add column {column} {kind}")
        except sqlite3.OperationalError:
            # Another process may have been quicker.
            if column not in _columns(database, table):
                raise


def _columns(database: sqlite3.Connection, table: str) -> list[str]:
    return [row[1] for row in database.execute(f"pragma table_info({table})")]


class NoJournal(Journal):
    """Writes nothing; for pools whose machines end with the client."""

    def open_pool(
        self, pool: str, name: str, provider: str, arguments: Mapping[str, Any], price: float | None
    ) -> None:
        """Write nothing."""

    def has_machines(self, pool: str) -> bool:
        """False: machines end with the client."""
        return False

    def _write(self, *statements: tuple[str, Values]) -> None:
        """Write nothing."""


def _began(pid: int) -> float:
    """When a process began, since the system gives the number of an ended process to a new one."""
    # Imported here: a local pool has no journal, and the import takes 20 ms.
    import psutil

    try:
        return float(psutil.Process(pid).create_time())
    except psutil.Error:
        return 0.0
