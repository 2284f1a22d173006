"""Jobs on a pool: starts scripts that go on without this client, follows and cancels them."""

from __future__ import annotations

import getpass
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from skyward.compute.workbench import Reachable
from skyward.errors import ConfigurationError, ImageError, NodeLostError
from skyward.files import includes
from skyward.wire.channel import PART
from skyward.worker.jobs import Job


def start_script(
    pool: Reachable,
    node: int,
    script: Path,
    arguments: Sequence[str] = (),
    *,
    name: str = "",
    environment: Mapping[str, str] | None = None,
    private: Mapping[str, str] | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
) -> str:
    """Start a Python script as a job, with the modules next to it; returns the job's id.

    `include` names further files and folders to take along, `exclude` patterns to leave out.
    """
    bundle, place = bundle_of(script, include, exclude)
    archive, _ = bundle.archive()
    return start(
        pool,
        node,
        name or _name_of(script),
        ["{python}", f"{{work}}/{place}", *arguments],
        environment=environment,
        private=private,
        files=archive,
    )


def start(
    pool: Reachable,
    node: int,
    name: str,
    command: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    private: Mapping[str, str] | None = None,
    files: bytes = b"",
) -> str:
    """Start a command as a job of a node; returns the job's id.

    `files` is a compressed tar, unpacked in the job's folder; `{work}` in the command is its place,
    and `{python}` the node's interpreter. In variables, `{folder}` is the job's folder; `private`
    are texts that only the user may read, by their places in it.
    """
    with pool.service(node, "jobs") as connection:
        try:
            connection.send(
                "start",
                name=name,
                command=list(command),
                environment=dict(environment or {}),
                private=dict(private or {}),
                by=f"{_user()}@{socket.gethostname()}",
            )
            view = memoryview(files)
            for begin in range(0, len(view), PART):
                connection.send("part", view[begin : begin + PART])
            connection.send("part")
            return str(connection.next_reply().value)
        except (EOFError, OSError) as problem:
            raise _lost(node, problem) from problem


def jobs_of(pool: Reachable, node: int) -> list[Job]:
    """The jobs of a node, in the order of their start."""
    return msgspec.convert(_ask(pool, node, "list"), list[Job])


def look_at(pool: Reachable, node: int, job: str) -> Job:
    """The job of that id, or the latest of that name; `PoolError` if there is none."""
    return msgspec.convert(_ask(pool, node, "look", job=job), Job)


def cancel(pool: Reachable, node: int, job: str) -> Job:
    """Interrupt a job; ten seconds later, what is left of it is killed."""
    return msgspec.convert(_ask(pool, node, "cancel", job=job), Job)


class JobOutput:
    """The output of a job: what is kept of it and, if followed, what comes until its end.

    >>> with closing(JobOutput(pool, 0, "train-1")) as output:
    ...     for dropped, data in output.parts(): ...
    ...     output.job.code
    """

    def __init__(
        self, pool: Reachable, node: int, job: str, *, tail: int | None = None, follow: bool = True
    ) -> None:
        """`tail` begins with the last so many lines."""
        self.job: Job | None = None
        """The job as it is at the end of the output."""
        self._node = node
        self._connection = pool.service(node, "jobs")
        self._connection.send("follow", job=job, tail=tail, follow=follow)

    def parts(self) -> Iterator[tuple[int, bytes]]:
        """How many bytes before this part are not kept any more, and the part."""
        while self.job is None:
            try:
                reply, data = self._connection.next_part()
            except (EOFError, OSError) as problem:
                raise _lost(self._node, problem) from problem
            if reply.more:
                yield int(reply.value["dropped"]), bytes(data)
            else:
                self.job = msgspec.convert(reply.value, Job)

    def close(self) -> None:
        """Stop following; the job goes on."""
        self._connection.close()


def bundle_of(
    script: Path, include: Sequence[str], exclude: Sequence[str]
) -> tuple[includes.Bundle, str]:
    """The files that go with a script, and the script's place among them.

    These are the script, the modules and packages next to it, and what the user names.
    """
    if not script.is_file():
        raise ConfigurationError(f"there is no script {script}")
    # A script that is a link brings the modules that are next to the link.
    found = Path(os.path.abspath(script))
    paths = [str(found), *_modules_next_to(found), *include]
    try:
        bundle = includes.find(paths, exclude)
    except ImageError as problem:
        told = str(problem).replace("Image(includes=", "sky run(include=")
        raise ConfigurationError(told) from problem
    here = Path.cwd()
    below = found.is_relative_to(here)
    return bundle, (found.relative_to(here) if below else Path(found.name)).as_posix()


def _modules_next_to(script: Path) -> Iterator[str]:
    with os.scandir(script.parent) as entries:
        for entry in sorted(entries, key=lambda each: each.name):
            if entry.name.startswith(".") or entry.name in includes.LEFT_OUT:
                continue
            path = Path(entry.path)
            is_package = entry.is_dir() and any(path.glob("*.py"))
            if is_package or (entry.is_file() and path.suffix == ".py" and path != script):
                yield entry.path


def _name_of(script: Path) -> str:
    kept = "".join(each if each.isalnum() and each.isascii() else "_" for each in script.stem)
    return kept[:40] or "job"


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def _ask(pool: Reachable, node: int, what: str, **arguments: Any) -> Any:
    with pool.service(node, "jobs") as connection:
        try:
            return connection.ask(what, **arguments)
        except (EOFError, OSError) as problem:
            raise _lost(node, problem) from problem


def _lost(node: int, problem: Exception) -> NodeLostError:
    return NodeLostError(
        f"the agent of node {node} is gone, and its jobs with it: {problem}; `sky ps` shows the "
        "pools that are there"
    )
