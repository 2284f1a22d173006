"""Reaching a pool that stays: its machines found again, and connections to its agents' services."""

from __future__ import annotations

import concurrent.futures
import contextlib
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from skyward.closing import Closing
from skyward.errors import NodeLostError, PoolError, SkywardError
from skyward.nodes import keeping, provider_loop
from skyward.nodes.host import Host, not_there
from skyward.nodes.inside import InsideProvider
from skyward.nodes.journal import NoJournal
from skyward.nodes.keeper import identity
from skyward.nodes.keeping import KeptNode, KeptPool
from skyward.providers import (
    Allocation,
    Machine,
    Order,
    Provider,
    Request,
    find_provider,
    holds_keys,
    is_here,
    stops,
)
from skyward.spec import Image
from skyward.wire.asking import ServiceConnection
from skyward.wire.identity import Credentials

_NOTHING = Request(None, None, None, Image(), ())
"""Nothing is ordered: the machines are there."""
CLOSE_SECONDS = 30.0
"""How long the end of a pool waits for what its provider still does."""
FIND_SECONDS = 60.0
"""How long a provider may take to find the machines of a pool."""
CALLS_NAMED = 5
"""How many calls by name an error names."""


@dataclass(frozen=True, slots=True)
class Adoption:
    """What a client needs to attach to a pool that stays."""

    record: KeptPool
    machines: Mapping[int, tuple[KeptNode, Machine]]
    client: str
    """The tenant that the client is."""
    allocation: Allocation[Any]
    """What found the machines; the client closes it."""


def provider_of(record: KeptPool) -> Provider:
    """The provider that has made the machines of a pool, or what a node has in its place."""
    if record.inside:
        return InsideProvider(record)
    provider: Provider = find_provider(record.provider)(**record.arguments)
    return provider


def found_machines(
    record: KeptPool, provider: Provider, allocation: Allocation[Any]
) -> dict[int, tuple[KeptNode, Machine]]:
    """The machines of a pool's nodes that run, as far as its provider has them still."""
    there = _machines(record, provider, allocation)
    return {index: found for index, found in there.items() if not found[1].ended}


def stopped_machines(record: KeptPool, provider: Provider) -> list[Machine]:
    """The machines of a pool of which none runs, but some can be started again."""
    if not stops(provider):
        return []
    allocation = provider.allocate(record.id)
    try:
        found = [machine for _, machine in _machines(record, provider, allocation).values()]
    finally:
        end(allocation)
    return found if all(machine.ended for machine in found) else []


def _machines(
    record: KeptPool, provider: Provider, allocation: Allocation[Any]
) -> dict[int, tuple[KeptNode, Machine]]:
    if is_here(provider):
        return {node.index: (node, provider.machine_at(node.machine)) for node in record.nodes}
    finding = provider_loop.submit(allocation.find())
    try:
        found = finding.result(FIND_SECONDS)
    except concurrent.futures.TimeoutError:
        finding.cancel()
        raise PoolError(
            f"{record.name}: the provider {record.provider} did not find its machines within "
            f"{FIND_SECONDS:.0f} s; see whether it can be reached, and try again"
        ) from None
    # One that runs goes before another of the same node that does not.
    ordered = sorted(found, key=lambda machine: machine.ended, reverse=True)
    machines = {machine.node: machine for machine in ordered}
    return {
        node.index: (node, machines[node.index]) for node in record.nodes if node.index in machines
    }


def end(allocation: Allocation[Any]) -> None:
    """End what a provider still does for a pool."""
    with contextlib.suppress(TimeoutError):
        provider_loop.submit(allocation.close()).result(CLOSE_SECONDS)


def exported(record: KeptPool) -> bytes:
    """The record with the provider's keys of the pool, for another machine.

    Raises `PoolError` if the pool can only be used on this machine.
    """
    provider = provider_of(record)
    keys = dict(provider.export_keys(record.id)) if holds_keys(provider) else {}
    return keeping.encode(msgspec.structs.replace(record, keys=keys))


def imported(data: bytes, where: str, name: str | None) -> KeptPool:
    """Write down a record that was exported, under a name of its own if one is given."""
    told = keeping.decode(data, where)
    record = msgspec.structs.replace(told, name=name or told.name, keys={})
    keeping.write(record, new=True)
    try:
        if told.keys and holds_keys(provider := provider_of(record)):
            provider.import_keys(record.id, told.keys)
    except BaseException:
        keeping.forget(record.name, record.id)
        raise
    return record


class MachinesGone(PoolError):
    """The machines of a pool that stays are gone, and only its record is left."""


class MachinesStopped(PoolError):
    """The machines of a pool that stays are stopped, though `sky stop` did not stop them."""


def check_here(record: KeptPool, provider: Provider) -> None:
    """Refuse a pool of another machine's own processes: homes may be shared by machines."""
    places = {node.hostname for node in record.nodes}
    here = socket.gethostname()
    if not record.inside and is_here(provider) and places and here not in places:
        raise PoolError(
            f"{record.name}: it stays on {', '.join(sorted(places))}, and this is {here}; a pool "
            "of sky.Local is used on its own machine"
        )


