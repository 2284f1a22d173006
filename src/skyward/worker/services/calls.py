"""Calls: takes calls by name, tells what came of them, and has a runner run them."""

from __future__ import annotations

import functools
import select
from collections.abc import Callable
from pathlib import Path
from typing import IO, Annotated, Any

import msgspec

from skyward.errors import PoolError, ProtocolError
from skyward.wire.asking import PART, next_part
from skyward.wire.channel import Channel
from skyward.wire.messages import Reply
from skyward.worker.kept_calls import CALL, RESULT, CallEnd, stream_file
from skyward.worker.kept_jobs import LIVE, JobView
from skyward.worker.programs import environment_of
from skyward.worker.services import ServedNode
from skyward.worker.services.copying import why
from skyward.worker.services.jobs import wait_or_leave

_REFUSALS = (PoolError, ValueError, OSError, msgspec.ValidationError)
WAIT_SECONDS = 0.5
"""How often the service looks whether a client that waits for a call is still there."""
RUNNER = "named-calls"


class CallRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A call to run; its bytes follow in parts, up to one without bytes."""

    name: str
    function: str
    command: list[str]
    """The command of the runner, if none is there."""
    environment: dict[str, str] = {}
    private: dict[str, str] = {}
    by: str = ""


class CallQuestion(msgspec.Struct, forbid_unknown_fields=True):
    """A question about one call."""

    name: str


class StreamQuestion(msgspec.Struct, forbid_unknown_fields=True):
    """The items of a stream of a call, from a position in its file on, as they come."""

    name: str
    began: float
    """When the call was made: a later one of the same name is another call."""
    stream: Annotated[int, msgspec.Meta(ge=0)]
    position: Annotated[int, msgspec.Meta(ge=0)] = 0


class EndedQuestion(msgspec.Struct, forbid_unknown_fields=True):
    """Which calls have ended or stream since so many did; without a number, how many do."""

    since: Annotated[int, msgspec.Meta(ge=0)] | None = None


class RunnerHello(msgspec.Struct, forbid_unknown_fields=True):
    """A runner that offers to run the calls."""

    job: str


class RunnerReport(msgspec.Struct, forbid_unknown_fields=True):
    """What became of a call."""

    name: str
    end: CallEnd | None = None
    streams: bool = False
    """Whether its result can be read already, while items still come."""


def serve(node: ServedNode, channel: Channel) -> None:
    """Answer until the client leaves."""
    while True:
        question, _ = next_part(channel)
        try:
            if question.what == "serve":
                hello = msgspec.convert(question.arguments, RunnerHello)
                _serve_runner(node, channel, hello)
                return
            reply = Reply(_answer(node, channel, question.what, question.arguments))
        except (ConnectionError, EOFError):
            raise
        except _REFUSALS as problem:
            reply = Reply(problem=why(problem))
        channel.send(reply)


def _answer(node: ServedNode, channel: Channel, what: str, asked: dict[str, Any]) -> Any:
    if what == "submit":
        return _submit(node, channel, msgspec.convert(asked, CallRequest))
    if what == "ended":
        return _ended(node, channel, msgspec.convert(asked, EndedQuestion))
    if what == "stream":
        return _send_stream(node, channel, msgspec.convert(asked, StreamQuestion))
    if what == "list":
        return [msgspec.to_builtins(each) for each in node.calls.all()]
    answers: dict[str, Callable[[str], Any]] = {
        "look": lambda name: msgspec.to_builtins(node.calls.get(name)),
        "cancel": lambda name: msgspec.to_builtins(node.calls.cancel(name)),
        "forget": node.calls.forget,
        "read": functools.partial(_send_result, node, channel),
    }
    if what not in answers:
        raise ValueError(f"this service does not answer {what!r}")
    return answers[what](msgspec.convert(asked, CallQuestion).name)


def _submit(node: ServedNode, channel: Channel, request: CallRequest) -> None:
    """Take all of a call, then have it run; without all of it there is no call."""
    refusal: Exception | None = None
    folder: Path | None = None
    try:
        folder = node.calls.begin(request.name)
    except _REFUSALS as problem:
        # Its parts come all the same.
        refusal = problem
    try:
        with open("/dev/null" if folder is None else folder / CALL, "wb") as file:
            refusal = _take(channel, file) or refusal
        if refusal is not None:
            raise refusal
        launch = functools.partial(_launch, node, request)
        node.calls.add(request.name, request.function, request.by, launch)
    except BaseException:
        if folder is not None:
            node.calls.give_up(request.name)
        raise


def _take(channel: Channel, file: IO[bytes]) -> OSError | None:
    """Write the parts that come; returns why they could not all be written."""
    problem: OSError | None = None
    while True:
        part, body = next_part(channel)
        if part.what != "part":
            raise ProtocolError(f"a client does not send {part.what!r} with a call")
        if not body:
            return problem
        try:
            file.write(body)
        except OSError as failure:
            # The parts that still come are passed over.
            problem = problem or failure


def _launch(node: ServedNode, request: CallRequest) -> str:
    return node.runners.start(
        RUNNER,
        request.command,
        working_directory=node.config.working_directory,
        environment={**environment_of(node.config), "PYTHONUNBUFFERED": "1"},
        own=request.environment,
        private=request.private,
        by=request.by,
    )


def _ended(node: ServedNode, channel: Channel, question: EndedQuestion) -> dict[str, Any]:
    poll = select.poll()
    poll.register(channel.fileno(), select.POLLIN)
    while True:
        count, names = node.calls.ended_since(question.since, WAIT_SECONDS)
        # A client that says something, or has left, does not wait any longer.
        if names or question.since is None or poll.poll(0):
            return {"since": count, "names": names}


def _send_result(node: ServedNode, channel: Channel, name: str) -> Any:
    """Send what came of a call, in parts; returns the call."""
    found = node.calls.get(name)
    path = Path(found.folder, RESULT)
    # Of a call that runs, the file may not be the last word, unless it streams.
    if not path.exists() or (found.state in LIVE and not found.streams):
        return msgspec.to_builtins(found)
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(0)
        while data := file.read(PART):
            channel.send(Reply({"size": size}, more=True), (data,))
    return msgspec.to_builtins(found)


def _send_stream(node: ServedNode, channel: Channel, asked: StreamQuestion) -> Any:
    """Send the items of a stream as they come; returns the call as it is after the last."""
    found = _same(node, asked)
    with Path(found.folder, stream_file(asked.stream)).open("rb") as file:
        file.seek(asked.position)
        while True:
            # Before its items: what has come until its end is there.
            goes_on = found.state in LIVE
            while data := file.read(PART):
                channel.send(Reply(more=True), (data,))
            if not goes_on:
                return msgspec.to_builtins(found)
            wait_or_leave(channel)
            found = _same(node, asked)


def _same(node: ServedNode, asked: StreamQuestion) -> JobView:
    found = node.calls.get(asked.name)
    if found.began != asked.began:
        raise PoolError(f"the call {asked.name!r} was forgotten before all of its items were read")
    return found


def _serve_runner(node: ServedNode, channel: Channel, hello: RunnerHello) -> None:
    """Take the reports of a runner; others send it the names of calls meanwhile."""
    calls = node.calls
    if not calls.serve(channel, hello.job):
        channel.send(Reply(problem="another runner is there"))
        return
    try:
        while True:
            question, _ = next_part(channel)
            if question.what == "leave":
                if calls.let_go(channel):
                    channel.send(Reply({"leave": True}))
                    return
                continue
            report = msgspec.convert(question.arguments, RunnerReport)
            if report.streams:
                calls.streams(report.name)
            elif report.end is None:
                calls.started(report.name)
            else:
                calls.ended(report.name, report.end)
    except msgspec.ValidationError as problem:
        raise ProtocolError(f"a runner does not report so: {problem}") from problem
    finally:
        calls.lost(channel)
