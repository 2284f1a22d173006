"""Occupancy: who uses a kept pool, and how to end it without taking it from others."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from skyward.console.measures import duration, size
from skyward.errors import NodeLostError, PoolError, SkywardError
from skyward.nodes import records
from skyward.nodes.cleanup import Cleaned, clean, halt
from skyward.nodes.deliveries import Deliveries, SentFolder
from skyward.nodes.kept import (
    MachinesGone,
    MachinesStopped,
    ReachedPool,
    check_here,
    provider_of,
)
from skyward.nodes.records import Journal, KeptPool, MachineRecord, PoolRecord
from skyward.providers import Provider, stops
from skyward.wire.channel import ServiceConnection
from skyward.worker.jobs import JOB, Job


@dataclass(frozen=True, slots=True)
class Occupancy:
    """A kept pool, as it is now."""

    state: str
    """In words: "kept, 2 clients, 1 call by name", "kept, idle for 5 min", "stopped"."""
    clients: tuple[dict[str, Any], ...] = ()
    idle: float | None = None
    """For how many seconds nobody has used it; None if it is not known, or in use."""
    values: tuple[dict[str, Any], ...] = ()
    """What it keeps by name: name, node, device, bytes and more of each."""


def occupancy(record: KeptPool) -> Occupancy:
    """Ask a pool who uses it."""
    if record.stopped:
        return Occupancy("stopping" if record.ending else "stopped")
    try:
        with ReachedPool(record) as pool, pool.head() as head:
            told = head.ask("who")
            values = _values(pool)
    except MachinesStopped:
        return Occupancy("stopped")
    except MachinesGone:
        return Occupancy("gone")
    except (SkywardError, OSError, EOFError):
        return Occupancy("kept, out of reach")
    clients, calls = tuple(told["clients"]), len(told["calls"])
    keeps = _in_words(values)
    if clients or calls:
        uses = [f"{len(clients)} client{'s' * (len(clients) > 1)}"] if clients else []
        uses += [f"{calls} call{'s' * (calls > 1)} by name"] if calls else []
        return Occupancy(f"kept, {', '.join(uses)}{keeps}", clients, values=values)
    idle = float(told["idle"])
    return Occupancy(f"kept, idle for {duration(idle)}{keeps}", idle=idle, values=values)


def _values(pool: ReachedPool) -> tuple[dict[str, Any], ...]:
    """What the nodes keep by name; those that do not answer are left out."""
    found = []
    for node in pool.nodes:
        with contextlib.suppress(SkywardError, OSError, EOFError):
            with pool.service(node, "values") as connection:
                found += [{**each, "node": node} for each in connection.ask("list")]
    return tuple(sorted(found, key=lambda each: str(each["name"])))


def _in_words(values: tuple[dict[str, Any], ...]) -> str:
    if not values:
        return ""
    whole = size(sum(each["bytes"] for each in values))
    return f", keeps {len(values)} value{'s' * (len(values) > 1)} ({whole})"


def journalled(record: KeptPool) -> PoolRecord:
    """A pool as the journal would have it, for one that another machine has made."""
    machines = tuple(
        MachineRecord(node.index, node.machine, node.address, record.created)
        for node in record.nodes
    )
    return PoolRecord(
        id=record.id,
        name=record.name,
        provider=record.provider,
        arguments=record.arguments,
        host="",
        pid=0,
        began=0.0,
        created=record.created,
        price=None,
        machines=machines,
    )


def recorded_pools(journal: Journal) -> list[tuple[PoolRecord, KeptPool | None]]:
    """All pools that the journal has, and those that are kept, each with its record."""
    kept: dict[str, KeptPool] = {}
    for name in records.names():
        # What cannot be read is in the journal, too, unless it came from another machine.
        with contextlib.suppress(PoolError):
            record = records.read(name)
            kept[record.id] = record
    found: list[tuple[PoolRecord, KeptPool | None]] = [
        (pool, kept.pop(pool.id, None)) for pool in journal.pools()
    ]
    return [*found, *((journalled(record), record) for record in kept.values())]


def end(
    journal: Journal, pool: PoolRecord, record: KeptPool, *, force: bool, stop: bool = False
) -> Cleaned:
    """End a kept pool; without `force`, only if nobody uses it.

    Its nodes write their volumes back first, and folders of this machine that they have come back.
    If no agent answers, its machines are removed all the same. With `stop`, the record stays, and
    so do the machines if the provider can stop them. An end that was interrupted goes on.
    """
    if record.ending:
        record = msgspec.structs.replace(record, nodes=record.ending, stopped=False, ending=[])
    unwritten: list[str] = []
    brought = 0
    provider = provider_of(record)
    with contextlib.ExitStack() as held:
        reached: ReachedPool | None = None
        if not record.stopped:
            if not force:
                check_here(record, provider)
            try:
                reached = held.enter_context(ReachedPool(record))
                head = reached.head()
            except (SkywardError, OSError, EOFError):
                reached = None
            else:
                head.close()
                held.enter_context(reached.lock(force=force))
                if not force:
                    check_jobs(record.name, reached.nodes, reached.service)
                unwritten += _write_back(reached)
                brought = _bring_back(reached, unwritten)
        with _prepared(provider, record, reached) if stop else contextlib.nullcontext():
            if reached is not None:
                reached.tell_end()
            # First: its clients start a lost node anew, as long as the record has the node.
            # It is not removed yet: whatever ends this process, the pool keeps its name and keys.
            count = len(record.nodes) or record.count
            stopped = msgspec.structs.replace(record, nodes=[], stopped=True, count=count)
            records.write(msgspec.structs.replace(stopped, ending=record.nodes))
        try:
            if stop and stops(provider):
                cleaned = halt(journal, pool, provider)
            else:
                cleaned = clean(journal, pool)
        except BaseException:
            records.write(record)
            raise
        if cleaned.failures:
            records.write(record)
        elif stop:
            records.write(stopped)
        else:
            records.forget(record.name, record.id)
    return dataclasses.replace(cleaned, unwritten=tuple(unwritten), brought=brought)


@contextlib.contextmanager
def _prepared(provider: Provider, record: KeptPool, reached: ReachedPool | None) -> Iterator[None]:
    """Have the machines lose nothing from now on; if the block fails, the pool is as it was."""
    if not stops(provider):
        yield
        return
    try:
        asyncio.run(provider.spare(record.id, True))
        yield
    except BaseException as problem:
        try:
            _check_agents(reached)
            asyncio.run(provider.spare(record.id, False))
        except BaseException as failure:
            why = str(failure) or type(failure).__name__
            problem.add_note(
                f"{record.name} is not stopped. If it ends by itself now, its machines or claims "
                f"may stay, and cost: {why}; `sky stop {record.name}` tries again, and "
                f"`sky down {record.name}` removes all"
            )
        raise


def _check_agents(reached: ReachedPool | None) -> None:
    """Raise unless every agent answers: a machine without one may end, and must lose nothing."""
    if reached is None:
        raise PoolError("its agents do not answer")
    for node in reached.nodes:
        reached.service(node, "clients").close()


def check_jobs(
    name: str, nodes: Iterable[int], service: Callable[[int, str], ServiceConnection]
) -> None:
    """Raise `PoolError` if a script runs on a node, unless this process belongs to it.

    Who takes the pool's lock hears of calls by name.
    """
    found = []
    for node in nodes:
        with contextlib.suppress(NodeLostError, OSError, EOFError):
            with service(node, "jobs") as connection:
                jobs = msgspec.convert(connection.ask("list"), list[Job])
            found += [
                f"{job.id} of {job.by or 'an unknown user'} on node {node}"
                for job in jobs
                if job.kind == "script" and job.state == "running" and job.id != os.environ.get(JOB)
            ]
    if found:
        raise PoolError(
            f"{name}: runs {', '.join(found)}; wait until it ends, end it with `sky cancel {name} "
            "JOB`, or pass --force (in Python, force=True)"
        )


def _write_back(pool: ReachedPool) -> list[str]:
    """Have every node write its volumes back; returns what failed."""
    problems = []
    for node in pool.nodes:
        try:
            with pool.service(node, "files") as connection:
                connection.send("write back")
                while connection.next_reply().more:
                    pass
        except (SkywardError, OSError, EOFError) as problem:
            problems.append(f"node {node}: {problem}")
    return problems


def _bring_back(pool: ReachedPool, problems: list[str]) -> int:
    """Bring back the folders that nodes got from this machine; returns how many files came.

    Adds what does not come to the problems.
    """
    if pool.record.inside:
        return 0
    try:
        folders: tuple[SentFolder, ...] = records.unpickled(pool.record).get("folders", ())
    except PoolError as problem:
        problems.append(f"folders that were sent: {problem}")
        return 0
    brought = 0
    for folder in folders:
        if not folder.back:
            continue
        if not folder.source.is_dir():
            problems.append(
                f"{folder.source}: there is no such folder on this machine, so what tasks wrote to "
                "its copies on nodes does not come back"
            )
            continue
        delivery = Deliveries((folder,), (), pool.service)
        try:
            brought += delivery.write_back(pool.nodes, problems.append, lambda what: None).files
        except PoolError as problem:
            problems.append(str(problem))
    return brought
