"""Classes: an object of a `@cls` class lives in a worker, and its methods run there."""

from __future__ import annotations

import functools
import inspect
import logging
import threading
import uuid
import weakref
from collections.abc import Callable
from typing import Any, Generic, Literal, ParamSpec, Protocol, TypeVar, cast, get_args, overload

from skyward import handles, instances
from skyward.closing import Closing
from skyward.errors import ConfigurationError, InstanceLostError, SerializationError
from skyward.functions import Function, Future, Pending, UnusedCall, Where, call_target
from skyward.groups import InstanceGroup

P = ParamSpec("P")
C = TypeVar("C")
Resources = Literal["worker", "own"]
"""Whose place the calls of an object take."""

_log = logging.getLogger("skyward")


class InstanceSeat(Protocol):
    """The worker process that an object lives in."""

    @property
    def lost(self) -> bool:
        """Whether the process is gone."""

    @property
    def where(self) -> str:
        """The process's node and worker, in words."""

    def run(self, pending: Pending[Any]) -> Any:
        """Run a call there, and wait."""

    def submit(self, pending: Pending[Any]) -> Future[Any]:
        """Run a call there, and don't wait."""

    def run_together(self, pendings: list[Pending[Any]]) -> list[Any]:
        """Run calls of objects of this pool at once; `BroadcastError` if any of them fails."""

    def free(self, pending: Pending[Any]) -> None:
        """Run a call there some time, for whom nobody waits; a finalizer may ask for it."""

    def offer(self, instance: Instance) -> handles.ObjectPlace:
        """Have tasks call the object; it lives until `take_back`, or until the client leaves."""

    def take_back(self, key: str) -> None:
        """Forget an object that was offered."""

    @property
    def default_timeout(self) -> float | None:
        """How long a call may take whose class and method don't say, in seconds."""


class MakingTarget(Protocol):
    """Where objects can be made: a `Compute`."""

    def run(self, pending: Making[C], on: None = None) -> C: ...
    def submit(self, pending: Making[C], on: None = None) -> Future[C]: ...
    def broadcast(self, pending: Making[C], on: None = None) -> InstanceGroup[C]: ...


def _target(where: Where) -> MakingTarget:
    return cast(MakingTarget, call_target(where))


class RemoteClass(Generic[P, C]):
    """A class whose objects live on nodes; made by `cls`."""

    def __init__(
        self,
        kind: Callable[P, C],
        *,
        restart: bool = False,
        timeout: float | None = None,
        resources: Resources = "worker",
    ) -> None:
        if not inspect.isclass(kind):
            raise ConfigurationError(
                f"@sky.cls on {kind!r}: it is not a class; use @sky.function for functions"
            )
        if not isinstance(restart, bool):
            raise ConfigurationError(f"cls(restart={restart!r}): give True or False")
        if resources not in get_args(Resources):
            raise ConfigurationError(
                f"cls(resources={resources!r}): give 'worker', if the object's calls take the "
                "place of a worker, or 'own', if it has a place of its own beside the workers'"
            )
        # Refuses what is no timeout.
        Function(kind, timeout=timeout)
        self.kind: type = kind
        self.restart, self.timeout, self.resources = restart, timeout, resources
        functools.update_wrapper(self, kind, updated=())

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Making[C]:
        return Making(self, args, kwargs)

    def local(self, *args: P.args, **kwargs: P.kwargs) -> C:
        """Make a plain object, here.

        >>> model = Model.local("gpt2")
        """
        made: C = self.kind(*args, **kwargs)
        return made

    @functools.cached_property
    def timeouts(self) -> dict[str, float]:
        """The timeouts of the methods that have their own."""
        members = inspect.getmembers_static(self.kind, lambda each: isinstance(each, Function))
        return {name: each.timeout for name, each in members if each.timeout is not None}

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type]:
        """A class that has this one as its base has the plain class as its base."""
        return (self.kind,)

    def __repr__(self) -> str:
        return f"<sky.cls {self.kind.__qualname__}>"


