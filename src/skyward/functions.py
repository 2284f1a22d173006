"""Functions: calling one describes a call, an operator sends it to a `Compute`, with a future.

`log` sends numbers there, also from inside a call.
"""

from __future__ import annotations

import collections.abc
import concurrent.futures
import contextlib
import functools
import inspect
import operator
import os
import queue
import sys
import threading
import types
import typing
import uuid
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping
from contextvars import ContextVar
from opcode import opname
from types import FrameType
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    Literal,
    NoReturn,
    ParamSpec,
    Protocol,
    Self,
    TypeVar,
    TypeVarTuple,
    cast,
    overload,
)

import cloudpickle

from skyward import context
from skyward.console import html
from skyward.context import kernel_shell
from skyward.errors import ConfigurationError, PoolClosedError
from skyward.objects import encoding
from skyward.objects.encoding import Code, Encoded
from skyward.objects.handles import opened

if TYPE_CHECKING:
    import asyncio

    import torch


P = ParamSpec("P")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
Ts = TypeVarTuple("Ts")

WAKE_SECONDS = 0.2
"""How often a waiting notebook looks whether the user has interrupted it."""
NAME_MOST = 200
"""How many characters a name has at most."""
NAMES_MOST = 1000
"""How many numbers one call may log."""
STEP_MOST = 2**53
"""Steps up to this are exact in a browser, too."""


class CallTarget(Protocol):
    """Where calls can be sent: a `Compute`."""

    def run(self, pending: Pending[T], on: int | Literal["head"] | None = None) -> T: ...
    def submit(self, pending: Pending[T], on: int | Literal["head"] | None = None) -> Future[T]: ...
    def broadcast(self, pending: Pending[T], on: None = None) -> list[T]: ...
    def run_all(self, pendings: tuple[Pending[Any], ...]) -> list[Any]: ...
    def stream_all(self, pendings: tuple[Pending[Any], ...], *, ordered: bool) -> Iterator[Any]: ...


Where = CallTarget | types.ModuleType

current: ContextVar[CallTarget | None] = ContextVar("skyward_compute", default=None)
active: list[CallTarget] = []
"""Every entered Compute of this process, for threads that inherited no context."""
_attaching = threading.Lock()


def call_target(where: Where) -> CallTarget:
    """The `Compute` that the right side of an operator stands for."""
    if not isinstance(where, types.ModuleType):
        if not hasattr(where, "run") or not hasattr(where, "broadcast"):
            raise TypeError(
                f"{where!r} cannot run functions; use a sky.Compute, or the skyward module inside "
                "a `with sky.Compute()` block"
            )
        return where
    if where.__name__ != "skyward":
        raise TypeError(f"the module {where.__name__!r} cannot run functions; did you mean sky?")
    found = current.get()
    if found is None and context.own_pool is not None:
        # In a task. A Compute that another task of this process has entered is not this one's.
        found = context.own_pool()
    if found is None:
        found = active_compute()
    if found is None:
        raise PoolClosedError(
            "no Compute is active here: `>> sky` works inside a `with sky.Compute()` block, and in "
            "scripts that `sky run` runs"
        )
    return found


def active_compute() -> CallTarget | None:
    """The Compute whose block this code is in, or that was entered last.

    In a script on a kept pool, outside of all blocks, it is that pool.
    """
    found = current.get() or (active[-1] if active else None)
    if found is None and context.POOL_VARIABLE in os.environ and context.VARIABLE not in os.environ:
        found = _pool_of_script()
    return found


def _pool_of_script() -> CallTarget:
    """Attach to the pool that this script runs on, when it is used for the first time."""
    with _attaching:
        # The script's own `sky`: what attaches is built on this module.
        found: CallTarget = active[-1] if active else sys.modules["skyward"].attach()
    return found


