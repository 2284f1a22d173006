"""Providers: the sources of machines, one module each, behind one small protocol.

A provider makes machines and destroys them. A machine can run a command, and can carry bytes to one
of its sockets. Skyward does everything else with these two, from installing Python to starting the
agent. docs/providers.md shows how to write a provider, and `skyward.testing` has the tests that
every provider passes.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import getpass
import hashlib
import importlib
import inspect
import os
import queue
import socket
import sys
import threading
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import (
    Any,
    Generic,
    Literal,
    ParamSpec,
    Protocol,
    TypeGuard,
    TypeVar,
    get_args,
    runtime_checkable,
)

import platformdirs

from skyward.accelerators import Accelerator
from skyward.errors import ConfigurationError
from skyward.spec import Image, Volume
from skyward.staff import Staff


@dataclass(frozen=True, slots=True)
class Request:
    """A pool's request to a provider: the properties of each machine, and how many at most."""

    accelerator: Accelerator | None
    vcpus: float | None
    memory_gb: float | None
    image: Image
    volumes: tuple[Volume, ...]
    most_nodes: int = 1
    """How many nodes the pool may have at most."""
    allocation: AllocationKind = "on-demand"
    max_hourly_cost: float | None = None
    """The most that one machine may cost in an hour, in US dollars."""
    disk_gb: float | None = None
    ttl: float | None = None
    """After how many seconds a machine ends itself, even without a client."""
    idle_timeout: float = 300.0
    """After how many seconds a machine without an agent ends itself, if it costs money."""
    keep: bool = False
    """Whether the machine, and the agent on it, are to outlive the client."""

    @property
    def python_image(self) -> str:
        """The official container image that has the Python that is asked for."""
        mine = f"{sys.version_info.major}.{sys.version_info.minor}"
        return f"python:{mine if self.image.python == 'auto' else self.image.python}-slim"


def tell_nobody(_: str) -> None:
    """Ignore what a provider waits for."""


def charge_nobody(_machine: str, _offer: Offer | None) -> None:
    """Ignore that a machine was bought."""


@dataclass(frozen=True, slots=True)
class Order:
    """The order for one machine, for one node of one pool."""

    pool: str
    """The pool's unique name; the machine must carry it, so that `find` works after a crash."""
    node: int
    request: Request
    tell: Callable[[str], None] = field(default=tell_nobody, compare=False, repr=False)
    """To be called with what `create` waits for, as it changes."""
    note: Callable[[str], None] = field(default=tell_nobody, compare=False, repr=False)
    """To be called with what the user should know, such as an offer that was passed over."""
    name: str = ""
    """The name that the user gave the pool."""
    bought: Callable[[str, Offer | None], None] = field(
        default=charge_nobody, compare=False, repr=False
    )
    """To be called, from any thread, with the id and the offer of a machine as soon as it costs.

    A `create` that waits for its machine to boot calls this first: the boot costs money, also if
    the machine is never reached. Without the call, a machine costs from the end of `create`.
    """


@dataclass(frozen=True, slots=True)
class Equipment:
    """The folder, the cards and the directory of a machine that needs no bootstrap."""

    folder: str
    """The node's private folder, with a short path: for its sockets and the agent's log."""
    hostname: str
    accelerators: int = 0
    accelerator: str | None = None
    working_directory: str | None = None
    """The directory in which the workers run and import; None for the client's own."""


LOOPBACK = "127.0.0.1"


