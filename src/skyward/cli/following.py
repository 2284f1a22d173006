"""Following a job: its output here as it comes, and its exit code."""

from __future__ import annotations

import contextlib
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from skyward.cli import output
from skyward.cli.commands import FAILED, INTERRUPTED
from skyward.console.measures import duration, size

if TYPE_CHECKING:
    from skyward.compute.workbench import Reachable
    from skyward.worker.kept_jobs import JobView


def follow_job(
    pool: Reachable,
    node: int,
    name: str,
    job: str,
    *,
    tail: int | None = None,
    follow: bool = True,
) -> int:
    """Show a job's output; returns the exit code that the command has then.

    Ctrl-C stops showing, and says how to go on and how to end the job. With `--json`, the job and
    its output are one document, which has what came until then if showing was stopped.
    """
    from skyward.compute.workbench.jobs import JobOutput, look_at

    with contextlib.closing(JobOutput(pool, node, job, tail=tail, follow=follow)) as shown:
        collected = bytearray()
        as_json = output.wants_json()
        try:
            for dropped, data in shown.parts():
                if dropped:
                    click.echo(f"({size(dropped)} of output are not kept any more)", err=True)
                if as_json:
                    collected += data
                else:
                    sys.stdout.buffer.write(data)
                    sys.stdout.buffer.flush()
        except KeyboardInterrupt:
            click.echo(
                f"\n{job} goes on. Follow it: sky logs {name} {job} -f; "
                f"end it: sky cancel {name} {job}",
                err=True,
            )
            if as_json:
                _print_document(look_at(pool, node, job), collected)
            return INTERRUPTED
    ended = shown.job
    assert ended is not None, "the output has ended"
    if as_json:
        _print_document(ended, collected)
    if not follow:
        return 0
    if ended.state != "done" and not as_json:
        click.echo(ending(ended), err=True)
    return exit_code(ended)


def _print_document(job: JobView, collected: bytearray) -> None:
    output.as_json(job_document(job) | {"output": collected.decode("utf-8", "replace")})


def job_document(job: JobView) -> dict[str, object]:
    """A job, for programs."""
    return {
        "id": job.id,
        "kind": job.kind,
        "state": job.state,
        "code": job.code,
        "began": datetime.fromtimestamp(job.began, UTC),
        "took": job.took,
        "command": job.command,
        "by": job.by,
        "folder": job.folder,
        "problem": job.problem,
    }


def exit_code(job: JobView) -> int:
    """The exit code of a job that has ended, as a shell tells it."""
    if job.code is None:
        return 0 if job.state == "done" else FAILED
    return job.code


def ending(job: JobView) -> str:
    """How a job has ended, in words."""
    failure = job.problem if job.kind == "call" else f"exit code {exit_code(job)}"
    reason = {
        "failed": f"failed with {failure}",
        "cancelled": "was cancelled",
        "lost": f"is lost: {job.problem}",
        "done": "is done",
        "running": "runs",
        "queued": "waits",
    }[job.state]
    return f"{job.id} {reason}, after {duration(job.took)}"
