"""`@compute`: a coroutine function that gets a compute of its own for each call."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

from skytorch import events
from skytorch.compute import Compute
from skytorch.defaults import Volumes
from skytorch.events import OnEvents
from skytorch.metrics import OnMetrics
from skyward.errors import ConfigurationError

P = ParamSpec("P")
T = TypeVar("T")


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
) -> Callable[
    [Callable[Concatenate[Compute, P], Awaitable[T]]], Callable[P, Coroutine[Any, Any, T]]
]:
    """Give a coroutine function a `Compute`, as its first argument, for the time of each call.

    The arguments are those of `Compute`; without a name it has the function's.

    >>> @compute(name="mnist", resources={"nvidia.com/gpu": "1"})
    ... async def train(node: Compute, epochs: int = 10): ...
    >>> asyncio.run(train(epochs=3))
    """
    if name is not None and not isinstance(name, str):
        raise ConfigurationError(f"@compute on {name!r}: write @compute(name='mnist') above it")

    def decorate(
        body: Callable[Concatenate[Compute, P], Awaitable[T]],
    ) -> Callable[P, Coroutine[Any, Any, T]]:
        if not inspect.iscoroutinefunction(body):
            raise ConfigurationError(
                f"@compute on {body!r}: write `async def`, since starting a compute is awaited"
            )
        if not inspect.signature(body).parameters:
            raise ConfigurationError(
                f"@compute on {body.__name__}(): it takes no argument; write "
                f"`async def {body.__name__}(node: Compute)`"
            )
        named = name or body.__name__.strip("_").replace("_", "-").lower()

        @functools.wraps(body)
        async def call(*arguments: P.args, **options: P.kwargs) -> T:
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
                    return await body(node, *arguments, **options)
                finally:
                    events.sink.reset(token)

        return call

    return decorate
