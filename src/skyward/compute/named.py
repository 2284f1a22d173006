"""Calls by name on a kept pool: they go on without their client, and keep their results.

Each is a job of the head's agent, and `runner` runs them. This is the client's end: calls are made,
listed, waited for, cancelled and forgotten. What came of a call is in logs of the job, as objects
with facts: one has the answers of all workers; each generator has another, to which its items are
written as they come.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import secrets
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import IO, Any, Literal, TypeVar

import msgspec

from skyward.calls.task import cannot_rebuild, not_the_end, remote_failure
from skyward.compute.broadcasts import refuse_one_shot_streams, values_of
from skyward.errors import (
    ConfigurationError,
    NodeLostError,
    Outcome,
    PoolClosedError,
    PoolError,
    RemoteError,
    SkywardError,
    TaskCancelledError,
    WorkerDiedError,
)
from skyward.functions import Future, Pending
from skyward.nodes.fleet import Fleet
from skyward.nodes.host import again_if_cut
from skyward.nodes.kept import ReachedPool, identity, way_back
from skyward.objects import encoding, stored
from skyward.objects.encoding import Encoded
from skyward.objects.payloads import Pieces
from skyward.wire.channel import PART, ServiceConnection
from skyward.wire.messages import Failure
from skyward.worker.jobs import LIVE, RESULT, Job, JobState

AGAIN_SECONDS = 30.0
"""How long a client tries to reach the head again before it takes the calls for lost."""
PAUSE_SECONDS = 0.2
RUNNER = ["{python}", "-m", "skyward.compute.runner"]
_IN_MEMORY = 16 << 20

T = TypeVar("T")
Reading = Callable[[], contextlib.AbstractContextManager[ServiceConnection]]
Objects = Generator[tuple[Any, Pieces, int]]
"""The objects of a log: what each is, its parts, and where it ends."""
Kind = Literal["call", "value", "stream", "item", "end", "raised", "problem"]


class CallFacts(msgspec.Struct):
    """How a call is to run; the first object of what is sent has them."""

    function: str
    key: bytes
    """The name of its code, by content."""
    timeout: float | None
    retries: int
    on: int | None
    everywhere: bool
    code_handles: list[bytes]
    """The data from `put` that the code refers to, by their keys."""
    handles: list[bytes]
    """The data from `put` that the arguments refer to."""
    fail_fast: bool = False


class Facts(msgspec.Struct):
    """What an object of a log is."""

    kind: Kind
    node: int = 0
    worker: int = 0
    name: str = ""
    where: str = ""
    failure: Failure | None = None
    text: str = ""
    everywhere: bool = False
    """Whether the call is a broadcast."""
    first: int | None = None
    """The rank of a broadcast that failed first."""
    stream: int = 0
    """Which of the call's streams has the items."""


