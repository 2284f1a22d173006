"""`sky models`: the model store, from the command line."""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from skyward.cli import output
from skyward.cli.commands import Command, CommandGroup, ignore_interrupts, remembered, shared
from skyward.console.measures import size
from skyward.errors import (
    ModelNotFoundError,
    StoreDamagedError,
    StoreError,
)

if TYPE_CHECKING:
    from skyward.store.models import ModelStore, ModelVersion

_PICKLED = (".pt", ".pth", ".bin")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def _store_options() -> list[click.Parameter]:
    return [
        shared(
            "--store",
            metavar="URL",
            help="Where the models are: a folder, s3://, https:// ... [SKYWARD_STORE]",
        ),
        shared("--token", help="The token of a store at http(s)://. [SKYWARD_STORE_TOKEN]"),
    ]


class _StoreCommand(Command):
    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.params[-2:-2] = _store_options()


class _Models(CommandGroup):
    command_class = _StoreCommand

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.params[-2:-2] = _store_options()


def _open_store() -> ModelStore:
    url = remembered("store") or os.environ.get("SKYWARD_STORE")
    if not url:
        raise click.UsageError(
            "no store is given; pass --store URL, or set SKYWARD_STORE, "
            "to a folder or an address such as s3://bucket/models"
        )
    token = remembered("token")
    if token is None and url.startswith(("http://", "https://")):
        token = os.environ.get("SKYWARD_STORE_TOKEN") or None
    from skyward.store.models import ModelStore

    return ModelStore(url, token)


