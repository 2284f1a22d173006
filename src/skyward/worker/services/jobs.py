"""Jobs: starts commands that go on without the client, and shows their output, state and end."""

from __future__ import annotations

import tarfile
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from skyward.errors import PoolError
from skyward.wire.asking import PART
from skyward.wire.messages import Size
from skyward.worker import output_log
from skyward.worker.kept_jobs import LIVE, JobView
from skyward.worker.programs import environment_of
from skyward.worker.services import Caller, Parts, ServedNode, answers


@answers("jobs")
def start(
    caller: Caller,
    name: str,
    command: list[str],
    environment: dict[str, str] | None = None,
    private: dict[str, str] | None = None,
    by: str = "",
) -> str:
    """Start a job; its files, a compressed tar, follow in parts, up to one without bytes.

    Without all of them there is no job.
    """
    node = caller.node
    with tempfile.TemporaryFile(dir=node.config.folder) as files:
        problem: OSError | None = None
        for body in caller.parts():
            try:
                files.write(body)
            except OSError as failure:
                # The parts that still come are passed over.
                problem = problem or failure
        if problem is not None:
            raise problem
        size = files.tell()
        files.seek(0)
        try:
            return node.jobs.start(
                name,
                command,
                working_directory=node.config.working_directory,
                environment={**environment_of(node.config), "PYTHONUNBUFFERED": "1"},
                own=environment or {},
                private=private or {},
                files=files if size else None,
                by=by,
            )
        except tarfile.TarError as failure:
            raise PoolError(str(failure)) from failure


@answers("jobs", "list")
def list_jobs(caller: Caller) -> list[Any]:
    """The jobs of the node, and the calls by name, in the order in which they were made."""
    return [msgspec.to_builtins(each) for each in _all(caller.node)]


@answers("jobs")
def look(caller: Caller, job: str) -> Any:
    """The call of that name, or the job of that id, or the latest of that name."""
    return msgspec.to_builtins(_found(caller.node, job))


@answers("jobs")
def cancel(caller: Caller, job: str) -> Any:
    """Have a job or a call by name end."""
    node = caller.node
    found = _found(node, job)
    owner = node.calls if found.kind == "call" else node.jobs
    return msgspec.to_builtins(owner.cancel(found.id))


@answers("jobs")
def follow(
    caller: Caller, job: str, position: Size = 0, tail: Size | None = None, follow: bool = True
) -> Parts:
    """A job's output, from a position on or its last lines, and what comes until the job ends.

    The last reply is the job as it is then.
    """
    node = caller.node
    found = _found(node, job)
    folder = Path(found.folder, "output")
    if tail is not None:
        position = output_log.position_of_last(folder, tail)
    while True:
        # Before its output: what it has written until its end is there.
        found = _found(node, found.id)
        while True:
            start, data = output_log.read(folder, position, PART)
            if not data:
                break
            yield {"position": start + len(data), "dropped": start - position}, (data,)
            position = start + len(data)
        if found.state not in LIVE or not follow:
            return msgspec.to_builtins(found)
        caller.wait()


def _all(node: ServedNode) -> list[JobView]:
    """The jobs of the node, and the calls by name, in the order in which they were made."""
    return sorted([*node.jobs.all(), *node.calls.all()], key=lambda each: each.began)


def _found(node: ServedNode, job: str) -> JobView:
    """The call of that name, or the job of that id, or the latest of that name."""
    if node.calls.has(job):
        return node.calls.get(job)
    try:
        return node.jobs.get(job)
    except PoolError:
        known = ", ".join(each.id for each in _all(node)) or "none"
        raise PoolError(f"there is no job {job!r}; the pool's jobs are: {known}") from None
