"""`sky models serve`: the model server, from the command line."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path

import click

from skyward.cli import output
from skyward.cli.commands import Command, remembered


def _existing_folder(context: click.Context, option: click.Parameter, value: Path) -> Path:
    if not value.is_dir():
        raise click.BadParameter(f"'{value}' does not exist; create it, or correct the path")
    return value


@click.command(cls=Command)
@click.argument(
    "directory", type=click.Path(file_okay=False, path_type=Path), callback=_existing_folder
)
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8470, show_default=True)
@click.option("--token", help="The token that clients must send. [SKYWARD_STORE_TOKEN]")
@click.option("--read-only", is_flag=True, help="Refuse every change.")
@click.option("--cert", type=click.Path(exists=True, dir_okay=False), help="The TLS certificate.")
@click.option("--key", type=click.Path(exists=True, dir_okay=False), help="The key of --cert.")
@click.option("--insecure", is_flag=True, help="Let a trusted network in without a token.")
def serve(
    directory: Path,
    host: str,
    port: int,
    token: str | None,
    read_only: bool,
    cert: str | None,
    key: str | None,
    insecure: bool,
) -> None:
    """Serve the store in DIRECTORY over HTTP, until interrupted."""
    if (cert is None) != (key is None):
        raise click.UsageError("TLS needs both --cert and --key")
    server = importlib.import_module("skyward.store.server.serving")
    token = token if token is not None else remembered("token")
    is_open = token is None and "SKYWARD_STORE_TOKEN" not in os.environ

    def started(url: str) -> None:
        if output.wants_json():
            # On one line, so that a program can read it while the server runs.
            about = {"directory": str(directory), "url": url, "read_only": read_only}
            click.echo(json.dumps(about))
        else:
            where = f" and on every address of this machine ({host or 'all'})"
            where = where if server.is_everywhere(host) else ""
            access = ", without a token" if is_open else ""
            click.echo(f"serving {directory} at {url}{where}{access}, until interrupted")
        sys.stdout.flush()

    server.serve(
        directory,
        host=host,
        port=port,
        token=token,
        read_only=read_only,
        certificate=cert,
        key=key,
        insecure=insecure,
        started=started,
    )
