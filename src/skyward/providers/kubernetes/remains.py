"""Remains: the Jobs of any pool that a namespace still has, for `sky gc`."""

from __future__ import annotations

import contextlib

from skyward.providers import Remains
from skyward.providers.kubernetes import jobs
from skyward.providers.kubernetes.access import Access, ApiError, Object
from skyward.providers.kubernetes.manifests import NAME, OWNER, PID, POOL, job_name

_OURS = "app.kubernetes.io/managed-by=skyward"


def remains(access: Access) -> list[Remains]:
    """What there is of each pool, whoever made it.

    Jobs with names of the user's own outlive their pools on purpose, and are left out.
    """
    there = [job for job in access.get("jobs", labelSelector=POOL)["items"] if _is_left(job)]
    claims = _claims(access) if there else {}
    return [_remains(access.place.namespace, job, claims) for job in there]


def _is_left(job: Object) -> bool:
    """Whether a Job is a pool's own, and the cluster is not about to remove it."""
    is_named = job["metadata"]["name"] != job_name(job["metadata"]["labels"][POOL])
    return not is_named and (not jobs.has_ended(job) or jobs.stays(job))


def _remains(namespace: str, job: Object, claims: dict[str, list[str]]) -> Remains:
    about = job["metadata"]
    told, name = about.get("annotations") or {}, about["name"]
    pid = told.get(PID, "")
    nodes = (f"node {namespace}/{name}-{node}" for node in jobs.nodes_of(job))
    owned = (f"claim {claim}" for claim in claims.get(name, ()))
    return Remains(
        pool=about["labels"][POOL],
        name=told.get(NAME, ""),
        owner=told.get(OWNER, ""),
        pid=int(pid) if pid.isdigit() else 0,
        resources=(f"Job {name}", *nodes, *owned),
    )


def _claims(access: Access) -> dict[str, list[str]]:
    """The claims that go with each Job; none if the user may not list claims."""
    found: dict[str, list[str]] = {}
    with contextlib.suppress(ApiError):
        for claim in access.get("persistentvolumeclaims", labelSelector=_OURS)["items"]:
            for owner in claim["metadata"].get("ownerReferences") or ():
                found.setdefault(owner["name"], []).append(claim["metadata"]["name"])
    return found
