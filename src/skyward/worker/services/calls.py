"""Calls: takes calls by name, tells what came of them, and has a runner run them."""

from __future__ import annotations

import functools
import select
from pathlib import Path
from typing import Annotated, Any

import msgspec

from skyward.errors import PoolError, ProtocolError
from skyward.wire.asking import PART
from skyward.worker.kept_calls import CALL, RESULT, CallEnd, stream_file
from skyward.worker.kept_jobs import LIVE, JobView
from skyward.worker.programs import environment_of
from skyward.worker.services import Caller, Parts, ServedNode, answers

WAIT_SECONDS = 0.5
"""How often the service looks whether a client that waits for a call is still there."""
RUNNER = "named-calls"

Count = Annotated[int, msgspec.Meta(ge=0)]


class RunnerReport(msgspec.Struct, forbid_unknown_fields=True):
    """What became of a call."""

    name: str
    end: CallEnd | None = None
    streams: bool = False
    """Whether its result can be read already, while items still come."""


@answers("calls")
def submit(
    caller: Caller,
    name: str,
    function: str,
    command: list[str],
    environment: dict[str, str] | None = None,
    private: dict[str, str] | None = None,
    by: str = "",
) -> None:
    """Have a call run; its bytes follow in parts, up to one without bytes.

    Without all of them there is no call. `command` is that of the runner, if none is there.
    """
    node = caller.node
    refusal: Exception | None = None
    folder: Path | None = None
    try:
        folder = node.calls.begin(name)
    except (PoolError, ValueError, OSError) as problem:
        # Its parts come all the same.
        refusal = problem
    try:
        with open("/dev/null" if folder is None else folder / CALL, "wb") as file:
            for body in caller.parts():
                try:
                    file.write(body)
                except OSError as failure:
                    # The parts that still come are passed over.
                    refusal = refusal or failure
        if refusal is not None:
            raise refusal
        launch = functools.partial(
            node.runners.start,
            RUNNER,
            command,
            working_directory=node.config.working_directory,
            environment={**environment_of(node.config), "PYTHONUNBUFFERED": "1"},
            own=environment or {},
            private=private or {},
            by=by,
        )
        node.calls.add(name, function, by, launch)
    except BaseException:
        if folder is not None:
            node.calls.give_up(name)
        raise


@answers("calls", "list")
def list_calls(caller: Caller) -> list[Any]:
    """All calls by name."""
    return [msgspec.to_builtins(each) for each in caller.node.calls.all()]


@answers("calls")
def look(caller: Caller, name: str) -> Any:
    """The call of a name."""
    return msgspec.to_builtins(caller.node.calls.get(name))


@answers("calls")
def cancel(caller: Caller, name: str) -> Any:
    """Have a call end."""
    return msgspec.to_builtins(caller.node.calls.cancel(name))


@answers("calls")
def forget(caller: Caller, name: str) -> bool:
    """Forget a call, and what came of it."""
    return caller.node.calls.forget(name)


@answers("calls")
def ended(caller: Caller, since: Count | None = None) -> dict[str, Any]:
    """Which calls have ended or stream since so many did; without a number, how many do."""
    poll = select.poll()
    poll.register(caller.channel.fileno(), select.POLLIN)
    while True:
        count, names = caller.node.calls.ended_since(since, WAIT_SECONDS)
        # A client that says something, or has left, does not wait any longer.
        if names or since is None or poll.poll(0):
            return {"since": count, "names": names}


@answers("calls")
def read(caller: Caller, name: str) -> Parts:
    """What came of a call; the last reply is the call."""
    found = caller.node.calls.get(name)
    path = Path(found.folder, RESULT)
    # Of a call that runs, the file may not be the last word, unless it streams.
    if path.exists() and (found.state not in LIVE or found.streams):
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            while data := file.read(PART):
                yield {"size": size}, (data,)
    return msgspec.to_builtins(found)


@answers("calls", "stream")
def read_stream(
    caller: Caller, name: str, began: float, stream: Count, position: Count = 0
) -> Parts:
    """The items of a stream of a call, from a position in its file on, as they come.

    `began` is when the call was made: a later one of the same name is another call. The last reply
    is the call as it is after the last item.
    """
    node = caller.node
    found = _same(node, name, began)
    with Path(found.folder, stream_file(stream)).open("rb") as file:
        file.seek(position)
        while True:
            # Before its items: what has come until its end is there.
            goes_on = found.state in LIVE
            while data := file.read(PART):
                yield None, (data,)
            if not goes_on:
                return msgspec.to_builtins(found)
            caller.wait()
            found = _same(node, name, began)


def _same(node: ServedNode, name: str, began: float) -> JobView:
    found = node.calls.get(name)
    if found.began != began:
        raise PoolError(f"the call {name!r} was forgotten before all of its items were read")
    return found


@answers("calls")
def serve(caller: Caller, job: str) -> dict[str, bool]:
    """Take the reports of a runner; others send it the names of calls meanwhile."""
    calls, channel = caller.node.calls, caller.channel
    if not calls.serve(channel, job):
        raise PoolError("another runner is there")
    try:
        while True:
            question, _ = caller.next_part()
            if question.what == "leave":
                if calls.let_go(channel):
                    return {"leave": True}
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
