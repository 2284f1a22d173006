"""The link of a process to shared state: over connections to its owner, or within the process.

Which state a name belongs to is decided here, too: that of a pool, or that of this process alone.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from skyward import context, functions
from skyward.errors import ConfigurationError, SkywardError, StateFullError, StateLostError
from skyward.state.owner import FULL, Asked, Owner, Session
from skyward.wire import messages
from skyward.wire.channel import Channel
from skyward.wire.handshake import PEER, Credentials, connect_peer, node_name
from skyward.wire.line import Line, LineRequest, limit
from skyward.wire.messages import Hello, Question, Reply

OWNER = 0
"""The node whose agent has the state."""
COMING_SECONDS = 20.0
"""How long a task waits for an owner that has not started yet."""
BEAT_SECONDS = 5.0
"""How often a process that waits or holds a lock shows that it is there."""
SILENT_SECONDS = 30.0
"""After so long without a word, an end with something open takes the other for lost."""
SETTLE_SECONDS = 2.0
"""How long an interrupted operation waits to learn whether it was performed."""


Undo = Callable[[Any], tuple[str, tuple[Any, ...]] | None]
"""From the answer to an operation, the operation that takes it back."""


# No dataclass: its `__init__` would take a tenth of the time of an increment.
class StateOperation(msgspec.Struct):
    """What a handle asks for."""

    kind: str
    name: str
    what: str
    arguments: tuple[Any, ...] = ()
    options: dict[str, Any] | None = None
    waits: bool = False
    timeout: float | None = None
    undo: Undo | None = None


def answered(reply: Reply) -> Any:
    """The value of an answer; raises the error that it tells of."""
    if not reply.problem:
        return reply.value
    raise (StateFullError if reply.value == FULL else ConfigurationError)(reply.problem)


class StateConnection(Line):
    """A line to an owner."""

    def __init__(
        self,
        channel: Channel,
        who: str,
        threaded: bool,
        process: str = "",
        direct: bool = False,
        held: set[tuple[str, int]] | None = None,
    ) -> None:
        """`who` is this process in words, and `process` names it to the owner.

        By that name, a second connection keeps the locks of the first, which are `held`. A thread
        of the line's own reads if it is `threaded`, and while the process holds locks. With
        `direct`, nothing is between this process and the owner that can end the connection alone.
        """
        self.held = set() if held is None else held
        """The locks that the process holds, by name and token."""
        self._numbers = itertools.count(1)
        self._heard_at = self._beaten_at = time.monotonic()
        try:
            channel.set_timeout(BEAT_SECONDS)
            about = {"who": who, "process": process, "direct": direct}
            channel.send(Question("begin", about))
            frame = channel.receive()
            reply = messages.decode_as(Reply, frame.kind, frame.meta)
            if reply.problem:
                raise StateLostError(reply.problem)
            self.epoch = str(reply.value)
        except BaseException:
            channel.close()
            raise
        super().__init__(channel, threaded=threaded or bool(self.held))
        if channel.shares_memory:
            limit(channel.detach()[0], socket.SO_SNDTIMEO, BEAT_SECONDS)

    def perform(self, operation: StateOperation) -> Any:
        """The owner's answer to an operation."""
        arguments: dict[str, Any] = {
            "of": (operation.kind, operation.name),
            "with": operation.arguments,
        }
        if operation.options:
            arguments["options"] = operation.options
        if operation.waits:
            arguments["waits"] = operation.timeout
        request = LineRequest(next(self._numbers))
        parts: list[Any] = []
        if not self.asked:
            # Before, nobody listened.
            self.heard = True
        try:
            self.ask(request, Question(operation.what, arguments, request.number))
            while True:
                while not request.answers:
                    if self.lost:
                        raise StateLostError(self.lost)
                    self.wait(request)
                reply = request.answers[0][0]
                if not reply.more:
                    break
                parts += reply.value
                request.answers.popleft()
            if operation.kind == "lock":
                self._note_lock(operation, reply.value)
        except BaseException:
            self._settle(request, operation)
            raise
        finally:
            self.asked.pop(request.number, None)
        value = answered(reply)
        return [*parts, *value] if parts else value

    def count(self) -> int:
        """How many objects the owner has; 0 if it does not say so soon."""
        request, due = LineRequest(next(self._numbers)), time.monotonic() + SETTLE_SECONDS
        try:
            self.ask(request, Question("count", {}, request.number))
            while not (request.answers or self.lost) and (left := due - time.monotonic()) > 0:
                self.wait(request, left)
        finally:
            self.asked.pop(request.number, None)
        return int(request.answers[0][0].value) if request.answers else 0

    def _note_lock(self, operation: StateOperation, value: Any) -> None:
        """Note a lock that the process holds now, or holds no more."""
        if operation.what == "acquire" and value:
            with self._lock:
                self.held.add((operation.name, value[0]))
            # From now on, the owner must hear of this process while it does other things.
            self.start_reader()
        elif operation.what == "release":
            with self._lock:
                self.held.discard((operation.name, operation.arguments[0]))

    def _settle(self, request: LineRequest, operation: StateOperation) -> None:
        """Cancel an operation whose caller was interrupted, or take back what it has done."""
        if operation.undo is None and not operation.waits:
            return
        cancelling, due = LineRequest(next(self._numbers)), time.monotonic() + SETTLE_SECONDS
        try:
            question = Question("cancel", {"with": (request.number,)}, cancelling.number)
            self.ask(cancelling, question)
            # The owner answers in order: an answer to the operation has come before this one.
            while not (cancelling.answers or self.lost) and (left := due - time.monotonic()) > 0:
                self.wait(cancelling, left)
        finally:
            self.asked.pop(cancelling.number, None)
        if operation.undo is None or not request.answers or request.answers[0][0].problem:
            return
        undone = operation.undo(request.answers[0][0].value)
        if undone is not None:
            what, arguments = undone
            with contextlib.suppress(StateLostError):
                self.perform(StateOperation(operation.kind, operation.name, what, arguments))

    def idle(self) -> None:
        """Show the owner that this process is there, if that matters, and ask the same of it."""
        now = time.monotonic()
        if self.heard or not (self.asked or self.held):
            self._heard_at, self.heard = now, False
        if now - self._heard_at > SILENT_SECONDS:
            self._part("keep")
            self.lose(f"it has not answered for {now - self._heard_at:.0f} s")
        elif (self.asked or self.held) and now - self._beaten_at >= BEAT_SECONDS:
            self._beaten_at = now
            self._say("beat")

    def _say(self, what: str) -> None:
        try:
            self.channel.send(Question(what))
        except OSError as problem:
            self.lose(f"the connection to it was lost ({problem})")

    def _part(self, what: str) -> None:
        """Tell the owner, if it hears it, whether the locks of this process are free now."""
        if self.held and not self.lost:
            self._say(what)

    def close(self, why: str = "the pool of this state is closed") -> None:
        """End the connection; what still waits is told so, and locks of this process are free."""
        self._part("bye")
        super().close(why)


