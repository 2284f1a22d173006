"""`sky` itself: what it imports, how it fails, and what its exit codes are."""

from __future__ import annotations

import importlib
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest

import skyward as sky
from skyward import checks
from skyward.cli import main as entry
from skyward.cli.commands import OPTIONS

from ..conftest import PATIENCE

HEAVY = ("torch", "numpy", "rich", "fsspec", "asyncio", "msgspec", "cryptography", "psutil")


@pytest.mark.parametrize(
    ("args", "more"),
    [(["--help"], ("skyward.cli.models",)), (["models", "--help"], ("skyward.store.models",))],
)
def test_help_imports_nothing_heavy(args: list[str], more: tuple[str, ...]) -> None:
    code = (
        "import atexit, sys\n"
        "from skyward.cli.main import main\n"
        "atexit.register(lambda: print('imported', *sys.modules))\n"
        f"sys.argv = ['sky', *{args!r}]\n"
        "main()"
    )

    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE
    )

    help_text, _, modules = done.stdout.partition("imported ")
    assert done.returncode == 0, done.stderr
    assert "Commands:" in help_text
    assert set(modules.split()).isdisjoint((*HEAVY, *more))


@pytest.mark.parametrize("name", entry.COMMANDS)
def test_every_command_listed_is_there(name: str) -> None:
    assert isinstance(entry.sky.get_command(click.Context(entry.sky), name), click.Command)


def test_the_installed_script_calls_the_entry_point() -> None:
    project = tomllib.loads((Path(sky.__file__).parents[2] / "pyproject.toml").read_text())

    module, _, function = project["project"]["scripts"]["sky"].partition(":")

    assert getattr(importlib.import_module(module), function) is entry.main


def test_the_version_is_printed(run) -> None:
    assert run("--version").stdout == f"skyward {sky.__version__}\n"


def test_an_unknown_command_is_wrong_usage(run) -> None:
    told = run("modles", code=2).stderr
    assert "Error: no command 'modles'; did you mean `models`? there are: ps, down, up" in told
    assert "no command 'x'; there are: gc, ls" in run("models", "x", code=2).stderr


def test_a_failure_is_one_line_on_stderr(run, store: sky.ModelStore) -> None:
    result = run("models", "show", "mnist", code=1)

    assert result.stdout == ""
    assert result.stderr.startswith("Error: ")
    assert f"no model 'mnist' in {store.url}, which does not exist; check" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("where", [0, 1, 4])
def test_debug_shows_the_traceback_wherever_it_stands(
    run, store: sky.ModelStore, where: int
) -> None:
    args = ["models", "show", "mnist"]
    args.insert(where, "--debug")

    result = run(*args, code=1)

    assert "Traceback (most recent call last)" in result.stderr
    assert "ModelNotFoundError" in result.stderr


def test_debug_can_come_from_the_environment(run, store: sky.ModelStore) -> None:
    result = run("models", "show", "mnist", code=1, env={"SKYWARD_DEBUG": "1"})

    assert "Traceback (most recent call last)" in result.stderr


def test_an_error_of_the_operating_system_is_told_without_a_traceback(
    run, store: sky.ModelStore
) -> None:
    name = f"{'x' * 300}.pt"

    assert run("models", "pull", "m", "-o", name, code=1).stderr == (
        f"Error: {name}: File name too long\n"
    )


def test_a_defect_of_ours_keeps_its_traceback(store: sky.ModelStore) -> None:
    code = (
        "import skyward.store.models as models\n"
        "models.ModelStore.list = lambda self: 1 / 0\n"
        "import sys; sys.argv = ['sky', 'models', 'ls']\n"
        "from skyward.cli.main import main; main()"
    )

    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE
    )

    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr


def test_exit_codes_are_what_the_shell_sees(start, store: sky.ModelStore) -> None:
    for args, code in ((["ls"], 0), (["show", "mnist"], 1), (["show"], 2)):
        process = start("models", *args)
        process.communicate(timeout=PATIENCE)
        assert process.returncode == code, args


def test_a_reader_that_leaves_early_is_no_error_message(start, store: sky.ModelStore) -> None:
    store.save_model({"x": 1}, "m", metadata={"x": "y" * 200_000})

    process = start("models", "show", "m", "--json")
    process.stdout.close()

    assert process.stderr.read() == b""
    assert process.wait(PATIENCE) == 141


def test_the_librarys_messages_name_options_on_the_command_line_only() -> None:
    def named() -> list[str]:
        return [
            checks.argument("token"),
            checks.argument("host", "::"),
            checks.argument("insecure", True),
            checks.argument("gc", python="gc()"),
            checks.argument("other", 1),
        ]

    in_python = ["token=...", "host='::'", "insecure=True", "gc()", "other=1"]
    assert named() == in_python
    with checks.naming_options(OPTIONS):
        assert named() == ["--token", "--host ::", "--insecure", "`sky models gc`", "other=1"]
    assert named() == in_python
