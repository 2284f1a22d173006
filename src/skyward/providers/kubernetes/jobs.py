"""The Job of a pool: it keeps the pods running, and owns everything else of the pool.

Its deadline is a lease that the client extends: without the client the cluster ends the pods, and
removes the Job with all that it owns. Every function here asks the API server, and waits for it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import threading
import time
from collections.abc import Sequence

from skyward.errors import ConfigurationError, PoolError, PoolStartError, UnreachableError
from skyward.providers import Remains, Request, signature
from skyward.providers.kubernetes import manifests
from skyward.providers.kubernetes.access import (
    Access,
    ApiError,
    ConflictError,
    NotFoundError,
    Object,
)
from skyward.providers.kubernetes.manifests import (
    AGENTLESS_SECONDS,
    JOB,
    LEASE_SECONDS,
    LEFT_BY,
    NODE,
    NODES,
    POOL,
    SIGNATURE,
    SPEC,
    TTL_SECONDS,
    Claim,
    Pod,
    claim_of,
    job_name,
    listed,
)

GONE_SECONDS = 50.0
_releasing = threading.Lock()
_OURS = "app.kubernetes.io/managed-by=skyward"
KICK_SECONDS = 4.0
"""After so long, a container that has not ended is ended from inside."""


def make(
    access: Access,
    name: str,
    pool: str,
    pod: Pod,
    request: Request,
    nodes: Sequence[int],
    called: str = "",
) -> tuple[Object, bool]:
    """The Job, with the claims that it needs, and whether it is new.

    One that exists and is the same is used. `called` is the name that the user gave the pool.
    """
    claims = _claims(access, request)
    manifest = manifests.job(name, pool, pod, request, nodes)
    cached = pod.cache is not None and pod.cache.startswith("/")
    if cached and not _takes_host_paths(access, manifest["spec"]["template"]):
        manifest = manifests.job(name, pool, dataclasses.replace(pod, cache=None), request, nodes)
    template = json.dumps(manifest["spec"]["template"], sort_keys=True)
    manifest["metadata"]["annotations"] |= signature(SIGNATURE, pool, called) | {
        SPEC: hashlib.sha256(template.encode()).hexdigest()[:16]
    }
    if any(_was_left(access, claim, name) for claim in claims):
        _spared(manifest)
    is_new = True
    try:
        made = access.create("jobs", manifest)
    except ConflictError:
        made, is_new = _used(access, name, manifest, claims)
    try:
        _complete(access, made, pod, request, claims, is_new=is_new)
    except BaseException:
        if is_new:
            with contextlib.suppress(PoolError):
                remove(access, name)
        raise
    return made, is_new


def _complete(
    access: Access,
    made: Object,
    pod: Pod,
    request: Request,
    claims: Sequence[Claim],
    *,
    is_new: bool,
) -> None:
    """Make what a Job needs, and see that it can be kept."""
    name = made["metadata"]["name"]
    if pod.queue and "suspend" not in made["spec"]:
        raise PoolStartError(
            f"Kubernetes(queue={pod.queue!r}): this cluster does not know suspended Jobs, which "
            "came with Kubernetes 1.21; leave queue= out"
        )
    # Now, and not at the deadline, it must show that the right to extend it is missing.
    if is_new or not request.keep:
        extend(access, name, int(age(access, made)) + LEASE_SECONDS)
    # Made after the Job that owns it, a claim is never left over; its pods wait for it.
    for claim in claims:
        owner = _owner(made) if claim.remove else None
        wanted = claim.manifest(pod.storage_class, request.most_nodes, owner)
        try:
            access.create("persistentvolumeclaims", wanted)
        except ConflictError:
            if owner is not None and (
                name in _owners(access, claim) or _was_left(access, claim, name)
            ):
                _give(access, claim, owner)


def _takes_host_paths(access: Access, template: Object) -> bool:
    """Whether the namespace's rules allow pods to keep a cache on their machine."""
    try:
        access.create("pods", _pod_of(template, "sky-try-"), dryRun="All")
    except ApiError as problem:
        # Whatever else is wrong, such as a quota, is told when the Job says so.
        return "hostPath" not in problem.message
    return True


def _pod_of(template: Object, prefix: str, *owners: Object) -> Object:
    about = template["metadata"] | {"generateName": prefix, "ownerReferences": list(owners)}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": about, "spec": template["spec"]}


