"""A cluster: several computes that start together and end together."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Iterator
from types import TracebackType
from typing import Any, Self, overload

from skytorch.client.compute import Compute
from skyward.errors import ConfigurationError


class Cluster:
    """Computes to enter as one; the cluster is a sequence of them, also in `async with ... as`.

    >>> async with Cluster(Compute(name="trainer"), Compute(name="judge")) as (trainer, judge):
    ...     model.to(trainer.device("cuda"))
    """

    def __init__(self, *computes: Compute) -> None:
        if not computes:
            raise ConfigurationError("Cluster(): give at least one Compute")
        for compute in computes:
            if not isinstance(compute, Compute):
                raise ConfigurationError(f"Cluster({compute!r}): expected Compute(name=...)")
        names = [compute.name for compute in computes]
        for name in names:
            if names.count(name) > 1:
                raise ConfigurationError(f"Cluster: two computes are named {name!r}; rename one")
        self._computes = computes

    def __len__(self) -> int:
        return len(self._computes)

    def __iter__(self) -> Iterator[Compute]:
        return iter(self._computes)

    @overload
    def __getitem__(self, index: int) -> Compute: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Compute, ...]: ...
    def __getitem__(self, index: int | slice) -> Compute | tuple[Compute, ...]:
        return self._computes[index]

    def is_ready(self) -> bool:
        """Whether every compute can be used now.

        >>> cluster.is_ready()
        """
        return all(compute.is_ready() for compute in self._computes)

    async def ready(self, timeout: float | None = None) -> Self:
        """Start all computes together, and return when all can be used.

        `TimeoutError` if that takes longer than `timeout` seconds.

        >>> trainer, judge = await Cluster(Compute(name="trainer"), Compute(name="judge")).ready()
        """
        await _together(compute.ready(timeout) for compute in self._computes)
        return self

    async def delete(self) -> None:
        """Take all computes down for good; leaving `async with` does this.

        >>> await cluster.delete()
        """
        ended = await asyncio.gather(
            *(compute.delete() for compute in self._computes), return_exceptions=True
        )
        for problem in ended:
            if isinstance(problem, BaseException):
                raise problem

    async def __aenter__(self) -> Self:
        try:
            await _together(compute.__aenter__() for compute in self._computes)
        except BaseException:
            await self.delete()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.delete()

    def __repr__(self) -> str:
        return f"<skytorch.Cluster of {', '.join(compute.name for compute in self._computes)}>"


async def _together(starts: Iterable[Coroutine[Any, Any, Compute]]) -> None:
    """Run all starts at once; when one fails, cancel the others."""
    starting = [asyncio.create_task(start) for start in starts]
    try:
        await asyncio.gather(*starting)
    except BaseException:
        for task in starting:
            task.cancel()
        await asyncio.gather(*starting, return_exceptions=True)
        raise
