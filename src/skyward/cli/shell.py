"""`sky shell`: a terminal on a node of a pool."""

from __future__ import annotations

import click

from skyward.cli import output
from skyward.cli.commands import Command
from skyward.cli.names import kept_pools
from skyward.cli.reached import chosen_node, reached


@click.command(cls=Command)
@click.argument("name", shell_complete=kept_pools)
@click.argument("node", type=int, required=False)
@click.option("--command", help="Run this on the terminal, in place of the user's shell.")
@click.option("--worker-env", is_flag=True, help="With the environment of the node's first worker.")
def shell(name: str, node: int | None, command: str | None, worker_env: bool) -> None:
    """Open a terminal on a node of the pool NAME: on NODE, or on the head.

    Every key goes to the node. The shell ends with `exit` or Ctrl-D, and its exit code is this
    command's. If the connection is lost, what runs in the shell ends.
    """
    if output.wants_json():
        raise click.UsageError("--json: a terminal has no document; use `sky exec --json`")
    from skyward.compute.workbench.terminal import open_terminal

    with reached(name) as pool:
        wanted = ["/bin/sh", "-c", command] if command else []
        code = open_terminal(pool, chosen_node(pool, node), wanted, like_worker=worker_env)
    click.get_current_context().exit(code)
