"""The magics: `%%sky` runs a cell on a pool, `%sky` shows pools and runs the command line."""

from __future__ import annotations

import argparse
import linecache
import os
import re
import shlex
import subprocess
import sys
import uuid
from typing import Any, NoReturn

from skyward.compute import Compute, entered_computes
from skyward.errors import ConfigurationError, PoolClosedError
from skyward.functions import Function, active, current
from skyward.notebook.cell import CellResult, cell_call
from skyward.notebook.reader import read_cell, wanted_names

_USAGE = "%%sky [--on POOL] [--node NODE | --all] [-o NAMES] [--timeout SECONDS]"


def load_ipython_extension(shell: Any) -> None:
    """Register the magics; IPython calls this for `%load_ext skyward`."""
    magics = SkyMagics(shell)
    shell.register_magic_function(magics.cell, magic_kind="cell", magic_name="sky")
    shell.register_magic_function(magics.line, magic_kind="line", magic_name="sky")


def unload_ipython_extension(shell: Any) -> None:
    """Remove the magics."""
    for kind in ("cell", "line"):
        shell.magics_manager.magics[kind].pop("sky", None)


class _Options(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(f"%%sky: {message}; write {_USAGE}")


def _options() -> _Options:
    options = _Options(prog="%%sky", usage=_USAGE, add_help=False)
    options.add_argument("--on", metavar="POOL")
    place = options.add_mutually_exclusive_group()
    place.add_argument("--node", metavar="NODE")
    place.add_argument("--all", action="store_true")
    options.add_argument("-o", "--out", default="", metavar="NAMES")
    options.add_argument("--timeout", type=float, metavar="SECONDS")
    return options


class SkyMagics:
    """The magics of one shell."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell

    def cell(self, line: str, cell: str) -> None:
        """Run the cell on a pool: %%sky [--on POOL] [--node NODE | --all] [-o NAMES].

        The cell gets copies of what it reads from the notebook. What it assigns stays there, except
        the names of -o. With --all, each of these names becomes a list: a value for every worker.
        """
        __tracebackhide__ = True  # IPython leaves this frame out.
        options = _options().parse_args(shlex.split(line))
        wanted = wanted_names(options.out)
        compute = self._pool(options.on)
        file = f"In [{self._shell.execution_count}]"
        # The magic is the cell's first line.
        source = "\n" + cell
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        body = cell_call(read_cell(source, file, self._shell.user_ns), wanted, uuid.uuid4().hex)
        pending = Function(body, name=file, timeout=options.timeout)()
        try:
            if options.all:
                self._take_all(compute.broadcast(pending), wanted)
            else:
                self._take(compute.run(pending, on=_node(options.node)), wanted)
            return
        except Exception as raised:
            problem = raised
        _raise_in(file, problem)

    def line(self, line: str) -> None:
        """Show this notebook's pools, or run the command line: %sky [COMMAND ...]."""
        arguments = shlex.split(line)
        if arguments:
            _run_command(arguments)
            return
        pools = _open_pools()
        if not pools:
            print("no pool is open in this notebook; start one with sky.Compute().start()")
        for compute in pools:
            self._publish({"text/plain": repr(compute), "text/html": compute._repr_html_()})

    def _pool(self, name: str | None) -> Compute:
        pools = _open_pools()
        if name is None:
            found = current.get() or (active[-1] if active else None)
            if isinstance(found, Compute):
                return found
            raise PoolClosedError(
                "%%sky: no pool is open in this notebook; start one with "
                "compute = sky.Compute().start()"
            )
        found = self._shell.user_ns.get(name)
        if isinstance(found, Compute):
            return found
        for compute in pools:
            if compute.name == name:
                return compute
        names = ", ".join(compute.name for compute in pools) or "none"
        raise ConfigurationError(
            f"%%sky --on {name}: there is no such pool; give a variable that holds a sky.Compute, "
            f"or the name of an open pool ({names})"
        )

    def _take(self, result: CellResult, wanted: tuple[str, ...]) -> None:
        self._shell.push({name: result.values[name] for name in wanted})
        self._publish(result.shown)

    def _take_all(self, results: list[CellResult], wanted: tuple[str, ...]) -> None:
        self._shell.push({name: [each.values[name] for each in results] for name in wanted})
        for result in results:
            self._publish(result.shown)

    def _publish(self, bundle: dict[str, str]) -> None:
        if bundle:
            self._shell.display_pub.publish(bundle)


def _raise_in(file: str, problem: Exception) -> NoReturn:
    """Raise a failure as if the cell's own line had raised it here, which IPython then shows."""
    __tracebackhide__ = True
    failures = list(problem.exceptions) if isinstance(problem, ExceptionGroup) else [problem]
    notes = "\n".join(note for each in failures for note in getattr(each, "__notes__", ()))
    found = re.search(rf'File "{re.escape(file)}", line (\d+)', notes)
    line = int(found[1]) if found else 1
    problem.__traceback__ = None
    exec(compile("\n" * (line - 1) + "raise problem", file, "exec"), {"problem": problem})
    raise AssertionError("unreachable")


def _open_pools() -> list[Compute]:
    return sorted(entered_computes, key=lambda compute: compute.name)


def _node(given: str | None) -> Any:
    if given is None or given == "head":
        return given
    if not given.isdecimal():
        raise ConfigurationError(f"%%sky --node {given}: give a node's number, or head")
    return int(given)


def _run_command(arguments: list[str]) -> None:
    """Run the command line in a process of its own, and show its output."""
    # Another process: a command may end it, or wait for long, and an interrupt ends it alone.
    environment = {**os.environ, "COLUMNS": "100"}
    with subprocess.Popen(
        [sys.executable, "-m", "skyward", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                print(line, end="")
        except BaseException:
            process.terminate()
            raise
