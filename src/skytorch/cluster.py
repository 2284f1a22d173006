"""A cluster: several computes that start together and end together."""

from __future__ import annotations

import asyncio
from types import TracebackType

from skytorch.compute import Compute
from skyward.errors import ConfigurationError


class Cluster:
    """Computes to enter as one; entering gives them as a tuple.

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

    async def __aenter__(self) -> tuple[Compute, ...]:
        starting = [asyncio.create_task(compute.__aenter__()) for compute in self._computes]
        try:
            await asyncio.gather(*starting)
        except BaseException:
            for task in starting:
                task.cancel()
            await asyncio.gather(*starting, return_exceptions=True)
            await self._delete()
            raise
        return self._computes

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._delete()

    async def _delete(self) -> None:
        ended = await asyncio.gather(
            *(compute.delete() for compute in self._computes), return_exceptions=True
        )
        for problem in ended:
            if isinstance(problem, BaseException):
                raise problem

    def __repr__(self) -> str:
        return f"<skytorch.Cluster of {', '.join(compute.name for compute in self._computes)}>"