def _seconds(context: click.Context, option: click.Parameter, value: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", value)
    if match is None:
        raise click.BadParameter(f"{value!r} is no duration; write 90s, 30m, 24h or 7d")
    return float(match[1]) * _UNITS[match[2] or "s"]


def _name(context: click.Context, option: click.Parameter, value: str | None) -> str | None:
    from skyward.store.catalog import name_problem

    problem = None if value is None else name_problem(value)
    if problem is not None:
        raise click.BadParameter(problem)
    return value


def _metadata(
    context: click.Context, option: click.Parameter, values: tuple[str, ...]
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for text in values:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise click.BadParameter(f"{text!r} is no KEY=VALUE; write -m accuracy=0.99")
        found[key] = _value(value)
    return found


def _value(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_no_json)
    except (ValueError, RecursionError):
        return text


def _no_json(constant: str) -> None:
    raise ValueError(constant)


_version_option: Callable[[Any], Any] = click.option(
    "--version", type=click.IntRange(min=1), metavar="N", help="This version, not the newest."
)


@click.command("models", cls=_Models)
def models() -> None:
    """Keep models by name and version.

    A version appears whole or not at all, takes space only for the tensors that changed, and is
    verified when it is read. Nothing is ever unpickled.
    """


@models.command()
@click.argument("file", type=click.Path(exists=True, path_type=Path))
@click.argument("name", callback=_name)
@click.option(
    "-m",
    "--metadata",
    multiple=True,
    metavar="KEY=VALUE",
    callback=_metadata,
    help="Stored with the version; a value that is JSON is stored as JSON. Can be repeated.",
)
def push(file: Path, name: str, metadata: dict[str, Any]) -> None:
    """Store FILE as the next version of NAME.

    FILE is a .safetensors file, a file of torch.save (.pt, .pth, .bin; weights and plain values
    only), or a folder with a checkpoint in several safetensors files and their index.
    """
    if not file.is_dir() and file.suffix not in (".safetensors", *_PICKLED):
        raise click.BadParameter(
            f"'{file}' ends in neither .safetensors nor {', '.join(_PICKLED)}", param_hint="'FILE'"
        )
    version = _open_store().import_file(file, name, metadata)
    ignore_interrupts()
    if output.wants_json():
        output.as_json(asdict(version))
        return
    new = f"{size(version.added)} new" if version.added else "nothing new to store"
    click.echo(f"{name} version {version.version}: {_extent(version)}, {new}")


@models.command()
@click.argument("name", callback=_name)
@click.option(
    "-o",
    "--output",
    "target",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="The file to write, .safetensors or .pt; if not given, the last part of NAME with "
    ".safetensors.",
)
@_version_option
@click.option("--force", is_flag=True, help="Overwrite the file.")
def pull(name: str, target: Path | None, version: int | None, force: bool) -> None:
    """Write the newest version of NAME to a file.

    The file appears when it is complete. A .safetensors file has one of several tied weights, as
    safetensors.torch.load_model expects; a .pt file keeps them tied.
    """
    file = target or Path(f"{name.rpartition('/')[2]}.safetensors")
    if file.suffix not in (".safetensors", *_PICKLED):
        raise click.BadParameter(
            f"'{file}' ends in neither .safetensors nor {', '.join(_PICKLED)}", param_hint="'-o'"
        )
    if file.exists() and not force:
        raise StoreError(f"{file} is there already; pass --force to overwrite it, or another -o")
    found = _open_store().export_file(name, file, version)
    ignore_interrupts()
    if output.wants_json():
        written = {"path": str(file), "bytes": file.stat().st_size}
        output.as_json({"name": name, "version": found.version, **written})
        return
    click.echo(f"{file}: {name} version {found.version}, {_extent(found)}")


@models.command("ls")
@click.argument("name", required=False, callback=_name)
def list_models(name: str | None) -> None:
    """List the newest version of every model, or every version of NAME."""
    store = _open_store()
    found, damaged = _readable(store, name)
    if output.wants_json():
        output.as_json([asdict(version) for version in found])
        _report(damaged)
        return
    if not found and not damaged:
        click.echo(f"no models yet in {_place(store)}", err=True)
        return
    rows = [
        (
            version.name,
            version.version,
            output.moment(version.created),
            size(version.size),
            size(version.added),
            version.tensors,
            _pairs(version.metadata),
        )
        for version in found
    ]
    heads = ("name", "version", "created", "size", "new", "tensors", "metadata")
    if rows:
        output.table(heads, rows, right=("version", "size", "new", "tensors"))
    _report(damaged)


def _place(store: ModelStore) -> str:
    return f"{store.url}, which does not exist" if store.absent else store.url


def _readable(
    store: ModelStore, name: str | None
) -> tuple[list[ModelVersion], list[StoreDamagedError]]:
    """The versions to list, and the errors of those that cannot be read."""
    try:
        return list(store.list() if name is None else store.versions(name)), []
    except StoreDamagedError:
        wanted = store.numbers(name)
    found: list[ModelVersion] = []
    damaged: list[StoreDamagedError] = []
    for owner, numbers in wanted.items():
        for number in numbers[-1:] if name is None else numbers:
            try:
                found.append(store.describe(owner, number)[0])
            except StoreDamagedError as problem:
                damaged.append(problem)
            except ModelNotFoundError:  # deleted meanwhile
                continue
    return found, damaged


def _report(damaged: list[StoreDamagedError]) -> None:
    """Report the versions that could not be read, and fail."""
    if damaged:
        raise StoreDamagedError("\n".join(map(str, damaged)))


@models.command()
@click.argument("name", callback=_name)
@_version_option
@click.option("--tensors", is_flag=True, help="List the tensors, with dtype, shape and size.")
def show(name: str, version: int | None, tensors: bool) -> None:
    """Show the description of the newest version of NAME."""
    found, contents = _open_store().describe(name, version)
    if output.wants_json():
        listed = {"contents": [asdict(tensor) for tensor in contents]} if tensors else {}
        output.as_json(asdict(found) | listed)
        return
    click.echo(f"{found.name} version {found.version}")
    facts = {
        "created": output.moment(found.created),
        "size": _extent(found),
        "new": size(found.added),
        "class": found.class_path or "",
        "saved by": f"skyward {found.skyward}, torch {found.torch}",
        "metadata": _pairs(found.metadata),
    }
    for what, value in facts.items():
        if value:
            click.echo(f"  {what:9} {output.clean(value)}")
    if tensors:
        click.echo()
        rows = [
            (tensor.name, tensor.dtype, "x".join(map(str, tensor.shape)) or "-", size(tensor.size))
            for tensor in contents
        ]
        output.table(("tensor", "dtype", "shape", "size"), rows, right=("size",))


@models.command()
@click.argument("name", callback=_name)
@click.option("--version", type=click.IntRange(min=1), metavar="N", help="Only this version.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
def rm(name: str, version: int | None, yes: bool) -> None:
    """Delete NAME, or one version of it.

    gc then frees the bytes that no other version needs.
    """
    store = _open_store()
    # By number alone, so that a damaged version can be deleted, too.
    numbers = store.numbers(name).get(name, [])
    if version is None and numbers:
        count = len(numbers)
        what = f"{name}, {'its one version' if count == 1 else f'all {count} versions'}"
    elif version in numbers:
        what = f"{name} version {version}"
        numbers = [version]
    else:
        store.describe(name, version)  # raises, and lists the versions that exist
        raise StoreError(f"{name} was saved this moment; call again to delete it")
    if not yes:
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise click.UsageError(f"there is no terminal to ask on; pass --yes to delete {what}")
        if not click.confirm(f"Delete {what}?", err=True):
            raise StoreError("nothing was deleted")
    store.delete(name, version)
    ignore_interrupts()
    if output.wants_json():
        output.as_json({"name": name, "deleted": numbers})
        return
    click.echo(f"deleted {what}")


@models.command()
@click.option(
    "--older-than",
    metavar="DURATION",
    callback=_seconds,
    default="24h",
    show_default=True,
    help="Leave younger files alone; go below a day only while nobody pushes.",
)
def gc(older_than: float) -> None:
    """Remove the bytes that no version needs any more."""
    store = _open_store()
    freed = store.gc(older_than)
    if store.absent:
        click.echo(f"no models yet in {_place(store)}", err=True)
    if output.wants_json():
        output.as_json({"freed": freed})
        return
    click.echo(f"freed {size(freed)}")


def _existing_folder(context: click.Context, option: click.Parameter, value: Path) -> Path:
    if not value.is_dir():
        raise click.BadParameter(f"'{value}' does not exist; create it, or correct the path")
    return value


@models.command(cls=Command)
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
    server = importlib.import_module("skyward.store.server")
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


def _extent(version: ModelVersion) -> str:
    count = version.tensors
    return f"{size(version.size)} in {count} tensor{'s' if count != 1 else ''}"


def _pairs(metadata: Any) -> str:
    return ", ".join(
        f"{key}={value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}"
        for key, value in metadata.items()
    )