# Or msgspec ends the process if two threads are the first to read a struct that has others.
msgspec.msgpack.Decoder(Facts)


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
        # An iterator may be collected, and so ended, in a thread that holds it.
        self._streaming = threading.RLock()
        self._streams: set[Objects] = set()
        """The streams that are read over connections of this client's."""
        self._connections: set[ServiceConnection] = set()

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
                "kept pool keeps calls by name: make it with Compute(name=..., keep=True)"
            )
        if not isinstance(name, str) or not name:
            raise ConfigurationError(f"name={name!r}: give a name, such as 'run-7'")
        if everywhere:
            refuse_one_shot_streams(pending)
        pending = pending.use()
        _check(pending, name)
        environment, private = way_back(record)
        me, submission = identity(), secrets.token_hex(8)
        with tempfile.SpooledTemporaryFile(_IN_MEMORY) as file:
            _write(file, pending, on=on, everywhere=everywhere, fail_fast=fail_fast)

            def start(agent: ServiceConnection) -> None:
                agent.send(
                    "start",
                    name=name,
                    function=pending.function.name,
                    command=RUNNER,
                    environment=environment,
                    private=private,
                    by=f"{me['user']}@{me['host']}",
                    submission=submission,
                )
                file.seek(0)
                while part := file.read(PART):
                    agent.send("part", part)
                agent.send("part")
                agent.next_reply()

            self._asked(start)
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
                self._settle(name)
        except NodeLostError:
            with self._lock:
                connection = self._connection
            if connection is not None:
                # With another connection, the watcher looks at all calls.
                connection.channel.abort()
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
        found = msgspec.convert(
            self._asked(lambda agent: agent.ask("list", kind="call")), list[Job]
        )
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

    def look(self, name: str) -> Job:
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
        with self._streaming:
            reading, streams = list(self._connections), list(self._streams)
        for agent in reading:
            agent.channel.abort()
        # Not when the user's iterators go: modules may be torn down by then.
        for objects in streams:
            _end(objects)
        for name, each in waiting.items():
            _fail(each, _left(name))

    # How it is asked.

    def _open_fleet(self) -> Fleet:
        if self._fleet.closed:
            raise PoolClosedError("this client has left the pool")
        return self._fleet

    def _asked(self, ask: Callable[[ServiceConnection], T]) -> T:
        """The answer to a question that may be asked twice: its connection may be cut."""

        def once() -> T:
            with fleet.service(fleet.head, "jobs") as agent:
                return ask(agent)

        with self._explained() as fleet:
            return again_if_cut(once)

    @contextlib.contextmanager
    def _asking(self) -> Iterator[ServiceConnection]:
        with self._explained() as fleet, fleet.service(fleet.head, "jobs") as agent:
            yield agent

    @contextlib.contextmanager
    def _explained(self) -> Iterator[Fleet]:
        """Have the errors of asking the head say what they mean."""
        fleet = self._open_fleet()
        try:
            yield fleet
        except (EOFError, OSError, NodeLostError) as problem:
            raise _lost(fleet.head, problem) from problem
        except PoolError as problem:
            if type(problem) is not PoolError:
                raise
            raise ConfigurationError(str(problem)) from None

    def _ask(self, what: str, name: str) -> Job:
        if not isinstance(name, str) or not name:
            raise ConfigurationError(f"{name!r} is no name of a call; give one, such as 'run-7'")
        found = self._asked(lambda agent: agent.ask(what, job=name, kind="call"))
        return msgspec.convert(found, Job)

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
        deadline = 0.0
        while self._goes_on():
            try:
                with self._asking() as agent:
                    with self._lock:
                        self._connection = agent
                    agent.send("ends")
                    agent.next_reply()
                    # Those that have ended before anybody here was told of ends.
                    names = list(self._futures)
                    deadline = 0.0
                    while True:
                        for name in names:
                            self._settle(name)
                        if not self._goes_on():
                            return
                        names = agent.next_reply().value
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

    def _settle(self, name: str) -> None:
        """Settle the futures of a call that has ended, or is gone.

        Also if it streams: then they have the items as these come. If it goes on, or if the result
        cannot be fetched now, they wait on.
        """
        with self._lock:
            waiting = self._futures.pop(name, [])
        try:
            while waiting:
                # Each its own objects, as if it were the only one.
                view, block = self._read(name)
                if not _is_readable(view):
                    return
                self._set(waiting.pop(0), view, block)
        except ConfigurationError as problem:
            gone, waiting = waiting, []
            _fail(gone, _forgotten(name, problem))
        finally:
            if waiting and not self._add(name, waiting):
                _fail(waiting, _left(name))

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

    def _read(self, name: str) -> tuple[Job, bytearray]:
        """A call, and what came of it as the pool keeps it; no bytes if there is nothing."""
        block, ended = bytearray(), list[Job]()
        with self._asking() as agent:
            agent.send("follow", job=name, log=RESULT, follow=False)
            for part in _parts(agent, ended):
                block += part
        return ended[0], block

    def _set(self, waiting: _Waiting, view: Job, block: bytearray) -> None:
        """Settle a future with what came of a call."""
        try:
            if waiting.began not in (None, view.began):
                raise _forgotten(view.id, None)
            value = self._decoded(view, block)
        except BaseException as problem:
            _fail([waiting], problem)
        else:
            with contextlib.suppress(Exception):  # cancelled in the meantime
                waiting.future.set_result(value)

    def _decoded(self, view: Job, block: bytearray) -> Any:
        """The value of a call; raises its exception."""
        if not block:
            raise _without_result(view)
        items_of = functools.partial(self._items, view)
        everywhere, found, first = _read_answers(memoryview(block), items_of)
        if everywhere:
            return values_of(f"{view.command[0]} ({view.id})", found, first)
        if found[0].error is not None:
            raise found[0].error
        return found[0].value

    # The items of generators.

    def _items(self, view: Job, stream: int) -> Iterator[Any]:
        """The items of a call's stream, then its exception; waits for those that are to come.

        They come over the client's way to the pool; once it has left, over one of their own.
        """
        position, apart = 0, False
        objects = self._objects(view, stream, position, self._reading_here)
        with self._streaming:
            self._streams.add(objects)
        try:
            while True:
                # Not decoded where they are received: an error of the user's is none of the
                # connection.
                for told, pieces, end in objects:
                    position = end
                    is_item, item = read_item(told, pieces)
                    if not is_item:
                        return
                    yield item
                # Only `leave` ends them without an exception.
                objects, apart = self._objects(view, stream, position, self._reading_apart), True
                _apart.add(objects)
        finally:
            if apart:
                objects.close()
            elif not self._left:
                with self._streaming:
                    self._streams.discard(objects)
                _end(objects)

    def _objects(self, view: Job, stream: int, position: int, reading: Reading) -> Objects:
        """What a log has from a position on; it just ends if the client leaves meanwhile."""
        deadline = 0.0
        ended: list[Job] = []
        while True:
            begin = position
            try:
                with reading() as agent:
                    # Already now: the next item of a slow generator may come after many cuts.
                    deadline = 0.0
                    log = f"stream-{stream}"
                    agent.send("follow", job=view.id, log=log, began=view.began, position=position)
                    for told, pieces, end in stored.arriving(_parts(agent, ended)):
                        position = begin + end
                        yield told, pieces, position
            except PoolClosedError:
                return
            except NodeLostError:
                # The way there may be cut for a moment.
                deadline = deadline or time.monotonic() + AGAIN_SECONDS
                if time.monotonic() > deadline:
                    raise
                time.sleep(PAUSE_SECONDS)
            else:
                # Not inside: `_asking` takes a `PoolError` for a refusal.
                raise _without_result(ended[0])

    @contextlib.contextmanager
    def _reading_here(self) -> Iterator[ServiceConnection]:
        """A connection of this client's that `leave` ends; `PoolClosedError` once it has left."""
        try:
            with self._asking() as agent:
                with self._streaming:
                    self._connections.add(agent)
                try:
                    if self._left:
                        raise EOFError("the client leaves")
                    yield agent
                finally:
                    with self._streaming:
                        self._connections.discard(agent)
        except NodeLostError:
            if self._left:
                raise PoolClosedError("this client has left the pool") from None
            raise

    @contextlib.contextmanager
    def _reading_apart(self) -> Iterator[ServiceConnection]:
        """A connection of its own, for what is read after the client has left."""
        head, record = self._fleet.head, self._fleet.record
        assert record is not None, "only a kept pool keeps calls"
        try:
            with ReachedPool(record) as pool, pool.service(head, "jobs") as agent:
                yield agent
        except (EOFError, OSError, NodeLostError) as problem:
            raise _lost(head, problem) from problem


