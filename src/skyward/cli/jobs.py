"""`sky run`, `jobs`, `logs` and `cancel`: scripts here or as jobs of a pool, and their output."""

from __future__ import annotations

import contextlib
import os
import runpy
import shlex
import sys
import traceback
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import click

from skyward.cli import output
from skyward.cli.commands import FAILED, INTERRUPTED, Command
from skyward.cli.names import accelerators, kept_pools, providers
from skyward.cli.nodes import chosen_node, reached
from skyward.cli.pools import made_provider
from skyward.console.measures import duration, size

if TYPE_CHECKING:
    from skyward.compute.workbench import Reachable
    from skyward.nodes.kept import ReachedPool
    from skyward.worker.jobs import Job
    from skyward.worker.task_output import TaskLine


HEADS = ("job", "kind", "state", "code", "began", "took", "by", "command")
_BEFORE_COMMAND = {"daemon": 2, "page": 3}
"""How many words of a job's command, the interpreter with its options, nobody has written."""


@click.command(cls=Command)
@click.argument("name", shell_complete=kept_pools)
@click.option("--node", type=int, help="Those of this node; else those of the head.")
def jobs(name: str, node: int | None) -> None:
    """List the jobs of the pool NAME, in the order of their start.

    A job is a script that `sky run SCRIPT --on NAME` has started, a call that a client has
    submitted with a name, the page of `sky ui NAME`, or a command of a plugin, which has every
    node, with the daemons that it has started. Jobs that have ended are kept until the pool ends or
    is stopped, the last 50 of a kind; calls so long, too, or until they are forgotten.
    """
    from skyward.compute.workbench.jobs import jobs_of

    with reached(name) as pool:
        found = jobs_of(pool, chosen_node(pool, node))
    if output.wants_json():
        output.as_json([job_document(each) for each in found])
        return
    if not found:
        click.echo(f"{name} has no jobs")
        return
    output.table(HEADS, [job_row(each) for each in found], right=("code", "took"))


def job_row(job: Job) -> tuple[object, ...]:
    """A job as a row of a table."""
    began = output.moment(datetime.fromtimestamp(job.began, UTC))
    code = "" if job.code is None else exit_code(job)
    script, *arguments = job.command[_BEFORE_COMMAND.get(job.kind, 1) :] or job.command
    command = shlex.join([script.rpartition("/")[2], *arguments])
    if job.kind == "daemon":
        command = script
    return job.id, job.kind, job.state, code, began, duration(job.took), job.by, command


@click.command(cls=Command, context_settings={"ignore_unknown_options": True})
@click.argument("script", type=click.Path(dir_okay=False, path_type=Path))
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.option("--on", "name", metavar="NAME", shell_complete=kept_pools, help="On this pool.")
@click.option("--provider", shell_complete=providers, help="Make a pool there, such as aws.")
@click.option("--nodes", type=click.IntRange(1), help="Make a pool of so many nodes.")
@click.option("--accelerator", shell_complete=accelerators, help="With it, such as H100:8.")
@click.option("--job", metavar="JOB", help="With --on: the job's name; else that of the script.")
@click.option("--include", multiple=True, help="With --on: also send this file or folder.")
@click.option("--exclude", multiple=True, help="With --on: leave out what matches this pattern.")
@click.option("--detach", is_flag=True, help="With --on: return when the job has started.")
def run(
    script: Path,
    args: tuple[str, ...],
    name: str | None,
    provider: str | None,
    nodes: int | None,
    accelerator: str | None,
    job: str | None,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    detach: bool,
) -> None:
    """Run SCRIPT with ARGS; `fn(x) >> sky` in it uses the pool.

    Without --on, SCRIPT runs here with a new pool, which ends with it. With --on, SCRIPT goes to
    the head node of the pool NAME, with the modules and packages next to it, and is a job there:
    it goes on when this command ends. Write -- before arguments that are also options of sky run.
    """
    if not script.is_file():
        raise click.UsageError(f"there is no script {script}")
    if name is None:
        for option, value in (("job", job), ("include", include), ("exclude", exclude)):
            if value:
                raise click.UsageError(f"--{option} is for a script on a pool: give --on NAME")
        if detach:
            raise click.UsageError("--detach is for a script on a pool: give --on NAME")
        code = _run_here(script, args, provider, nodes, accelerator)
        click.get_current_context().exit(code)
    for option, given in (("provider", provider), ("nodes", nodes), ("accelerator", accelerator)):
        if given is not None:
            raise click.UsageError(f"--{option}: the pool {name} is there already, as it is")
    code = _run_there(script, args, name, job or "", include, exclude, detach)
    click.get_current_context().exit(code)


