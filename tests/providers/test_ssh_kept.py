"""A pool on SSH hosts that stays: another process attaches to it, and `sky down` ends it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import skyward as sky
from skyward.cli.main import sky as command
from skyward.compute import reach
from skyward.nodes import records

from .ssh_hosts import Sshd

SCRIPT = """
import os
import skyward as sky

@sky.function
def pid():
    return os.getpid()

with sky.attach("far") as compute:
    print(*(pid() @ compute))
"""


@sky.function
def pid() -> int:
    return os.getpid()


@pytest.mark.slow
def test_another_process_attaches_over_ssh(
    sshd: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slow: the hosts get Skyward first."""
    monkeypatch.setenv("SKYWARD_STATE", str(tmp_path))
    options = sky.Options(console=False)
    with sky.Compute(sshd.provider(), nodes=2, name="far", keep=True, options=options) as compute:
        before = pid() @ compute
    found = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=False
    )
    assert found.stdout.split() == [str(each) for each in before], found.stderr
    with reach("far") as pool, pool.service(1, "about") as about:
        assert about.ask("facts")["node"] == 1
    result = CliRunner().invoke(command, ["down", "far"])
    assert result.exit_code == 0, result.output
    assert "2 machines removed" in result.output
    assert records.names() == []
