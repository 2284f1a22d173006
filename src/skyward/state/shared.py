"""Shared objects: the handles through which tasks and the client use state of a pool by name."""

from __future__ import annotations

import operator
import pickle
import queue
import threading
from collections.abc import (
    Callable,
    ItemsView,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    MutableSet,
    ValuesView,
)
from types import TracebackType
from typing import (
    Any,
    ClassVar,
    Generic,
    Literal,
    Self,
    SupportsIndex,
    TypeVar,
    cast,
    overload,
)

import msgspec

from skyward.errors import ConfigurationError, StateLostError
from skyward.former import SHARED, missing
from skyward.objects import encoding
from skyward.state.link import StateOperation, Undo, link_for, worker_count

K = TypeVar("K")
V = TypeVar("V")
D = TypeVar("D")
E = TypeVar("E")
T = TypeVar("T")

NAME_MAX = 200
BATCH_BYTES = 4 << 20
"""How many bytes of values `update` sends at once."""
LEASE_SECONDS = 30.0
LEASE_MIN = 10.0
"""A holder shows that it is there every 5 s, so a shorter lease would end by chance."""

_NOTHING: Any = object()

VALUE_MAX = 8 << 20
"""How many bytes one value may have, encoded."""
KEY_MAX = 16 << 10

_PLAIN = frozenset((int, float, str, bytes, bool, type(None)))
_WITH_BUFFERS = b"\x00"
"""The first byte of a value that is more than a pickle, whose first byte is 0x80."""

_packer = msgspec.msgpack.Encoder()
_key_reader = msgspec.msgpack.Decoder()
_reader = msgspec.msgpack.Decoder(tuple[bytes, list[bytes], list[tuple[int, int]]])


class EmptyTimeoutError(TimeoutError, queue.Empty):
    """No item came in time; a `queue.Empty`."""


class FullTimeoutError(TimeoutError, queue.Full):
    """There was no room in time; a `queue.Full`."""


class BarrierTimeoutError(TimeoutError, threading.BrokenBarrierError):
    """The others did not come in time; a `threading.BrokenBarrierError`."""


class SharedObject:
    """The common part of all handles."""

    KIND: ClassVar[str]

    def __init__(
        self,
        name: str,
        *,
        on: Any = None,
        consistency: Literal["strong", "eventual"] | None = None,
    ) -> None:
        """`consistency` is there for programs that give it: every object here is strong."""
        if consistency not in ("strong", "eventual", None):
            raise ConfigurationError(
                f"sky.{self.KIND}({name!r}, consistency={consistency!r}): leave it out; every "
                "object is 'strong' here, and 'eventual' asks for less"
            )
        if not isinstance(name, str) or not 0 < len(name) <= NAME_MAX:
            raise ConfigurationError(
                f"sky.{self.KIND}({name!r}): give a name of 1 to {NAME_MAX} characters"
            )
        self.name = name
        self._on = on
        self._epoch = ""
        """Names the owner whose state this handle has seen; empty if none."""
        self._made_with: dict[str, Any] | None = None
        """The options that this handle has given that owner."""

    def _options(self) -> dict[str, Any] | None:
        """What the object is made with, if it is not there."""
        return None

    def _call(
        self,
        what: str,
        *arguments: Any,
        waits: bool = False,
        timeout: float | None = None,
        undo: Undo | None = None,
    ) -> Any:
        """Have the owner perform an operation."""
        link = link_for(self._on)
        try:
            epoch = self._epoch or link.epoch()
            if not self._epoch:
                self._made_with = self._options()
            # Always sent: somebody may have deleted the object, and this call makes it anew.
            operation = StateOperation(
                self.KIND, self.name, what, arguments, self._made_with, waits, timeout, undo
            )
            value = link.perform(operation, epoch)
        except StateLostError as problem:
            knew, self._epoch = self._epoch, ""
            raise self._lost(problem, knew=bool(knew)) from problem.__cause__
        self._epoch = epoch
        return value

    def _lost(self, problem: StateLostError, *, knew: bool) -> StateLostError:
        after = (
            "; what it had may be gone: the next call uses the state that is there then"
            if knew
            else ""
        )
        return StateLostError(f"{self!r} cannot be reached: {problem}{after}")

    def _wait(
        self, what: str, *arguments: Any, timeout: float | None, undo: Undo | None = None
    ) -> Any:
        """Have the owner perform an operation that may wait; None if it waited too long."""
        self._check_timeout(timeout)
        return self._call(what, *arguments, waits=True, timeout=timeout, undo=undo)

    def _check_timeout(self, timeout: Any) -> None:
        is_number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
        if timeout is not None and not (is_number and timeout >= 0):
            raise ConfigurationError(
                f"{self!r}: timeout={timeout!r}; give seconds, 0 or more, or None to wait for any "
                "time"
            )

    def delete(self) -> None:
        """Remove the object from the pool; one of this name that is used later is new.

        >>> sky.dict("scores").delete()
        """
        self._call("delete")

    def __getattr__(self, name: str) -> Any:
        raise missing(f"sky.{self.KIND}", name, SHARED)

    def __reduce__(self) -> tuple[Callable[..., Self], tuple[Any, ...]]:
        """In another process, the handle belongs to the pool of that process."""
        return type(self), (self.name,)

    def __repr__(self) -> str:
        return f"<sky.{self.KIND} {self.name!r}>"