_apart: weakref.WeakSet[Objects] = weakref.WeakSet()
"""The streams that are read without a client; ended before modules are torn down."""


@atexit.register
def _end_apart() -> None:
    for objects in list(_apart):
        _end(objects)


def _end(objects: Objects) -> None:
    with contextlib.suppress(ValueError):  # another thread is at work with them, and ends them
        objects.close()


def _parts(agent: ServiceConnection, ended: list[Job]) -> Iterator[bytearray]:
    """What the agent sends of a log, up to its end; then `ended` has the job."""
    while True:
        reply, data = agent.next_part()
        if not reply.more:
            ended.append(msgspec.convert(reply.value, Job))
            return
        yield data


def _is_readable(view: Job) -> bool:
    """Whether what came of a call can be read: it has ended, or its items come."""
    return view.streams or view.state not in LIVE


def _fail(waiting: list[_Waiting], problem: BaseException) -> None:
    for each in waiting:
        with contextlib.suppress(Exception):  # cancelled in the meantime
            each.future.set_exception(problem)


# Why a client does not get what came of a call.


def _without_result(view: Job) -> SkywardError:
    """Why a call that has ended has no result, or a stream of it no end."""
    if view.state == "cancelled":
        return TaskCancelledError(f"{view.id} was cancelled before it started")
    if view.state == "lost":
        return WorkerDiedError(f"{view.id} is lost: {view.problem}; forget it, and submit it again")
    return PoolError(f"{view.id} has no result: {view.problem}")


def _forgotten(name: str, problem: BaseException | None) -> PoolError:
    """A call is not there any more, or another one has its name."""
    told = f": {problem}" if problem is not None else ""
    return PoolError(f"{name} was forgotten before its result was here{told}")


