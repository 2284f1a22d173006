"""The link of a process to the owner of shared state: over connections, or within the process."""

from __future__ import annotations

import contextlib
import itertools
import secrets
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from skyward.errors import SkywardError, StateLostError
from skyward.state.connection import Slot, StateConnection, StateOperation, answered
from skyward.state.owned import KINDS
from skyward.state.owner import Asked, Owner, Session
from skyward.wire.channel import Channel

LAST_SECONDS = 1.0
"""How long the last actions over a link may take."""


class StateLink(ABC):
    """A way to the owner of some shared state."""

    @abstractmethod
    def epoch(self) -> str:
        """Names the owner that is there now; `StateLostError` if there is none."""

    @abstractmethod
    def perform(self, operation: StateOperation, epoch: str) -> Any:
        """The answer of the owner of that epoch; `StateLostError` if it is lost."""

    @abstractmethod
    def close(self) -> None:
        """End the link."""


class RemoteLink(StateLink):
    """A link over a connection, which is made when it is first needed, and again after a loss."""

    def __init__(
        self,
        dial: Callable[[], Channel],
        who: str,
        *,
        threaded: bool = True,
        direct: bool = False,
    ) -> None:
        """`dial` connects to the owner; `who` is this process, in words.

        `threaded` and `direct` are those of `StateConnection`; a connection to a socket of this
        machine is direct in any case.
        """
        self._dial, self._who, self._threaded, self._direct = dial, who, threaded, direct
        self._process = secrets.token_hex(8)
        self._held: set[tuple[str, int]] = set()
        """The locks that this process holds, over one connection after the other."""
        self._lock = threading.Lock()
        self._connection: StateConnection | None = None
        self._closed = False
        self._last: list[Callable[[], None]] = []

    def before_close(self, action: Callable[[], None]) -> None:
        """Have an action use the state once more before the link ends, if it is reachable then."""
        self._last.append(action)

    def _do_last(self) -> None:
        for action in self._last:
            with contextlib.suppress(SkywardError, OSError):
                action()

    @property
    def alive(self) -> bool:
        """Whether there is a connection."""
        connection = self._connection
        return connection is not None and not connection.lost

    def epoch(self) -> str:
        return self._connected().epoch

    def _connected(self) -> StateConnection:
        connection = self._connection
        if connection is not None and not connection.lost:
            return connection
        with self._lock:
            lost = self._connection
            if lost is not None:
                if not lost.lost:
                    return lost
                lost.close()
                self._connection = None
            if self._closed:
                raise StateLostError("the pool of this state is closed")
            try:
                channel = self._dial()
                direct = self._direct or channel.is_to_a_socket_here
                self._connection = StateConnection(
                    channel, self._who, self._threaded, self._process, direct, self._held
                )
            except StateLostError:
                raise
            except (OSError, EOFError, SkywardError) as problem:
                raise StateLostError(str(problem)) from problem
            return self._connection

    def perform(self, operation: StateOperation, epoch: str) -> Any:
        connection = self._connected()
        if connection.epoch != epoch:
            raise StateLostError("its owner was lost, and another one has taken its place")
        return connection.perform(operation)

    def close(self) -> None:
        if self._last and self.alive:
            # The owner may not answer any more: the end does not wait for it.
            thread = threading.Thread(target=self._do_last, name="skyward-state-end", daemon=True)
            thread.start()
            thread.join(LAST_SECONDS)
        with self._lock:
            self._closed = True
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


class LocalSession(Session):
    """The threads of a process that has its state itself."""

    def __init__(self) -> None:
        super().__init__()
        self.who = "this process"
        self.slots: dict[int, Slot] = {}

    def answer(
        self, number: int, value: Any = None, problem: str = "", *, more: bool = False
    ) -> None:
        slot = self.slots.get(number) if more else self.slots.pop(number, None)
        if slot is not None:
            slot.fill(value, problem, more=more)


class LocalLink(StateLink):
    """The way to state of this process alone, for functions that run outside of any pool."""

    def __init__(self) -> None:
        self._owner = Owner(KINDS)
        self._session = LocalSession()
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)

    def epoch(self) -> str:
        return self._owner.epoch

    def perform(self, operation: StateOperation, epoch: str) -> Any:
        slot = Slot()
        session, number = self._session, next(self._numbers)
        asked = Asked(session, number, operation.waits, operation.timeout)
        arguments = list(operation.arguments)
        try:
            with self._lock:
                session.slots[number] = slot
                self._owner.perform(
                    asked,
                    operation.kind,
                    operation.name,
                    operation.what,
                    arguments,
                    operation.options,
                )
            slot.wait(operation.timeout if operation.waits else None)
            while not slot.over:
                with self._lock:
                    self._owner.expire()
                slot.wait(0.0)
            return answered(slot)
        except BaseException:
            with self._lock:
                session.slots.pop(number, None)
                self._owner.cancel(session, number)
                self._undo(operation, slot)
            raise

    def _undo(self, operation: StateOperation, slot: Slot) -> None:
        """Take back what an operation has done whose caller was interrupted."""
        if operation.undo is None or not slot.over or slot.problem:
            return
        undone = operation.undo(slot.value)
        if undone is not None:
            what, arguments = undone
            asked = Asked(self._session, next(self._numbers))
            self._owner.perform(asked, operation.kind, operation.name, what, [*arguments], None)

    def close(self) -> None:
        """There is nothing to end."""