def _owner(job: Object) -> Object:
    about = job["metadata"]
    return {"apiVersion": "batch/v1", "kind": "Job", "name": about["name"], "uid": about["uid"]}


def _used(
    access: Access, name: str, manifest: Object, claims: Sequence[Claim]
) -> tuple[Object, bool]:
    """The Job of this name that exists, if it can be used; else a new one in its place."""
    try:
        there = access.get("jobs", name)
    except NotFoundError:
        return access.create("jobs", manifest), True
    about, wanted = there["metadata"], manifest["metadata"]
    differs = (about.get("annotations") or {}).get(SPEC) != wanted["annotations"][SPEC]
    if differs and not has_ended(there) and nodes_of(there) and is_of_this_process(there):
        raise ConfigurationError(
            f"Kubernetes(job={name!r}): this process uses that Job with other arguments; end that "
            "pool first, or give this one another name"
        )
    if differs or has_ended(there):
        if is_spared(there):
            _spared(manifest)
        return _replaced(access, name, manifest, claims), True
    change = {
        "metadata": {
            "labels": {POOL: wanted["labels"][POOL]},
            "annotations": wanted["annotations"],
        },
        "spec": {"parallelism": manifest["spec"]["parallelism"]},
    }
    return access.patch("jobs", name, change), False


def _replaced(access: Access, name: str, manifest: Object, claims: Sequence[Claim]) -> Object:
    """A new Job in place of one with the same name, with its claims, which would go with it."""
    kept = [claim for claim in claims if claim.remove and name in _owners(access, claim)]
    for claim in kept:
        _give(access, claim, None, left_by=name)
    remove(access, name)
    _until_job_gone(access, name)
    made = access.create("jobs", manifest)
    for claim in kept:
        _give(access, claim, _owner(made))
    return made


def is_idle(access: Access, name: str) -> bool:
    """Whether this process made the Job of that name, and no pool uses it now."""
    try:
        job = access.get("jobs", name)
    except NotFoundError:
        return False
    return is_of_this_process(job) and not nodes_of(job)


def has_ended(job: Object) -> bool:
    """Whether a Job is at its end, and makes no more pods."""
    conditions = (job.get("status") or {}).get("conditions") or ()
    finished = any(
        each["type"] in ("Complete", "Failed", "FailureTarget") and each["status"] == "True"
        for each in conditions
    )
    return finished or job["metadata"].get("deletionTimestamp") is not None


def age(access: Access, job: Object) -> float:
    """How many seconds of its deadline a Job has used."""
    started = (job.get("status") or {}).get("startTime")
    return max(0.0, access.seconds_since(started)) if started else 0.0


def _until_job_gone(access: Access, name: str) -> None:
    deadline = time.monotonic() + GONE_SECONDS
    with contextlib.suppress(NotFoundError):
        while time.monotonic() < deadline:
            access.get("jobs", name)
            time.sleep(0.1)


def resize(
    access: Access,
    name: str,
    nodes: Sequence[int],
    *,
    pool: str | None = None,
    version: str | None = None,
) -> None:
    """Have the Job keep a pod for each of these nodes, of this pool; refused if it has changed."""
    about: Object = {"annotations": {NODES: listed(nodes)}}
    if pool is not None:
        about["labels"] = {POOL: pool}
    if version is not None:
        about["resourceVersion"] = version
    access.patch("jobs", name, {"metadata": about, "spec": {"parallelism": len(nodes)}})


def extend(access: Access, name: str, seconds: int) -> Object:
    """Have the Job live for so long, counted from its start."""
    return access.patch("jobs", name, {"spec": {"activeDeadlineSeconds": seconds}})


def stay(access: Access, name: str, seconds: float | None) -> None:
    """Have the Job live for so long from now, or until its pods have ended, whoever is there."""
    until = None
    if seconds is not None:
        until = int(age(access, access.get("jobs", name)) + seconds) + AGENTLESS_SECONDS
    access.patch("jobs", name, {"spec": {"activeDeadlineSeconds": until}})


def empty(access: Access, name: str) -> None:
    """Have the Job keep no pods, and wait until they have ended; its nodes stay on it.

    It has no deadline then: nothing ends a pool that is stopped.
    """
    access.patch("jobs", name, {"spec": {"parallelism": 0, "activeDeadlineSeconds": None}})
    end_pods(access, name)


# A Job of a pool that is stopped stays after its end, and its claims with it: its containers end
# without an agent, and so they do when `sky stop` or `sky start` is killed half-way.