class Function(Generic[P, T]):
    """A function whose calls are lazy: calling it describes a call, and an operator runs it."""

    __sky_function__ = True
    apart: str = ""
    """The object with a place of its own that the calls belong to; empty if there is none."""

    def __init__(
        self,
        body: Callable[P, T],
        *,
        timeout: float | None = None,
        retries: int = 0,
        name: str | None = None,
        fail_fast: bool = False,
        kept_on: Any = None,
    ) -> None:
        """`kept_on` is the device that keeps the tensors of results, as `remote` takes it."""
        if not callable(body):
            raise ConfigurationError(
                f"@sky.function on {body!r}: it is not callable; decorate a function"
            )
        if timeout is not None and not _is_time(timeout):
            raise ConfigurationError(
                f"function(timeout={timeout!r}): give seconds above 0, or None"
            )
        if not isinstance(retries, int) or retries < 0:
            raise ConfigurationError(
                f"function(retries={retries!r}): give a whole number, 0 or more"
            )
        if name is not None and not isinstance(name, str):
            raise ConfigurationError(f"function(name={name!r}): give a name, as a string")
        if not isinstance(fail_fast, bool):
            raise ConfigurationError(f"function(fail_fast={fail_fast!r}): give True or False")
        self.body = body
        self.timeout = timeout
        self.retries = retries
        self.fail_fast = fail_fast
        self.kept_on = kept_on
        self.name = name or getattr(body, "__qualname__", type(body).__name__)
        functools.update_wrapper(self, body, updated=())
        self._code: Code | None = None
        self._lock = threading.Lock()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Pending[T]:
        return UnusedCall(self, args, kwargs)

    def local(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run here, now.

        >>> train.local(x)
        """
        token = context.inside.set(True)
        try:
            return self.body(*opened(args), **opened(kwargs))
        finally:
            context.inside.reset(token)

    def with_body(self, body: Callable[P, T]) -> Function[P, T]:
        """The same function with another body, for decorators."""
        return self._changed(body, self.kept_on)

    def keeping(self, device: Any) -> Function[P, T]:
        """The same function with results whose tensors are kept on a device."""
        return self._changed(self.body, device)

    def _changed(self, body: Callable[P, T], kept_on: Any) -> Function[P, T]:
        return Function(body, **{**self._settings, "kept_on": kept_on})

    def with_timeout(self, seconds: float) -> Function[P, T]:
        """The same function with another timeout for its calls.

        >>> train.with_timeout(600)(x) >> compute
        """
        if not _is_time(seconds):
            raise ConfigurationError(f"with_timeout({seconds!r}): give seconds above 0")
        changed = self._changed(self.body, self.kept_on)
        changed.timeout = seconds
        with self._lock:
            # The same body: it need not be encoded again.
            changed._code = self._code
        return changed

    @property
    def seat(self) -> Any:
        """The worker process that the calls must run in; None if any can run them."""
        return None

    @property
    def __sky_constant__(self) -> tuple[Any, ...]:
        return (self.body,)

    def __reduce__(self) -> str | tuple[Any, ...]:
        """For plain pickle: by name if the name can be imported, else with the body's code."""
        name = getattr(self, "__qualname__", "")
        found: Any = sys.modules.get(self.__module__) if self.__module__ != "__main__" else None
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is self:
            return str(name)
        body = cloudpickle.dumps(self.body)
        return _unpickled, (body, self._settings)

    def by_value(self) -> tuple[Any, ...]:
        """For Skyward's own pickles, which carry code that a worker cannot import."""
        return _rebuild, (self.body, self._settings)

    @property
    def _settings(self) -> dict[str, Any]:
        names = ("timeout", "retries", "name", "fail_fast", "kept_on")
        return {name: getattr(self, name) for name in names}

    def __repr__(self) -> str:
        return f"<sky.function {self.name}>"

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """As a method: calls include the instance."""
        if instance is None:
            return self
        bound = _Bound(self, instance)
        bound.__doc__ = self.__doc__
        return bound

    def code(self) -> Code:
        """The encoded body; it is encoded again only after an object that it uses has changed."""
        code = self._code
        if code is not None and code.references.fresh():
            return code
        with self._lock:
            if self._code is None or not self._code.references.fresh():
                self._code = Code.of(self.body)
            return self._code

    if not TYPE_CHECKING:
        # Hidden from type checkers, which find the mistake themselves.
        def __rshift__(self, where: object) -> NoReturn:
            raise self._not_called(">>")

        def __gt__(self, where: object) -> NoReturn:
            raise self._not_called(">")

        def __matmul__(self, where: object) -> NoReturn:
            raise self._not_called("@")

    def _not_called(self, operator: str) -> TypeError:
        """The error for a function before an operator, in place of a call of it."""
        name = str(self.name).rpartition(".")[2]
        return TypeError(
            f"{name} {operator} ...: {name} is a function, and only its calls run; write "
            f"{name}(...) {operator} compute, with parentheses also if it takes no arguments"
        )

    @functools.cached_property
    def parameter_names(self) -> tuple[str, ...]:
        """The names of the parameters, for error messages about arguments."""
        try:
            return tuple(inspect.signature(self.body).parameters)
        except (TypeError, ValueError):
            return ()

    @functools.cached_property
    def streamed_parameters(self) -> frozenset[str]:
        """Parameters annotated `Iterator[T]`, whose arguments travel item by item."""
        body = inspect.unwrap(self.body)
        try:
            hints = typing.get_type_hints(body)
        except Exception:
            # Of an annotation that cannot be evaluated, the text still says whether it streams.
            hints = dict(getattr(body, "__annotations__", {}))
        return frozenset(
            name for name, hint in hints.items() if name != "return" and _is_iterator(hint)
        )


class _Bound(functools.partial[Any]):
    """A function as a method of an instance."""

    def local(self, *args: Any, **kwargs: Any) -> Any:
        """Run here, now."""
        return self.func.local(*self.args, *args, **kwargs)  # type: ignore[attr-defined]


def _unpickled(body: bytes, settings: dict[str, Any]) -> Function[..., Any]:
    return _rebuild(cloudpickle.loads(body), settings)


def _rebuild(body: Callable[..., Any], settings: dict[str, Any]) -> Function[..., Any]:
    return Function(body, **settings)


def _is_time(seconds: object) -> bool:
    return isinstance(seconds, (int, float)) and not isinstance(seconds, bool) and seconds > 0


def _is_iterator(hint: Any) -> bool:
    if isinstance(hint, str):
        return hint.rpartition(".")[2].startswith("Iterator[") or "abc.Iterator[" in hint
    origin = typing.get_origin(hint) or hint
    if origin in (typing.Union, types.UnionType):
        kinds = [kind for kind in typing.get_args(hint) if kind is not types.NoneType]
        return all(map(_is_iterator, kinds))
    return origin in (collections.abc.Iterator, collections.abc.Generator)


class Pending(Generic[T]):
    """A described call; nothing runs until an operator sends it somewhere."""

    __slots__ = ("args", "function", "kwargs")

    function: Function[..., T]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __init__(
        self, function: Function[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        object.__setattr__(self, "function", function)
        object.__setattr__(self, "args", args)
        object.__setattr__(self, "kwargs", kwargs)

    def use(self) -> Self:
        """Note that somebody has done something with the call."""
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"a Pending is immutable; call {self.function.name} again instead")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"a Pending is immutable; call {self.function.name} again instead")

    def __reduce__(self) -> tuple[Any, ...]:
        return Pending, (self.use().function, self.args, self.kwargs)

    def with_timeout(self, seconds: float) -> Pending[T]:
        """The same call with another timeout.

        >>> train(x).with_timeout(600) >> compute
        """
        return UnusedCall(self.function.with_timeout(seconds), self.use().args, self.kwargs)

    def whole_arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments; those that travel item by item in other calls are sent at once."""
        streamed = self.function.streamed_parameters
        if not streamed:
            return self.args, self.kwargs
        names = self.function.parameter_names

        def whole(name: str, value: Any) -> Any:
            return iter(list(value)) if name in streamed and value is not None else value

        args = tuple(
            whole(names[index] if index < len(names) else "", value)
            for index, value in enumerate(self.args)
        )
        return args, {name: whole(name, value) for name, value in self.kwargs.items()}

    def __rshift__(self, where: Where) -> T:
        """Run on one node, wait."""
        return call_target(where).run(self)

    def __gt__(self, where: Where) -> Future[T]:
        """Run on one node, don't wait."""
        return call_target(where).submit(self)

    def __matmul__(self, where: Where) -> list[T]:
        """Run on every worker at once."""
        return call_target(where).broadcast(self)

    @overload
    def __and__(self, other: Pending[A]) -> Group[T, A]: ...
    @overload
    def __and__(self, other: Group[*Ts]) -> Group[T, *Ts]: ...
    def __and__(self, other: Any) -> Any:
        if isinstance(other, Group):
            return Group((self, *other.pendings))
        return Group((self, checked(other)))

    def __getattr__(self, name: str) -> NoReturn:
        if name in Pending.__slots__:
            raise AttributeError(name)
        raise AttributeError(
            f"a call of {self.function.name} has not run, so it has no {name!r}; run it first, "
            f"with {self.function.name}(...) >> compute"
        )

    def __getitem__(self, item: object) -> NoReturn:
        raise TypeError(
            f"a call of {self.function.name} has not run, so it has no items; run it first, with "
            f"{self.function.name}(...) >> compute"
        )

    def __bool__(self) -> bool:
        raise TypeError(
            f"a call of {self.function.name} has not run, so it is neither true nor false; note "
            "that `a > b > c` and `x and y` do not work on calls: use `>>`, `&` and parentheses"
        )

    def __repr__(self) -> str:
        shown = [_short(value) for value in self.use().args]
        shown += [f"{name}={_short(value)}" for name, value in self.kwargs.items()]
        return f"<pending {self.function.name}({', '.join(shown)})>"

    def _repr_html_(self) -> str:
        """What a notebook shows: the call, and how to run it, which is easily forgotten."""
        call = repr(self).removeprefix("<pending ").removesuffix(">")
        hint = html.muted("has not run; run it with >> compute")
        return html.block(html.line(html.mark("idle", "pending"), html.code(call), hint))


class UnusedCall(Pending[T]):
    """A described call that nobody has done anything with; one that is a statement warns.

    It becomes a plain `Pending` with its use: no code of ours runs when that one is dropped, which
    would cost every call, and swallow a Ctrl-C that comes then.
    """

    __slots__ = ()

    def use(self) -> Self:
        object.__setattr__(self, "__class__", Pending)
        return self

    def __del__(self) -> None:
        # Only of statements: a call in a variable may not have run because of an exception.
        if _is_statement(sys._getframe().f_back):
            name = self.function.name
            warnings.warn(
                f"{name}(...) never ran: calling a @sky.function only describes a call; run it "
                f"with {name}(...) >> compute, or here with {name}.local(...)",
                RuntimeWarning,
                stacklevel=2,
            )


def _is_statement(frame: FrameType | None) -> bool:
    """Whether a frame is about to drop the value of an expression that is a whole statement."""
    if frame is None or frame.f_lasti < 0:
        return False
    code, at = frame.f_code.co_code, frame.f_lasti
    if opname[code[at]] != "POP_TOP":
        return False
    # Before it comes what has made the value; a loop that is left drops its iterator, too.
    at -= 2
    while at > 0 and opname[code[at]] == "CACHE":
        at -= 2
    return opname[code[at]] in ("CALL", "CALL_FUNCTION_EX", "CALL_KW", "BINARY_OP")


class Group(Generic[*Ts]):
    """Different calls to run in parallel: `(a() & b()) >> compute`."""

    __slots__ = ("pendings",)

    def __init__(self, pendings: tuple[Pending[Any], ...]) -> None:
        self.pendings = pendings

    @overload
    def __and__(self, other: Pending[A]) -> Group[*Ts, A]: ...
    @overload
    def __and__(self, other: Group[A]) -> Group[*Ts, A]: ...
    @overload
    def __and__(self, other: Group[A, B]) -> Group[*Ts, A, B]: ...
    @overload
    def __and__(self, other: Group[A, B, C]) -> Group[*Ts, A, B, C]: ...
    def __and__(self, other: Any) -> Any:
        if isinstance(other, Group):
            return Group((*self.pendings, *other.pendings))
        return Group((*self.pendings, checked(other)))

    def with_timeout(self, seconds: float) -> Group[*Ts]:
        """The same calls, each with that timeout."""
        return Group(tuple(pending.with_timeout(seconds) for pending in self.pendings))

    def __len__(self) -> int:
        return len(self.pendings)

    def __iter__(self) -> Iterator[Pending[Any]]:
        return iter(self.pendings)

    def __rshift__(self, where: Where) -> tuple[*Ts]:
        """Run all of them, wait for all."""
        return cast("tuple[*Ts]", tuple(call_target(where).run_all(self.pendings)))

    def __gt__(self, where: Where) -> tuple[Future[Any], ...]:
        """Run all of them, don't wait."""
        target = call_target(where)
        return tuple(target.submit(pending) for pending in self.pendings)

    def __repr__(self) -> str:
        return f"<group of {len(self.pendings)} calls>"


class Gather(Generic[T_co]):
    """Any number of calls; made by `gather`."""

    __slots__ = ("_ordered", "_pendings", "_stream")

    def __init__(self, pendings: tuple[Pending[Any], ...], stream: bool, ordered: bool) -> None:
        self._pendings, self._stream, self._ordered = pendings, stream, ordered

    def with_timeout(self, seconds: float) -> Gather[T_co]:
        """The same calls, each with that timeout.

        >>> sky.gather(f(1), f(2)).with_timeout(60) >> compute
        """
        changed = tuple(pending.with_timeout(seconds) for pending in self._pendings)
        return Gather(changed, self._stream, self._ordered)

    def __and__(self, other: Pending[Any] | Group[Any] | Gather[Any]) -> Gather[T_co]:
        """Add more calls."""
        more = other if isinstance(other, (Group, Gather)) else (checked(other),)
        return Gather((*self._pendings, *more), self._stream, self._ordered)

    def __len__(self) -> int:
        return len(self._pendings)

    def __iter__(self) -> Iterator[Pending[Any]]:
        return iter(self._pendings)

    def __repr__(self) -> str:
        return f"<gather of {len(self._pendings)} calls>"

    def __rshift__(self, where: Where) -> T_co:
        """Run all of them."""
        target = call_target(where)
        result: Any
        if self._stream:
            result = target.stream_all(self._pendings, ordered=self._ordered)
        elif self._ordered:
            result = target.run_all(self._pendings)
        else:
            result = list(target.stream_all(self._pendings, ordered=False))
        return cast(T_co, result)


@overload
def gather(
    *pendings: Pending[T], stream: Literal[False] = False, ordered: bool = True
) -> Gather[list[T]]: ...
@overload
def gather(
    *pendings: Pending[T], stream: Literal[True], ordered: bool = True
) -> Gather[Iterator[T]]: ...
def gather(*pendings: Pending[Any], stream: bool = False, ordered: bool = True) -> Gather[Any]:
    """Any number of calls at once: a list, or with `stream` an iterator of results.

    >>> sky.gather(*[score(x) for x in xs]) >> compute
    """
    return Gather(tuple(checked(pending) for pending in pendings), stream, ordered)


def checked(pending: Any) -> Pending[Any]:
    """The argument, which must be a described call."""
    if not isinstance(pending, Pending):
        raise TypeError(
            f"{_short(pending)} is not a call of a @sky.function; write f(x), not f or f.local(x)"
        )
    return pending


@overload
def function(
    body: Callable[P, T],
    /,
    *,
    timeout: float | None = None,
    retries: int = 0,
    name: str | None = None,
    fail_fast: bool = False,
) -> Function[P, T]: ...
@overload
def function(
    *,
    timeout: float | None = None,
    retries: int = 0,
    name: str | None = None,
    fail_fast: bool = False,
) -> Callable[[Callable[P, T]], Function[P, T]]: ...
def function(
    body: Callable[..., Any] | None = None,
    /,
    *,
    timeout: float | None = None,
    retries: int = 0,
    name: str | None = None,
    fail_fast: bool = False,
) -> Any:
    """Make calls of a function lazy, so that they can be sent to a `Compute`.

    With `fail_fast`, a broadcast ends as soon as one worker has failed.

    >>> @sky.function
    ... def add(a: int, b: int) -> int:
    ...     return a + b
    >>> add(1, 2) >> compute
    3
    """
    if body is None:
        return lambda actual: Function(
            actual, timeout=timeout, retries=retries, name=name, fail_fast=fail_fast
        )
    if timeout is None and not retries and name is None and not fail_fast:
        return as_function(body)
    if isinstance(body, Function) or getattr(type(body), "__sky_method__", False):
        raise ConfigurationError(
            f"function({_short(body)}, ...): it is a function of Skyward's already, with its own "
            "timeout, retries and name; give them where it is made, or use with_timeout"
        )
    return Function(body, timeout=timeout, retries=retries, name=name, fail_fast=fail_fast)


def as_function(body: Callable[..., Any]) -> Function[..., Any]:
    """A callable as a function: a method of an object on a node runs where the object is."""
    if isinstance(body, Function):
        return body
    if getattr(type(body), "__sky_method__", False):
        found: Function[..., Any] = body.function  # type: ignore[attr-defined]
        return found
    return Function(body)


@overload
def remote(body: Function[P, T], /, *, device: str | torch.device = "auto") -> Function[P, T]: ...
@overload
def remote(body: Callable[P, T], /, *, device: str | torch.device = "auto") -> Function[P, T]: ...
def remote(body: Callable[..., Any], /, *, device: Any = "auto") -> Function[..., Any]:
    """The function with kept results: their tensors are sky tensors, and never come here.

    `device` is a device of the node that runs the call, as `compute.device` takes it: "cuda",
    "cuda:1", "cpu", or "auto" for the best of it. If it is a sky device, calls run on its node.

    >>> model = sky.remote(load)("gpt2") >> compute
    """
    is_sky = getattr(device, "type", None) == "sky"
    if not is_sky and (not isinstance(device, str) or not device or device.startswith("sky")):
        raise ConfigurationError(
            f"remote({_short(body)}, device={device!r}): give 'cuda', 'cpu', 'mps' or 'auto', or a "
            "device of compute.device()"
        )
    return as_function(body).keeping(device)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


LOOK_SECONDS = 0.25
"""A Ctrl-C that comes when a wait is about to begin does not end it: Python looks for one before.
So waits begin anew after so long."""


def taken(items: queue.SimpleQueue[T]) -> T:
    """The next item of a queue; waits for it, until a Ctrl-C."""
    while True:
        with contextlib.suppress(queue.Empty):
            return items.get(timeout=LOOK_SECONDS)


class Future(concurrent.futures.Future[T]):
    """A `concurrent.futures.Future` that can be awaited too; cancelling it cancels the remote work.

    As an argument of another call, it stands for its result: the call begins when that is there.

    >>> future = train(x) > compute
    >>> future.result()
    >>> evaluate(future.as_argument()) > compute
    """

    __sky_handle__ = True
    fresh = True
    """Each call that has it as an argument gets an object of its own."""

    def __init__(self) -> None:
        super().__init__()
        self._stop: Callable[[], None] | None = None
        self._is_running: Callable[[], bool] | None = None

    def _bind(self, stop: Callable[[], None], is_running: Callable[[], bool]) -> None:
        self._stop, self._is_running = stop, is_running

    def result(self, timeout: float | None = None) -> T:
        """What the call returned, or its exception; waits for it, at most so many seconds."""
        while timeout is None and not self.done():
            with contextlib.suppress(TimeoutError):
                self.exception(LOOK_SECONDS)
        return super().result(timeout)

    def as_argument(self) -> T:
        """This future, which type checkers take for its result: for arguments of other calls."""
        return cast(T, self)

    @property
    def key(self) -> bytes:
        """What stands for the result in the arguments of a call."""
        key: bytes = self.__dict__.get("_key") or self.__dict__.setdefault(
            "_key", uuid.uuid4().bytes
        )
        return key

    @property
    def encoded(self) -> Encoded:
        """The result as it is sent; only when the future is done."""
        return encoding.encode(self.result(), own_modules=True, what="the result of a call")

    def __sky_open__(self) -> T:
        """The result: for a call that runs here."""
        return self.result()

    def __await__(self) -> Generator[Any, None, T]:
        # Only here: every executor would spend 15 ms of its start on it.
        import asyncio

        waiting = asyncio.wrap_future(self)
        if kernel_shell() is None:
            return waiting.__await__()
        return _awake(waiting).__await__()

    def _repr_html_(self) -> str:
        """What a notebook shows: whether the call waits, runs, is done or has failed."""
        more = ""
        if self.cancelled():
            kind, state = "idle", "cancelled"
        elif not self.done():
            kind, state = "busy", "running" if self.running() else "waiting"
        elif (problem := self.exception()) is not None:
            kind, state, more = "bad", "failed", f"{type(problem).__name__}: {problem}"
        else:
            kind, state, more = "good", "done", type(self.result()).__name__
        words = more if len(more) <= 200 else more[:197] + "..."
        return html.block(
            html.line(html.strong("future"), html.mark(kind, state), html.code(words))
        )

    def running(self) -> bool:
        """Whether a worker has the call and it is not done."""
        return not self.done() and self._is_running is not None and self._is_running()

    def cancel(self) -> bool:
        """Cancel the call, also when it runs already."""
        cancelled = super().cancel()
        stop, self._stop = self._stop, None
        if cancelled and stop is not None:
            # Threads in `wait` and `as_completed` learn of the cancellation only by this call.
            self.set_running_or_notify_cancel()
            stop()
        return cancelled


class ArrivalSignal:
    """Lets coroutines wait for what another thread brings."""

    def __init__(self) -> None:
        self._awaited: list[Future[None]] = []

    def tell(self, *_: object) -> None:
        """Have the waiting coroutines look again; on any thread."""
        if self._awaited:
            awaited, self._awaited = self._awaited, []
            for each in awaited:
                with contextlib.suppress(concurrent.futures.InvalidStateError):  # cancelled
                    each.set_result(None)

    async def until(self, is_there: Callable[[], bool]) -> None:
        """Let other coroutines run until something is there, which `tell` follows."""
        while not is_there():
            told: Future[None] = Future()
            self._awaited.append(told)
            if not is_there():
                await told


async def apart(action: Callable[[], None]) -> None:
    """Let other coroutines run while another thread does something that waits."""
    import asyncio

    await asyncio.to_thread(action)


async def _awake(waiting: asyncio.Future[T]) -> T:
    """Wait, and wake the event loop again and again.

    ipykernel notes an interrupt on another thread, and its event loop learns of that when it wakes.
    """
    import asyncio

    try:
        while not waiting.done():
            await asyncio.wait([waiting], timeout=WAKE_SECONDS)
        return waiting.result()
    except asyncio.CancelledError:
        waiting.cancel()
        raise


class NumberTaker(Protocol):
    """Takes the numbers that a worker's tasks log."""

    def take(self, values: dict[str, float], step: int | None) -> None: ...


_number_taker: NumberTaker | None = None


def install_taker(taker: NumberTaker | None) -> None:
    """Called once by a worker process, to take what its tasks log."""
    global _number_taker
    _number_taker = taker


# A process that a task forks has no connection to the client.
os.register_at_fork(after_in_child=lambda: install_taker(None))


def log(
    values: Mapping[str, Any] | None = None, /, *, step: int | None = None, **more: Any
) -> None:
    """Draw numbers on the page of the pool, and pass them on to the tracker that is set up.

    It works in a task, on the client inside a `with sky.Compute()` block, and outside of any pool,
    where only the tracker gets the numbers. Without `step`, each name counts its own steps. An
    array or a tensor of one element is taken with its `item()`, which waits for a device. Else the
    call waits for nothing in a task, and on the client for Weights & Biases alone.

    >>> sky.log(loss=0.3, accuracy=0.91, step=7)
    >>> sky.log({"train/loss": 0.3})
    """
    given = {**(values or {}), **more}
    if not 0 < len(given) <= NAMES_MOST:
        raise ConfigurationError(
            f"sky.log() got {len(given)} numbers, and takes {NAMES_MOST} in a call; log fewer, "
            "such as a mean for each layer"
            if given
            else "sky.log() got no number; write sky.log(loss=0.3, step=7)"
        )
    numbers = {name: _number(name, value) for name, value in given.items()}
    if step is not None:
        step = _step(step)
    if _number_taker is not None:
        _number_taker.take(numbers, step)
        return
    if context.own_pool is None:
        target = active_compute()
    else:
        # In a process that a task has forked, which has only pools of its own.
        target = current.get() or next(reversed(active), None)
    take = getattr(target, "take_numbers", None)
    if take is not None:
        take(numbers, step)
    elif sys.modules.keys() & {"wandb", "mlflow"}:
        # Imported here: a worker never needs it.
        from skyward.events import track_outside

        track_outside(numbers, step)


def _number(name: Any, value: Any) -> float:
    if not isinstance(name, str) or not name.strip() or len(name) > NAME_MOST:
        raise ConfigurationError(
            f"sky.log({{{name!r}: ...}}): a name is text of 1 to {NAME_MOST} characters"
        )
    found, cause = value, None
    try:
        if hasattr(value, "item"):
            found = value.item()
        if not isinstance(found, (str, bytes, bytearray)):
            return float(found)
    except (TypeError, ValueError, RuntimeError, OverflowError) as problem:
        cause = problem
    shape = getattr(value, "shape", None)
    what = type(value).__name__ + (f" of shape {tuple(shape)}" if shape else "")
    raise ConfigurationError(
        f"sky.log({name}={_one_line(value)}): this {what} is not one number that a curve can have; "
        "give an int, a float, or an array or tensor of one element, such as loss.mean()"
    ) from cause


def _step(step: Any) -> int:
    cause = None
    try:
        found = operator.index(step.item() if hasattr(step, "item") else step)
        if abs(found) <= STEP_MOST:
            return found
    except (TypeError, ValueError, RuntimeError) as problem:
        cause = problem
    raise ConfigurationError(
        f"sky.log(step={_one_line(step)}): give a whole number of at most 2**53, or none"
    ) from cause


def _one_line(value: Any) -> str:
    try:
        text = " ".join(repr(value).split())
    except RuntimeError:
        # A tensor whose device is gone.
        text = object.__repr__(value)
    return text if len(text) <= 60 else text[:60] + "..."
