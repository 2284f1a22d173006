"""The states of jobs: what Slurm says of them, and the end of those that are cancelled."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

from skyward.errors import PoolError
from skyward.providers.slurm import steps
from skyward.providers.slurm.commands import SlurmCluster, SlurmJob

POLL_SECONDS = 0.1
"""How often the client asks for a job that is ending."""
GONE_SECONDS = 20.0
"""How long the client waits for the end of a job that it cancelled; an epilog may take more."""
ENDING_SECONDS = 45.0
"""How long a job may be ending: by default, Slurm kills its processes after 30 s."""
STATE_SECONDS = 0.5
"""For how long an answer about a job's state is used again."""


class JobStates:
    """Asks Slurm for jobs, once for all who ask at the same time."""

    def __init__(
        self,
        cluster: SlurmCluster,
        start: Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]],
    ) -> None:
        """`start` makes a task, which its owner keeps."""
        self._cluster, self._start = cluster, start
        self._states: dict[str, tuple[float, asyncio.Task[SlurmJob | None]]] = {}

    async def get(self, id: str, *, fresh: bool = False) -> SlurmJob | None:
        """A job's state; nodes that ask at the same time share the answer."""
        asked = self._states.get(id)
        usable = asked is not None and (
            not asked[1].done() if fresh else time.monotonic() - asked[0] < STATE_SECONDS
        )
        if asked is None or not usable:
            asked = self._states[id] = time.monotonic(), self._start(self._cluster.job(id))
        return await asyncio.shield(asked[1])

    async def settled(self, id: str) -> SlurmJob | None:
        """A job that is not ending: what it was for Slurm while its processes ended says little.

        A preempted job goes back into the queue, and one that has failed is over.
        """
        deadline = time.monotonic() + ENDING_SECONDS
        while True:
            job = await self.get(id, fresh=True)
            if job is None or job.state != "COMPLETING" or time.monotonic() > deadline:
                return job
            await asyncio.sleep(POLL_SECONDS)

    async def cancel(self, id: str, job: SlurmJob | None) -> None:
        """Cancel a job unless it has ended, and wait until nothing of it runs."""
        deadline = time.monotonic() + GONE_SECONDS
        if job is None or not job.has_ended:
            await self._cluster.cancel(id)
        pause = 0.05
        while (job := await self.get(id, fresh=True)) is not None:
            if job.has_ended and (job.state != "COMPLETING" or time.monotonic() > deadline):
                break
            if time.monotonic() > deadline:
                raise PoolError(f"job {id} does not end: it is {job.state}; see `squeue`")
            await asyncio.sleep(pause)
            pause = min(2 * pause, 1.0)

    async def has(self, job: str, host: str, token: str) -> bool:
        """Whether a job has a node, and the keeper there is the one with this token."""
        found = await self.get(job)
        if found is None or found.is_waiting or found.has_ended:
            return False
        if host not in await self._cluster.hostnames(found.hosts):
            return False
        if await self._cluster.is_down(host):
            return False
        keeper = await steps.greet_one(self._cluster, job, host)
        return keeper is not None and token in ("", keeper.token)

    async def how_it_is(self, job: str, host: str) -> str:
        """What Slurm says of a job and a node of it."""
        found = await self.get(job, fresh=True)
        if found is None or found.is_waiting or found.has_ended:
            waits = found is not None and found.is_waiting
            return "Slurm has put it back into the queue" if waits else how_it_ended(job, found)
        is_down = await self._cluster.is_down(host)
        return f"Slurm has given {host} up" if is_down else "it still runs"


def how_it_ended(id: str, job: SlurmJob | None) -> str:
    """How a job has ended, for people."""
    if job is None:
        return f"job {id} is gone; see `sacct --jobs={id}`"
    said = "" if job.comment in ("", "(null)") or job.nodes else f"; it said: {job.comment}"
    # What it has come to is known only when all its processes have ended.
    state = "" if job.state == "COMPLETING" else f": {job.state}"
    return f"job {id} has ended{state}{said}; see `sacct --jobs={id}`"
