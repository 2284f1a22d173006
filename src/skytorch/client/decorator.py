"""`@compute`: a coroutine function that gets a compute of its own for each call."""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Annotated, Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

from skytorch.client import event as events
from skytorch.client.compute import Compute
from skytorch.client.event import OnEvents
from skytorch.client.init import Volumes
from skytorch.client.metrics import OnMetrics
from skyward.errors import ConfigurationError

P = ParamSpec("P")
T = TypeVar("T")


class Decorator(Protocol):
    """What `@compute(...)` returns: the function loses the parameter that the compute is for."""

    @overload
    def __call__(
        self, body: Callable[Concatenate[Compute, P], Awaitable[T]], /
    ) -> Callable[P, Coroutine[Any, Any, T]]: ...
    @overload
    def __call__(
        self, body: Callable[..., Awaitable[T]], /
    ) -> Callable[..., Coroutine[Any, Any, T]]: ...


def compute(
    name: str | None = None,
    *,
    image: str | None = None,
    command: Sequence[str] | None = None,
    args: Sequence[str] | None = None,
    env: Mapping[str, str] | None = None,
    resources: Mapping[str, str | int | float] | None = None,
    labels: Mapping[str, str] | None = None,
    annotations: Mapping[str, str] | None = None,
    suspend: bool = False,
    volumes: Volumes | None = None,
    on_events: OnEvents | None = None,
    on_metrics: OnMetrics | None = None,
) -> Decorator:
    """Give a coroutine function a `Compute` for the time of each call.

    The compute goes to the parameter annotated `Compute`, wherever it stands; without such a
    parameter to the first one, if that has no annotation. The arguments are those of `Compute`; the
    default name is the function's.

    >>> @compute(name="mnist", resources={"nvidia.com/gpu": "1"})
    ... async def train(epochs: int, node: Compute): ...
    >>> asyncio.run(train(3))
    """
    if name is not None and not isinstance(name, str):
        raise ConfigurationError(f"@compute on {name!r}: write @compute(name='mnist') above it")

    def decorate(body: Callable[..., Awaitable[T]]) -> Callable[..., Coroutine[Any, Any, T]]:
        if not inspect.iscoroutinefunction(body):
            raise ConfigurationError(
                f"@compute on {body!r}: write `async def`, since starting a compute is awaited"
            )
        signature = inspect.signature(body)
        target = _target(body, signature)
        # What the caller passes: everything but the compute.
        outer = signature.replace(
            parameters=[each for each in signature.parameters.values() if each is not target]
        )
        named = name or body.__name__.strip("_").replace("_", "-").lower()

        @functools.wraps(body)
        async def call(*arguments: Any, **options: Any) -> T:
            given = outer.bind(*arguments, **options)
            given.apply_defaults()
            node = Compute(
                named,
                image=image,
                command=command,
                args=args,
                env=env,
                resources=resources,
                labels=labels,
                annotations=annotations,
                suspend=suspend,
                volumes=volumes,
                on_events=on_events,
                on_metrics=on_metrics,
            )
            async with node:
                token = events.sink.set(node.hear)
                try:
                    passed = _with_compute(signature, target, given, node)
                    return await body(*passed.args, **passed.kwargs)
                finally:
                    events.sink.reset(token)

        call.__signature__ = outer  # type: ignore[attr-defined]
        return call

    return decorate


def _target(body: Callable[..., Any], signature: inspect.Signature) -> inspect.Parameter:
    """The parameter that gets the compute."""
    parameters = list(signature.parameters.values())
    for parameter in parameters:
        if _is_compute(parameter.annotation, body):
            return parameter
    first = parameters[0] if parameters else None
    if (
        first is not None
        and first.annotation in (first.empty, Any, "Any")
        and first.kind not in (first.VAR_POSITIONAL, first.VAR_KEYWORD)
    ):
        return first
    raise ConfigurationError(
        f"@compute on {body.__name__}{signature}: no parameter is annotated Compute; write "
        f"`async def {body.__name__}(node: Compute)`"
    )


def _is_compute(annotation: object, body: Callable[..., Any]) -> bool:
    if isinstance(annotation, str):
        known = {**body.__globals__, **inspect.getclosurevars(body).nonlocals}
        try:
            meant: object = eval(annotation, known)
        except Exception:
            # A name that is only imported for type checkers, or inside a function.
            return annotation.rpartition(".")[2] == "Compute"
        return _is_compute(meant, body)
    if typing.get_origin(annotation) in (Annotated, typing.Union, types.UnionType):
        return any(_is_compute(each, body) for each in typing.get_args(annotation))
    return isinstance(annotation, type) and issubclass(annotation, Compute)


def _with_compute(
    signature: inspect.Signature,
    target: inspect.Parameter,
    given: inspect.BoundArguments,
    node: Compute,
) -> inspect.BoundArguments:
    """The caller's arguments and the compute, in the order of the function's own signature."""
    passed = {**given.arguments, target.name: node}
    ordered = {name: passed[name] for name in signature.parameters if name in passed}
    return inspect.BoundArguments(signature, ordered)
