"""Ranks: how the processes of a mesh find each other, and the process groups between them.

The client tells the first rank of all others. Each rank connects to those below it in a tree, whose
records then come from it, as a client connects to a device. All meet in one store for the groups.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import socket
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import msgspec

from skyward.device.meeting import BACKLOGS, ON_ONE_HOST
from skyward.device.peers import PATIENCE_SECONDS, MakeLink, Peers, Unreachable
from skyward.errors import SkywardError
from skyward.wire.channel import Channel
from skyward.wire.handshake import PEER, Credentials, Dialer, connect
from skyward.wire.messages import Hello
from skyward.wire.native import Terms

BELOW_MOST = 4
"""How many ranks one rank passes its records on to."""
MEET_SECONDS = 120.0
"""How long the ranks wait for each other when they meet."""
LATE_PART = 1 / 6
"""Of the time for a collective, what is left for a rank to come after the others have failed."""


class Rank(msgspec.Struct):
    """A process of a mesh, as the rank above it is told of it."""

    number: int
    name: str
    """For people."""
    pool: str
    listener: str
    """The name in its certificate."""
    endpoints: tuple[str, ...]
    """Where other processes may try to reach it, the best place first."""
    ticket: str
    """What it is shown by the rank above it."""
    below: list[Rank]


class Joining(msgspec.Struct):
    """What a rank is told of itself, of those below it, and of the mesh."""

    rank: Rank
    size: int
    world: str
    """The name of the group of all ranks."""
    seconds: float
    """How long the ranks wait for one in a collective before it is an error."""
    host: str
    """Where the first rank is reached by the others."""
    port: int = 0
    """Its store's; 0 as long as it has none."""


class Groups(msgspec.Struct):
    """Process groups to be made: for each name, the ranks of every group that has it."""

    ranks: dict[str, list[list[int]]]