def spare(access: Access, name: str) -> None:
    """Have the Job stay after its end, with all that it owns."""
    access.patch("jobs", name, {"spec": {"ttlSecondsAfterFinished": None}})


def unspare(access: Access, name: str) -> None:
    """Have the cluster remove the Job after its end again."""
    access.patch("jobs", name, {"spec": {"ttlSecondsAfterFinished": TTL_SECONDS}})


def is_spared(job: Object) -> bool:
    """Whether a Job stays after its end."""
    return job["spec"].get("ttlSecondsAfterFinished") is None


def _spared(manifest: Object) -> None:
    manifest["spec"].pop("ttlSecondsAfterFinished", None)


def add_pod(access: Access, name: str) -> None:
    """Make a pod that the Job takes for one of its own; raises `NotFoundError` without a Job.

    The Job would make one itself, but waits before it does: ten seconds after the first pod that
    failed, twice as long after each one more.
    """
    job = access.get("jobs", name)
    if has_ended(job):
        raise NotFoundError(404, "Gone", f"the Job {name} has ended", "making pods")
    if job["spec"].get("suspend"):
        return  # Its queue decides.
    owner = _owner(job) | {"controller": True}
    access.create("pods", _pod_of(job["spec"]["template"], f"{name}-", owner))


# The end of nodes and pools.


def is_of_this_process(job: Object) -> bool:
    """Whether this process has made or used a Job last."""
    told, mine = job["metadata"].get("annotations") or {}, signature("", "", "")
    return all(told.get(f"{SIGNATURE}{each}") == mine[each] for each in ("owner", "pid"))


def nodes_of(job: Object) -> list[int]:
    """The nodes that a Job is to have pods for."""
    told = (job["metadata"].get("annotations") or {}).get(NODES, "")
    return [int(each) for each in told.split(",") if each]


def find(access: Access, pool: str) -> Object | None:
    """The Job of a pool; None if there is none. One that has ended counts if it is to stay."""
    there = access.get("jobs", labelSelector=f"{POOL}={pool}")["items"]
    there.sort(key=has_ended)
    return next((each for each in there if not has_ended(each) or stays(each)), None)


def stays(job: Object) -> bool:
    """Whether a Job stays after its end, and nobody is removing it."""
    return is_spared(job) and job["metadata"].get("deletionTimestamp") is None


def remove(access: Access, name: str) -> None:
    """Remove a Job and all that it owns, and wait until its pods have ended."""
    access.delete("jobs", name)
    end_pods(access, name)


def end_pods(access: Access, name: str) -> None:
    """Remove the pods of a Job, and wait until they have ended."""
    selector = {"labelSelector": f"{JOB}={name}"}
    # The cluster would do that as well, but may take a minute to begin.
    access.delete_all("pods", **selector)
    began = time.monotonic()
    kick_at = began + KICK_SECONDS
    ignored: set[str] = set()
    while left := [
        each
        for each in access.get("pods", **selector)["items"]
        if is_live(each) and each["metadata"]["name"] not in ignored
    ]:
        now = time.monotonic()
        if now > began + GONE_SECONDS:
            names = ", ".join(each["metadata"]["name"] for each in left)
            raise PoolError(f"these pods do not end: {names}; look at their nodes")
        if now > kick_at:
            ignored |= {each["metadata"]["name"] for each in left if not _end(access, each)}
            kick_at = time.monotonic() + KICK_SECONDS
        time.sleep(0.1)


def _end(access: Access, pod: Object) -> bool:
    """End a container from inside, since a pod that is deleted while it starts may run on.

    Gives False if there is nothing to wait for: the container has not started and will not, or the
    cluster has lost the machine that it is on.
    """
    states = (pod.get("status") or {}).get("containerStatuses") or ()
    if all("waiting" in (each.get("state") or {}) for each in states):
        return False
    refused: list[str] = []
    command = ["sh", "-c", "kill 1"]
    try:
        with access.execute(pod["metadata"]["name"], command, refused.append) as end:
            end.recv(1)
    except (UnreachableError, OSError):
        return False
    return not refused


