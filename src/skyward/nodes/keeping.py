"""Records of the pools that stay: all that another client needs to attach to one.

A record is a JSON file of mode 0600 in the user's state directory. It has the pool's keys: whoever
can read it can use the pool.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import fcntl
import os
import re
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

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
    """A pool that stays."""

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
    """The certificate and the key of the pool's authority; None if its sockets are this user's."""
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

    @property
    def head(self) -> int:
        """The first node, whose agent knows the clients."""
        return min((node.index for node in self.nodes), default=0)

    def node(self, index: int) -> KeptNode | None:
        """The node of that index."""
        return next((node for node in self.nodes if node.index == index), None)


def folder() -> Path:
    """The folder of the records; it need not exist yet."""
    return state_folder() / "pools"


def check_name(name: str) -> None:
    """Refuse a name that cannot be the name of a record."""
    if not _NAME.fullmatch(name):
        raise ConfigurationError(
            f"a pool that stays cannot be called {name!r}: use letters, digits, '.', '_' and '-', "
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
            f"no pool called {name!r} stays here; "
            + (f"there are: {there}" if there else "`sky up NAME` or Compute(keep=True) makes one")
        ) from None
    except OSError as problem:
        raise PoolError(f"the record {path} cannot be read: {problem}") from problem


def decode(data: bytes, where: str) -> KeptPool:
    """The record in these bytes."""
    try:
        record = msgspec.json.decode(data, type=KeptPool)
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
        f"a pool called {name!r} stays already; sky.attach({name!r}) uses it, and "
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
