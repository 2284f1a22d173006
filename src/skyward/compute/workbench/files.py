"""Places to copy from and to: this machine, and a node of a pool."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import msgspec

from skyward.compute.workbench import Reachable
from skyward.errors import NodeLostError, PoolError, ProtocolError
from skyward.wire.asking import PART, ServiceConnection
from skyward.worker.services import copying

UNANSWERED = 32
"""How many files are sent to a node before the node has said that it has them."""
ASKS_FIRST = 8 << 20
"""From this size on, a file is sent after the node has said that it has room."""


class Look(msgspec.Struct):
    """What is at a path."""

    path: str
    """The whole path."""
    kind: str
    """"file", "folder", "other", or empty if nothing is there."""
    parent: bool = True
    """Whether the folder above is there."""
    free: int = 0
    """Bytes that are free there."""
    size: int = 0
    mode: int = 0o644
    identity: str = ""
    """The same for two paths that lead to one thing on one machine."""


class FoundEntry(msgspec.Struct):
    """Something in a folder."""

    name: str
    """Its path below the folder."""
    kind: str
    size: int = 0
    mode: int = 0o644
    identity: str = ""
    target: str = ""
    """Where a link leads."""


class FilePlace(Protocol):
    """A machine's files. After an error, the place can only be closed."""

    def shown(self, path: str) -> str:
        """A path as the user would write it."""

    def look(self, path: str) -> Look:
        """What is at a path, through links."""

    def walk(self, path: str) -> Iterator[FoundEntry]:
        """Everything below a folder, a folder before what is in it."""

    def ask(self, path: str) -> None:
        """Ask for the bytes of a file; several may be asked for ahead of time."""

    def answered(self) -> Iterator[bytes]:
        """The bytes of the file that was asked for first."""

    def write(self, path: str, size: int, mode: int, parts: Iterable[bytes]) -> None:
        """Write a file; it may not be there before `settle`."""

    def make_folder(self, path: str, mode: int, *, staged: bool = False) -> None:
        """Make a folder, unless it is there; one that is `staged` gets its name by `move`."""

    def make_link(self, path: str, target: str) -> None:
        """Make a symbolic link."""

    def move(self, path: str, to: str) -> None:
        """Give a finished folder its name."""

    def remove(self, path: str) -> None:
        """Remove a folder that was not finished."""

    def settle(self) -> None:
        """Wait until everything is there."""

    def close(self) -> None:
        """Close the place."""


class FilesHere:
    """The files of this machine."""

    def __init__(self) -> None:
        self._asked: deque[str] = deque()

    def shown(self, path: str) -> str:
        """A path as the user would write it."""
        return path

    def look(self, path: str) -> Look:
        """What is at a path, through links."""
        return msgspec.convert(copying.look(os.path.abspath(os.path.expanduser(path))), Look)

    def walk(self, path: str) -> Iterator[FoundEntry]:
        """Everything below a folder, a folder before what is in it."""
        return (msgspec.convert(each, FoundEntry) for each in copying.walk(path))

    def ask(self, path: str) -> None:
        """Remember the file."""
        self._asked.append(path)

    def answered(self) -> Iterator[bytes]:
        """The bytes of the file that was asked for first."""
        return copying.contents(self._asked.popleft())

    def write(self, path: str, size: int, mode: int, parts: Iterable[bytes]) -> None:
        """Write a file."""
        arriving = copying.UnfinishedFile(path, size, mode)
        try:
            for part in parts:
                arriving.write(part)
            arriving.finish()
        finally:
            arriving.discard()

    def make_folder(self, path: str, mode: int, *, staged: bool = False) -> None:
        """Make a folder, unless it is there; one that is `staged` gets its name by `move`."""
        copying.make_folder(path, mode)

    def make_link(self, path: str, target: str) -> None:
        """Make a symbolic link."""
        copying.make_link(path, target)

    def move(self, path: str, to: str) -> None:
        """Give a finished folder its name."""
        Path(path).rename(to)

    def remove(self, path: str) -> None:
        """Remove a folder that was not finished."""
        copying.remove_unfinished(path)

    def settle(self) -> None:
        """Do nothing: everything is there."""

    def close(self) -> None:
        """Do nothing."""