def _lost(head: int, problem: BaseException) -> NodeLostError:
    """The head cannot be reached."""
    return NodeLostError(
        f"node {head}, the head, which has the pool's calls by name, is lost or out of reach: "
        f"{problem}"
    )


def _left(name: str) -> PoolClosedError:
    """The client that waits for a call leaves."""
    return PoolClosedError(
        f"its client left the pool; {name} goes on, unless the pool was ended: "
        f"compute.result({name!r}) gets its result after the next sky.attach"
    )


# What is sent.


def _check(pending: Pending[Any], name: str) -> None:
    function = pending.function
    if function.seat is not None:
        raise ConfigurationError(
            f"submit({function.name}, name={name!r}): the object of this method lives with its "
            "client; make the object inside a function, and name the call of that function"
        )
    if function.kept_on is not None:
        raise ConfigurationError(
            f"submit({function.name}, name={name!r}): the tensors of sky.remote are those of their "
            "client; name the plain function, whose result is kept, and move it to a device later"
        )


def _write(
    file: IO[bytes],
    pending: Pending[Any],
    *,
    on: int | None,
    everywhere: bool,
    fail_fast: bool,
) -> None:
    function = pending.function
    code = function.code()
    args, kwargs = pending.whole_arguments()
    call = encoding.Arguments(function.name, function.parameter_names, args, kwargs)
    # The bytes of tensors on devices travel, too: the devices are this client's.
    encoded = encoding.encode(call, own_modules=True)
    facts = CallFacts(
        function=function.name,
        key=code.key,
        timeout=function.timeout,
        retries=function.retries,
        on=on,
        everywhere=everywhere,
        code_handles=[each.key for each in code.encoded.handles],
        handles=[each.key for each in encoded.handles],
        fail_fast=fail_fast or function.fail_fast,
    )
    _append(file, code.encoded, msgspec.to_builtins(facts, builtin_types=(bytes,)))
    _append(file, encoded)
    for handle in {each.key: each for each in (*code.encoded.handles, *encoded.handles)}.values():
        _append(file, handle.encoded, handle.key)


def _append(file: IO[bytes], encoded: Encoded, facts: Any = None) -> None:
    stored.append(file, encoded.pieces, encoded.buffers, encoded.storages, facts)


# What came of it.


def _read_answers(
    block: memoryview, items_of: Callable[[int], Iterator[Any]]
) -> tuple[bool, list[Outcome], int | None]:
    """Whether a call is a broadcast, what came of it for each worker, and which rank failed first.

    `items_of` has the items of a stream of that number.
    """
    found: list[Outcome] = []
    everywhere, first = False, None
    for told, pieces in stored.objects(block):
        facts = msgspec.convert(told, Facts)
        if facts.kind == "call":
            everywhere, first = facts.everywhere, facts.first
        elif facts.kind == "stream":
            found.append(Outcome(facts.node, facts.worker, items_of(facts.stream)))
        else:
            found.append(_outcome(facts, pieces))
    return everywhere, found, first


def read_item(told: Any, pieces: Pieces) -> tuple[bool, Any]:
    """Whether an object of a stream is an item, and the item; raises what ended the stream."""
    facts = msgspec.convert(told, Facts)
    with encoding.own_classes():
        if facts.kind == "item":
            return True, encoding.decode(*pieces)
        return False, _value(facts, pieces)


def _value(facts: Facts, pieces: Pieces) -> Any:
    """The value of a call, or None at the end of a stream; raises what a call has raised."""
    given = pieces if len(pieces[0]) > 0 else None
    if facts.kind == "raised":
        assert facts.failure is not None
        return remote_failure(facts.failure, given, facts.name, facts.where).get()
    if facts.kind == "problem":
        raise _problem(facts, given)
    if facts.kind == "end":
        return None
    try:
        return encoding.decode(*pieces)
    except SkywardError:
        raise
    except Exception as problem:
        raise cannot_rebuild(facts.where, problem) from problem


def _problem(facts: Facts, pieces: Pieces | None) -> BaseException:
    if pieces is not None:
        with contextlib.suppress(Exception):
            rebuilt: BaseException = encoding.decode(*pieces).rebuild()
            return rebuilt
    return RemoteError(f"{facts.name}: {facts.text}", type_name=facts.name)


def _outcome(facts: Facts, pieces: Pieces) -> Outcome:
    try:
        with encoding.own_classes():
            return Outcome(facts.node, facts.worker, _value(facts, pieces))
    except Exception as problem:
        return Outcome(facts.node, facts.worker, error=not_the_end(problem))
