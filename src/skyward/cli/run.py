"""`sky run`: run a script here with a pool ready, or on a pool that stays."""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import click

from skyward.cli import output
from skyward.cli.commands import FAILED, INTERRUPTED, Command
from skyward.cli.following import follow_job, job_document
from skyward.cli.names import accelerators, kept_pools, providers
from skyward.cli.reached import chosen_node, reached
from skyward.cli.up import made_provider


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
    from skyward.nodes.inside import way_back

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