def release(access: Access, name: str, node: int) -> None:
    """Remove a node's pod, from a process that did not make it; with the last one, everything."""
    # One node at a time: the last one must see that it is the last.
    with _releasing:
        while True:
            job: Object = {}
            with contextlib.suppress(NotFoundError):
                job = access.get("jobs", name)
            left = [each for each in nodes_of(job) if each != node] if job else []
            if not left:
                remove(access, name)
                return
            try:
                resize(access, name, left, version=job["metadata"]["resourceVersion"])
                break
            except ConflictError:
                continue  # Another process was quicker.
        for pod in access.get("pods", labelSelector=f"{JOB}={name},{NODE}={node}")["items"]:
            access.delete("pods", pod["metadata"]["name"])


def is_live(pod: Object) -> bool:
    """Whether a container of the pod runs, or may yet."""
    status = pod.get("status") or {}
    if status.get("phase") in ("Succeeded", "Failed"):
        return False
    states = [each.get("state") or {} for each in status.get("containerStatuses") or ()]
    return not states or not all("terminated" in state for state in states)


def is_running(pod: Object) -> bool:
    """Whether the pod's containers run."""
    status = pod.get("status") or {}
    states = [each.get("state") or {} for each in status.get("containerStatuses") or ()]
    return bool(states) and all("running" in state for state in states) and "podIP" in status


# Claims.


def _owners(access: Access, claim: Claim) -> list[str]:
    """The names of the objects with which a claim goes."""
    try:
        found = access.get("persistentvolumeclaims", claim.name)
    except NotFoundError:
        return []
    return [each["name"] for each in found["metadata"].get("ownerReferences") or ()]


def _give(access: Access, claim: Claim, owner: Object | None, left_by: str | None = None) -> None:
    """Have a claim go with an object, or with none; `left_by` notes whose it will be again."""
    about = {
        "ownerReferences": None if owner is None else [owner],
        "labels": {LEFT_BY: left_by},
    }
    access.patch("persistentvolumeclaims", claim.name, {"metadata": about})


def _was_left(access: Access, claim: Claim, name: str) -> bool:
    """Whether a claim lost its Job of that name, and the client ended before it made another."""
    if not claim.remove:
        return False
    try:
        found = access.get("persistentvolumeclaims", claim.name)["metadata"]
    except NotFoundError:
        return False
    has_owner = bool(found.get("ownerReferences"))
    return not has_owner and (found.get("labels") or {}).get(LEFT_BY) == name


def _claims(access: Access, request: Request) -> list[Claim]:
    """The claims to make; refuses those that are to be there and are not."""
    found = []
    for volume in request.volumes:
        claim = claim_of(volume)
        if claim is None:
            continue
        if claim.size is not None:
            found.append(claim)
            continue
        try:
            access.get("persistentvolumeclaims", claim.name)
        except NotFoundError:
            raise ConfigurationError(
                f"{volume}: there is no claim {claim.name!r} in the namespace "
                f"{access.place.namespace!r}; make it, or have it made with "
                f"'pvc://{claim.name}?size=10Gi'"
            ) from None
    return found


# What a namespace still has of any pool, for `sky gc`.


def remains(access: Access) -> list[Remains]:
    """What there is of each pool, whoever made it.

    Jobs with names of the user's own outlive their pools on purpose, and are left out.
    """
    there = [job for job in access.get("jobs", labelSelector=POOL)["items"] if _is_left(job)]
    claims = _claims_of_jobs(access) if there else {}
    return [_remains_of(access.place.namespace, job, claims) for job in there]


def _is_left(job: Object) -> bool:
    """Whether a Job is a pool's own, and the cluster is not about to remove it."""
    is_named = job["metadata"]["name"] != job_name(job["metadata"]["labels"][POOL])
    return not is_named and (not has_ended(job) or stays(job))


def _remains_of(namespace: str, job: Object, claims: dict[str, list[str]]) -> Remains:
    about = job["metadata"]
    name = about["name"]
    nodes = (f"node {namespace}/{name}-{node}" for node in nodes_of(job))
    owned = (f"claim {claim}" for claim in claims.get(name, ()))
    told = (about.get("annotations") or {}) | about["labels"]
    return Remains.labelled(told, SIGNATURE, f"Job {name}", *nodes, *owned)


def _claims_of_jobs(access: Access) -> dict[str, list[str]]:
    """The claims that go with each Job; none if the user may not list claims."""
    found: dict[str, list[str]] = {}
    with contextlib.suppress(ApiError):
        for claim in access.get("persistentvolumeclaims", labelSelector=_OURS)["items"]:
            for owner in claim["metadata"].get("ownerReferences") or ():
                found.setdefault(owner["name"], []).append(claim["metadata"]["name"])
    return found