def tree(ranks: Sequence[Rank]) -> Rank:
    """The first rank, with the others below it.

    >>> row = [Rank(n, f"rank {n}", "", "", (), "", []) for n in range(6)]
    >>> [[each.number for each in rank.below] for rank in (tree(row), row[1])]
    [[1, 2, 3, 4], [5]]
    """
    for rank in ranks[1:]:
        ranks[(rank.number - 1) // BELOW_MOST].below.append(rank)
    return ranks[0]


def depth(number: int) -> int:
    """How many ranks are above one: each waits longer for an answer than those below it do.

    >>> [depth(number) for number in (0, 1, 4, 5, 20, 21)]
    [0, 1, 1, 2, 2, 3]
    """
    return 1 + depth((number - 1) // BELOW_MOST) if number else 0


_IN_PLACE = f"{PEER}-rank"


def role_of(hello: Hello, ticket: str) -> str:
    """What a rank wants to be to the one below it; empty for whoever has another ticket."""
    shown, _, role = hello.role.removeprefix(f"{_IN_PLACE}-").partition("-")
    is_rank = hello.role.startswith(f"{_IN_PLACE}-") and ticket
    return role if is_rank and secrets.compare_digest(shown, ticket) else ""


class OwnRank:
    """This process's part in a mesh; the core calls it on the thread that runs the operations."""

    def __init__(
        self,
        library: ctypes.CDLL,
        kind: str,
        credentials: Credentials | None,
        peers: Peers,
        import_torch: Callable[[], None],
    ) -> None:
        self._library, self._kind = library, kind
        self._credentials, self._peers = credentials, peers
        self._import_torch = import_torch
        self._held: list[Channel] = []
        self._number, self._address, self._seconds = 0, "", 0.0
        self._store: Any = None
        self._groups: dict[str, Any] = {}
        # The core calls it; it must live as long as it may.
        self.join = MakeLink(self._join)

    def _join(self, description: bytes, message: Any, size: int) -> int:
        try:
            try:
                joining = msgspec.json.decode(description, type=Joining)
            except msgspec.ValidationError:
                self._make_groups(msgspec.json.decode(description, type=Groups))
            else:
                self._meet(joining)
        except Exception as problem:
            words = (str(problem) or type(problem).__name__).encode()[: size - 1] + b"\0"
            ctypes.memmove(message, words, len(words))
            return 1
        return 0

    def _meet(self, joining: Joining) -> None:
        self._number = joining.rank.number
        self._seconds = joining.seconds
        self._library.sky_worker_rank(
            ctypes.c_uint32(self._number),
            joining.rank.name.encode(),
            ctypes.c_double(joining.seconds * LATE_PART / (1 + depth(self._number))),
        )
        self._import_torch()
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        seconds = timedelta(seconds=MEET_SECONDS)
        if not self._number:
            self._store = TCPStore(
                joining.host, 0, is_master=True, wait_for_workers=False, timeout=seconds
            )
            joining.port = self._store.port
        for below in joining.rank.below:
            self._add(below, joining)
        if self._number:
            self._store = TCPStore(joining.host, joining.port, is_master=False, timeout=seconds)
        self._address = _own_address(joining.host, joining.port)
        self._make_groups(Groups({joining.world: [list(range(joining.size))]}))

    def _add(self, rank: Rank, joining: Joining) -> None:
        """Connect to a rank below this one, as a client does to a device."""
        problems = []
        for endpoint in rank.endpoints:
            channels: list[Channel] = []
            try:
                channels.extend(self._dial(endpoint, rank))
                break
            except (OSError, EOFError, SkywardError) as problem:
                problems.append(f"{endpoint.partition(':')[0]}: {problem}")
        else:
            raise Unreachable(
                f"{joining.rank.name} does not reach {rank.name} ({'; '.join(problems)})"
            )
        self._held.extend(channels)
        shares_memory = channels[0].shares_memory
        if shares_memory:
            ways = [channel.detach()[0].fileno() for channel in channels]
        else:
            ways = [channel.native_link.address for channel in channels]
        below = msgspec.structs.replace(joining, rank=rank)
        message = ctypes.create_string_buffer(2048)
        if self._library.sky_worker_add_rank(
            rank.name.encode(),
            (ctypes.c_uint64 * len(ways))(*ways),
            len(ways),
            int(shares_memory),
            msgspec.json.encode(below),
            message,
            ctypes.c_size_t(len(message)),
        ):
            raise Unreachable(message.value.decode(errors="replace"))

    def _dial(self, endpoint: str, rank: Rank) -> Iterator[Channel]:
        pid = os.getpid()
        if endpoint.startswith("unix:"):
            if not os.path.exists(endpoint.removeprefix("unix:")):
                raise Unreachable("it is on another host")
            for role in ON_ONE_HOST:
                hello = Hello(rank.pool, f"{_IN_PLACE}-{rank.ticket}-{role}", pid=pid)
                yield connect(endpoint, hello, None, rank.listener)[0]
            return
        if self._credentials is None:
            raise Unreachable("there are no credentials for a network here")
        self._peers.use_links()
        for role, backlog in BACKLOGS.items():
            dialer = Dialer(
                endpoint,
                Hello(rank.pool, f"{_IN_PLACE}-{rank.ticket}-{role}", pid=pid),
                self._credentials,
                rank.listener,
                gone="its process has ended",
                patience=PATIENCE_SECONDS,
                terms=Terms(backlog),
            )
            yield dialer.open()[0]

    def _make_groups(self, groups: Groups) -> None:
        for name, every in groups.ranks.items():
            mine = next(ranks for ranks in every if self._number in ranks)
            self._groups[name] = self._make_group(name, mine)

    def _make_group(self, name: str, ranks: list[int]) -> Any:
        """A group that operations find by its name, with the ranks of it that are this one's."""
        import torch
        from torch.distributed import distributed_c10d

        c10d: Any = distributed_c10d
        own, size = ranks.index(self._number), len(ranks)
        store = c10d.PrefixStore(f"{name}/{ranks[0]}", self._store)
        group = c10d.ProcessGroup(store, own, size)
        seconds = timedelta(seconds=self._seconds * (1 - LATE_PART))
        is_own_gpu = self._kind.startswith("cuda") and self._has_own_gpu(store, own, size)
        if is_own_gpu:
            options = c10d.ProcessGroupNCCL.Options()
            options._timeout = seconds
            backend = c10d.ProcessGroupNCCL(store, own, size, options)
            kind = c10d.ProcessGroup.BackendType.NCCL
        else:
            options = c10d.ProcessGroupGloo._Options()
            device = c10d.ProcessGroupGloo.create_device(hostname=self._address)
            options._devices, options._timeout, options._threads = [device], seconds, 2
            backend = c10d.ProcessGroupGloo(store, own, size, options)
            kind = c10d.ProcessGroup.BackendType.GLOO
        backend._set_sequence_number_for_group()
        group._set_default_backend(kind)
        for place in ("cuda",) if is_own_gpu else ("cpu", "cuda"):
            group._register_backend(torch.device(place), kind, backend)
        group._set_group_name(name)
        c10d._register_process_group(name, group)
        return group

    def _has_own_gpu(self, store: Any, own: int, size: int) -> bool:
        """Whether no two ranks of a group share a GPU: NCCL wants one for each."""
        import torch

        index = torch.device(self._kind).index or 0
        store.set(f"gpu/{own}", str(torch.cuda.get_device_properties(index).uuid))
        return len({store.get(f"gpu/{rank}") for rank in range(size)}) == size

    def close(self) -> None:
        """Leave the mesh: its client has left."""
        with contextlib.suppress(ImportError, AttributeError):
            from torch.distributed import distributed_c10d

            c10d: Any = distributed_c10d
            for name in self._groups:
                c10d._unregister_process_group(name)
        self._groups, self._store = {}, None
        for channel in self._held:
            channel.close()
        self._held = []


def _own_address(host: str, port: int) -> str:
    """The address of this machine that the first rank's machine sees."""
    with socket.create_connection((host, port), timeout=MEET_SECONDS) as reached:
        return str(reached.getsockname()[0])