class ReachedPool(Closing):
    """A pool that stays, without being its client: for its services alone."""

    def __init__(self, record: KeptPool, *, forget: bool = False) -> None:
        """With `forget`, the record of a pool whose machines are gone is removed."""
        self.record, self._forget = record, forget
        provider = self._provider = provider_of(record)
        check_here(record, provider)
        self._hosts: dict[int, Host] = {}
        self._allocation: Allocation[Any] | None = provider.allocate(record.id)
        try:
            self._adopt(provider, self._allocation)
        except BaseException:
            self.close()
            raise
        self.credentials = Credentials(*record.credentials) if record.credentials else None

    def _adopt(self, provider: Provider, allocation: Allocation[Any]) -> None:
        """Find out how the machines are reached."""
        record = self.record
        # Twice: the answer of some providers lags behind.
        self.machines = found_machines(record, provider, allocation) or found_machines(
            record, provider, allocation
        )
        if record.nodes and not self.machines:
            raise self._unused()
        adopting = []
        for index, (kept, machine) in sorted(self.machines.items()):
            host = Host(provider, allocation, Order(record.id, index, _NOTHING), NoJournal())
            adopting.append(provider_loop.submit(host.adopt(kept, machine)))
            self._hosts[index] = host
        late = concurrent.futures.wait(adopting, FIND_SECONDS).not_done
        for each in late:
            each.cancel()
        if late:
            raise PoolError(
                f"{record.name}: {len(late)} of its {len(adopting)} machines did not answer within "
                f"{FIND_SECONDS:.0f} s; see whether they can be reached, and try again"
            )
        for each in adopting:
            each.result()

    @property
    def nodes(self) -> tuple[int, ...]:
        """The indexes of the nodes."""
        return tuple(self._hosts)

    def service(self, node: int, name: str) -> ServiceConnection:
        """A connection to a service of a node's agent; the caller closes it."""
        if node not in self._hosts:
            raise not_there(node, self.nodes)
        return self._hosts[node].service(name, self.credentials)

    def head(self) -> ServiceConnection:
        """A connection to the service that knows the clients; `PoolError` if no agent is left."""
        problem: SkywardError | None = None
        for index in self.nodes:
            try:
                return self.service(index, "clients")
            except NodeLostError as failure:
                problem = problem or failure
        if all(host.has_ended() for host in self._hosts.values()):
            raise self._unused()
        raise PoolError(
            f"{self.record.name}: none of its {len(self.nodes)} agents answers: {problem}; try "
            f"again, or end it with `sky down {self.record.name}`"
        )

    def _unused(self) -> PoolError:
        """Why no machine of the pool can be used: they are stopped, or gone."""
        name = self.record.name
        if stopped := stopped_machines(self.record, self._provider):
            ids = ", ".join(sorted(machine.id for machine in stopped))
            return MachinesStopped(
                f"{name} is stopped: its machines do not run any more ({ids}); `sky start {name}` "
                f"starts them again, and `sky down {name}` removes them"
            )
        if not self._forget:
            return MachinesGone(f"{name}: its machines are gone; `sky down {name}` removes it")
        keeping.forget(name, self.record.id)
        return MachinesGone(
            f"{name}: its machines are gone, so its record is, too; `sky up {name}` or "
            "Compute(keep=True) makes it anew"
        )

    def adoption(self) -> Adoption:
        """What a new client of the pool needs."""
        with self.head() as head:
            client = str(head.ask("choose", identity=identity()))
        allocation, self._allocation = self._allocation, None
        assert allocation is not None
        return Adoption(self.record, self.machines, client, allocation)

    def lock(self, client: str = "", *, force: bool = False) -> ServiceConnection:
        """Keep others from changing the pool until the connection is closed.

        `PoolError` if another client does, or without `force` if others are attached or calls by
        name go on.
        """
        return lock(self.head(), self.record.name, client, force=force)

    def tell_end(self) -> None:
        """Have the agents tell their clients that this client ends the pool."""
        for index in self.nodes:
            # Whoever does not answer has no client who would hear of it.
            with (
                contextlib.suppress(NodeLostError, OSError, EOFError),
                self.service(index, "clients") as service,
            ):
                service.ask("ending", identity=identity())

    def close(self) -> None:
        """End what found the machines, unless a client has it now."""
        allocation, self._allocation = self._allocation, None
        if allocation is not None:
            end(allocation)


def lock(
    head: ServiceConnection, name: str, client: str, *, force: bool = False
) -> ServiceConnection:
    """Take the pool's lock over a connection to its head, and return the connection."""
    try:
        head.ask("lock", identity=identity(), client=client, force=force)
        calls = () if force else head.ask("who")["calls"]
    except PoolError as problem:
        head.close()
        raise PoolError(
            f"{name}: {problem}; have them leave it, or pass --force (in Python, force=True)"
        ) from None
    except BaseException:
        with contextlib.suppress(OSError):
            head.close()
        raise
    if calls:
        head.close()
        raise PoolError(f"{name}: {_called(name, calls)}, or pass --force (in Python, force=True)")
    return head


def _called(pool: str, calls: Sequence[dict[str, str]]) -> str:
    """Which calls by name wait or run, and how to end them."""
    shown = [f"{each['name']} of {each['by'] or 'an unknown user'}" for each in calls[:CALLS_NAMED]]
    if len(calls) > CALLS_NAMED:
        shown.append(f"{len(calls) - CALLS_NAMED} more")
    if len(calls) == 1:
        return (
            f"runs the call {shown[0]}; wait until it ends, end it with "
            f"`sky cancel {pool} {calls[0]['name']}`"
        )
    return (
        f"runs the calls {', '.join(shown)}; wait until they end, end each with "
        f"`sky cancel {pool} NAME`"
    )
