"""A store with its address in the environment, and ways to call `sky`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import skyward as sky
from skyward.cli.main import sky as command

from ..conftest import PATIENCE

pytest.importorskip("torch")

Run = Callable[..., Result]
Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> sky.ModelStore:
    """An empty store that `SKYWARD_STORE` names, and a folder to work in."""
    monkeypatch.setenv("SKYWARD_STORE", str(tmp_path / "store"))
    for name in ("SKYWARD_STORE_TOKEN", "SKYWARD_DEBUG", "SKYWARD_PROGRESS"):
        monkeypatch.delenv(name, raising=False)
    # A relative one would not do for programs that are started in another folder.
    monkeypatch.setenv("PYTHONPATH", str(Path(sky.__file__).parents[1]))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return sky.ModelStore(tmp_path / "store")


@pytest.fixture
def run() -> Run:
    """Call `sky` in this process, and expect an exit code."""

    def call(*args: str, code: int = 0, **settings: Any) -> Result:
        result = CliRunner().invoke(command, list(args), **settings)
        unforeseen = result.exception and not isinstance(result.exception, SystemExit)
        assert not unforeseen, repr(result.exception)
        assert result.exit_code == code, result.output
        return result

    return call


@pytest.fixture
def run_json(run: Run) -> Callable[..., Any]:
    """Call `sky` with `--json`, and read all of stdout."""
    return lambda *args: json.loads(run(*args, "--json").stdout)


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a real `sky`, or a script of this folder, in a process that ends with the test."""
    started = []

    def begin(*args: str, script: str | None = None, **settings: Any) -> subprocess.Popen[bytes]:
        what = ["-m", "skyward"] if script is None else [str(Path(__file__).with_name(script))]
        environment = os.environ | {"TERM": "xterm", "COLUMNS": "100", "PYTHONFAULTHANDLER": "1"}
        environment |= settings.pop("env", {})
        streams = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
        }
        process = subprocess.Popen(
            [sys.executable, *what, *args], env=environment, **streams | settings
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        if process.poll() is None:
            # For the report of a test that failed: where the process was.
            process.send_signal(signal.SIGABRT)
        _, errors = process.communicate(timeout=PATIENCE)
        if errors:
            print(errors.decode(errors="replace"))