class Machine(ABC):
    """A machine that a provider made, or found; most machines leave what has a default."""

    id: str
    """The provider's name for the machine; enough to destroy the machine later."""
    node: int
    """The number of the node that the machine was made for."""
    address: str
    """How other machines of the pool reach this one."""
    direct: str | None = None
    """An address that this process may try to connect to; None if only `dial` works."""
    python: str | None = None
    """A Python that has skyward and the image's packages; None if the bootstrap makes one."""
    offer: Offer | None = None
    """The offer that was bought; None if the machine costs nothing, or nobody knows what."""
    ended: bool = False
    """Whether a machine that was found does not run.

    It can be removed, or started again by `create`; there is no agent on it.
    """
    listens: str = ""
    """The address at which its processes listen for the client, if that is not `direct`."""
    forwards_to: str = ""
    """The address at which its processes listen for `forward`; empty if `dial` is as fast."""
    may_be_here: bool = False
    """Whether the machine may be the client's own.

    Then the client tries the Unix sockets of the node's processes first, and shares memory with
    them. A socket's path has the pool's id in it: another machine has none, or nobody listens.
    """
    notice: str = ""
    """The name of a module that the agent runs on the machine, with the node's Python.

    The module ends with a line on its standard output, "SECONDS REASON", as soon as the provider
    says that it takes the machine back.
    """
    equipment: Equipment | None = None
    """What the client needs to know of its own machine; None if the machine needs the bootstrap."""

    @abstractmethod
    async def run(
        self,
        command: Sequence[str],
        *,
        input: bytes = b"",
        output: Callable[[bytes], None] | None = None,
    ) -> int:
        """Run a command with its standard input, and return its exit status.

        `output` gets the bytes of both output streams as they come. Cancelling ends the command. As
        in a shell, the status is 127 if there is no such command, and 128 + n after signal n.
        Raises `UnreachableError` if the machine or the connection to it is gone.
        """

    @abstractmethod
    async def dial(self, endpoint: str) -> socket.socket:
        """A blocking socket that carries bytes to "unix:PATH" or "tcp:127.0.0.1:PORT" there.

        The connection is private: no other user can read or open it. Shutting down one direction
        here shuts it down there. If no process listens, raises an `OSError` if the provider can
        tell; otherwise the socket is at its end.
        """

    async def forward(self, endpoint: str) -> socket.socket:
        """A faster `dial` for ports at `forwards_to`; both directions may end together."""
        return await self.dial(endpoint)

    @abstractmethod
    async def alive(self) -> bool:
        """Whether the machine exists; False only if it is known to be gone for good.

        After False, the pool gives the node up at once. Raises a `PoolStartError`, such as
        `UnreachableError`, if the provider gets no answer: then the pool waits for the node, as
        long as `orphan_timeout` says.
        """

    async def reach(self) -> None:  # noqa: B027
        """Find out how a machine that was found is reached; after that, `direct` is known."""

    async def after_start(self) -> None:  # noqa: B027
        """Undo what `Stopper.spare` did: the machine has an agent, and the pool is on record."""

    @abstractmethod
    async def destroy(self) -> None:
        """Remove the machine, whatever runs on it, and wait for its end; may be called twice."""


M = TypeVar("M", bound=Machine)
Made = TypeVar("Made", bound=Machine, covariant=True)


class Maker(Protocol[Made]):
    """A provider that makes machines one by one."""

    async def create(self, order: Order) -> Made:
        """Make a machine; if it raises `PoolStartError`, it leaves nothing behind.

        How long it waits, in a queue for example, is for the provider to say: a pool sets no limit.
        """

    async def find(self, pool: str) -> Sequence[Made]:
        """Every existing machine of a pool, also one whose `create` was interrupted."""


class Allocation(Generic[M]):
    """What a provider gives one pool, to get machines from; these are made one by one.

    All coroutines run on one event loop. `skyward.providers.allocation` has the one for providers
    that ask for several machines at once.
    """

    def __init__(self, maker: Maker[M], pool: str) -> None:
        self.pool = pool
        self._maker = maker

    def expect(self, nodes: Iterable[int]) -> None:
        """Know that these nodes start together: each is ordered soon, or `expect_no_more`."""

    def expect_no_more(self, node: int) -> None:
        """Know that a node needs no machine, or that its start has failed."""

    async def get(self, order: Order) -> M:
        """A machine for a node; raises a `PoolStartError` if there is none, and leaves nothing.

        If it is cancelled, `find` has what was made.
        """
        return await self._maker.create(order)

    async def find(self) -> Sequence[M]:
        """Every machine of the pool that exists, whoever ordered it."""
        return await self._maker.find(self.pool)

    async def sweep(self) -> None:
        """Remove what the pool has besides machines, such as a firewall's rules.

        It is called after the last machine is gone; may be called twice.
        """

    async def close(self) -> None:
        """End what the allocation still does; the machines stay as they are."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a provider is and can do; each thing that it can do is a protocol of this module."""

    sells: bool = False
    """Whether its machines cost money: it is a `Seller`."""
    answers: bool = False
    """Whether it can be asked whether it would work: it is an `Answering`."""
    collects: bool = False
    """Whether it finds the remains of all pools: it is a `Collector`."""
    stops: bool = False
    """Whether it can stop machines and keep them: it is a `Stopper`."""
    holds_keys: bool = False
    """Whether it keeps keys of its own for each pool: it is a `KeyHolder`."""
    moves: bool = False
    """Whether its arguments name what only one machine has, such as files: it is a `Mover`."""
    here: bool = False
    """Whether its machines are this machine: it is a `ThisMachine`.

    Then a machine has `equipment`, no bootstrap is needed, and the agent is a child process that
    ends with the client: there is nothing to write into the journal.
    """
    encrypted: bool = True
    """Whether the channels to its machines need credentials."""
    mounts_folders: bool = True
    """Whether a node can have a folder of its machine at another path."""