class SharedDict(SharedObject, MutableMapping[K, V], Generic[K, V]):
    """A dict that the whole pool shares; made by `sky.dict(name)`.

    Keys are str, bytes, int, float, bool and None, and tuples of them. A value is a copy: to change
    it in the dict, assign it again, or use `change`.

    >>> scores = sky.dict("scores")
    >>> scores["run 1"] = 0.93
    """

    KIND = "dict"

    def _key(self, key: Any) -> bytes:
        return encode_key(key, repr(self))

    def _value(self, key: Any, value: Any) -> bytes:
        return encode(value, f"the value of {key!r} in {self!r}")

    def __getitem__(self, key: K) -> V:
        found = self._call("get", self._key(key))
        if found is None:
            raise KeyError(key)
        return cast(V, decode(found))

    @overload
    def get(self, key: K, /) -> V | None: ...
    @overload
    def get(self, key: K, /, default: V | D) -> V | D: ...
    def get(self, key: K, /, default: Any = None) -> Any:
        """The value of a key, or the default."""
        found = self._call("get", self._key(key))
        return default if found is None else decode(found)

    def __setitem__(self, key: K, value: V) -> None:
        self._call("set", self._key(key), self._value(key, value))

    def __delitem__(self, key: K) -> None:
        if self._call("pop", self._key(key)) is None:
            raise KeyError(key)

    def __contains__(self, key: object) -> bool:
        return bool(self._call("has", self._key(key)))

    def __len__(self) -> int:
        return int(self._call("len"))

    def __bool__(self) -> bool:
        return len(self) > 0

    def __iter__(self) -> Iterator[K]:
        """The keys of this moment."""
        return iter([decode_key(key) for key in self._call("keys")])

    def items(self) -> ItemsView[K, V]:
        """The keys and values of this moment."""
        return self.copy().items()

    def values(self) -> ValuesView[V]:
        """The values of this moment."""
        return self.copy().values()

    def copy(self) -> dict[K, V]:
        """A plain dict with what this one has now."""
        return {decode_key(key): decode(value) for key, value in self._call("items")}

    @overload
    def pop(self, key: K, /) -> V: ...
    @overload
    def pop(self, key: K, /, default: V | D) -> V | D: ...
    def pop(self, key: K, /, default: Any = _NOTHING) -> Any:
        """Remove a key and return its value: of several callers, one gets it."""
        found = self._call("pop", self._key(key))
        if found is None:
            if default is _NOTHING:
                raise KeyError(key)
            return default
        return decode(found)

    def popitem(self) -> tuple[K, V]:
        """Remove the key that was added last, and return it with its value."""
        found = self._call("popitem")
        if found is None:
            raise KeyError(f"{self!r} is empty")
        return decode_key(found[0]), decode(found[1])

    def clear(self) -> None:
        """Remove everything."""
        self._call("clear")

    def setdefault(self, key: K, default: V = None, /) -> V:  # type: ignore[assignment]
        """The value of a key; if it has none, the default becomes its value: of several, one."""
        encoded = self._value(key, default)
        return cast(V, decode(self._call("setdefault", self._key(key), encoded)))

    def update(self, other: Any = (), /, **more: Any) -> None:
        """Add keys and values, all at once if their values have fewer than 4 MB together."""
        pairs = other.items() if isinstance(other, Mapping) else other
        batch: list[tuple[bytes, bytes]] = []
        size = 0
        for key, value in (*pairs, *more.items()):
            pair = self._key(key), self._value(key, value)
            size += len(pair[1])
            if batch and size > BATCH_BYTES:
                self._call("update", batch)
                batch, size = [], len(pair[1])
            batch.append(pair)
        if batch:
            self._call("update", batch)

    def compare_and_set(self, key: K, expected: V, new: V) -> bool:
        """Replace a value if it is equal to the expected one; says whether it was.

        >>> tasks.compare_and_set("job 7", "waiting", "running")
        """
        encoded, value = self._key(key), self._value(key, new)
        while (found := self._call("get", encoded)) is not None and decode(found) == expected:
            if self._call("replace", encoded, found, value):
                return True
        return False

    def change(self, key: K, function: Callable[[V], V], default: V = _NOTHING) -> V:
        """Replace a value by what a function makes of it, and return that.

        The function runs here. If another process changes the value meanwhile, it runs again.

        >>> sky.dict("best").change("loss", lambda best: min(best, loss), default=loss)
        """
        encoded = self._key(key)
        while True:
            found = self._call("get", encoded)
            if found is None and default is _NOTHING:
                raise KeyError(key)
            new = function(default if found is None else decode(found))
            if self._call("replace", encoded, found, self._value(key, new)):
                return new


