"""Commands on nodes: the client's end of a command that an agent runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from skyward.closing import Closing
from skyward.compute.workbench import Reachable
from skyward.errors import NodeLostError
from skyward.wire.asking import PART

WINDOW = 1 << 20
"""How many bytes of input the agent holds until the command has taken them."""


class NodeCommand(Closing):
    """A command that runs on a node for as long as this object is open.

    One thread reads `output`; any thread may send input and signals meanwhile.

    >>> with NodeCommand(pool, 0, ["nvidia-smi"]) as command:
    ...     for stream, data in command.output(): ...
    ...     command.code
    """

    def __init__(
        self,
        pool: Reachable,
        node: int,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        like_worker: bool = False,
        terminal: tuple[int, int] | None = None,
        takes_input: bool = False,
    ) -> None:
        """Start the command; `PoolError` if the node cannot.

        No command is the user's shell. `terminal` is its rows and columns.
        """
        self.node = node
        self.code: int | None = None
        """The exit code, once `output` has ended; for a signal, 128 and its number."""
        self._room = WINDOW
        self._unread = False
        self._changed = threading.Condition()
        self._connection = pool.service(node, "exec")
        try:
            self._connection.send(
                "run",
                command=list(command),
                environment=dict(environment or {}),
                like_worker=like_worker,
                terminal=terminal,
                takes_input=takes_input,
            )
            self._connection.next_part()
        except (EOFError, OSError) as problem:
            self._connection.close()
            raise self._lost(problem) from problem
        except BaseException:
            self._connection.close()
            raise

    def output(self) -> Iterator[tuple[str, bytes]]:
        """What the command writes, as it comes: the stream's name, and bytes."""
        try:
            while self.code is None:
                try:
                    reply, data = self._connection.next_part()
                except (EOFError, OSError) as problem:
                    raise self._lost(problem) from problem
                if isinstance(reply.value, str):
                    yield reply.value, bytes(data)
                elif isinstance(reply.value, dict):
                    self._note(reply.value)
        finally:
            with self._changed:
                self._unread = True
                self._changed.notify_all()

    def _note(self, told: dict[str, Any]) -> None:
        if "code" in told:
            self.code = int(told["code"])
            return
        with self._changed:
            self._room += int(told.get("taken", 0))
            self._unread = self._unread or bool(told.get("closed"))
            self._changed.notify_all()

    def _lost(self, problem: Exception) -> NodeLostError:
        reason = str(problem) or "no connection"
        return NodeLostError(
            f"node {self.node} is gone, and the command with it: {reason}; "
            "`sky ps` shows the pools that are there"
        )

    def send_input(self, data: bytes) -> bool:
        """Send bytes to the command's input; False if it reads no more.

        Waits while the command has not taken earlier ones.
        """
        while data:
            part, data = data[:PART], data[PART:]
            with self._changed:
                while not self._unread and self._room < len(part):
                    self._changed.wait()
                if self._unread:
                    return False
                self._room -= len(part)
            try:
                self._connection.send("input", part)
            except OSError:
                # The reader of `output` says why.
                return False
        return not self._unread

    def end_input(self) -> None:
        """Tell the command that its input is complete."""
        self._connection.send("input")

    def signal(self, number: int) -> None:
        """Send a signal to the command and its process group."""
        self._connection.send("signal", number=int(number))

    def resize(self, rows: int, columns: int) -> None:
        """Give the command's terminal another size."""
        self._connection.send("size", rows=rows, columns=columns)

    def close(self) -> None:
        """End the command, if it still runs, with everything that it has started."""
        with self._changed:
            self._unread = True
            self._changed.notify_all()
        self._connection.close()
