"""Gathering: the pools of all processes of this user, seen through their doors, and kept pools.

A kept pool is shown once, by what its agents tell; its clients here add what only they know: calls
that wait, torch devices, bytes. However many look, a process and an agent have one connection each.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from typing import Any

import msgspec

from skyward.errors import SkywardError
from skyward.nodes import records
from skyward.nodes.kept import ReachedPool
from skyward.nodes.records import KeptNode, KeptPool
from skyward.page.door import VIEW, addresses, connect
from skyward.page.hub import TICK_SECONDS, Hub
from skyward.page.pool import Message, Row, ShownPool
from skyward.wire.channel import ServiceConnection
from skyward.worker.task_board import BUCKETS

LOOK_SECONDS = 1.0
"""How often new processes and pools are looked for."""
SILENCE_SECONDS = 30.0
"""A process that sends nothing for so long, though it should every 5 s, is given up."""
AGAIN_SECONDS = 5.0
"""How long a kept pool that could not be reached is left alone."""
NODE_AGAIN_SECONDS = 2.0
"""How long to wait before an agent that could not be reached is asked again."""
ANSWER_SECONDS = 1.0
"""How long the first look at a pool waits for its agents."""
MEASURE_SECONDS = 3.0
SKEW_SECONDS = 0.5
"""A node's clock that differs by more than this from what was thought is measured again."""
SAME_SECONDS = 2.0
"""A task is the one that was told if it has the same name and began within so many seconds."""
LINE_MOST = 64 << 20
UNREADABLE = (OSError, ValueError, LookupError, TypeError, msgspec.MsgspecError)
"""What reading a process may raise, which may have another version of Skyward."""

_OF_AGENTS = ("begun", "succeeded", "failed", "cancelled", "call_seconds")
_OF_CLIENTS = ("retried", "nodes_lost", "sent", "received", "curves_left_out")
_CAN_WAIT = frozenset({"time", "usage"})
"""A report of nothing else wakes nobody."""
NOTES_OF_CLIENTS = frozenset(
    {"call_retried", "device_opened", "device_closed", "node_lost", "node_failed", "node_stopped"}
)
"""The events of a client that the page shows of a kept pool; the agents tell of the others."""