class SharedSet(SharedObject, MutableSet[E], Generic[E]):
    """A set that the whole pool shares; made by `sky.set(name)`.

    Elements are what keys of `sky.dict` are.

    >>> sky.set("seen").add_new(url)
    True
    """

    KIND = "set"

    def _element(self, element: Any) -> bytes:
        return encode_key(element, repr(self))

    def add(self, element: E) -> None:
        """Add an element."""
        self._call("add", self._element(element))

    def add_new(self, element: E) -> bool:
        """Add an element; says whether it is new: of several callers, one is told so."""
        return bool(self._call("add", self._element(element)))

    def discard(self, element: E) -> None:
        """Remove an element if it is there."""
        self._call("discard", self._element(element))

    def remove(self, element: E) -> None:
        """Remove an element; `KeyError` if it is not there: of several callers, one removes it."""
        if not self._call("discard", self._element(element)):
            raise KeyError(element)

    def pop(self) -> E:
        """Remove an element and return it: of several callers, one gets it."""
        found = self._call("pop")
        if found is None:
            raise KeyError(f"{self!r} is empty")
        return cast(E, decode_key(found))

    def clear(self) -> None:
        """Remove everything."""
        self._call("clear")

    def __contains__(self, element: object) -> bool:
        return bool(self._call("has", self._element(element)))

    def __len__(self) -> int:
        return int(self._call("len"))

    def __iter__(self) -> Iterator[E]:
        """The elements of this moment."""
        return iter([decode_key(element) for element in self._call("keys")])

    @classmethod
    def _from_iterable(cls, it: Iterable[Any]) -> Any:
        """The operators of `collections.abc.Set` make plain sets."""
        return frozenset(it)


class SharedCounter(SharedObject):
    """A whole number that the whole pool shares, 0 at first; made by `sky.counter(name)`.

    >>> sky.counter("images").add(64)
    64
    """

    KIND = "counter"

    def _whole(self, number: SupportsIndex) -> int:
        try:
            return operator.index(number)
        except TypeError:
            raise ConfigurationError(
                f"{self!r} counts in whole numbers, not in {number!r}; use a sky.dict for others"
            ) from None

    def add(self, amount: SupportsIndex = 1) -> int:
        """Add to the counter, and return what it is then."""
        return int(self._call("add", amount if type(amount) is int else self._whole(amount)))

    def increment(self, n: SupportsIndex = 1) -> int:
        """The same as `add`."""
        return self.add(n)

    def decrement(self, n: SupportsIndex = 1) -> int:
        """Subtract from the counter, and return what it is then."""
        return self.add(-self._whole(n))

    @property
    def value(self) -> int:
        """What the counter is now."""
        return int(self._call("get"))

    def set(self, value: SupportsIndex) -> None:
        """Set the counter."""
        self._call("set", self._whole(value))

    def reset(self, value: SupportsIndex = 0) -> None:
        """The same as `set`; 0 if nothing is given."""
        self.set(value)

    def compare_and_set(self, expected: SupportsIndex, new: SupportsIndex) -> bool:
        """Set the counter if it is what is expected; says whether it was."""
        return bool(self._call("replace", self._whole(expected), self._whole(new)))

    def __int__(self) -> int:
        return self.value