def _run_there(
    script: Path,
    args: tuple[str, ...],
    name: str,
    job: str,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    detach: bool,
) -> int:
    from skyward.compute.workbench.jobs import look_at, start_script
    from skyward.nodes.kept import way_back

    with reached(name) as pool:
        head = chosen_node(pool, None)
        environment, private = way_back(pool.record)
        started = start_script(
            pool,
            head,
            script,
            args,
            name=job,
            environment=environment,
            private=private,
            include=include,
            exclude=exclude,
        )
        if detach and output.wants_json():
            output.as_json(job_document(look_at(pool, head, started)))
            return 0
        click.echo(f"job {started} on {name}", err=True)
        if detach:
            click.echo(f"follow it: sky logs {name} {started} -f", err=True)
            return 0
        return follow_job(pool, head, name, started)


def _run_here(
    script: Path,
    args: tuple[str, ...],
    provider: str | None,
    nodes: int | None,
    accelerator: str | None,
) -> int:
    """Run the script as Python would, within a new pool; returns the exit code."""
    if output.wants_json():
        raise click.UsageError("--json: what the script prints is no document; leave it out")
    import skyward
    from skyward import accelerators as cards

    made: dict[str, Any] = {}
    if provider is not None:
        made["provider"] = made_provider(provider)
    if nodes is not None:
        made["nodes"] = nodes
    if accelerator is not None:
        made["accelerator"] = cards.parse(accelerator)
    # The pool is called after the script.
    with _as_main_program(script, args), skyward.Compute(**made):
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as end:
            return _exit_code(end.code)
        except KeyboardInterrupt:
            return INTERRUPTED
        except BaseException as problem:
            shown = _without_runpy(problem.__traceback__, script)
            traceback.print_exception(type(problem), problem, shown)
            return FAILED
    return 0


@contextlib.contextmanager
def _as_main_program(script: Path, args: tuple[str, ...]) -> Iterator[None]:
    """Let the script find its arguments, and the modules next to it."""
    arguments, path = sys.argv, list(sys.path)
    sys.argv = [str(script), *args]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = arguments, path


def _exit_code(code: object) -> int:
    """The exit code that Python has for the argument of `sys.exit`."""
    if code is None:
        return 0
    if isinstance(code, int):
        return code
    print(code, file=sys.stderr)
    return FAILED


def _without_runpy(trace: TracebackType | None, script: Path) -> TracebackType | None:
    """The traceback from the script's own first line on."""
    at = trace
    while at is not None and at.tb_frame.f_code.co_filename != str(script):
        at = at.tb_next
    return at or trace


@click.command(cls=Command)
@click.argument("name", shell_complete=kept_pools)
@click.argument("job", required=False)
@click.option("-f", "--follow", is_flag=True, help="Go on with what comes, until Ctrl-C.")
@click.option("--tail", type=click.IntRange(0), help="Begin with the last so many lines.")
@click.option("--node", "nodes", type=int, multiple=True, help="Only what this node has.")
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
        elif len(nodes) > 1:
            raise click.UsageError("--node: a job runs on one node; give one")
        else:
            node = chosen_node(pool, *nodes or (None,))
            code = follow_job(pool, node, name, job, tail=tail, follow=follow)
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


def _print_document(job: Job, collected: bytearray) -> None:
    output.as_json(job_document(job) | {"output": collected.decode("utf-8", "replace")})


def job_document(job: Job) -> dict[str, object]:
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


def exit_code(job: Job) -> int:
    """The exit code of a job that has ended, as a shell tells it."""
    if job.code is None:
        return 0 if job.state == "done" else FAILED
    return job.code


def ending(job: Job) -> str:
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
