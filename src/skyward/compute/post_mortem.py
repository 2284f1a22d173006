"""A post-mortem: a person looks at the frames of a task that has failed on its worker."""

from __future__ import annotations

from skyward import functions
from skyward.calls.debuggers import ON_FAILURES, VARIABLE, debug_mode
from skyward.compute import Compute
from skyward.errors import ConfigurationError, DebuggerError, PoolClosedError
from skyward.functions import Function
from skyward.wire.messages import AT_BREAKPOINTS, NEVER, POST_MORTEM


def post_mortem(
    compute: Compute | None = None, *, node: int | None = None, worker: int = 0
) -> None:
    """Open a debugger in the frames of the call that failed last, on the worker where it ran.

    With SKYWARD_DEBUGGER=1, a worker keeps the frames of a task that fails until its next task
    begins. `node` and `worker` choose one of the ranks of a broadcast. Returns when the person
    leaves the debugger.

    >>> sky.post_mortem()
    """
    if debug_mode() in (NEVER, AT_BREAKPOINTS):
        raise DebuggerError(
            f"workers keep nothing of a call that fails; set {VARIABLE}=1 before you make the call"
        )
    found = compute or functions.active_compute()
    if not isinstance(found, Compute):
        raise PoolClosedError(
            "no Compute is active here, and the workers of one that is left are gone: call "
            f"sky.post_mortem() inside the `with` block, or set {VARIABLE}={ON_FAILURES}"
        )
    fleet = found._open_fleet
    if node is None:
        if fleet.dispatcher.failed is None:
            raise DebuggerError(f"no call has failed on this pool since {VARIABLE} was set")
        node, worker = fleet.dispatcher.failed
    elif (node, worker) not in fleet.workers():
        raise ConfigurationError(
            f"post_mortem(node={node!r}, worker={worker!r}): the pool's workers are "
            f"{fleet.workers()}"
        )
    pending = Function(_look_back, name="post_mortem")()
    task = fleet.dispatcher.prepare(pending, worker=(node, worker), keep=True)
    task.debugged, task.timeout = POST_MORTEM, None
    fleet.dispatcher.run(task)


def _look_back() -> None:
    """Nothing: the worker opens a debugger instead."""
