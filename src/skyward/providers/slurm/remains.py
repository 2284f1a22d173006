"""Remains: the jobs of any pool that a cluster still has, for `sky gc`."""

from __future__ import annotations

from collections.abc import Sequence

from skyward.providers import Remains
from skyward.providers.slurm.commands import SlurmCluster
from skyward.providers.slurm.submission import PREFIX


async def remains(cluster: SlurmCluster) -> Sequence[Remains]:
    """What there is of each pool, whoever made it."""
    found: dict[str, Remains] = {}
    for name, user, job in await cluster.jobs_of_pools():
        pool = name.removeprefix(PREFIX)
        if pool == name:
            continue
        owner, pid, called = job.about
        before = found[pool].resources if pool in found else ()
        found[pool] = Remains(
            pool=pool,
            name=called,
            owner=owner or user,
            pid=pid,
            resources=(*before, f"job {job.id}"),
        )
    return list(found.values())