class Making(Generic[C]):
    """An object that has been described; an operator makes it, on a node."""

    def __init__(
        self, kind: RemoteClass[..., C], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.kind, self.args, self.kwargs = kind, args, kwargs

    @property
    def name(self) -> str:
        """The name of the class."""
        return str(self.kind.kind.__qualname__)

    def __rshift__(self, where: Where) -> C:
        """Make one object, on one node, and wait until it is there."""
        return _target(where).run(self)

    def __gt__(self, where: Where) -> Future[C]:
        """Make one object, on one node, and don't wait."""
        return _target(where).submit(self)

    def __matmul__(self, where: Where) -> InstanceGroup[C]:
        """Make one object in every worker, and wait until all are there."""
        return _target(where).broadcast(self)

    def call(self, key: str) -> Pending[None]:
        """The call that makes the object, in the worker that runs it."""
        make = instances.make_apart if self.kind.resources == "own" else instances.make
        function: Function[..., None] = Function(make, name=self.name)
        function.apart = self.apart(key)
        return Pending(function, (key, self.kind.kind, *self.args), self.kwargs)

    def apart(self, key: str) -> str:
        """The key, if the object has a place of its own; otherwise nothing."""
        return key if self.kind.resources == "own" else ""

    def freeing(self, key: str) -> Pending[None]:
        """The call that frees the object, in the worker that has it."""
        function: Function[..., None] = Function(instances.free, name=f"{self.name}: freed")
        function.apart = self.apart(key)
        return Pending(function, (key,), {})

    def new_key(self) -> str:
        """A key for one more object."""
        return f"{self.name} {uuid.uuid4().hex}"

    def __bool__(self) -> bool:
        raise TypeError(
            f"{self!r} has not been made, so it is neither true nor false; make it with "
            f"`{self.name}(...) >> compute`"
        )

    def __getattr__(self, name: str) -> Any:
        if "kind" not in vars(self):
            # `copy` and `pickle` ask before the copy has anything.
            raise AttributeError(name)
        raise AttributeError(
            f"{self.name}(...) only describes an object, so it has no {name!r} yet; make it first: "
            f"`model = {self.name}(...) >> compute`, or {self.name}.local(...) here"
        )

    def __repr__(self) -> str:
        return f"<{self.name} that is not made yet>"


class Residence:
    """Where one object lives; whatever can call the object holds this, and frees it last."""

    def __init__(
        self,
        making: Making[Any],
        key: str,
        seat: InstanceSeat,
        make_again: Callable[[str], InstanceSeat],
    ) -> None:
        """`make_again` makes the object anew, under the key that it gets."""
        self.making, self.key = making, key
        self._seat, self._make_again = seat, make_again
        self._lock = threading.Lock()
        self._closed = False
        self._finalizer = self._watched()

    def _watched(self) -> Any:
        finalizer = weakref.finalize(self, self._seat.free, self.making.freeing(self.key))
        # When the process ends, its pools end, and their objects with them.
        finalizer.atexit = False
        return finalizer

    def seat(self) -> InstanceSeat:
        """The worker that has the object; makes a lost one anew if its class says so."""
        with self._lock:
            if self._closed:
                raise InstanceLostError(f"this {self.making.name} was closed; make another one")
            if self.making.kind.restart and self._seat.lost:
                lost = self._seat.where
                self._finalizer.detach()
                self._seat = self._make_again(self.key)
                self._finalizer = self._watched()
                _log.warning(
                    "%s was lost on %s; it was made again, with the same arguments, on %s",
                    self.making.name,
                    lost,
                    self._seat.where,
                )
            return self._seat

    def close(self) -> None:
        """Free the object."""
        if self.note_closed() and not self._seat.lost:
            closing = SeatFunction(
                instances.close,
                f"{self.making.name}.close",
                lambda: self._seat,
                apart=self.making.apart(self.key),
            )
            self._seat.run(Pending(closing, (self.key,), {}))

    def note_closed(self) -> bool:
        """Note that the object is closed, or is being closed; False if that was so before.

        Without the lock, which a thread may hold that makes the object again: a task may have
        closed it, and then this is said on the thread which that one waits for.
        """
        before, self._closed = self._closed, True
        self._finalizer.detach()
        self._seat.take_back(self.key)
        return not before

    def sent(self, handle: Instance) -> tuple[Any, ...]:
        """The handle as it travels; from now on, only `close` and the client's end free it."""
        if self._closed:
            raise SerializationError(
                f"this {self.making.name} cannot be sent, since it was closed; make another one"
            )
        kind, place = self.making.kind, self._seat.offer(handle)
        timeout = self._seat.default_timeout if kind.timeout is None else kind.timeout
        return handles.arrived, (self.key, self.making.name, place, {"": timeout, **kind.timeouts})

    def __repr__(self) -> str:
        return f"{self.making.name} on {self._seat.where}"


class SeatFunction(Function[..., Any]):
    """A function whose calls run in one worker process."""

    def __init__(
        self,
        body: Callable[..., Any],
        name: str,
        seat: Callable[[], InstanceSeat],
        *,
        apart: str = "",
        timeout: float | None = None,
        kept_on: Any = None,
    ) -> None:
        super().__init__(body, name=name, timeout=timeout, kept_on=kept_on)
        self.apart = apart
        self._find_seat = seat

    @property
    def seat(self) -> InstanceSeat:
        return self._find_seat()


class InstanceFunction(SeatFunction):
    """A method of one object: calling it describes a call, as for any function."""

    def __init__(
        self, residence: Residence, method: str, plain: Callable[..., Any], kept_on: Any = None
    ) -> None:
        timeout = getattr(plain, "timeout", None) if isinstance(plain, Function) else None
        super().__init__(
            instances.call,
            f"{residence.making.name}.{method}",
            residence.seat,
            apart=residence.making.apart(residence.key),
            timeout=residence.making.kind.timeout if timeout is None else timeout,
            kept_on=kept_on,
        )
        self._residence, self._method, self._plain = residence, method, plain
        self.__doc__ = plain.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Pending[Any]:
        return UnusedCall(self, (self._residence.key, self._method, *args), kwargs)

    def local(self, *args: Any, **kwargs: Any) -> Any:
        """A method of an object on a node cannot run here."""
        raise ConfigurationError(
            f"{self.name} belongs to {self._residence!r}; make an object here with "
            f"{self._residence.making.name}.local(...)"
        )

    def _changed(self, body: Callable[..., Any], kept_on: Any) -> InstanceFunction:
        return InstanceFunction(self._residence, self._method, self._plain, kept_on)

    @functools.cached_property
    def parameter_names(self) -> tuple[str, ...]:
        """As of the method, after those of `instances.call`."""
        names = Function(self._plain).parameter_names
        is_static = isinstance(
            inspect.getattr_static(self._residence.making.kind.kind, self._method), staticmethod
        )
        bound = inspect.ismethod(self._plain) or is_static
        return ("key", "method", *(names if bound else names[1:]))

    @functools.cached_property
    def streamed_parameters(self) -> frozenset[str]:
        """As of the method."""
        return Function(self._plain).streamed_parameters

    def by_value(self) -> tuple[Any, ...]:
        """It cannot travel."""
        raise SerializationError(_stays_here(str(self.name)))

    def __reduce__(self) -> tuple[Any, ...]:
        return self.by_value()


class RemoteMethod:
    """A method of an object on a node: a call runs there, and waits for the result."""

    __sky_method__ = True

    def __init__(self, function: InstanceFunction) -> None:
        self.function = function
        """The same method as a function, whose calls are lazy."""
        self.__doc__ = function.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function.seat.run(self.function(*args, **kwargs))

    def submit(self, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call without waiting.

        >>> future = model.predict.submit(x)
        """
        return self.function.seat.submit(self.function(*args, **kwargs))

    def pending(self, *args: Any, **kwargs: Any) -> Pending[Any]:
        """Describe a call, for `>>`, `&` and `sky.gather`.

        >>> sky.gather(*[model.predict.pending(x) for x in xs]) >> compute
        """
        return self.function(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return handles.method_of, (Instance(self.function._residence), self.function._method)

    def __repr__(self) -> str:
        return f"<method {self.function.name} of an object on {self.function.seat.where}>"


class Instance(Closing):
    """An object on a node, with the methods of its class; a `with` block closes it."""

    __sky_instance__ = True
    _residence: Residence
    _functions: dict[str, InstanceFunction]

    def __init__(self, residence: Residence) -> None:
        object.__setattr__(self, "_residence", residence)
        object.__setattr__(self, "_functions", {})

    def _function(self, name: str) -> InstanceFunction:
        function = self._functions.get(name)
        if function is None:
            plain = instances.method_of(self._residence.making.kind.kind, name)
            function = self._functions[name] = InstanceFunction(self._residence, name, plain)
        return function

    def _method(self, name: str) -> RemoteMethod:
        return RemoteMethod(self._function(name))

    def __getattr__(self, name: str) -> RemoteMethod:
        method = self._method(name)
        # Kept: the next look does not come here.
        object.__setattr__(self, name, method)
        return method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._method("__call__")(*args, **kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(
            f"{name!r} of {self._residence!r} cannot be set from here; write a method that sets it"
        )

    def close(self) -> None:
        """Call the object's own `close`, if it has one, and free the object."""
        self._residence.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return self._residence.sent(self)

    def __repr__(self) -> str:
        return f"<{self._residence!r}>"


def _stays_here(what: str) -> str:
    return (
        f"{what} cannot be sent to a task: only the client describes calls of it; send the object "
        "or its method, and call that there"
    )


@overload
def cls(kind: Callable[P, C], /) -> RemoteClass[P, C]: ...
@overload
def cls(
    *, restart: bool = False, timeout: float | None = None, resources: Resources = "worker"
) -> Callable[[Callable[P, C]], RemoteClass[P, C]]: ...
def cls(
    kind: Callable[..., Any] | None = None,
    /,
    *,
    restart: bool = False,
    timeout: float | None = None,
    resources: Resources = "worker",
) -> Any:
    """Have the objects of a class live on nodes: made once, and used by any number of calls.

    With `restart`, an object that is lost with its worker is made again, with the same arguments,
    at the next call. `timeout` is that of each call of a method, in seconds.
    With `resources="own"`, an object has a place of its own, a thread beside the tasks of a worker:
    it is made and answers while all workers are busy.

    >>> @sky.cls
    ... class Model:
    ...     def __init__(self, path: str) -> None: ...
    ...     def predict(self, text: str) -> float: ...
    >>> model = Model("gpt2") >> compute
    >>> model.predict("hello")
    """
    if kind is None:
        return lambda actual: RemoteClass(
            actual, restart=restart, timeout=timeout, resources=resources
        )
    return RemoteClass(kind)