class SharedQueue(SharedObject, Generic[T]):
    """A queue that the whole pool shares; made by `sky.queue(name, maxsize=0)`.

    Each item goes to one caller. An item that a process has taken is gone with that process.

    >>> sky.queue("jobs").put(job)
    >>> job = sky.queue("jobs").get(timeout=10)
    """

    KIND = "queue"

    def __init__(self, name: str, maxsize: int = 0, *, on: Any = None) -> None:
        super().__init__(name, on=on)
        if not isinstance(maxsize, int) or isinstance(maxsize, bool) or maxsize < 0:
            raise ConfigurationError(
                f"sky.queue({name!r}, maxsize={maxsize!r}): give a number of items, or 0 for any"
            )
        self._maxsize = maxsize

    def _options(self) -> dict[str, Any] | None:
        return {"maxsize": self._maxsize} if self._maxsize else None

    def put(self, item: T, block: bool = True, timeout: float | None = None) -> None:
        """Append an item; waits for room, and raises `queue.Full` if there is none in time."""
        encoded = encode(item, f"an item of {self!r}")
        if not block:
            if not self._call("put", encoded):
                raise queue.Full(f"{self!r} is full")
        elif not self._wait("put", encoded, timeout=timeout):
            raise FullTimeoutError(f"{self!r} had no room for {timeout:g} s")

    def put_nowait(self, item: T) -> None:
        """Append an item; `queue.Full` if there is no room."""
        self.put(item, block=False)

    def get(self, block: bool = True, timeout: float | None = None) -> T:
        """Take the first item; waits for one, and raises `queue.Empty` if none comes in time."""
        if not isinstance(block, bool):
            raise ConfigurationError(f"{self!r}.get({block!r}): write get(timeout={block!r})")
        if block:
            found = self._wait("get", timeout=timeout, undo=_unget)
        else:
            found = self._call("get", undo=_unget)
        if found is not None:
            return cast(T, decode(found[0]))
        if not block:
            raise queue.Empty(f"{self!r} is empty")
        raise EmptyTimeoutError(
            f"{self!r} had no item for {timeout:g} s; catch this as queue.Empty: None may be an "
            "item, so that `get` does not return it for none"
        )

    def get_nowait(self) -> T:
        """Take the first item; `queue.Empty` if there is none."""
        return self.get(block=False)

    def qsize(self) -> int:
        """How many items there are now."""
        return int(self._call("facts")[0])

    @property
    def maxsize(self) -> int:
        """How many items there can be; 0 for any number."""
        return int(self._call("facts")[1])

    def empty(self) -> bool:
        """Whether there is no item now."""
        return self.qsize() == 0

    def full(self) -> bool:
        """Whether there is no room now."""
        count, room = self._call("facts")
        return bool(room and count >= room)

    def __len__(self) -> int:
        return self.qsize()

    def __bool__(self) -> bool:
        """A queue is true also if it is empty, as `queue.Queue` is."""
        return True

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.name, self._maxsize)


def _unget(taken: Any) -> tuple[str, tuple[Any, ...]] | None:
    return ("unget", (taken[0],)) if taken else None


