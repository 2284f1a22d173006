"""Attaching: a `Compute` on a pool that stays, from any process of its user."""

from __future__ import annotations

import os

from skyward.compute import Compute
from skyward.compute.listening import OnEvent, check_callback
from skyward.context import POOL_VARIABLE
from skyward.errors import ConfigurationError, PoolError
from skyward.nodes import keeping
from skyward.nodes.failures import shown_from_outside
from skyward.nodes.reaching import ReachedPool


def attach(name: str | None = None, *, on_event: OnEvent | None = None) -> Compute:
    """Connect to a pool that stays, and return a `Compute` on it.

    The pool was made by `sky up NAME` or by `Compute(name=..., keep=True)`. Leaving the block, or
    the end of the process, leaves the pool as it is. Without a name, it is the pool on which this
    process runs. `on_event` is as for `Compute`.

    >>> with sky.attach("train") as compute:
    ...     result = train(model) >> compute
    """
    check_callback(on_event)
    try:
        with reach(_named(name), forget=True) as reached:
            return Compute._attach(reached.adoption(), on_event)
    except PoolError as problem:
        raise shown_from_outside(problem) from problem.__cause__


def reach(name: str, *, forget: bool = False) -> ReachedPool:
    """A pool that stays, for its services alone: `pool.service(0, "about")`.

    With `forget`, the record of a pool whose machines are gone is removed.
    """
    record = keeping.read(name)
    if record.stopped:
        raise PoolError(f"{name} is stopped; `sky start {name}` starts it again")
    return ReachedPool(record, forget=forget)


def _named(name: str | None) -> str:
    found = name or os.environ.get(POOL_VARIABLE)
    if not found or not isinstance(found, str):
        raise ConfigurationError(
            f"attach({name!r}): give the name of a pool that stays, such as `sky ps` lists; "
            f"only a script that runs on such a pool ({POOL_VARIABLE}) may leave it out"
        )
    return found