@runtime_checkable
class Provider(Protocol):
    """A source of machines: a value, which holds no connection."""

    @property
    def name(self) -> str:
        """The provider's name, for people and in the registry."""

    @property
    def capabilities(self) -> Capabilities:
        """What the provider can do beyond this protocol; its class has the attribute, too."""

    def check(self, request: Request) -> None:
        """Raise a `ConfigurationError` for a request that this provider can never fulfil."""

    def describe(self) -> Mapping[str, Any]:
        """The arguments for JSON, without secrets: `sky down` makes the provider from them."""

    def price(self, request: Request) -> float | None:
        """The price of a machine for an hour, in US dollars; None if it is unknown."""

    def allocate(self, pool: str) -> Allocation[Any]:
        """What gives a pool its machines; `Allocation(self, pool)`, if they are made one by one."""


class Seller(Provider, Protocol):
    """A provider whose machines cost money; a machine's `offer` is the one that was bought."""

    @property
    def region(self) -> str | None:
        """The region that the user has chosen; None for the usual one."""
        ...

    @property
    def instance_type(self) -> str | None:
        """The type of machine that the user has chosen; None for any that fulfils a request."""
        ...

    def in_region(self, region: str) -> Seller:
        """The same provider in a region; raises a `ConfigurationError` if it has another."""
        ...

    def offers(self, request: Request) -> Sequence[Offer]:
        """The machines that fulfil a request, in the order in which `create` tries them.

        May ask the provider, and then keeps the answers for the next time. Raises
        `UnavailableError` if the provider does not answer.
        """
        ...

    def why_none(self, request: Request) -> str:
        """Why there is no offer for a request, in a sentence; empty if there is no more to say."""
        ...


def sells(provider: Provider) -> TypeGuard[Seller]:
    """Whether a provider's machines cost money."""
    return provider.capabilities.sells


class Answering(Provider, Protocol):
    """A provider that can be asked whether it would work, for `sky doctor`."""

    async def ping(self) -> str:
        """Ask one quick question that costs nothing, and return who answered.

        Raises a `ConfigurationError` if the user has not set the provider up, and another
        `SkywardError` if it is set up and does not work.
        """
        ...


def answers(provider: Provider) -> TypeGuard[Answering]:
    """Whether a provider can be asked whether it would work."""
    return provider.capabilities.answers


class Stopper(Provider, Protocol):
    """A provider that can stop machines and keep them, for `sky stop` and `sky start`.

    If there is a stopped machine of the pool for the node, `create` starts that one.
    """

    async def check_stop(self, pool: str) -> None:
        """Raise a `PoolError` with the reason if a pool's machines can never be stopped.

        It is called before anything is ended.
        """
        ...

    async def spare(self, pool: str, spared: bool) -> None:
        """Have a pool's machines lose nothing from now on if they end by themselves, or undo that.

        It is called before the agents are ended: a machine without one may end itself, and its
        client may be killed before it calls `stop`. It is undone if the pool goes on with all its
        agents. Raises a `PoolError` if that is not possible.
        """
        ...

    async def stop(self, pool: str) -> float | None:
        """Stop the machines of a pool, whose agents have ended, and wait for that.

        What they have on their disks stays. Returns what all of them cost in an hour from now on,
        in US dollars; None if that is unknown. Raises a `PoolError` if one cannot be stopped.
        """
        ...


def stops(provider: Provider) -> TypeGuard[Stopper]:
    """Whether a provider can stop machines and keep them."""
    return provider.capabilities.stops


class KeyHolder(Provider, Protocol):
    """A provider that keeps keys of its own for each pool, in the user's state folder."""

    def export_keys(self, pool: str) -> Mapping[str, str]:
        """The keys that another machine of the user's needs for a pool, as texts by name.

        Raises a `PoolError` if the pool can only be used on this machine.
        """
        ...

    def import_keys(self, pool: str, keys: Mapping[str, str]) -> None:
        """Write down keys that another machine has exported."""
        ...


