"""Why a client does not get what came of a call by name, as errors."""

from __future__ import annotations

from skyward.errors import (
    NodeLostError,
    PoolClosedError,
    PoolError,
    SkywardError,
    TaskCancelledError,
    WorkerDiedError,
)
from skyward.worker.kept_jobs import JobView


def without_result(view: JobView) -> SkywardError:
    """Why a call that has ended has no result, or a stream of it no end."""
    if view.state == "cancelled":
        return TaskCancelledError(f"{view.id} was cancelled before it started")
    if view.state == "lost":
        return WorkerDiedError(f"{view.id} is lost: {view.problem}; forget it, and submit it again")
    return PoolError(f"{view.id} has no result: {view.problem}")


def lost(head: int, problem: BaseException) -> NodeLostError:
    """The head cannot be reached."""
    return NodeLostError(
        f"node {head}, the head, which has the pool's calls by name, is lost or out of reach: "
        f"{problem}"
    )


def left(name: str) -> PoolClosedError:
    """The client that waits for a call leaves."""
    return PoolClosedError(
        f"its client left the pool; {name} goes on, unless the pool was ended: "
        f"compute.result({name!r}) gets its result after the next sky.attach"
    )
