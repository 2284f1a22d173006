"""Calls by name as a client sees them: made, listed, waited for, cancelled and forgotten."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec

from skyward.compute.broadcasting import refuse_one_shot_streams, values_of
from skyward.compute.named import outcomes, problems, sending
from skyward.compute.named.items import AGAIN_SECONDS, PAUSE_SECONDS, ItemStreams
from skyward.errors import (
    ConfigurationError,
    NodeLostError,
    PoolClosedError,
    PoolError,
    SkywardError,
)
from skyward.functions import Future, Pending
from skyward.nodes.fleet import Fleet
from skyward.wire.asking import ServiceConnection
from skyward.worker.kept_jobs import LIVE, JobState, JobView


@dataclass(frozen=True, slots=True)
class NamedCall:
    """A call by name, as it is now."""

    name: str
    function: str
    state: JobState
    began: datetime
    took: float
    by: str
    problem: str
    """Why it has no result; empty if it has one, or may still get one."""


@dataclass(eq=False, slots=True)
class _Waiting:
    """A future that waits for a call."""

    future: Future[Any]
    began: float | None = None
    """When that call was made: a later one of the same name is another call."""


class NamedCalls:
    """The calls by name of one pool, for one client."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._lock = threading.Lock()
        self._futures: dict[str, list[_Waiting]] = {}
        self._watching: threading.Thread | None = None
        self._connection: ServiceConnection | None = None
        self._left = False
        self._streams = ItemStreams(self._asking)

    # What a client asks.

    def submit(
        self,
        pending: Pending[Any],
        name: str,
        *,
        on: int | None,
        everywhere: bool,
        fail_fast: bool = False,
    ) -> Future[Any]:
        """Have the pool run a call that goes on without this client."""
        record = self._open_fleet().record
        if record is None:
            raise ConfigurationError(
                f"name={name!r}: this pool ends with its client, and its calls with it; only a "
                "pool that stays keeps calls by name: make it with Compute(name=..., keep=True)"
            )
        if not isinstance(name, str) or not name:
            raise ConfigurationError(f"name={name!r}: give a name, such as 'run-7'")
        if everywhere:
            refuse_one_shot_streams(pending)
        with self._asking() as agent:
            sending.send(
                agent,
                record,
                name,
                pending.use(),
                on=on,
                everywhere=everywhere,
                fail_fast=fail_fast,
            )
        return self.future(name)

    def future(self, name: str) -> Future[Any]:
        """What comes of a call."""
        future: Future[Any] = Future()
        future._bind(lambda: self._cancel_quietly(name), lambda: self._runs(name))
        waiting = _Waiting(future)
        if not self._add(name, [waiting]):
            raise PoolClosedError("this client has left the pool")
        # It may have ended before anybody here was told of ends.
        try:
            view = self.look(name)
            waiting.began = view.began
            if _is_readable(view):
                self._settle_or_watch(name)
        except BaseException:
            self._take(name, future)
            raise
        return future

    def result(self, name: str, timeout: float | None) -> Any:
        """Wait for a call, and return its value or raise its exception."""
        future = self.future(name)
        try:
            return future.result(timeout)
        except TimeoutError:
            if future.done():
                raise
            state = self.look(name).state
            raise TimeoutError(
                f"{name} is {state}, {timeout:g} s later; it goes on, and "
                f"compute.result({name!r}) waits for it again"
            ) from None
        finally:
            self._take(name, future)

    def all(self) -> list[NamedCall]:
        """The calls, in the order in which they were made."""
        with self._asking() as agent:
            found = msgspec.convert(agent.ask("list"), list[JobView])
        return [
            NamedCall(
                each.id,
                each.command[0],
                each.state,
                datetime.fromtimestamp(each.began, UTC),
                each.took,
                each.by,
                each.problem,
            )
            for each in found
        ]

    def look(self, name: str) -> JobView:
        """One call."""
        return self._ask("look", name)

    def cancel(self, name: str) -> None:
        """End a call; nothing happens if it has ended."""
        self._ask("cancel", name)

    def forget(self, name: str) -> bool:
        """Discard the result of a call that has ended; whether there was one."""
        with self._asking() as agent:
            return bool(agent.ask("forget", name=name))

    def leave(self) -> None:
        """Wait for nothing any more: the client leaves. The calls go on."""
        with self._lock:
            self._left = True
            waiting, self._futures = self._futures, {}
            connection = self._connection
        if connection is not None:
            connection.channel.abort()
        self._streams.leave()
        for name, each in waiting.items():
            _fail(each, problems.left(name))

    # How it is asked.

    def _open_fleet(self) -> Fleet:
        if self._fleet.closed:
            raise PoolClosedError("this client has left the pool")
        return self._fleet

    @contextlib.contextmanager
    def _asking(self) -> Iterator[ServiceConnection]:
        fleet = self._open_fleet()
        try:
            with fleet.service(fleet.head, "calls") as agent:
                yield agent
        except (EOFError, OSError, NodeLostError) as problem:
            raise problems.lost(fleet.head, problem) from problem
        except PoolError as problem:
            if type(problem) is not PoolError:
                raise
            raise ConfigurationError(str(problem)) from None

    def _ask(self, what: str, name: str) -> JobView:
        if not isinstance(name, str) or not name:
            raise ConfigurationError(f"{name!r} is no name of a call; give one, such as 'run-7'")
        with self._asking() as agent:
            return msgspec.convert(agent.ask(what, name=name), JobView)

    def _cancel_quietly(self, name: str) -> None:
        with contextlib.suppress(SkywardError):
            self.cancel(name)

    def _runs(self, name: str) -> bool:
        try:
            return self.look(name).state == "running"
        except SkywardError:
            return False

    # How this client learns of ends.

    def _watch(self) -> None:
        """Settle futures as their calls end, until there are none."""
        since: int | None = None
        deadline = 0.0
        while self._goes_on():
            try:
                with self._asking() as agent:
                    with self._lock:
                        self._connection = agent
                    told = agent.ask("ended", since=None)
                    since = int(told["since"])
                    self._settle_ended()
                    deadline = 0.0
                    while self._goes_on():
                        told = agent.ask("ended", since=since)
                        since = int(told["since"])
                        for name in told["names"]:
                            self._settle_told(name)
            except SkywardError as problem:
                # The way there may be cut for a moment, or the node is started again.
                deadline = deadline or time.monotonic() + AGAIN_SECONDS
                if self._left or time.monotonic() > deadline:
                    self._fail_all(problem)
                else:
                    time.sleep(PAUSE_SECONDS)
            except Exception as problem:
                # Nobody else would tell those who wait.
                self._fail_all(problem)
            finally:
                with self._lock:
                    self._connection = None

    def _goes_on(self) -> bool:
        with self._lock:
            if self._futures and not self._left:
                return True
            self._watching = None
            return False

    def _add(self, name: str, waiting: list[_Waiting]) -> bool:
        """Have futures settled when their call ends; False if the client has left."""
        with self._lock:
            if self._left:
                return False
            self._futures.setdefault(name, []).extend(waiting)
            if self._watching is None:
                self._watching = threading.Thread(
                    target=self._watch, name="skyward-named", daemon=True
                )
                self._watching.start()
            return True

    def _settle_ended(self) -> None:
        """Settle the futures of calls that have ended, or that a new agent does not know."""
        for name in list(self._futures):
            try:
                self._settle(name)
            except ConfigurationError as problem:
                self._fail(name, problems.lost(0, problem))

    def _settle_told(self, name: str) -> None:
        """Settle the futures of a call whose end was told; it may be forgotten already."""
        try:
            self._settle(name)
        except ConfigurationError as problem:
            self._fail(name, problem)

    def _settle_or_watch(self, name: str) -> None:
        """Settle the futures of a call that has ended, or have the watcher try again."""
        try:
            self._settle(name)
        except NodeLostError:
            with self._lock:
                connection = self._connection
            if connection is not None:
                # With another connection it looks at all calls.
                connection.channel.abort()

    def _settle(self, name: str) -> None:
        """Settle the futures of a call if it has ended: a told end may be that of an earlier one.

        Also if it streams: then they have the items as these come. If the result cannot be fetched
        now, they wait on.
        """
        if name not in self._futures or not _is_readable(self.look(name)):
            return
        with self._lock:
            waiting = self._futures.pop(name, [])
        try:
            while waiting:
                # Each its own objects, as if it were the only one.
                view, block = self._read(name)
                if not _is_readable(view):
                    return
                self._set(waiting.pop(0), view, block)
        finally:
            if waiting and not self._add(name, waiting):
                _fail(waiting, problems.left(name))

    def _fail(self, name: str, problem: BaseException) -> None:
        with self._lock:
            waiting = self._futures.pop(name, [])
        _fail(waiting, problem)

    def _fail_all(self, problem: BaseException) -> None:
        for name in list(self._futures):
            self._fail(name, problem)

    def _take(self, name: str, future: Future[Any]) -> None:
        """Forget a future that nobody waits for."""
        with self._lock:
            left = [each for each in self._futures.get(name, []) if each.future is not future]
            self._futures[name] = left
            if not left:
                del self._futures[name]

    def _read(self, name: str) -> tuple[JobView, bytearray]:
        """A call, and what came of it as the pool keeps it; no bytes if there is nothing."""
        block = bytearray()
        with self._asking() as agent:
            agent.send("read", name=name)
            reply, data = agent.next_part()
            if reply.more:
                block = bytearray(int(reply.value["size"]))
            at = 0
            while reply.more:
                block[at : at + len(data)] = data
                at += len(data)
                reply, data = agent.next_part()
        return msgspec.convert(reply.value, JobView), block

    def _set(self, waiting: _Waiting, view: JobView, block: bytearray) -> None:
        """Settle a future with what came of a call."""
        try:
            if waiting.began not in (None, view.began):
                raise PoolError(f"{view.id} was forgotten before its result was here")
            value = self._decoded(view, block)
        except BaseException as problem:
            _fail([waiting], problem)
        else:
            with contextlib.suppress(Exception):  # cancelled in the meantime
                waiting.future.set_result(value)

    def _decoded(self, view: JobView, block: bytearray) -> Any:
        """The value of a call; raises its exception."""
        if not block:
            raise problems.without_result(view)
        items_of = functools.partial(self._streams.items, view)
        everywhere, found, first = outcomes.read(memoryview(block), items_of)
        if everywhere:
            return values_of(f"{view.command[0]} ({view.id})", found, first)
        if found[0].error is not None:
            raise found[0].error
        return found[0].value


def _is_readable(view: JobView) -> bool:
    """Whether what came of a call can be read: it has ended, or its items come."""
    return view.streams or view.state not in LIVE


def _fail(waiting: list[_Waiting], problem: BaseException) -> None:
    for each in waiting:
        with contextlib.suppress(Exception):  # cancelled in the meantime
            each.future.set_exception(problem)