def holds_keys(provider: Provider) -> TypeGuard[KeyHolder]:
    """Whether a provider keeps keys of its own for each pool."""
    return provider.capabilities.holds_keys


class Mover(Provider, Protocol):
    """A provider whose arguments name what only one machine has, such as files and profiles."""

    @classmethod
    def arguments_here(cls, arguments: Mapping[str, Any], home: str) -> Mapping[str, Any]:
        """What `describe` has told another machine, for this one.

        `home` was the user's home folder there. What is not on this machine is left to what the
        user has here; if that does not do, the provider is not made, or does not reach the pool.
        """
        ...


def moves(provider: Provider) -> TypeGuard[Mover]:
    """Whether a provider's arguments name what only one machine has."""
    return provider.capabilities.moves


def file_here(path: str | None, home: str) -> str | None:
    """Where this machine has a file that another has, whose user's home folder was `home`.

    None if there is no such file, neither at its path nor at the same place in the user's own home.
    """
    if not path:
        return None
    found = [path]
    if home and Path(path).is_relative_to(home):
        found.append(str(Path.home() / Path(path).relative_to(home)))
    return next((each for each in found if Path(each).expanduser().exists()), None)


class ThisMachine(Provider, Protocol):
    """A provider whose machines are this machine."""

    def machine_at(self, machine: str) -> Machine:
        """The machine of a kept pool, by its id."""
        ...


def is_here(provider: Provider) -> TypeGuard[ThisMachine]:
    """Whether a provider's machines are this machine."""
    return provider.capabilities.here


@dataclass(frozen=True, slots=True)
class Remains:
    """What a provider still has of one pool."""

    pool: str
    name: str
    """The name that the user gave the pool; empty if unknown."""
    owner: str
    """The user, the host and the machine of the client, "me@laptop#1a2b3c4d"."""
    pid: int
    """The number of the client's process; 0 if unknown."""
    resources: tuple[str, ...]
    """What there is, such as "instance i-0abc" and "security group sg-0abc"."""

    @classmethod
    def labelled(cls, labels: Mapping[str, str], prefix: str, *resources: str) -> Remains:
        """Resources whose labels, with a prefix, say whose they are, as `signature` does."""
        pid = labels.get(f"{prefix}pid", "")
        return cls(
            pool=labels.get(f"{prefix}pool", ""),
            name=labels.get(f"{prefix}name", ""),
            owner=labels.get(f"{prefix}owner", ""),
            pid=int(pid) if pid.isdecimal() else 0,
            resources=resources,
        )


def signature(prefix: str, pool: str, name: str) -> dict[str, str]:
    """The labels, with a prefix, that say which pool a resource belongs to, and whose it is."""
    about = {"pool": pool, "name": name, "owner": owner(), "pid": str(os.getpid())}
    return {f"{prefix}{key}": value for key, value in about.items()}


def gathered(found: Iterable[Remains]) -> list[Remains]:
    """One for each pool, with the resources of all that were found."""
    pools: dict[str, Remains] = {}
    for each in found:
        before = pools[each.pool].resources if each.pool in pools else ()
        pools[each.pool] = replace(each, resources=(*before, *each.resources))
    return list(pools.values())


_MACHINE_ID = Path("/etc/machine-id")
_OWNER_LENGTH = 256
"""How long the tag of a cloud may be."""


def owner() -> str:
    """The user, the host and the machine of this client: "me@laptop#1a2b3c4d".

    `sky gc` knows the pools of this user by it. The last part tells machines apart whose hosts
    have the same name, such as root@localhost.
    """
    try:
        user = getpass.getuser()
    except (OSError, KeyError):
        user = str(os.getuid())
    mark = f"#{_machine_mark()}"
    return f"{user}@{socket.gethostname()}"[: _OWNER_LENGTH - len(mark)] + mark


def _machine_mark() -> str:
    """Eight digits that are always the same on this machine, and say nothing else about it."""
    try:
        known = _MACHINE_ID.read_text("ascii").strip()
    except (OSError, UnicodeError):
        known = ""
    if not known:
        address = uuid.getnode()
        # Without a network card, Python makes up an address, which another process does not know.
        made_up = address >> 40 & 1
        known = "" if made_up else f"{address:012x}"
    return hashlib.sha256(known.encode()).hexdigest()[:8]


