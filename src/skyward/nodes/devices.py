"""Torch devices of a pool: each is opened once, and has a process of its own on its node."""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from skyward.calls.device_tensors import Holder
from skyward.console import Console
from skyward.device import build, processors
from skyward.device.meeting import BACKLOGS, Whereabouts
from skyward.device.recovery import recoveries
from skyward.errors import ConfigurationError, DeviceError, NoDeviceError, SkywardError
from skyward.events import DeviceClosed, DeviceOpened, EventStream
from skyward.nodes.node import Roster
from skyward.nodes.spec import PoolSpec
from skyward.nodes.stacks import read_stacks
from skyward.wire.channel import Channel
from skyward.wire.handshake import PEER, Authority, Credentials, node_name
from skyward.wire.messages import CloseDevice, DeviceDown, DeviceUp, Message, OpenDevice
from skyward.wire.native import Terms

if TYPE_CHECKING:
    import torch

    from skyward.device.client import Device

START_SECONDS = 300.0
"""How long a device process may take: its first start on a machine compiles the worker core."""
ABSENT = "it did not come to where the others are"
"""What the ranks of a mesh say of one that does not come (`worker/ranks.cpp`)."""
LAST_SECONDS = 5.0
"""How long leaving a pool waits for its devices before it says so."""
POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class RankProcess:
    """The process of a rank of a mesh."""

    first: int
    """The number of the first rank's process."""
    node: int
    name: str
    """What errors call the rank."""
    pid: int


