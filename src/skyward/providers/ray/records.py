"""Records of pools on Ray: the keys to talk to a pool's driver, and how the driver is found.

They lie in the user's state folder until the pool is removed, so that `sky down` can end the pool
after the client was killed.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec

from skyward.errors import PoolError
from skyward.providers import state_folder
from skyward.wire.handshake import Credentials


class DriverAddress(msgspec.Struct, frozen=True):
    """Where a driver listens, and who it is."""

    addresses: list[str]
    port: int
    certificate: str
    pid: int = 0
    ray: str = ""
    python: str = ""


class Record(msgspec.Struct):
    """What is known of one pool."""

    authority: str
    certificate: str
    key: str
    program: str = ""
    """The job's name, or the process's number and start."""
    driver: DriverAddress | None = None
    nodes: list[int] = []
    """The nodes that were asked for."""
    pid: int = 0
    """The process that asked for them first."""
    name: str = ""
    """The name that the user gave the pool."""

    @property
    def credentials(self) -> Credentials:
        """The client's."""
        return Credentials(self.authority, self.certificate, self.key)


def _path(pool: str, suffix: str) -> Path:
    return state_folder() / "ray" / f"{pool}.{suffix}"


def log_of(pool: str) -> Path:
    """The log of a driver that runs beside the client."""
    return _path(pool, "log")


def read(pool: str) -> Record | None:
    """The record of a pool; None if there is none."""
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode(_path(pool, "json").read_bytes(), type=Record)
    return None


def encode(record: Record) -> str:
    """A record as text, for another machine of the user's."""
    return msgspec.json.encode(record).decode()


def decode(text: str) -> Record:
    """The record in a text of `encode`; raises `PoolError` for anything else."""
    try:
        return msgspec.json.decode(text, type=Record)
    except msgspec.MsgspecError as problem:
        raise PoolError(f"the keys to the driver are damaged: {problem}; export again") from problem


def pools() -> list[str]:
    """The pools that have a record."""
    return sorted(path.stem for path in (state_folder() / "ray").glob("*.json"))


def write(pool: str, record: Record) -> None:
    """Write a pool's record, whole, for this user alone."""
    path = _path(pool, "json")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}")
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(msgspec.json.encode(record))
    part.rename(path)


def remove(pool: str) -> None:
    """Forget a pool."""
    for suffix in ("json", "log"):
        _path(pool, suffix).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        (state_folder() / "ray").rmdir()
