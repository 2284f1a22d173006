"""Why a job waits, in Slurm's own words, and what may be done about it."""

from __future__ import annotations

import datetime

from skyward.providers.slurm.commands import SlurmJob

_ADVICE = (
    ("PartitionTimeLimit", "the partition allows less time: give a shorter time="),
    ("PartitionNodeLimit", "the partition allows fewer nodes: ask for fewer, or another one"),
    ("PartitionConfig", "the partition allows no such job: see `scontrol show partition`"),
    ("BadConstraints", "no node has what is asked for: see `sinfo --Node --long`"),
    ("InvalidAccount", "give an account= of yours: see `sacctmgr show associations`"),
    ("InvalidQOS", "give a qos= that you may use: see `sacctmgr show qos`"),
    ("AccountNotAllowed", "the partition does not take this account: give another account="),
    ("QOSNotAllowed", "the partition does not take this QOS: give another qos="),
    ("DependencyNeverSatisfied", "the job that it depends on has failed"),
    ("JobHeldAdmin", "an administrator holds the job"),
    ("launch failed requeued held", "its nodes could not start it: see `scontrol show job`"),
    ("JobLaunchFailure", "its nodes could not start it: see `scontrol show job`"),
)
_HOPELESS = (
    *("PartitionTimeLimit", "PartitionNodeLimit", "BadConstraints", "InvalidAccount"),
    *("InvalidQOS", "AccountNotAllowed", "QOSNotAllowed", "DependencyNeverSatisfied"),
    *("launch failed requeued held", "JobLaunchFailure"),
)
"""Reasons that no waiting mends."""
_LIMITS = ("MaxGRESPerUser", "MaxCpuPerUser", "MaxJobsPerUser", "MaxMemoryPerUser", "GrpGRES")
_SOON = ("None", "")


def told(job: SlurmJob, place: tuple[int, int] | None) -> str:
    """Why a job waits, for people: "job 42 waits: Priority (3rd of 12 in main)"."""
    if job.reason in _SOON:
        return f"job {job.id} is submitted"
    details = []
    if place is not None and place[1] > 1:
        details.append(f"{ordinal(place[0])} of {place[1]} in {job.partition}")
    if (start := expected(job.start)) is not None:
        details.append(f"expected to start at {start}")
    if any(limit in job.reason for limit in _LIMITS):
        details.append("a limit of your account: it runs when your other jobs have ended")
    more = f" ({', '.join(details)})" if details else ""
    return f"job {job.id} waits: {job.reason}{more}"


def ordinal(number: int) -> str:
    """A place in a line: "1st"."""
    teen = number % 100 in (11, 12, 13)
    return f"{number}{'th' if teen else {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th')}"


def expected(start: str) -> str | None:
    """When Slurm expects a job to start, without the date if that is today."""
    try:
        when = datetime.datetime.fromisoformat(start)
    except ValueError:
        return None
    today = when.date() == datetime.datetime.now().date()
    return when.strftime("%H:%M" if today else "%Y-%m-%d %H:%M")


def hopeless(job: SlurmJob) -> str:
    """Why a job will never run, with the next step; empty if it may yet."""
    if not any(job.reason.startswith(words) for words in _HOPELESS):
        return ""
    return f"{job.reason}{advice(job.reason)}"


def advice(reason: str) -> str:
    """The next step for a reason."""
    return next((f"; {step}" for words, step in _ADVICE if reason.startswith(words)), "")