class RemoteLink:
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
        self._dial, self.who, self.threaded, self._direct = dial, who, threaded, direct
        self._closed = False
        self.begin()

    def begin(self) -> None:
        """Begin without a connection; a process that was forked forgets its parent's."""
        self._process = secrets.token_hex(8)
        self._held: set[tuple[str, int]] = set()
        """The locks that this process holds, over one connection to the owner after the other."""
        self._epoch = ""
        """Names the owner that has granted them."""
        self._lock = threading.Lock()
        self.connection: StateConnection | None = None
        """May be lost."""

    def epoch(self) -> str:
        """Names the owner that is there now; `StateLostError` if there is none."""
        return self._connected().epoch

    def _connected(self) -> StateConnection:
        connection = self.connection
        if connection is not None and not connection.lost:
            return connection
        with self._lock:
            lost = self.connection
            if lost is not None:
                if not lost.lost:
                    return lost
                lost.close()
                self.connection = None
            if self._closed:
                raise StateLostError("the pool of this state is closed")
            try:
                channel = self._dial()
                direct = self._direct or channel.is_to_a_socket_here
                connection = StateConnection(
                    channel, self.who, self.threaded, self._process, direct, self._held
                )
            except StateLostError:
                raise
            except (OSError, EOFError, SkywardError) as problem:
                raise StateLostError(str(problem)) from problem
            if connection.epoch != self._epoch:
                # What another owner has granted is gone with that one.
                self._held.clear()
                self._epoch = connection.epoch
            self.connection = connection
            return connection

    def count(self) -> int:
        """How many objects the owner that is there now has; 0 if there is none."""
        try:
            return self._connected().count()
        except StateLostError:
            return 0

    def perform(self, operation: StateOperation, epoch: str) -> Any:
        """The answer of the owner of that epoch; `StateLostError` if it is lost."""
        connection = self.connection
        if connection is None or connection.lost:
            connection = self._connected()
        if connection.epoch != epoch:
            raise StateLostError("its owner was lost, and another one has taken its place")
        return connection.perform(operation)

    def close(self) -> None:
        """End the link."""
        with self._lock:
            self._closed = True
            connection, self.connection = self.connection, None
        if connection is not None:
            connection.close()


