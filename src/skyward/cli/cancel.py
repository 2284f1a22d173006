"""`sky cancel`: end a job of a pool."""

from __future__ import annotations

import click

from skyward.cli import output
from skyward.cli.commands import Command
from skyward.cli.following import job_document
from skyward.cli.names import kept_pools
from skyward.cli.reached import chosen_node, reached


@click.command(cls=Command)
@click.argument("name", shell_complete=kept_pools)
@click.argument("job")
def cancel(name: str, job: str) -> None:
    """End the job JOB of the pool NAME: its id or its name, as `sky jobs` lists them.

    A script is interrupted as by Ctrl-C; what is left of it 10 s later is killed. A call that was
    submitted with a name is cancelled.
    """
    from skyward.compute.workbench.jobs import cancel as cancel_job

    with reached(name) as pool:
        found = cancel_job(pool, chosen_node(pool, None), job)
    if output.wants_json():
        output.as_json(job_document(found))
    elif found.state in ("queued", "running"):
        click.echo(f"{found.id}: interrupted")
    else:
        click.echo(f"{found.id}: has ended already ({found.state})")
