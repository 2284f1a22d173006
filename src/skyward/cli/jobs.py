"""`sky jobs`: the jobs of a pool."""

from __future__ import annotations

import shlex
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from skyward.cli import output
from skyward.cli.commands import Command
from skyward.cli.following import exit_code, job_document
from skyward.cli.names import kept_pools
from skyward.cli.reached import chosen_node, reached
from skyward.console.measures import duration

if TYPE_CHECKING:
    from skyward.worker.kept_jobs import JobView


HEADS = ("job", "state", "code", "began", "took", "by", "command")


@click.command(cls=Command)
@click.argument("name", shell_complete=kept_pools)
def jobs(name: str) -> None:
    """List the jobs of the pool NAME, in the order of their start.

    A job is a script that `sky run SCRIPT --on NAME` has started, or a call that a client has
    submitted with a name. Scripts that have ended are kept until the pool ends or is stopped,
    the last 50 of them; calls so long, too, or until they are forgotten.
    """
    show_jobs(name)


def show_jobs(name: str) -> None:
    """Print the jobs of a pool."""
    from skyward.compute.workbench.jobs import jobs_of

    with reached(name) as pool:
        found = jobs_of(pool, chosen_node(pool, None))
    if output.wants_json():
        output.as_json([job_document(each) for each in found])
        return
    if not found:
        click.echo(f"{name} has no jobs")
        return
    output.table(HEADS, [job_row(each) for each in found], right=("code", "took"))


def job_row(job: JobView) -> tuple[object, ...]:
    """A job as a row of a table."""
    began = output.moment(datetime.fromtimestamp(job.began, UTC))
    code = "" if job.code is None else exit_code(job)
    script, *arguments = job.command[1:] or job.command
    command = shlex.join([script.rpartition("/")[2], *arguments])
    return job.id, job.state, code, began, duration(job.took), job.by, command
