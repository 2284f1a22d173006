"""joblib: `Parallel` runs on the pool while it is open."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from skyward.context import InstanceInfo
from skyward.plugins.plugin import Plugin, check_installed, installing, requirement

if TYPE_CHECKING:
    from skyward.plugins.parallel import OpenCompute


def joblib(version: str | None = None) -> Plugin:
    """Run `joblib.Parallel` on the pool, in everything that uses it.

    Inside the block, `n_jobs=-1` means all slots of the pool. With `n_jobs=1`, or without `n_jobs`,
    joblib runs in this process, as it does without the pool; `require="sharedmem"` runs on threads
    of this process.

    >>> with sky.Compute(nodes=4, plugins=[sky.plugins.joblib()]):
    ...     squares = joblib.Parallel(n_jobs=-1)(joblib.delayed(square)(i) for i in range(100))
    """
    package = requirement("joblib", "joblib", "latest" if version is None else version)
    return (
        Plugin.create("joblib")
        .with_transform(installing([package]))
        .with_around_process(with_joblib)
        .with_around_client(on_the_pool)
    )


@contextlib.contextmanager
def with_joblib(info: InstanceInfo) -> Iterator[None]:
    """Find out before the first task whether the worker has joblib."""
    check_installed("joblib")
    yield


@contextlib.contextmanager
def on_the_pool(compute: OpenCompute) -> Iterator[None]:
    """Have joblib use the pool."""
    check_installed("joblib")
    from skyward.plugins import parallel

    with parallel.default(compute):
        yield