class Collector(Provider, Protocol):
    """A provider that finds the remains of all pools, without the journal."""

    @property
    def where(self) -> str:
        """Where the provider looks for remains, for people: "aws in us-east-1"."""
        ...

    async def remains(self) -> Sequence[Remains]:
        """What there is of any pool of any client."""
        ...


def collects(provider: Provider) -> TypeGuard[Collector]:
    """Whether a provider finds the remains of all pools."""
    return provider.capabilities.collects


BUILT_IN = {
    "local": "skyward.providers.local:Local",
    "container": "skyward.providers.container:Container",
    "ssh": "skyward.providers.ssh:SSH",
    "kubernetes": "skyward.providers.kubernetes:Kubernetes",
    "aws": "skyward.providers.aws:AWS",
    "slurm": "skyward.providers.slurm:Slurm",
    "ray": "skyward.providers.ray:Ray",
}
"""The class of each provider that is part of Skyward."""


def find_provider(name: str) -> type[Any]:
    """The class of a provider, by name: one of ours, or one that a package registered."""
    if name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].partition(":")
        found: type[Any] = getattr(importlib.import_module(module), attribute)
        return found
    for entry in metadata.entry_points(group="skyward.providers", name=name):
        loaded: type[Any] = entry.load()
        return loaded
    raise ConfigurationError(
        f"no provider is called {name!r}; there are {', '.join(provider_names())}, and packages "
        "may add more"
    )


def provider_names() -> list[str]:
    """The names of all providers: ours, and those that packages registered."""
    entries = metadata.entry_points(group="skyward.providers")
    return sorted({*BUILT_IN, *(entry.name for entry in entries)})


def providers_with(capability: Callable[[Provider], bool]) -> dict[str, type[Any]]:
    """The classes of all providers that can do something, such as `sells`, by name."""
    found: dict[str, Any] = {}
    for name in provider_names():
        # A provider of another package that cannot be imported has nothing to be asked for.
        with contextlib.suppress(ImportError):
            kind: object = find_provider(name)
            if isinstance(kind, Provider) and capability(kind):
                found[name] = kind
    return found


def check_provider(call: str, provider: object) -> None:
    """Refuse what is no provider, in the call of a function, and say what was probably meant."""
    # `isinstance` takes a class for an instance: it has the attributes that the protocol names.
    if isinstance(provider, Provider) and not isinstance(provider, type):
        return
    hint = " (give an instance, not the class)" if isinstance(provider, type) else ""
    raise ConfigurationError(f"{call}(provider={provider!r}): expected {_meant(provider)}{hint}")


def _meant(given: object) -> str:
    """The call that makes the provider whose class or name was given."""
    if isinstance(given, str) and given.lower() in provider_names():
        given = find_provider(given.lower())
    if not isinstance(given, type) or not isinstance(given, Provider):
        ours = [f"sky.{place.partition(':')[2]}" for place in BUILT_IN.values()]
        others = [name for name in provider_names() if name not in BUILT_IN]
        near = difflib.get_close_matches(str(given).lower(), provider_names(), n=1)
        meant = f"did you mean {_meant(near[0])}? There are" if near else "one of"
        return f"a provider; {meant} {', '.join([*ours, *others])}"
    prefix = "sky." if given.__module__.startswith("skyward.providers.") else ""
    required = [
        each.name
        for each in inspect.signature(given).parameters.values()
        if each.default is each.empty and each.kind is not each.VAR_KEYWORD
    ]
    return f"{prefix}{given.__name__}({'...' if required else ''})"