class Gathering(Hub):
    """Shows the pools of this user's processes; with names, only pools that are called so."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        super().__init__()
        self._names = frozenset(names)
        self._doors: dict[str, socket.socket] = {}
        self._readers: list[threading.Thread] = []
        self._clients: dict[str, ShownPool] = {}
        """What processes here that are clients of kept pools tell of those, by their keys."""
        self._kept: dict[str, KeptWatch] = {}
        self._tried: dict[str, float] = {}
        """When each kept pool was last begun to be watched."""
        self._failures: set[str] = set()
        """What looks around have failed with, of which each was reported once."""
        self._measured = False
        self._ended = threading.Event()
        self._looker: threading.Thread | None = None

    def begin(self) -> None:
        self._ended.clear()
        self._looker = threading.Thread(target=self._look, name="skyward-look", daemon=True)
        self._looker.start()

    def end(self) -> None:
        self._ended.set()
        if self._looker is not None:
            self._looker.join()
        with self.lock:
            doors, readers, kept = list(self._doors.values()), self._readers, self._kept
            self._readers, self._kept, self._tried = [], {}, {}
        for connection in doors:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for watch in kept.values():
            watch.end()
        for thread in readers:
            thread.join()

    def close(self) -> None:
        """End all viewers and connections."""
        with self.lock:
            viewers = list(self._viewers)
        for viewer in viewers:
            self.leave(viewer)
        if self._measured:
            self._measured = False
            self.release()

    def measure(self) -> list[tuple[Message, Message]]:
        """The same; from the first call on, all pools are sampled.

        The histogram of calls would begin again if each question made connections of its own.
        """
        if not self._measured:
            self._measured = True
            self.hold()
            deadline = time.monotonic() + MEASURE_SECONDS
            while (addresses() or records.names()) and time.monotonic() < deadline:
                with self.lock:
                    if self.pools and all(pool.samples for pool in self.pools.values()):
                        break
                time.sleep(TICK_SECONDS)
        with self.lock:
            for pool in self.pools.values():
                pool.sample()
        return super().measure()

    # Looking around.

    def _look(self) -> None:
        while not self._ended.is_set():
            try:
                self._look_at_doors()
                self._look_at_kept()
            except Exception as problem:
                # Once; the next look may succeed.
                if repr(problem) not in self._failures:
                    self._failures.add(repr(problem))
                    traceback.print_exception(problem, file=sys.stderr)
            self._ended.wait(LOOK_SECONDS)

    def _look_at_doors(self) -> None:
        """Have a connection to each of the user's processes with pools."""
        for address in addresses():
            if address in self._doors:
                continue
            connection = connect(address, VIEW)
            if connection is None:
                continue
            connection.settimeout(SILENCE_SECONDS)
            thread = threading.Thread(
                target=self._read, args=(address, connection), name="skyward-gather", daemon=True
            )
            with self.lock:
                self._doors[address] = connection
                self._readers = [each for each in self._readers if each.is_alive()] + [thread]
            thread.start()

    def _look_at_kept(self) -> None:
        """Have a watch for each of the kept pools."""
        now = time.monotonic()
        for watch in self._kept.values():
            watch.look_at_record()
        for name in records.names():
            known = self._kept.get(name)
            wanted = not self._names or name in self._names
            waits = now - self._tried.get(name, -AGAIN_SECONDS) < AGAIN_SECONDS
            if wanted and not waits and (known is None or not known.is_alive):
                self._tried[name] = now
                with self.lock:
                    self._kept[name] = KeptWatch(name, self)

    # Other processes.

    def _read(self, address: str, connection: socket.socket) -> None:
        found: dict[str, ShownPool] = {}
        try:
            with connection.makefile("r", encoding="utf-8") as lines:
                while line := lines.readline(LINE_MOST):
                    for message in json.loads(line) if line.strip() else ():
                        self.hear(message, found)
        except UNREADABLE:
            pass
        finally:
            connection.close()
            with self.lock:
                self._doors.pop(address, None)
                for key in list(found):
                    self.hear({"type": "gone", "pool": key}, found)

    def hear(self, message: Message, found: dict[str, ShownPool]) -> None:
        """Take a message of a process; `found` has the pools that the process has told of."""
        key = message.get("pool", "")
        identity, _, process = key.rpartition("-")
        kind = message["type"]
        if kind == "pool" and (not self._names or message["name"] in self._names):
            of_kept = records.find(identity) is not None
            found[key] = ShownPool(key, message["name"], message["provider"])
            found[key].absorb(message)
            with self.lock:
                if of_kept:
                    self._clients[key] = found[key]
                    self._add_of_client(identity, process, message)
                else:
                    self.show(found[key])
        elif kind == "gone" and key in found:
            with self.lock:
                pool = found.pop(key)
                if self._clients.pop(key, None) is None:
                    self.hide(pool)
        elif key in found:
            with self.lock:
                found[key].absorb(message)
                if key in self._clients:
                    found[key].news()
                    self._add_of_client(identity, process, message)
            self.wake()

    def _add_of_client(self, identity: str, process: str, message: Message) -> None:
        """Add to a kept pool what a client tells, and its agents cannot."""
        kept = self.pools.get(key_of_kept(identity))
        if kept is not None and message["type"] != "sample":
            kept.add_numbers([*row, process] for row in message["numbers"])
            if message["type"] == "changes":
                notes = message["notes"]
                kept.add_notes(note for note in notes if note.get("event") in NOTES_OF_CLIENTS)

    def samples_of(self, identity: str) -> list[Message]:
        """The last samples of the clients on this machine of a kept pool."""
        known = [(key, pool.latest()) for key, pool in self._clients.items()]
        return [each for key, each in known if each and key.rpartition("-")[0] == identity]

    def show_kept(self, kept: KeptShown) -> None:
        """Show a kept pool in place of those that were shown for it.

        A client that has made the pool was shown before the pool was one that stays.
        """
        identity = kept.record.id
        with self.lock:
            for key, pool in list(self.pools.items()):
                if key.rpartition("-")[0] == identity:
                    self.hide(pool, "replaced")
                    self._clients[key] = pool
            self.show(kept)
            for key, client in self._clients.items():
                if key.rpartition("-")[0] == identity:
                    self._add_of_client(identity, key.rpartition("-")[2], client.snapshot())


def key_of_kept(pool: str) -> str:
    """What names a kept pool on a page; its clients on this machine have keys of their own."""
    return f"{pool}-kept"


