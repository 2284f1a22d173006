"""`sky logs`: the output of a job, or of the tasks of a pool."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from skyward.cli import output
from skyward.cli.commands import INTERRUPTED, Command
from skyward.cli.following import follow_job
from skyward.cli.names import kept_pools
from skyward.cli.reached import chosen_node, reached

if TYPE_CHECKING:
    from skyward.nodes.reaching import ReachedPool
    from skyward.worker.task_output import TaskLine


@click.command(cls=Command)
@click.argument("name", shell_complete=kept_pools)
@click.argument("job", required=False)
@click.option("-f", "--follow", is_flag=True, help="Go on with what comes, until Ctrl-C.")
@click.option("--tail", type=click.IntRange(0), help="Begin with the last so many lines.")
@click.option("--node", "nodes", type=int, multiple=True, help="Only tasks of this node.")
def logs(
    name: str, job: str | None, follow: bool, tail: int | None, nodes: tuple[int, ...]
) -> None:
    """Show the output of JOB, or without one what tasks on the pool NAME have written.

    Of a job, the last 64 MiB are kept; of tasks, the last MiB of every executor, labelled by node.
    With -f, the exit code of a job that ends is this command's.
    """
    with reached(name) as pool:
        if job is None:
            chosen = [chosen_node(pool, each) for each in nodes] or sorted(pool.nodes)
            code = _show_tasks(pool, chosen, follow, tail)
        elif nodes:
            raise click.UsageError("--node: a job runs on the head node; leave it out")
        else:
            head = chosen_node(pool, None)
            code = follow_job(pool, head, name, job, tail=tail, follow=follow)
    click.get_current_context().exit(code)


def _show_tasks(pool: ReachedPool, nodes: list[int], follow: bool, tail: int | None) -> int:
    from skyward.compute.workbench.task_output import PoolOutput

    as_json = output.wants_json()
    if as_json and follow:
        raise click.UsageError("--json: what is followed has no end; leave out -f")
    found = []
    with PoolOutput(pool, nodes, tail=tail, follow=follow) as shown:
        try:
            for node, line in shown.lines():
                if as_json:
                    found.append(_document(node, line))
                else:
                    _write(node, line)
        except KeyboardInterrupt:
            return INTERRUPTED
    if as_json:
        output.as_json(found)
    return 0


def _document(node: int, line: TaskLine) -> dict[str, object]:
    return {
        "node": node,
        "worker": line.worker,
        "when": datetime.fromtimestamp(line.when, UTC),
        "stream": line.stream,
        "text": line.text,
    }


def _write(node: int, line: TaskLine) -> None:
    stream = sys.stderr if line.stream == "stderr" else sys.stdout
    label = f"node {node}, worker {line.worker}" if line.worker else f"node {node}"
    for each in line.text.splitlines():
        stream.write(f"[{label}] {each}\n")
    stream.flush()
