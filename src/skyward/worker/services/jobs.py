"""Jobs: starts commands that go on without the client, and shows their output, state and end."""

from __future__ import annotations

import select
import tarfile
import tempfile
from pathlib import Path
from typing import Annotated, Any

import msgspec

from skyward.errors import PoolError, ProtocolError
from skyward.wire.asking import PART, next_part
from skyward.wire.channel import Channel
from skyward.wire.messages import Reply
from skyward.worker import output_log
from skyward.worker.changes import ChangeListener
from skyward.worker.kept_jobs import LIVE, JobView
from skyward.worker.programs import environment_of
from skyward.worker.services import ServedNode
from skyward.worker.services.copying import why

_REFUSALS = (PoolError, ValueError, OSError, tarfile.TarError, msgspec.ValidationError)
LOOK_SECONDS = 0.1
"""How often a log that a client follows is looked at."""

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 48)]


class JobRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A job to start; its files, a compressed tar, follow in parts, up to one without bytes."""

    name: str
    command: list[str]
    environment: dict[str, str] = {}
    private: dict[str, str] = {}
    by: str = ""


class JobQuestion(msgspec.Struct, forbid_unknown_fields=True):
    """A question about one job."""

    job: str


class FollowRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A job's output, from a position on or its last lines, and what comes until the job ends."""

    job: str
    position: Count = 0
    tail: Count | None = None
    follow: bool = True


def serve(node: ServedNode, channel: Channel) -> None:
    """Answer until the client leaves."""
    while True:
        question, _ = next_part(channel)
        try:
            reply = Reply(_answer(node, channel, question.what, question.arguments))
        except (ConnectionError, EOFError):
            raise
        except _REFUSALS as problem:
            reply = Reply(problem=why(problem))
        channel.send(reply)


def _answer(node: ServedNode, channel: Channel, what: str, asked: dict[str, Any]) -> Any:
    match what:
        case "start":
            return _start(node, channel, msgspec.convert(asked, JobRequest))
        case "list":
            return [msgspec.to_builtins(each) for each in _all(node)]
        case "look":
            return msgspec.to_builtins(_found(node, msgspec.convert(asked, JobQuestion).job))
        case "cancel":
            job = _found(node, msgspec.convert(asked, JobQuestion).job)
            owner = node.calls if job.kind == "call" else node.jobs
            return msgspec.to_builtins(owner.cancel(job.id))
        case "follow":
            return _follow(node, channel, msgspec.convert(asked, FollowRequest))
    raise ValueError(f"this service does not answer {what!r}")


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


def _start(node: ServedNode, channel: Channel, request: JobRequest) -> str:
    """Take the job's files, then start it; without all of them there is no job."""
    with tempfile.TemporaryFile(dir=node.config.folder) as files:
        problem: OSError | None = None
        while True:
            part, body = next_part(channel)
            if part.what != "part":
                raise ProtocolError(f"a client does not send {part.what!r} with a job's files")
            if not body:
                break
            try:
                files.write(body)
            except OSError as failure:
                # The parts that still come are passed over.
                problem = problem or failure
        if problem is not None:
            raise problem
        size = files.tell()
        files.seek(0)
        environment = environment_of(node.config)
        return node.jobs.start(
            request.name,
            request.command,
            working_directory=node.config.working_directory,
            environment={**environment, "PYTHONUNBUFFERED": "1"},
            own=request.environment,
            private=request.private,
            files=files if size else None,
            by=request.by,
        )


def _follow(node: ServedNode, channel: Channel, request: FollowRequest) -> Any:
    """Send a job's output as it comes; returns the job as it is at the end."""
    found = _found(node, request.job)
    folder = Path(found.folder, "output")
    position = request.position
    if request.tail is not None:
        position = output_log.position_of_last(folder, request.tail)
    while True:
        # Before its output: what it has written until its end is there.
        found = _found(node, found.id)
        while True:
            start, data = output_log.read(folder, position, PART)
            if not data:
                break
            told = {"position": start + len(data), "dropped": start - position}
            channel.send(Reply(told, more=True), (data,))
            position = start + len(data)
        if found.state not in LIVE or not request.follow:
            return msgspec.to_builtins(found)
        wait_or_leave(channel)


def wait_or_leave(
    channel: Channel, seconds: float = LOOK_SECONDS, listener: ChangeListener | None = None
) -> bool:
    """Wait for a moment, or for a change, and return whether there was one.

    `EOFError` if the client has left, or says anything.
    """
    poll = select.poll()
    poll.register(channel.fileno(), select.POLLIN)
    if listener is not None:
        poll.register(listener.fileno(), select.POLLIN)
    found = poll.poll(seconds * 1000)
    if any(descriptor == channel.fileno() for descriptor, _ in found):
        channel.receive()
        raise ProtocolError("a client that follows says nothing")
    return bool(found)