class KeptShown(ShownPool):
    """A kept pool, by what its agents tell."""

    def __init__(self, record: KeptPool, gathering: Gathering | None = None) -> None:
        super().__init__(key_of_kept(record.id), record.name, record.provider)
        self.record, self._gathering = record, gathering
        self._of_nodes: dict[int, dict[str, Any]] = {}
        """What each agent has told last of workers, clients, jobs and totals."""
        self._counted: dict[str, dict[str, Any]] = {}
        """The last sample of every client: what those who are gone have moved stays counted."""
        self.add_nodes(self._row(node.index, "connecting") for node in record.nodes)

    def _row(self, index: int, state: str) -> Row:
        node = self.record.node(index)
        if node is None:
            return [index, state, "", None, 0, ""]
        return [index, state, node.address, node.accelerator, node.accelerators, ""]

    @property
    def all_answered(self) -> bool:
        """Whether every node has told something, or cannot be reached."""
        return not any(row[1] == "connecting" for row in list(self.nodes.values()))

    def renew(self, record: KeptPool) -> None:
        """Take over the nodes of a record that has changed."""
        before, self.record = self.record, record
        there = {node.index: node for node in record.nodes}
        for index in [each for each in self.nodes if before.node(each) != there.get(each)]:
            self._of_nodes.pop(index, None)
            self._lose_calls(index, set())
            self.forget_node(index)
            if index not in there:
                self.add_nodes([self._row(index, "stopped")])
        new = [index for index in there if index not in self.nodes]
        self.add_nodes(self._row(index, "connecting") for index in new)
        self._set_states()

    def take(self, node: int, told: dict[str, Any]) -> None:
        """Take a report of a node's agent, or {"state": ...}."""
        if node not in self.nodes:
            return
        if "state" in told:
            self.add_nodes([self._row(node, told["state"])])
        tasks, lines = told.get("tasks", ()), told.get("lines", ())
        if told.get("fresh"):
            # The agent begins again with all that it knows.
            tasks, lines = self._untold(node, tasks, lines)
            self._lose_calls(node, {f"{node}:{task[0]}" for task in tasks})
        for task in tasks:
            self._take_task(node, task)
        self.add_lines(_line_row(node, line) for line in lines)
        if "usage" in told:
            usage = told["usage"]
            memory = usage["memory_used"], usage["memory_total"]
            moved = usage["network_received"], usage["network_sent"]
            self.add_load(node, usage["cpu_percent"], memory, usage["gpus"], moved)
        states = {key: told[key] for key in ("workers", "clients", "jobs", "totals") if key in told}
        self._of_nodes[node] = self._of_nodes.get(node, {}) | states
        if states.keys() - {"totals"}:
            self._set_states()

    def _untold(
        self, node: int, tasks: Iterable[Row], lines: Iterable[Row]
    ) -> tuple[list[Row], list[Row]]:
        """What the agent had not told before its connection was lost."""
        known = {call[0]: call[4] for call in self._ended if call[2] == node}
        last = max((line[0] for line in self._lines if line[1] == node), default=0.0)
        # A node that was started again counts its tasks anew.
        return (
            [
                task
                for task in tasks
                if abs(known.get(f"{node}:{task[0]}", 0.0) - task[3]) > SAME_SECONDS
            ],
            [line for line in lines if line[0] > last],
        )

    def _lose_calls(self, node: int, but: set[str]) -> None:
        for key, call in list(self.running.items()):
            if call[2] == node and key not in but:
                self.add_call([*call[:5], time.time(), "lost", call[7]])

    def _take_task(self, node: int, task: Row) -> None:
        number, name, worker, began, ended, how, client, error = task
        about = [f"{node}:{number}", name, node, worker, began, ended]
        self.add_call([*about, None if ended is None else how, client])
        if ended is not None and how in ("failed", "lost"):
            why = error or "its process has ended"
            event = {"event": "call_failed", "time": ended, "name": name, "node": node}
            self.add_notes([event | {"error": why, "client": client}])

    def _set_states(self) -> None:
        told = sorted(self._of_nodes.items())
        workers = [[node, each] for node, known in told for each in range(known.get("workers", 0))]
        jobs = [job for _, known in told for job in known.get("jobs", ())]
        clients: dict[str, dict[str, Any]] = {}
        for _, known in told:
            for name, who in known.get("clients", {}).items():
                before = clients.get(name, {})
                clients[name] = {**before, **who}
                if "since" in before and "since" in who:
                    # A node that came later knows a later one.
                    clients[name]["since"] = min(before["since"], who["since"])
        jobs.sort(key=lambda job: float(job["began"]))
        self.set_now(workers=workers, clients=clients, jobs=jobs)

    def sample(self) -> None:
        if self.samples or self.is_measured:
            clients = [] if self._gathering is None else self._gathering.samples_of(self.record.id)
            self.add_sample(self.numbers(clients))
        else:
            # Until the load is known for the first time, there is more to come soon.
            self.sample_due = time.monotonic() + TICK_SECONDS

    def numbers(self, clients: Iterable[Message]) -> Message:
        """The pool's numbers now, with the samples of its clients on this machine."""
        totals: Message = dict.fromkeys(_OF_AGENTS, 0)
        buckets = [0] * (len(BUCKETS) + 1)
        for told in [known["totals"] for known in self._of_nodes.values() if "totals" in known]:
            for name in _OF_AGENTS:
                totals[name] += told[name]
            buckets = [a + b for a, b in zip(buckets, told["buckets"], strict=True)]
        hourly = self.record.hourly_cost
        cost = None if hourly is None else hourly * (time.time() - self.record.created) / 3600
        submitted = totals.pop("begun")
        numbers = totals | {"buckets": buckets, "cost": cost, "hourly_cost": hourly}
        numbers |= {"devices": [], "waiting": 0}
        for each in clients:
            process = each["pool"].rpartition("-")[2]
            self._counted[each["pool"]] = {name: each.get(name, 0) for name in _OF_CLIENTS}
            numbers["waiting"] += each["waiting"]
            numbers["devices"] += [{**row, "process": process} for row in each["devices"]]
        for name in _OF_CLIENTS:
            numbers[name] = sum(counted[name] for counted in self._counted.values())
        return numbers | {"submitted": submitted + numbers["waiting"]}