class PoolDevices:
    """Asks the nodes of a pool for device processes, and keeps the open devices."""

    def __init__(
        self,
        pool_id: str,
        spec: PoolSpec,
        roster: Roster,
        authority: Authority | None,
        credentials: Credentials | None,
        events: EventStream,
        console: Console,
    ) -> None:
        self._id, self._spec, self._roster = pool_id, spec, roster
        self._authority, self._credentials = authority, credentials
        self._events, self._console = events, console
        self._numbers = itertools.count(1)
        self._waiting: dict[int, tuple[int, queue.SimpleQueue[DeviceUp | DeviceDown]]] = {}
        self._open: dict[int, tuple[int, set[str], Device]] = {}
        self._ranks: dict[int, RankProcess] = {}
        self._lost: list[tuple[int, set[str], int]] = []
        """The node, kinds and index of lost devices whose tensors a checkpoint has."""
        self._kept: set[int] = set()
        """The indices of devices whose processes hold kept tensors."""
        self._finished: queue.SimpleQueue[Exception | str] = queue.SimpleQueue()
        """How waiting for each of these devices ended; "hurry" if it is to end now."""
        self._lock = threading.RLock()

    def get(self, node: int, kind: str) -> int:
        """The index of the sky device of that kind on that node.

        If the device was lost and has a checkpoint, it comes back with the checkpoint's tensors,
        and its node is awaited.
        """
        for last in (False, True):
            if self._awaits(node):
                self._await_node(node)
            try:
                index = self._open_device(node, kind, back=True)
                break
            except ConfigurationError:
                # The node may have been lost a moment ago, with its device.
                if last or not self._awaits(node):
                    raise
        try:
            recoveries.fill(index)
        except BaseException as problem:
            # Its tensors have memory and no contents: nobody may read them.
            self._drop(node, index, f"its checkpoint cannot be read: {problem}")
            raise
        return index

    def of_process(self, node: int, kind: str, pid: int) -> int:
        """The index of the device that is that process; of the node's, if another client has it."""
        found = self._kept_process(node, kind, pid)
        return self.get(node, kind) if found is None else found

    def _await_node(self, index: int) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and not self._roster.closed:
            node = self._roster.get(index)
            if node is None or node.serves or node.state == "failed":
                return
            time.sleep(POLL_SECONDS)

    def _open_device(self, node: int, kind: str, *, back: bool) -> int:
        """The index of the node's device of that kind; opens the device if it is not open.

        If the device was lost and has a checkpoint, it is opened again, and its tensors have to be
        filled. Without `back` that is refused.
        """
        with self._lock:
            found = self._find(node, kind)
            if found is not None and not self._is_alive(found):
                self._drop(node, found, "its process is gone")
                found = None
            return self._start(node, kind, back=back) if found is None else found

    def _kept_process(self, node: int, kind: str, pid: int) -> int | None:
        """The index of the device that is a process with kept values; None if it is not to be had.

        If the node's device of that kind is another process, this one is a device besides.
        """
        with self._lock:
            found = self._find_process(node, pid)
            if found is not None and self._is_alive(found):
                return found
            if any(at == node and kind in kinds for at, kinds, _ in self._lost):
                # `get` brings that device back.
                return None
            try:
                return self._start(node, kind, back=True, pid=pid)
            except ConfigurationError:
                return None

    def _find_process(self, node: int, pid: int) -> int | None:
        devices = [device for at, _, device in list(self._open.values()) if at == node]
        return next((device.index for device in devices if device.pid == pid), None)

    def _awaits(self, node: int) -> bool:
        """Whether a device that was lost with a node comes back when the node is there again."""
        return any(at == node for at, _, _ in self._lost)

    def _lost_as(
        self, node: int, kinds: set[str], *, back: bool
    ) -> tuple[int, set[str], int] | None:
        """The lost device of a node that was known by one of these kinds."""
        from skyward.device.core import core

        lost = next((each for each in self._lost if each[0] == node and each[1] & kinds), None)
        if lost is not None and not back:
            raise DeviceError(
                f"sky:{lost[2]} ({core().place(lost[2])}) was lost; ask compute.device() for it, "
                "which brings it back with the tensors of its checkpoint"
            )
        return lost

    @staticmethod
    def _is_alive(index: int) -> bool:
        from skyward.device.core import core

        return index in core().open_devices

    def _drop(self, node: int, index: int, why: str) -> None:
        """Close a device; if it has a checkpoint, the next one takes its place."""
        for number, (_, kinds, device) in list(self._open.items()):
            if device.index == index and self._open.pop(number, None) is not None:
                self._ended(node, kinds, device, why)
                with contextlib.suppress(SkywardError):
                    self._tell(node, CloseDevice(number))

    def _ended(self, node: int, kinds: set[str], device: Device, why: str) -> None:
        """Close a lost device; if it has a checkpoint, the next one takes its place."""
        from skyward.device.core import core

        if recoveries.get(device.index) is not None:
            core().keep_index(device.index)
            self._lost.append((node, kinds, device.index))
        device.close(why)
        self._events.emit(DeviceClosed, node, device.index, why)

    def _place_of(self, index: int) -> tuple[int, set[str]] | None:
        """The node of an open device, and the kinds by which the device was asked for."""
        # Without the lock: a device starts under the lock.
        for node, kinds, device in list(self._open.values()):
            if device.index == index:
                return node, kinds
        return None

    def holder(self, index: int) -> Holder | None:
        """The node of a sky device of this pool, and the worker if only one sees the GPU."""
        found = self._place_of(index)
        if found is None:
            return None
        node, kinds = found
        gpus = [int(kind[5:]) for kind in kinds if kind.startswith("cuda:")]
        alone = self._spec.worker.per_node == "accelerator" and gpus
        return node, gpus[0] if alone else None

    def ranks_of(
        self, index: int, workers: Sequence[tuple[int, int]]
    ) -> dict[tuple[int, int], int] | None:
        """The rank that each worker has in a mesh; None if the device is no mesh of this pool."""
        first = next((n for n, (_, _, each) in self._open.items() if each.index == index), None)
        nodes = [each.node for each in list(self._ranks.values()) if each.first == first]
        if not nodes:
            return None
        ranks = {(node, nodes[:rank].count(node)): rank for rank, node in enumerate(nodes)}
        if set(ranks) != set(workers):
            raise ConfigurationError(
                f"the mesh sky:{index} has {len(ranks)} ranks on nodes {sorted(set(nodes))}, and "
                f"the function runs on {len(workers)} workers of nodes "
                f"{sorted({node for node, _ in workers})}, each of which gets the tensors of one "
                "rank; make the mesh of as many ranks as there are workers"
            )
        return ranks

    def home(self, index: int) -> tuple[int, str] | None:
        """The node and the kind of a sky device of this pool; None if it has no such device."""
        found = self._place_of(index)
        if found is None:
            return None
        node, kinds = found
        # It may have been asked for as "auto", but is known by its own kind, too.
        return node, next((kind for kind in sorted(kinds) if kind != "auto"), "auto")

    def for_result(self, wanted: str | torch.device, node: int, worker: int) -> torch.device:
        """The device that the results of a worker stay on; opens the device if it is not open."""
        import torch

        if not isinstance(wanted, str):
            return wanted
        kind = os.environ.get("SKYWARD_DEVICE") or wanted
        if self._spec.worker.per_node == "accelerator" and kind in ("cuda", "auto") and worker:
            # Every worker has a GPU of its own; the first one's is what "auto" finds.
            kind = f"cuda:{worker}"
        # To fill a lost device runs functions on the node, and the result waits in a worker of it.
        return torch.device("sky", self._open_device(node, kind, back=False))

    def process_of(self, index: int) -> int:
        """The number of an open device's process on its node; 0 if there is no such device."""
        devices = [device for _, _, device in list(self._open.values())]
        return next((device.pid for device in devices if device.index == index), 0)

    def open_on(self, node: int) -> list[int]:
        """The indices of the open devices of that node, without meshes."""
        return [
            device.index
            for number, (at, _, device) in list(self._open.items())
            if at == node and number not in self._ranks
        ]

    def all_open(self) -> list[tuple[int, int, str]]:
        """The node, index and kind of every open device."""
        return [
            (node, device.index, max(kinds - {"auto"}, default="auto"))
            for node, kinds, device in list(self._open.values())
        ]

    def has_open(self, node: int) -> bool:
        """Whether a device of that node is open, or a rank of a mesh is on it."""
        there = [at for at, _, _ in list(self._open.values())]
        return node in there or any(each.node == node for each in list(self._ranks.values()))

    def _find(self, node: int, kind: str, *, asked: str = "") -> int | None:
        for at, kinds, device in list(self._open.values()):
            if at == node and kind in kinds:
                kinds.update(filter(None, [asked]))
                return device.index
        return None

    def _start_processes(
        self, places: Sequence[tuple[int, str]], pid: int = 0, ticket: str = ""
    ) -> list[DeviceUp]:
        """Start a device process at each place, which is a node and a kind."""
        from skyward.device.core import core

        asked: list[tuple[int, int, str]] = []
        up: list[DeviceUp] = []
        try:
            # First: the processes may have to compile their core, as this one has, on another
            # machine or another processor.
            for node, kind in places:
                number = next(self._numbers)
                self._waiting[number] = (node, queue.SimpleQueue())
                asked.append((number, node, kind))
                self._tell(node, OpenDevice(number, kind, pid, ticket))
            over_network = self._credentials is not None
            parts = ("client", build.LINK) if over_network else ("client",)
            build.libraries(parts, self._console.own_line)
            core()
            if over_network:
                core().use_links()
            for number, node, kind in asked:
                answer = self._waiting[number][1].get(timeout=START_SECONDS)
                if isinstance(answer, DeviceDown):
                    raise NoDeviceError(f"device({kind!r}, node={node}): {answer.reason}")
                up.append(answer)
        except BaseException as problem:
            for number, node, _ in asked:
                with contextlib.suppress(SkywardError):
                    self._tell(node, CloseDevice(number))
            if isinstance(problem, queue.Empty):
                raise SkywardError(
                    f"the device process on node {asked[len(up)][1]} did not start within "
                    f"{START_SECONDS:.0f} s; see whether its machine is overloaded, and ask for "
                    "the device again"
                ) from None
            raise
        finally:
            for number, _, _ in asked:
                del self._waiting[number]
        return up

    def _start(self, node: int, kind: str, *, back: bool, pid: int = 0) -> int:
        from skyward.device.client import Device

        self._lost_as(node, {kind}, back=back)
        [answer] = self._start_processes([(node, kind)], pid)
        number, endpoint, real = answer.number, answer.endpoint, answer.kind
        # "auto" and "cuda" may be the same device: both must give tensors of one torch device.
        same = None if pid else self._find(node, real, asked=kind)
        if same is not None:
            self._tell(node, CloseDevice(number))
            return same
        try:
            before = self._lost_as(node, {kind, real}, back=back)
            device = Device(
                lambda role: self._connect(node, endpoint, role),
                answer,
                node,
                self._locate(node, endpoint),
                lost=lambda why: self._given_up(node, number, why),
                again=None if before is None else before[2],
            )
        except BaseException:
            with contextlib.suppress(SkywardError):
                self._tell(node, CloseDevice(number))
            raise
        if before is not None:
            self._lost.remove(before)
        self._open[number] = (node, {kind, real}, device)
        self._events.emit(DeviceOpened, node, device.index, real)
        return device.index

    def mesh(self, size: int, kind: str) -> tuple[int, str]:
        """Open a device that is that many processes, which all carry out what it is told.

        Returns its index, and the name of the process group of all. Nodes that are about to be
        ready are awaited, if the others are too few.
        """
        self._await_places(size, kind)
        try:
            return self._open_mesh(size, kind)
        except (ConfigurationError, NoDeviceError):
            # A node may have been lost a moment ago.
            if len(self._places(kind)) >= size:
                raise
        self._await_places(size, kind)
        return self._open_mesh(size, kind)

    def _await_places(self, size: int, kind: str) -> None:
        for node in self._roster.nodes:
            if len(self._places(kind)) < size:
                self._await_node(node.index)

    def _open_mesh(self, size: int, kind: str) -> tuple[int, str]:
        from skyward.device.client import Device
        from skyward.device.core import core
        from skyward.device.ranks import Joining, Rank, tree

        with self._lock:
            places = self._places(kind)
            if size > len(places):
                raise self._too_few(size, kind, places)
            places = places[:size]
            ticket = secrets.token_hex(16)
            ups = self._start_processes(places, ticket=ticket)
            nodes = [node for node, _ in places]
            numbers = [up.number for up in ups]
            world = f"sky-{self._id}-{numbers[0]}"
            names = [f"rank {rank} (node {node})" for rank, node in enumerate(nodes)]
            for up, node, name in zip(ups, nodes, names, strict=True):
                self._ranks[up.number] = RankProcess(numbers[0], node, name, up.pid)
            try:
                found = [
                    self._locate(node, up.endpoint) for node, up in zip(nodes, ups, strict=True)
                ]
                ranks = [
                    Rank(rank, names[rank], there.pool, there.name, there.endpoints, ticket, [])
                    for rank, there in enumerate(found)
                ]
                first = self._roster.get(nodes[0])
                host = first.host.address if first is not None else "127.0.0.1"
                device = Device(
                    lambda role: self._connect(nodes[0], ups[0].endpoint, role),
                    ups[0],
                    nodes[0],
                    found[0],
                    lost=lambda why: self._given_up(nodes[0], numbers[0], why),
                )
                core().explain_absent_with(
                    device.index, lambda text: self._give_up_absent(numbers[0], text)
                )
                kinds = {f"mesh of {size} {ups[0].kind}"}
                # Before they meet: the loss of one ends the wait of the others.
                self._open[numbers[0]] = (nodes[0], kinds, device)
                seconds = self._spec.options.collective_timeout
                core().join_mesh(device.index, Joining(tree(ranks), size, world, seconds, host))
            except BaseException as problem:
                opened = self._open.pop(numbers[0], None)
                if opened is not None:
                    opened[2].close(f"its ranks did not meet: {problem}")
                self._end_ranks(numbers[0])
                raise
            self._events.emit(DeviceOpened, nodes[0], device.index, *kinds)
            return device.index, world

    def _places(self, kind: str) -> list[tuple[int, str]]:
        """The node and the kind of each rank that a mesh may have: all on GPUs, or all on CPUs."""
        nodes = [node for node in self._roster.nodes if node.serves]
        if kind == "auto":
            kind = "cuda" if any(node.host.accelerators for node in nodes) else "cpu"
        places: list[tuple[int, str]] = []
        for node in nodes:
            gpus, per_node = node.host.accelerators, self._spec.worker.per_node
            workers = per_node if isinstance(per_node, int) else gpus
            if kind == "cpu":
                places += [(node.index, kind)] * workers
            elif gpus:
                ranks = range(max(gpus, workers))
                places += [(node.index, f"cuda:{rank % gpus}") for rank in ranks]
        return places

    def _too_few(
        self, size: int, kind: str, places: Sequence[tuple[int, str]]
    ) -> ConfigurationError:
        nodes = len(self._roster.nodes)
        takes = f"mesh: it takes {size} ranks, and the pool has {len(places)}"
        if kind != "cuda" and all(each == "cpu" for _, each in places):
            return ConfigurationError(
                f"{takes} on {nodes} nodes; give more nodes, or more workers on each: "
                "worker=sky.Worker(per_node=4)"
            )
        with_gpus = len({node for node, _ in places})
        return ConfigurationError(
            f"{takes} with GPUs: {with_gpus} of its {nodes} nodes have one; give more nodes with "
            'GPUs, or compute.mesh("cpu", ...) for a rank per worker'
        )

    def _give_up_absent(self, first: int, text: str) -> str:
        """End a mesh whose ranks do not come, as an error's text says; returns where they are."""
        absent = {
            number: rank
            for number, rank in list(self._ranks.items())
            if rank.first == first and f"{rank.name}: {ABSENT}" in text
        }
        nodes = sorted({rank.node for rank in absent.values()})
        found = read_stacks(nodes, self._roster.service)
        lines = []
        for rank in absent.values():
            # The process, or that the agent of its node does not answer.
            here = [each for each in found if each.node == rank.node and each.pid in (rank.pid, 0)]
            lines += [f"{rank.name}: {each.text(everything=True)}" for each in here]
        self._lose(list(absent), ABSENT)
        lines.append(
            "The mesh is lost: call compute.mesh() again, and load what you have saved; "
            "sky.Options(collective_timeout=...) gives ranks more time"
        )
        return "".join(f"\n{line}" for line in lines)

    def _end_ranks(self, first: int) -> None:
        """End the processes of a mesh, if the device is one."""
        for number, rank in list(self._ranks.items()):
            if rank.first == first and self._ranks.pop(number, None) is not None:
                with contextlib.suppress(SkywardError):
                    self._tell(rank.node, CloseDevice(number))

    def heard(self, message: DeviceUp | DeviceDown) -> None:
        """Take an agent's message that a device process listens, or has ended."""
        waiting = self._waiting.get(message.number)
        if waiting is not None:
            waiting[1].put(message)
        elif isinstance(message, DeviceDown):
            self._lose([message.number], message.reason)

    def node_lost(self, node: int, why: str) -> None:
        """Close the devices of a node that is lost."""
        for number, (at, answers) in list(self._waiting.items()):
            if at == node:
                answers.put(DeviceDown(number, why))
        there = {n for n, (at, _, _) in list(self._open.items()) if at == node}
        there |= {n for n, rank in list(self._ranks.items()) if rank.node == node}
        self._lose(sorted(there), why)

    def _given_up(self, node: int, number: int, why: str) -> None:
        """Close a device that cannot be reached any more, and end its process if that is alive."""
        self._lose([number], why)
        with contextlib.suppress(SkywardError):
            self._tell(node, CloseDevice(number))

    def _lose(self, numbers: list[int], why: str) -> None:
        def take(each: int) -> tuple[int, str, tuple[int, set[str], Device] | None]:
            rank = self._ranks.get(each)
            number = each if rank is None else rank.first
            return number, "" if rank is None else rank.name, self._open.pop(number, None)

        def lose() -> None:
            for each in numbers:
                number, name, lost = take(each)
                if lost is None:
                    # The device may be starting; it is in `_open` when the lock is free.
                    with self._lock:
                        number, name, lost = take(each)
                if lost is not None:
                    self._ended(*lost, f"{name} is lost: {why}" if name else why)
                    self._end_ranks(number)

        # On a thread of its own: a device starts under the lock, and waits for the calling thread.
        threading.Thread(target=lose, name="skyward-device-lost", daemon=True).start()

    def keep(self, index: int) -> None:
        """Have `finish` wait for a device: its tensors stay when this client leaves."""
        self._kept.add(index)

    def finish(self, note: Callable[[str], None]) -> None:
        """Wait for all that was issued on devices with kept tensors; raises the first failure.

        A call of `hurry` ends the wait: the next `close` drops what is not done.
        """
        waiting = [
            (node, device.index)
            for node, _, device in list(self._open.values())
            if device.index in self._kept
        ]
        for each in waiting:
            self._begin_to_wait(*each)
        failures: list[Exception] = []
        for _ in waiting:
            try:
                ended = self._finished.get(timeout=LAST_SECONDS)
            except queue.Empty:
                note("waits for the last operations on kept tensors; Ctrl-C leaves them undone")
                ended = self._finished.get()
            if ended == "hurry":
                break
            if isinstance(ended, Exception):
                failures.append(ended)
        if failures:
            for other in failures[1:]:
                failures[0].add_note(f"Another device failed, too: {other}")
            raise failures[0]

    def _begin_to_wait(self, node: int, index: int) -> None:
        thread = threading.Thread(
            target=self._wait_for, args=(node, index), name="skyward-device-last", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:
            # At the end of the interpreter no thread can be started.
            self._wait_for(node, index)

    def _wait_for(self, node: int, index: int) -> None:
        import torch

        try:
            torch.accelerator.synchronize(index)
        except Exception as failure:
            # Whatever an operation raised: nobody else would hear of it.
            failure.add_note(
                f"This failed on sky:{index} (node {node}) after tensors of that device were "
                "kept, and was noticed when the client left the pool."
            )
            self._finished.put(failure)
        else:
            self._finished.put("done")

    def hurry(self) -> None:
        """End the wait of `finish`."""
        self._finished.put("hurry")

    def close(self, why: str) -> None:
        """Close every device and end their processes."""
        for number, (_, answers) in list(self._waiting.items()):
            answers.put(DeviceDown(number, why))
        # First the meshes: the ranks of one may still meet, under the lock.
        ended = self._end({rank.first for rank in list(self._ranks.values())}, why)
        with self._lock:
            ended += self._end(list(self._open), why)
        if self._lost:
            from skyward.device.core import core

            for _, _, index in self._lost:
                recoveries.forget(index)
                core().give_up_index(index)
        if ended or self._lost:
            processors.give_back()

    def _end(self, numbers: Iterable[int], why: str) -> int:
        """Close devices because the user wants that; how many of them were open."""
        count = 0
        for number in numbers:
            found = self._open.pop(number, None)
            if found is None:
                continue
            node, _, device = found
            device.end(why)
            self._end_ranks(number)
            self._events.emit(DeviceClosed, node, device.index, why)
            recoveries.forget(device.index)
            with contextlib.suppress(SkywardError):
                self._tell(node, CloseDevice(number))
            count += 1
        return count

    # The way to a node.

    def _tell(self, index: int, message: Message) -> None:
        node = self._roster.get(index)
        if node is None or not node.serves:
            there = [each.index for each in self._roster.nodes if each.serves]
            if not self._roster.nodes:
                raise ConfigurationError(
                    f"device(node={index}): the pool has no nodes now, because it shrinks to none "
                    "when it is idle; call compute.resize(1) first, or give nodes=(1, n)"
                )
            raise ConfigurationError(
                f"device(node={index}): that node is not ready; ready are {there}"
                if node is not None
                else f"device(node={index}): the pool's nodes are {there}"
            )
        node.tell(message)

    def _connect(self, index: int, endpoint: str, role: str) -> Channel:
        node = self._roster.get(index)
        if node is None:
            raise ConfigurationError(
                f"device(node={index}): that node has left the pool; see `compute.nodes`"
            )
        channel, _ = node.host.approach(
            role,
            node.host.routes.choose(endpoint),
            self._credentials,
            gone="its process has ended",
            patience=self._spec.options.orphan_timeout,
            terms=Terms(BACKLOGS[role]),
        ).attempt()
        return channel

    def _locate(self, index: int, endpoints: str) -> Whereabouts:
        node = self._roster.get(index)
        found = node.host.routes.for_peers(endpoints) if node is not None else ()
        return Whereabouts(self._id, node_name(self._id, index), found, self._issue)

    def _issue(self) -> Credentials | None:
        """Credentials for a process of another pool of this client's; a job has no key for them."""
        return self._authority.issue(PEER) if self._authority else None
