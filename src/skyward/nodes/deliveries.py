"""Deliveries: folders of the client that nodes get when they start, and that follow its changes."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from skyward.errors import PoolError, SkywardError
from skyward.files.items import FileItem, Listing
from skyward.files.scanner import Scanner
from skyward.files.transfer import Synced, bring, send
from skyward.spec import Volume
from skyward.wire.channel import ServiceConnection
from skyward.wire.messages import Question

RECENT_SECONDS = 1.0
"""How old a scan may be for a node that starts: many nodes start at the same time."""
AT_ONCE = 16
"""How many nodes get files at the same time."""

Open = Callable[[int, str], ServiceConnection]


@dataclass(frozen=True, slots=True)
class SentFolder:
    """A folder of the client, and where nodes have it."""

    source: Path
    root: str = ""
    """Its place on a node; empty for the working directory."""
    excludes: tuple[str, ...] = ()
    everything: bool = False
    """Whether files that git ignores are sent, too."""
    before_calls: bool = False
    back: bool = False
    """Whether files that functions write come back to the client."""


class Delivery:
    """One folder: what was seen of it last, and what nodes got."""

    def __init__(self, folder: SentFolder) -> None:
        self.folder = folder
        self._scanner = Scanner(folder.source, folder.excludes, everything=folder.everything)
        self._seen: tuple[float, Listing] | None = None
        self.sent: dict[int, Listing] = {}
        """The files that each node got last."""
        self.brought: dict[str, FileItem] = {}
        """The files that came back from nodes, by name."""

    def scan(self) -> Listing:
        """What the folder holds now."""
        try:
            listing = self._scanner.scan()
        except OSError as problem:
            raise PoolError(
                f"the files of {self.folder.source} cannot be read: {problem}; make them readable, "
                "or leave them out with excludes=[...]"
            ) from problem
        self._seen = time.monotonic(), listing
        return listing

    def recent(self) -> Listing:
        """What the folder held a moment ago."""
        seen = self._seen
        if seen is not None and time.monotonic() - seen[0] < RECENT_SECONDS:
            return seen[1]
        return self.scan()


class Deliveries:
    """The folders of one pool."""

    def __init__(
        self, folders: Sequence[SentFolder], volumes: Sequence[Volume], open_service: Open
    ) -> None:
        self._deliveries = [Delivery(folder) for folder in folders]
        self._volumes = tuple(volumes)
        self._open = open_service
        self.follows = bool(self._deliveries)
        """Whether nodes have folders of this machine."""

    @property
    def comes_back(self) -> bool:
        """Whether anything is written back when the pool ends."""
        return bool(self._volumes) or any(each.folder.back for each in self._deliveries)

    def deliver(self, node: int, told: Callable[[str], None] = lambda what: None) -> None:
        """Give a node that starts all folders and volumes."""
        for volume in self._volumes:
            self._tell_node(node, "mount", volume, told)
        for delivery in self._deliveries:
            self._send(delivery, delivery.recent(), node, told)

    def sync(self, nodes: Sequence[int]) -> Synced:
        """Make all folders of the nodes as they are here now."""
        done = Synced()
        for delivery in self._deliveries:
            done += self._send_all(delivery, delivery.scan(), nodes)
        return done

    def before_calls(self, nodes: Callable[[], Sequence[int]]) -> None:
        """Send what has changed in folders that are to be as here before every call."""
        for delivery in self._deliveries:
            if not delivery.folder.before_calls:
                continue
            listing = delivery.scan()
            self._send_all(
                delivery, listing, [n for n in nodes() if delivery.sent.get(n) != listing]
            )

    def write_back(
        self,
        nodes: Sequence[int],
        told: Callable[[str], None],
        progress: Callable[[str], None] | None = None,
        *,
        last: bool = False,
    ) -> Synced:
        """Write what functions have written into volumes to where these come from.

        With `last`, the volumes go, too. `told` hears of what does not come back, and of the
        progress, unless `progress` does.
        """
        done = Synced()
        problems: dict[tuple[object, int], PoolError] = {}
        for what in ("write back", "unmount") if last else ("write back",):
            for volume, node in itertools.product(self._volumes, nodes):
                try:
                    done += Synced(files=self._tell_node(node, what, volume, progress or told))
                except PoolError as problem:
                    problems[volume, node] = problem
        for delivery in self._deliveries:
            if delivery.folder.back and not delivery.folder.source.is_dir():
                # Of a client on another machine.
                told(f"there is no folder {delivery.folder.source} here: its files stay on nodes")
                continue
            for node in nodes if delivery.folder.back else ():
                try:
                    done += self._bring(delivery, node, told, progress)
                except PoolError as problem:
                    problems[delivery, node] = problem
        if problems:
            # Only now: what one node cannot write back must not keep the others from it.
            told_problems = "; ".join(map(str, problems.values()))
            raise PoolError(told_problems) from next(iter(problems.values()))
        return done

    def _bring(
        self,
        delivery: Delivery,
        node: int,
        told: Callable[[str], None],
        progress: Callable[[str], None] | None,
    ) -> Synced:
        folder = delivery.folder
        try:
            with self._open(node, "files") as connection:
                return bring(
                    connection, folder.root, folder.source, delivery.brought, told, progress
                )
        except (SkywardError, OSError, EOFError) as problem:
            raise PoolError(f"{folder.source}: node {node}: {problem}") from problem

    def _tell_node(self, node: int, what: str, volume: Volume, told: Callable[[str], None]) -> int:
        arguments: dict[str, object] = {"target": volume.target}
        if what == "mount":
            arguments |= {"source": volume.source, "read_only": volume.read_only}
        try:
            with self._open(node, "files") as connection:
                connection.channel.send(Question(what, arguments))
                while (reply := connection.next_reply()).more:
                    told(str(reply.value))
                return int(reply.value)
        except (SkywardError, OSError, EOFError) as problem:
            raise PoolError(f"{volume}: node {node}: {problem}") from problem

    def _send_all(self, delivery: Delivery, listing: Listing, nodes: Sequence[int]) -> Synced:
        if not nodes:
            return Synced()
        with ThreadPoolExecutor(min(AT_ONCE, len(nodes)), "skyward-files") as threads:
            sending = [threads.submit(self._send, delivery, listing, node) for node in nodes]
            return sum((each.result() for each in sending), Synced())

    def _send(
        self,
        delivery: Delivery,
        listing: Listing,
        node: int,
        told: Callable[[str], None] = lambda what: None,
    ) -> Synced:
        folder = delivery.folder
        try:
            with self._open(node, "files") as connection:
                done, listing = send(
                    connection, listing, delivery.scan, folder.source, folder.root, told
                )
        except (SkywardError, OSError, EOFError) as problem:
            place = folder.root or "its working directory"
            raise PoolError(
                f"node {node} did not get {folder.source} at {place}: {problem}"
            ) from problem
        delivery.sent[node] = listing
        return done
