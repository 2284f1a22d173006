"""Remains: the drivers of any pool that a Ray cluster still has, for `sky gc`.

A driver that ends takes its placement groups and actors with it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from skyward.providers import Remains, owner
from skyward.providers.ray import records
from skyward.providers.ray.jobs_api import METADATA, NAME, OWNER, PID, JobsApi
from skyward.providers.ray.programs import DriverProgram


def jobs(api: JobsApi) -> list[Remains]:
    """The drivers that are jobs of the cluster, whoever submitted them."""
    found: dict[str, Remains] = {}
    for job, about in api.jobs_of_pools():
        pool = about[METADATA]
        pid = 0
        with contextlib.suppress(ValueError):
            pid = int(about.get(PID, ""))
        before = found[pool].resources if pool in found else ()
        found[pool] = Remains(
            pool=pool,
            name=about.get(NAME, ""),
            owner=about.get(OWNER, ""),
            pid=pid,
            resources=(*before, f"job {job}"),
        )
    return list(found.values())


def processes(program: Callable[[str, str], DriverProgram]) -> list[Remains]:
    """The drivers that are processes of this machine; `program` makes one by pool and id."""
    found = []
    for pool in records.pools():
        record = records.read(pool)
        # A job's name is one word; a process is known by its number and its start.
        if record is None or len(record.program.split()) != 2:
            continue
        if program(pool, record.program).why_over():
            continue
        process = record.program.split()[0]
        resources = (f"process {process}",)
        found.append(Remains(pool, record.name, owner(), record.pid, resources))
    return found
