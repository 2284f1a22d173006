"""A kept pool on SSH hosts: commands, files and jobs on it, through its own connections."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from click.testing import CliRunner

import skyward as sky
from skyward.cli.main import sky as command
from skyward.compute import reach
from skyward.compute.workbench.head_page import HeadPage

from .ssh_hosts import Sshd

INSIDE = """
import os, pathlib, skyward as sky

@sky.function
def where():
    return sky.instance_info().node

with sky.attach() as compute:
    found = where() @ compute
# The job has a record of its own, for it could not read that of the client's machine.
theirs = pathlib.Path(os.environ["SKYWARD_STATE"])
print(found, "from a job:", theirs.is_relative_to(os.environ["SKYWARD_JOB_FOLDER"]))
"""


def run(*args: str, code: int = 0) -> str:
    result = CliRunner().invoke(command, list(args))
    assert result.exit_code == code, (result.output, result.exception)
    return result.stdout


def first_pool(url: str) -> dict[str, Any]:
    """What the page tells first of the pool."""
    with urlopen(url.replace("/?", "/stream?"), timeout=200) as stream:
        lines = (line[6:] for line in stream if line.startswith(b"data: "))
        told = (message for line in lines for message in json.loads(line))
        found: dict[str, Any] = next(each for each in told if each["type"] == "pool")
        return found


def test_commands_files_and_jobs_on_ssh_hosts(
    sshd: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SKYWARD_STATE", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    Path("fit.py").write_text("print(open('rates.txt').read())")
    Path("rates.txt").write_text("0.1, 0.2")
    Path("inside.py").write_text(INSIDE)
    options = sky.Options(console=False)
    with sky.Compute(sshd.provider(), nodes=2, name="gpus", keep=True, options=options):
        pass
    try:
        told = json.loads(run("exec", "gpus", "--all", "--json", "--", "sh", "-c", "echo $PWD"))
        folders = [each["stdout"].strip() for each in told]
        assert len(set(folders)) == 2
        run("cp", "rates.txt", "gpus:")
        assert run("run", "fit.py", "--on", "gpus") == "0.1, 0.2\n"
        assert run("logs", "gpus", "fit") == "0.1, 0.2\n"
        assert run("run", "inside.py", "--on", "gpus") == "[0, 1] from a job: True\n"
        run("cp", "gpus/0:rates.txt", "back.txt")
        assert Path("back.txt").read_text() == "0.1, 0.2"
        with reach("gpus") as pool, HeadPage(pool) as page:
            # The head reaches the other node without the provider, and nobody is a client now.
            shown = first_pool(page.url)
        assert [row[1] for row in shown["nodes"]] == ["ready", "ready"]
        assert sorted(call[2] for call in shown["ended"] if call[1] == "where") == [0, 1]
        assert [job["id"] for job in shown["jobs"]] == ["fit-1", "inside-2"]
    finally:
        sky.attach("gpus").down(force=True)