class LocalLink(Session):
    """The way to state of this process alone, for functions that run outside of any pool."""

    def __init__(self) -> None:
        super().__init__()
        self.who = "this process"
        self._owner = Owner()
        self._asked: dict[int, LineRequest] = {}
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)

    def epoch(self) -> str:
        """Names the owner."""
        return self._owner.epoch

    def perform(self, operation: StateOperation, epoch: str) -> Any:
        """The owner's answer to an operation."""
        request = LineRequest(next(self._numbers))
        due = math.inf
        if operation.waits and operation.timeout is not None:
            due = time.monotonic() + operation.timeout
        try:
            with self._lock:
                self._asked[request.number] = request
                asked = Asked(self, request.number, operation.waits, operation.timeout)
                self._perform(asked, operation, operation.what, operation.arguments)
            while not request.answers:
                request.wait(max(0.0, due - time.monotonic()))
                with self._lock:
                    self._owner.expire()
            return answered(request.answers[0][0])
        except BaseException:
            with self._lock:
                self._owner.cancel(self, request.number)
                self._take_back(operation, request)
            raise
        finally:
            self._asked.pop(request.number, None)

    def _perform(
        self, asked: Asked, operation: StateOperation, what: str, arguments: tuple[Any, ...]
    ) -> None:
        self._owner.perform(
            asked, operation.kind, operation.name, what, [*arguments], operation.options
        )

    def _take_back(self, operation: StateOperation, request: LineRequest) -> None:
        """Take back what an operation has done whose caller was interrupted."""
        if operation.undo is None or not request.answers or request.answers[0][0].problem:
            return
        undone = operation.undo(request.answers[0][0].value)
        if undone is not None:
            self._perform(Asked(self, next(self._numbers)), operation, *undone)

    def answer(
        self, number: int, value: Any = None, problem: str = "", *, more: bool = False
    ) -> None:
        request = self._asked.get(number)
        if request is None:
            return
        if request.answers:
            # A further part of the same answer.
            value = [*request.answers.pop()[0].value, *value]
        request.give(Reply(value, problem, more, number), bytearray())


StateLink = RemoteLink | LocalLink


class WorkerLink(RemoteLink):
    """The link of a process of a node to the state of its pool, wherever the owner is then."""

    def __init__(self) -> None:
        super().__init__(self._reach, "", direct=True)
        self.credentials: Credentials | None = None
        """What this process proves its identity with; None if it is no worker."""

    def prepare(self, credentials: Credentials | None, *, threads: bool) -> None:
        """Set what this process proves its identity with, and whether threads run its tasks.

        A worker does so when it starts. On its main thread, tasks are never interrupted in code of
        ours that reads, so that it can read by itself.
        """
        self.credentials, self.threaded = credentials, threads

    @property
    def leads_anywhere(self) -> bool:
        """Whether this process belongs to a pool."""
        connection = self.connection
        # The environment takes its time.
        return (connection is not None and not connection.lost) or context.VARIABLE in os.environ

    def _reach(self) -> Channel:
        info = _await_owner()
        self.who = f"worker {info.worker} of node {info.node} (process {os.getpid()})"
        hello = Hello(info.job_id, f"{PEER}-service-state", pid=os.getpid())
        try:
            return connect_peer(info.state, hello, self.credentials, node_name(info.job_id, OWNER))
        except OSError as problem:
            why = f" ({problem})" if str(problem) else ""
            raise StateLostError(f"node {OWNER}, which has it, does not answer{why}") from problem


worker_link = WorkerLink()
os.register_at_fork(after_in_child=worker_link.begin)
_local = LocalLink()


def link_for(on: Any) -> StateLink:
    """The way to the state of `on`, or of the current pool; that of this process if it has none."""
    if on is not None and not hasattr(on, "state_link"):
        raise ConfigurationError(f"on={on!r} has no shared state; give a sky.Compute")
    target: Any = on
    if on is None:
        target = functions.current.get() or next(reversed(functions.active), None)
    if target is None:
        if worker_link.leads_anywhere:
            return worker_link
        target = functions.active_compute()
        if target is None:
            return _local
    link: StateLink = target.state_link()
    return link


def _await_owner() -> context.InstanceInfo:
    """This process's place in the pool, once the owner of the state is known."""
    deadline = time.monotonic() + COMING_SECONDS
    while not (info := context.instance_info()).state:
        if not info.peers and info.node != OWNER:
            raise StateLostError(
                f"node {info.node} cannot reach node {OWNER}, which has it, because this pool has "
                "Options(cluster=False); use it from the client, or leave that option out"
            )
        if time.monotonic() > deadline:
            raise StateLostError(f"node {OWNER}, which has it, is not there")
        time.sleep(0.05)
    return info


def worker_count(on: Any) -> int:
    """How many workers the pool has whose state `link_for` finds."""
    target: Any = on or functions.active_compute()
    if target is None:
        return context.instance_info().total_workers
    return int(target.worker_count())
