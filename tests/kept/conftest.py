"""Kept pools: each test module has a state folder of its own, and leaves no agent behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import skyward as sky
from skyward.nodes import records
from skyward.worker import detached

from ..conftest import PATIENCE, other_case

QUIET = sky.Options(console=False)
HASTY = sky.Options(console=False, orphan_timeout=5)
"""For pools on which clients are killed; on a busy machine, those that live may be silent, too."""

Script = Callable[[str], subprocess.Popen[str]]
"""Starts a script in another process; it has `sky` imported."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The state folder, and the folder in which agents that stay have theirs."""
    tmp_path_factory.getbasetemp()  # chosen now, before it would be below a folder of this fixture
    folder = Path(tempfile.mkdtemp(prefix="skyk-", dir="/tmp"))
    changed = {"SKYWARD_STATE": str(folder / "state"), "TMPDIR": str(folder)}
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    tempfile.tempdir = str(folder)
    yield folder
    tempfile.tempdir = None
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value
    left = [each for each in folder.glob("sky-*") if detached.running(each)]
    for each in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(detached.running(each), 15)
    shutil.rmtree(folder, ignore_errors=True)
    assert not left, "agents were left behind"


@pytest.fixture(scope="module")
def script(home: Path) -> Iterator[Script]:
    """Start a script in another process."""
    started = []

    def start(text: str) -> subprocess.Popen[str]:
        program = "import os, sys\nimport skyward as sky\n" + textwrap.dedent(text)
        process = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # A client that is killed leaves a socket there.
            env={**os.environ, "XDG_RUNTIME_DIR": str(home)},
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:  # after a test that failed
            process.kill()
            process.communicate()


def said(process: subprocess.Popen[str]) -> str:
    """What a script printed, after its end."""
    out, problems = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, problems
    return out.strip()


@pytest.fixture(scope="module", params=["unix", pytest.param("tcp", marks=other_case)])
def kept(request: pytest.FixtureRequest, home: Path) -> Iterator[str]:
    """The name of a pool of two nodes that stays; once with Unix sockets, once with TLS."""
    name = f"kept-{os.getpid()}-{request.param}"  # `sky stacks` finds those of all processes
    with sky.Compute(
        sky.Local(transport=request.param), nodes=2, name=name, keep=True, options=HASTY
    ):
        pass
    yield name
    sky.attach(name).down(force=True)
    assert name not in records.names()
