"""scikit-learn: whatever takes `n_jobs` runs on the pool while it is open."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from skyward.context import InstanceInfo
from skyward.plugins.frameworks.joblib import on_the_pool
from skyward.plugins.plugin import Plugin, check_installed, installing, requirement


def sklearn(version: str | None = None) -> Plugin:
    """Run what scikit-learn does in parallel on the pool: searches, cross-validation, forests.

    >>> with sky.Compute(nodes=4, plugins=[sky.plugins.sklearn()]):
    ...     search = GridSearchCV(SVC(), grid, n_jobs=-1).fit(x, y)
    """
    package = requirement("sklearn", "scikit-learn", "latest" if version is None else version)
    return (
        Plugin.create("sklearn")
        .with_transform(installing([package, "joblib"]))
        .with_around_process(_with_sklearn)
        .with_around_client(on_the_pool)
    )


@contextlib.contextmanager
def _with_sklearn(info: InstanceInfo) -> Iterator[None]:
    check_installed("sklearn", "scikit-learn")
    yield