class SharedLock(SharedObject):
    """A lock that the whole pool shares; made by `sky.lock(name)`.

    It is held by a process, and free when that process ends, or is out of reach for `lease`
    seconds: the next holder then sees `abandoned`. It is not reentrant. `timeout` is for the `with`
    block.

    >>> with sky.lock("download", timeout=600) as lock:
    ...     if lock.abandoned: ...
    """

    KIND = "lock"

    def __init__(
        self,
        name: str,
        timeout: float | None = None,
        *,
        lease: float = LEASE_SECONDS,
        on: Any = None,
    ) -> None:
        super().__init__(name, on=on)
        self._check_timeout(timeout)
        if not isinstance(lease, int | float) or not lease >= LEASE_MIN:
            raise ConfigurationError(
                f"sky.lock({name!r}, lease={lease!r}): give {LEASE_MIN:g} s or more"
            )
        self._timeout, self._lease = timeout, float(lease)
        self._token: int | None = None
        self._abandoned = False

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        """Hold the lock; waits for it, and raises `TimeoutError` if it is not free in time.

        Without `blocking`, returns whether it was free.
        """
        if blocking:
            granted = self._wait("acquire", self._lease, timeout=timeout, undo=_release)
        else:
            granted = self._call("acquire", self._lease, undo=_release)
        if granted is not None:
            self._token, self._abandoned = granted
            return True
        if not blocking:
            return False
        holder = self.owner
        raise TimeoutError(
            f"{self!r} was not free for {timeout:g} s"
            + (f"; it is held by {holder}" if holder else "")
        )

    def release(self) -> None:
        """Let the lock go; `StateLostError` if this process was silent for its lease."""
        if self._token is None:
            raise RuntimeError(f"{self!r} is not held through this handle, so it cannot release it")
        token, self._token = self._token, None
        if not self._call("release", token):
            raise StateLostError(
                f"{self!r} is not held any more: contact to this process was lost for longer than "
                f"its lease of {self._lease:g} s, and another may have held it since; check what "
                "the lock protects, and give it a longer lease"
            )

    @property
    def abandoned(self) -> bool:
        """Whether the holder before this one was lost while it held the lock."""
        return self._abandoned

    @property
    def token(self) -> int | None:
        """The number of this holding, which grows with each; None if the handle holds nothing.

        What the lock protects can refuse the token of an earlier holder.
        """
        return self._token

    @property
    def owner(self) -> str | None:
        """Who holds the lock now, in words; None if it is free."""
        found: str | None = self._call("owner")
        return found

    def locked(self) -> bool:
        """Whether somebody holds the lock now."""
        return self.owner is not None

    def __reduce__(self) -> tuple[Any, ...]:
        return _lock, (self.name, self._timeout, self._lease)

    def __enter__(self) -> Self:
        self.acquire(timeout=self._timeout)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


class SharedBarrier(SharedObject):
    """A barrier that the whole pool shares; made by `sky.barrier(name, parties=None)`.

    Without `parties`, it is for all workers of the pool. If one that waits there gives up or is
    lost, all others get a `threading.BrokenBarrierError`, as those who come later until `reset`.

    >>> sky.barrier("epoch").wait(timeout=60)
    """

    KIND = "barrier"

    def __init__(
        self, name: str, parties: int | None = None, *, n: int | None = None, on: Any = None
    ) -> None:
        """`n` is another name of `parties`."""
        super().__init__(name, on=on)
        if n is not None:
            if parties is not None:
                raise ConfigurationError(
                    f"sky.barrier({name!r}, parties={parties!r}, n={n!r}): these are two names of "
                    "one number; give one of them"
                )
            parties = n
        is_number = isinstance(parties, int) and not isinstance(parties, bool)
        if parties is not None and not (is_number and parties > 0):
            raise ConfigurationError(
                f"sky.barrier({name!r}, parties={parties!r}): give a whole number above 0, or "
                "leave it out for all workers of the pool"
            )
        self._parties = parties

    def _options(self) -> dict[str, Any]:
        return {"parties": self._parties or worker_count(self._on)}

    def wait(self, timeout: float | None = None) -> int:
        """Wait until all have come; returns this one's number, from 0 to parties - 1."""
        found = self._wait("wait", timeout=timeout)
        if isinstance(found, int):
            return found
        if found is None:
            parties, *_ = self._call("facts")
            raise BarrierTimeoutError(
                f"{self!r}: not all {parties} came in {timeout:g} s; the barrier is broken now: "
                "`reset` it before it is used again"
            )
        raise threading.BrokenBarrierError(f"{self!r} is broken: {found}; `reset` it to use it")

    def abort(self) -> None:
        """Break the barrier: those who wait, and those who come, get a `BrokenBarrierError`."""
        self._call("abort")

    def reset(self) -> None:
        """Make the barrier usable again; those who wait get a `BrokenBarrierError`."""
        self._call("reset")

    @property
    def parties(self) -> int:
        """How many must come."""
        return int(self._call("facts")[0])

    @property
    def n_waiting(self) -> int:
        """How many wait now."""
        return int(self._call("facts")[1])

    @property
    def broken(self) -> bool:
        """Whether the barrier is broken."""
        return bool(self._call("facts")[2])

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.name, self._parties)


