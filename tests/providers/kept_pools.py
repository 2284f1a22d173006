"""What a kept pool does on every provider: others use it, and nothing of it is left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from click.testing import CliRunner

import skyward as sky
from skyward.cli.main import sky as command
from skyward.nodes import records
from skyward.nodes.records import Journal
from skyward.providers import Provider

QUIET = sky.Options(console=False)
_SCRIPT = """
import os
import sys
import skyward as sky

@sky.function
def pid():
    return os.getpid()

with sky.attach(sys.argv[1]) as compute:
    compute.keep("answer", {"of": sys.argv[1], "tensors": 0})
    print(*(pid() @ compute))
"""


@sky.function
def pid() -> int:
    return os.getpid()


@sky.function
def marked(path: str, text: str = "") -> str:
    """What the file of a machine says; writes it if a text is given."""
    if text:
        with open(path, "w") as file:
            file.write(text)
    with open(path) as file:
        return file.read()


def start(provider: Provider, name: str, nodes: int = 1, **more: Any) -> list[int]:
    """Start a kept pool, and leave it; gives the processes of its workers."""
    with sky.Compute(
        provider, nodes=nodes, name=name, **{"keep": True, "options": QUIET, **more}
    ) as compute:
        return list(pid() @ compute)


def use_elsewhere(name: str, workers: list[int]) -> None:
    """Use the pool from another process, and find here what that one has kept."""
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, name],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.split() == [str(each) for each in workers], done.stderr
    with sky.attach(name) as compute:
        assert compute.kept("answer") == {"of": name, "tensors": 0}
        assert list(pid() @ compute) == workers


def says(*words: str, code: int = 0) -> str:
    """What a command of `sky` says."""
    done = CliRunner().invoke(command, list(words))
    assert done.exit_code == code, done.output
    return done.output


def shown(name: str) -> Any:
    """What `sky ps` says of the pool."""
    told = json.loads(CliRunner().invoke(command, ["ps", "--json"]).stdout)
    return next(each for each in told if each["name"] == name)


def end(name: str, machines: int = 1) -> None:
    """End the pool with `sky down`, after which nothing of it is on record."""
    plural = "s" * (machines > 1)
    assert f"{machines} machine{plural} removed" in says("down", name)
    assert records.names() == []
    assert Journal().pools() == []