def _line_row(node: int, line: Row) -> Row:
    """A line as the page has it: one of a call by name is the call's, as one of a job is the job's.

    Workers know such a call by its function and its name: "train (run-7)".
    """
    when, worker, stream, text, function, client, job = line
    called, separator, named = function.rpartition(" (")
    if not job and separator and named.endswith(")"):
        return [when, node, worker, stream, text, called, client, named[:-1]]
    return [when, node, worker, stream, text, function, client, job]


class KeptWatch:
    """Has a kept pool shown, until it is ended or the pool is; one thread for each agent hears it.

    The thread of the watch itself reaches nodes, which may take long, and waits while none comes.
    """

    def __init__(self, name: str, gathering: Gathering) -> None:
        self.name, self.gathering = name, gathering
        self.pool: KeptShown | None = None
        self.woken = threading.Event()
        """Set if there is something to do: nodes have changed, agents have answered, or the end."""
        self.known = KnownNodes()
        self._ended = False
        self._mark: tuple[int, int] | None = None
        self._nodes: dict[int, NodeWatch] = {}
        self._reached: list[ReachedPool] = []
        """What the watches of nodes go through."""
        self._thread = threading.Thread(target=self._run, name="skyward-kept", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the pool is still shown."""
        return self._thread.is_alive()

    def look_at_record(self) -> None:
        """Have the record read again if its file is another one."""
        if self._mark is not None and self._found_mark() != self._mark:
            self.woken.set()

    def _found_mark(self) -> tuple[int, int]:
        try:
            found = records.path_of(self.name).stat()
        except OSError:
            return 0, 0
        return found.st_ino, found.st_mtime_ns

    def end(self) -> None:
        """End the connections and the threads."""
        self._ended = True
        self.woken.set()
        self._thread.join()

    def _run(self) -> None:
        pool = None
        try:
            record = self._read()
            if record.stopped:
                return
            pool = self.pool = KeptShown(record, self.gathering)
            self._watch(record)
            deadline = time.monotonic() + ANSWER_SECONDS
            while not (pool.all_answered or self._ended) and time.monotonic() < deadline:
                self.woken.wait(max(0.0, deadline - time.monotonic()))
                self.woken.clear()
            self.gathering.show_kept(pool)
            while not self._ended:
                if self._found_mark() != self._mark:
                    written = self._read()
                    if written.id != record.id or written.stopped:
                        return
                    record = written
                with self.gathering.lock:
                    nodes = self.known.nodes
                if nodes != pool.record.nodes:
                    now = msgspec.structs.replace(record, nodes=nodes)
                    self._watch(now)
                    with self.gathering.lock:
                        pool.renew(now)
                    self.gathering.wake()
                self.woken.wait()
                self.woken.clear()
        except (SkywardError, EOFError, *UNREADABLE):
            pass  # it is gone, or out of reach; who looks for kept pools tries again
        finally:
            self._close(self._nodes)
            for reached in self._reached:
                reached.close()
            if pool is not None:
                self.gathering.hide(pool)

    def _read(self) -> KeptPool:
        self._mark = self._found_mark()
        record = records.read(self.name)
        with self.gathering.lock:
            self.known.write(record.nodes)
        return record

    def _watch(self, record: KeptPool) -> None:
        """Have a watch for every node of the record, and for no other."""
        there = {node.index: node for node in record.nodes}
        others = [i for i, watch in self._nodes.items() if watch.facts != there.get(i)]
        self._close({index: self._nodes.pop(index) for index in others})
        new = there.keys() - self._nodes.keys()
        if new:
            reached = ReachedPool(record)
            self._reached.append(reached)
            for index in sorted(new & set(reached.nodes)):
                self._nodes[index] = NodeWatch(reached, index, self)

    @staticmethod
    def _close(watches: dict[int, NodeWatch]) -> None:
        for watch in watches.values():
            watch.end()
        for watch in watches.values():
            watch.thread.join()

    def take(self, node: int, told: dict[str, Any]) -> None:
        """Take what the agent of a node tells, on the thread that hears it."""
        pool = self.pool
        if pool is None:
            return
        members = dict[int, KeptNode | None]
        with self.gathering.lock:
            pool.take(node, told)
            # Only the head is told of all changes.
            if node == pool.record.head and "members" in told:
                self.known.tell(msgspec.convert(told["members"], members, strict=False))
        if "state" in told or "members" in told:
            self.woken.set()
        if not told.keys() <= _CAN_WAIT:
            self.gathering.wake()


class NodeWatch:
    """Hears the agent of one node on a thread of its own."""

    def __init__(self, pool: ReachedPool, node: int, watch: KeptWatch) -> None:
        self.facts = pool.record.node(node)
        """What the record says of the node; another agent has other facts."""
        self._pool, self._node, self._watch = pool, node, watch
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._connection: ServiceConnection | None = None
        self._skew: float | None = None
        self.thread = threading.Thread(target=self._run, name="skyward-node-watch", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                self._hear()
            except (SkywardError, EOFError, *UNREADABLE):
                if not self._ended.is_set():
                    self._watch.take(self._node, {"state": "unreachable"})
            self._ended.wait(NODE_AGAIN_SECONDS)

    def _hear(self) -> None:
        connection = self._pool.service(self._node, "activity")
        with contextlib.closing(connection):
            with self._lock:
                self._connection = connection
                if self._ended.is_set():
                    return
            connection.channel.on_change(self._changed)
            connection.send("watch")
            state: dict[str, Any] = {"state": "ready", "fresh": True}
            while True:
                told = connection.next_reply().value
                self._watch.take(self._node, self._in_our_time(told) | state)
                state = {}

    def _changed(self, connected: bool) -> None:
        self._watch.take(self._node, {"state": "ready" if connected else "reconnecting"})

    def _in_our_time(self, told: dict[str, Any]) -> dict[str, Any]:
        """The report with the times of this machine's clock: clocks of machines differ."""
        skew = time.time() - float(told["time"])
        if self._skew is None or abs(skew - self._skew) > SKEW_SECONDS:
            self._skew = skew
        if abs(self._skew) < SKEW_SECONDS:
            return told
        for task in told.get("tasks", ()):
            task[3] += self._skew
            task[4] = task[4] and task[4] + self._skew
        for line in told.get("lines", ()):
            line[0] += self._skew
        return told

    def end(self) -> None:
        """Have the thread end."""
        self._ended.set()
        with self._lock:
            if self._connection is not None:
                with contextlib.suppress(OSError):
                    self._connection.channel.abort()


class KnownNodes:
    """The nodes of a pool, by its record and by what its head was told; what came last counts."""

    def __init__(self) -> None:
        self._written: dict[int, KeptNode] = {}
        self._told: dict[int, KeptNode | None] = {}
        self._outdated: dict[int, KeptNode | None] = {}
        """What the head was told, and says still, of nodes of which the record has news."""

    def write(self, nodes: list[KeptNode]) -> None:
        """Take the nodes of the record, which was read."""
        now = {node.index: node for node in nodes}
        for index, node in self._told.items():
            if now.get(index) != self._written.get(index):
                self._outdated[index] = node
        self._written = now

    def tell(self, members: dict[int, KeptNode | None]) -> None:
        """Take all that the head was told of nodes that came, and of those that left, as None."""
        self._told = members
        old = self._outdated.items()
        self._outdated = {i: node for i, node in old if i in members and members[i] == node}

    @property
    def nodes(self) -> list[KeptNode]:
        """The nodes that there are, in the order of their numbers."""
        newer = {i: node for i, node in self._told.items() if i not in self._outdated}
        found = self._written | newer
        return [node for _, node in sorted(found.items()) if node is not None]