class SharedEvent(SharedObject):
    """An event that the whole pool shares; made by `sky.event(name)`.

    >>> sky.event("weights ready").wait(timeout=60)
    """

    KIND = "event"

    def set(self) -> None:
        """Say that it has happened: all who wait go on."""
        self._call("set")

    def clear(self) -> None:
        """Say that it has not happened yet."""
        self._call("clear")

    def is_set(self) -> bool:
        """Whether it has happened."""
        return bool(self._call("get"))

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it has happened; `TimeoutError` if that is not in time."""
        if self._wait("wait", timeout=timeout) is None:
            raise TimeoutError(f"{self!r} was not set for {timeout:g} s")
        return True


def _release(granted: Any) -> tuple[str, tuple[Any, ...]] | None:
    return ("release", (granted[0],)) if granted else None


def _lock(name: str, timeout: float | None, lease: float) -> SharedLock:
    return SharedLock(name, timeout=timeout, lease=lease)


# Keys and values as bytes; the owner never decodes them.


def encode_key(key: Any, what: str) -> bytes:
    """A key as bytes; two keys are the same if their bytes are.

    So 1, 1.0 and True are three keys, unlike in a dict of Python's.
    """
    if not _is_key(key):
        raise ConfigurationError(
            f"{what}: {_short(key)} cannot be a key; use a str, bytes, int, float, bool or None, "
            "or a tuple of them"
        )
    try:
        encoded = _packer.encode(key)
    except (OverflowError, UnicodeEncodeError) as problem:
        raise ConfigurationError(
            f"{what}: {_short(key)} cannot be a key ({problem}); use its str"
        ) from None
    if len(encoded) > KEY_MAX:
        raise ConfigurationError(
            f"{what}: a key of {len(encoded)} bytes; at most {KEY_MAX} are possible: use a hash"
        )
    return encoded


def decode_key(encoded: bytes) -> Any:
    """The key."""
    return _frozen(_key_reader.decode(encoded))


def encode(value: Any, what: str) -> bytes:
    """A value as bytes; `what` names it in errors."""
    if type(value) in _PLAIN:
        encoded = pickle.dumps(value, 5)
    else:
        encoded = _encode_any(value, what)
    if len(encoded) > VALUE_MAX:
        raise ConfigurationError(
            f"{what} has {len(encoded) / 1e6:.1f} MB, but shared state is for small values, at "
            f"most {VALUE_MAX / 1e6:.1f} MB; pass large data to functions with sky.put, or keep it "
            "in a sky.ModelStore or a file, and share its name"
        )
    return encoded


def decode(encoded: bytes) -> Any:
    """The value."""
    if encoded[:1] != _WITH_BUFFERS:
        return pickle.loads(encoded)
    data, buffers, storages = _reader.decode(memoryview(encoded)[1:])
    # A user may change the arrays, and each of them has the value for itself.
    views = [memoryview(bytearray(buffer)) for buffer in buffers]
    return encoding.decode(data, views, storages)


def _encode_any(value: Any, what: str) -> bytes:
    encoded = encoding.encode(value, own_modules=True, what=what)
    if encoded.handles:
        raise ConfigurationError(
            f"{what} refers to {encoded.handles[0]!r}, which only calls can carry; pass it to the "
            "functions as an argument"
        )
    whole = b"".join(encoded.pieces)
    if not encoded.buffers:
        return whole
    buffers = [bytes(buffer) for buffer in encoded.buffers]
    return _WITH_BUFFERS + _packer.encode((whole, buffers, encoded.storages))


def _is_key(key: Any) -> bool:
    if type(key) is tuple:
        return all(map(_is_key, key))
    return type(key) in _PLAIN


def _frozen(key: Any) -> Any:
    return tuple(map(_frozen, key)) if type(key) is list else key


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
