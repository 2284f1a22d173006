"""Jobs: starts what goes on without the client, and shows its output, its state and its end.

A job is a script, or a call by name; one client of the pool, the runner, runs the calls.
"""

from __future__ import annotations

import re
import tarfile
from pathlib import Path
from typing import Any, Literal

import msgspec

from skyward.errors import PoolError, ProtocolError
from skyward.wire.channel import PART
from skyward.wire.messages import Size
from skyward.worker import output_log
from skyward.worker.jobs import GIVEN, LIVE, Job, JobState
from skyward.worker.services import Caller, Parts, answers

_LOGS = re.compile(r"output|result|stream-[0-9]+")

Only = Literal["", "call"]
"""Whether a question is about calls alone."""


class RunnerReport(msgspec.Struct, forbid_unknown_fields=True):
    """What became of a call."""

    name: str
    state: JobState
    problem: str = ""
    streams: bool = False
    """Whether its result can be read already, while items still come."""


@answers("jobs")
def start(
    caller: Caller,
    name: str,
    command: list[str],
    environment: dict[str, str] | None = None,
    private: dict[str, str] | None = None,
    by: str = "",
    function: str = "",
    submission: str = "",
) -> str:
    """Start a job, and return its id; what it needs follows in parts, up to one without bytes.

    That is a compressed tar for a script. With `function` it is a call of that function, and the
    command is that of the runner, if none is there. Without all parts there is no job. A call of
    the same name and submission is not started twice.
    """
    jobs = caller.node.jobs
    refusal: Exception | None = None
    job: Job | None = None
    try:
        job = jobs.begin(name, "call" if function else "script", submission)
    except (PoolError, OSError) as problem:
        # Its parts come all the same.
        refusal = problem
    if job is not None and jobs.is_there(job):
        for _ in caller.parts():
            pass
        return job.id
    try:
        with open("/dev/null" if job is None else Path(job.folder, GIVEN), "wb") as file:
            for body in caller.parts():
                try:
                    file.write(body)
                except OSError as failure:
                    # The parts that still come are passed over.
                    refusal = refusal or failure
        if job is None or refusal is not None:
            raise refusal or PoolError("there is no job")
        jobs.start(job, command, own=environment, private=private, by=by, function=function)
    except BaseException as problem:
        if job is not None:
            jobs.give_up(job)
        if isinstance(problem, tarfile.TarError):
            raise PoolError(str(problem)) from problem
        raise
    return job.id


@answers("jobs", "list")
def list_jobs(caller: Caller, kind: Only = "") -> list[Any]:
    """The jobs that users have started, in the order in which they were made."""
    found = caller.node.jobs.all((kind,)) if kind else caller.node.jobs.all()
    return [msgspec.to_builtins(each) for each in found]


@answers("jobs")
def look(caller: Caller, job: str, kind: Only = "") -> Any:
    """The job of that id, or the latest of that name."""
    return msgspec.to_builtins(caller.node.jobs.get(job, kind))


@answers("jobs")
def cancel(caller: Caller, job: str, kind: Only = "") -> Any:
    """Have a job end."""
    return msgspec.to_builtins(caller.node.jobs.cancel(job, kind))


@answers("jobs")
def forget(caller: Caller, name: str) -> bool:
    """Forget a call that has ended, and what came of it; whether there was one."""
    return caller.node.jobs.forget(name)


@answers("jobs")
def follow(
    caller: Caller,
    job: str,
    log: str = "output",
    position: Size = 0,
    tail: Size | None = None,
    follow: bool = True,
    began: float | None = None,
) -> Parts:
    """A job's output, from a position on or its last lines, and what comes until the job ends.

    Or another of its logs: the `result` of a call, or the items of a generator. `began` is when the
    job was made: a later one of the same name is another job. The last reply is the job as it is
    then.
    """
    if not _LOGS.fullmatch(log):
        raise PoolError(f"a job has no log {log!r}")
    jobs = caller.node.jobs
    found = jobs.get(job)
    folder = Path(found.folder, log)
    if tail is not None:
        position = output_log.position_of_last(folder, tail)
    for _ in caller.looks():
        # Before the log: what the job has written until its end is there.
        found = jobs.get(found.id)
        if began not in (None, found.began):
            raise PoolError(f"the call {job!r} was forgotten before all of its items were read")
        while True:
            start, data = output_log.read(folder, position, PART)
            if not data:
                break
            yield {"position": start + len(data), "dropped": start - position}, (data,)
            position = start + len(data)
        if found.state not in LIVE or not follow:
            break
    return msgspec.to_builtins(found)


@answers("jobs")
def ends(caller: Caller) -> Parts:
    """Tell which calls have ended, stream or are gone, each time that there are such.

    The first reply has none: from then on, all are told.
    """
    jobs = caller.node.jobs
    version, before = jobs.version, jobs.calls()
    yield [], ()
    for _ in caller.looks():
        if jobs.version == version:
            continue
        version, now = jobs.version, jobs.calls()
        changed = [name for name, call in before.items() if now.get(name) != call]
        new = [name for name, (_, is_readable) in now.items() if is_readable and name not in before]
        before = now
        if changed or new:
            yield [*changed, *new], ()


@answers("jobs")
def serve(caller: Caller, job: str) -> dict[str, bool]:
    """Take the reports of a runner; others send it the names of calls meanwhile."""
    jobs, channel = caller.node.jobs, caller.channel
    if not jobs.serve(channel, job):
        raise PoolError("another runner is there")
    while True:
        question, _ = caller.next_part()
        if question.what == "leave":
            if jobs.let_go(channel):
                return {"leave": True}
            continue
        try:
            told = msgspec.convert(question.arguments, RunnerReport)
        except msgspec.ValidationError as problem:
            raise ProtocolError(f"a runner does not report so: {problem}") from problem
        jobs.report(told.name, told.state, told.problem, streams=told.streams)