AllocationKind = Literal["on-demand", "spot", "spot-if-available"]
"""How a machine is bought: at a fixed price, or cheaper and until the provider takes it back."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A machine that a provider sells.

    >>> str(Offer("aws", "us-east-1", None, "g6.xlarge", L4(), 4, 16, "x86_64", "spot", 0.33))
    'g6.xlarge (L4-24GB, 4 vCPUs, 16 GB) in us-east-1, spot, $0.33 an hour'
    """

    provider: str
    region: str
    zone: str | None
    """The part of the region; None for any."""
    instance_type: str
    accelerator: Accelerator | None
    """The accelerators of the machine, which may be more than were asked for."""
    vcpus: float
    memory_gb: float
    architecture: str
    allocation: Literal["on-demand", "spot"]
    hourly_cost: float | None
    """The price in US dollars; None if it is unknown."""

    def __str__(self) -> str:
        return self.of(1)

    def of(self, count: int) -> str:
        """The offer and its price, for so many machines.

        >>> Offer("aws", "us-east-1", None, "t3.nano", None, 2, 0.5, "x86_64", "spot", 2).of(3)
        '3 x t3.nano (2 vCPUs, 0.5 GB) in us-east-1, spot, $2.00 an hour each, $6.00 an hour in all'
        """
        parts = f"{self.vcpus:g} vCPUs, {self.memory_gb:g} GB"
        if self.accelerator is not None:
            parts = f"{self.accelerator}, {parts}"
        price, cost = "price unknown", self.hourly_cost
        if cost is not None:
            price = f"{money(cost)} an hour"
            if count > 1:
                price = f"{price} each, {money(cost * count)} an hour in all"
        how = "spot" if self.allocation == "spot" else "on demand"
        what = f"{count} x {self.instance_type}" if count > 1 else self.instance_type
        return f"{what} ({parts}) in {self.zone or self.region}, {how}, {price}"


def money(dollars: float) -> str:
    """An amount in US dollars, with as many decimals as make a difference.

    >>> money(0.0116), money(40.9)
    ('$0.0116', '$40.90')
    """
    if 0 < dollars < 0.00005:
        return "less than $0.0001"
    return f"${dollars:.2f}" if dollars >= 0.1 or not dollars else f"${dollars:.4f}"


def check_allocation(call: str, allocation: object) -> None:
    """Refuse what is no `AllocationKind`, in the call of a function."""
    if allocation not in get_args(AllocationKind):
        raise ConfigurationError(
            f"{call}(allocation={allocation!r}): choose 'on-demand', 'spot', or "
            "'spot-if-available', which takes an on-demand machine where there is no spot machine"
        )


def check_region(call: str, region: object) -> None:
    """Refuse what cannot be a region's name, in the call of a function."""
    if region is not None and (not isinstance(region, str) or not region.strip()):
        raise ConfigurationError(
            f"{call}(region={region!r}): give the provider's name of a region, such as 'us-east-1'"
        )


def state_folder() -> Path:
    """The folder, which `SKYWARD_STATE` may name; it need not exist yet."""
    return Path(os.environ.get("SKYWARD_STATE") or platformdirs.user_state_dir("skyward"))


# The loop of providers.


P = ParamSpec("P")
T = TypeVar("T")

MOST_THREADS = 32
"""How many blocking calls of providers run at once."""

connecting = Staff("skyward-connect", most=64)
"""The threads that make connections: each takes a few round trips."""

_loop: asyncio.AbstractEventLoop | None = None
_loop_lock = threading.Lock()


def submit(work: Coroutine[Any, Any, T]) -> Future[T]:
    """Begin to run a coroutine on the providers' loop; the future can cancel it."""
    try:
        loop = _running_loop()
    except BaseException:
        work.close()  # else Python would warn that nobody has awaited it
        raise
    return asyncio.run_coroutine_threadsafe(work, loop)


async def in_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Do on such a thread what waits; whoever cancels this waits for the end of the work."""
    doing = asyncio.wrap_future(connecting.submit(work, *args, **kwargs))
    try:
        return await asyncio.shield(doing)
    except asyncio.CancelledError:
        await asyncio.wait([doing])
        raise


def _running_loop() -> asyncio.AbstractEventLoop:
    global _loop
    with _loop_lock:
        if _loop is None:
            made: queue.SimpleQueue[asyncio.AbstractEventLoop | Exception] = queue.SimpleQueue()
            threading.Thread(
                target=_run_loop, args=(made,), name="skyward-providers", daemon=True
            ).start()
            found = made.get()
            if isinstance(found, Exception):
                raise found
            _loop = found
        return _loop


def _run_loop(made: queue.SimpleQueue[asyncio.AbstractEventLoop | Exception]) -> None:
    # Made on this thread: a Ctrl-C interrupts the main thread, and would leave half a loop.
    try:
        loop = asyncio.new_event_loop()
        loop.set_default_executor(Staff("skyward-provider", MOST_THREADS))
    except Exception as problem:
        # Such as too many open files; whoever waits for the loop raises it.
        made.put(problem)
        return
    made.put(loop)
    loop.run_forever()


def _forget_loop() -> None:
    global _loop, _loop_lock
    _loop, _loop_lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget_loop)
