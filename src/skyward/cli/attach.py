"""`sky attach`: how to use a pool that stays, and its record for another machine."""

from __future__ import annotations

import os
from pathlib import Path

import click

from skyward.cli import names, output
from skyward.cli.commands import Command


@click.command(cls=Command)
@click.argument("name", required=False, shell_complete=names.kept_pools)
@click.option(
    "--export",
    "target",
    metavar="FILE",
    help="Write the pool's record, and the keys that Skyward made for it, to a file.",
)
@click.option("--import", "source", metavar="FILE", help="Read a record that was exported.")
def attach(name: str | None, target: str | None, source: str | None) -> None:
    """Check that the pool NAME can be used from here, and say who uses it.

    --export and --import move its record to another machine of yours. The record is a key: whoever
    has it can run anything on the pool.
    """
    if source is not None:
        if target is not None:
            raise click.UsageError("give --export or --import, not both")
        _import(Path(source), name)
        return
    if name is None:
        raise click.UsageError("give the name of a pool, or --import FILE")
    from skyward.nodes import keeping

    record = keeping.read(name)
    if target is not None:
        from skyward.nodes.reaching import exported

        _export(exported(record), Path(target))
        return
    from skyward.nodes.occupancy import occupancy

    now = occupancy(record)
    if output.wants_json():
        output.as_json({"name": name, "state": now.state, "clients": list(now.clients)})
        return
    click.echo(f"{name}: {now.state}; in Python: sky.attach({name!r})")


def _export(data: bytes, path: Path) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(data)
    if output.wants_json():
        output.as_json({"file": str(path)})
    else:
        click.echo(f"{path}: a key to the pool; give it to nobody, and delete it after --import")


def _import(path: Path, name: str | None) -> None:
    from skyward.nodes.reaching import imported

    record = imported(path.read_bytes(), str(path), name)
    if output.wants_json():
        output.as_json({"name": record.name})
    else:
        click.echo(f"{record.name}: sky.attach({record.name!r}) uses it from here, too")