class FilesOnNode:
    """The files of a node, over connections to its agent."""

    def __init__(self, pool: Reachable, node: int, label: str) -> None:
        """`label` is the node as the user names it, such as `train/0`."""
        self._pool, self._node, self._label = pool, node, label
        self._connection = pool.service(node, "copying")
        self._unanswered = 0

    def shown(self, path: str) -> str:
        """A path as the user would write it."""
        return f"{self._label}:{path}"

    def look(self, path: str) -> Look:
        """What is at a path, through links."""
        return msgspec.convert(self._ask("look", path=path), Look)

    def walk(self, path: str) -> Iterator[FoundEntry]:
        """Everything below a folder, over a connection of its own: files are read meanwhile."""
        with self._pool.service(self._node, "copying") as connection:
            connection.send("list", path=path)
            while True:
                reply, _ = self._next(connection)
                yield from msgspec.convert(reply.value, list[FoundEntry])
                if not reply.more:
                    return

    def ask(self, path: str) -> None:
        """Ask for the bytes of a file; several may be asked for ahead of time."""
        self._send("read", path=path)

    def answered(self) -> Iterator[bytes]:
        """The bytes of the file that was asked for first."""
        while True:
            reply, data = self._next(self._connection)
            if not reply.more:
                return
            yield data

    def write(self, path: str, size: int, mode: int, parts: Iterable[bytes]) -> None:
        """Send a file; large ones after the node has said that it has room."""
        asks = size >= ASKS_FIRST
        if self._unanswered >= UNANSWERED or asks:
            self.settle()
        self._send("write", path=path, size=size, mode=mode, asks_first=asks)
        if asks:
            self._next(self._connection)
        for part in parts:
            for start in range(0, len(part), PART):
                self._send("part", part[start : start + PART])
        self._send("part")
        self._unanswered += 1

    def make_folder(self, path: str, mode: int, *, staged: bool = False) -> None:
        """Make a folder, unless it is there; one that is `staged` gets its name by `move`."""
        self._ask("folder", path=path, mode=mode, staged=staged)

    def make_link(self, path: str, target: str) -> None:
        """Make a symbolic link."""
        self._ask("link", path=path, target=target)

    def move(self, path: str, to: str) -> None:
        """Give a finished folder its name."""
        self._ask("move", path=path, to=to)

    def remove(self, path: str) -> None:
        """Remove a folder that was not finished, over a connection that nothing waits on."""
        with self._pool.service(self._node, "copying") as connection:
            connection.ask("remove", path=path)

    def settle(self) -> None:
        """Wait until the node has everything."""
        while self._unanswered:
            self._unanswered -= 1
            self._next(self._connection)

    def _ask(self, what: str, **arguments: Any) -> Any:
        self.settle()
        self._send(what, **arguments)
        return self._next(self._connection)[0].value

    def _send(self, what: str, body: bytes = b"", **arguments: Any) -> None:
        try:
            self._connection.send(what, body, **arguments)
        except OSError as problem:
            raise self._lost(problem) from problem

    def _next(self, connection: ServiceConnection) -> tuple[Any, bytes]:
        try:
            reply, data = connection.next_part()
        except PoolError as problem:
            raise PoolError(f"{self._label}: {problem}") from None
        except ProtocolError:
            raise
        except (EOFError, OSError) as problem:
            raise self._lost(problem) from problem
        return reply, bytes(data)

    def _lost(self, problem: Exception) -> NodeLostError:
        return NodeLostError(
            f"{self._label}: the node is gone: {problem}; what was not copied completely is "
            "removed; `sky ps` shows the pools that are there"
        )

    def close(self) -> None:
        """End the connection."""
        self._connection.close()
