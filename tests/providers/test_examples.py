"""The examples that need other machines, run as a user would run them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from ..conftest import only_in_all
from . import podman
from .ssh_hosts import Sshd
from .torch_index import torch_index

EXAMPLES = Path(__file__).parents[2] / "examples"


@only_in_all
@pytest.mark.slow
@pytest.mark.usefixtures("engine")
def test_a_model_is_trained_in_a_container_that_had_nothing() -> None:
    """Slow: installs PyTorch in a new container, some 30 s."""
    index = torch_index()
    mounts = [f"{each.source}:{each.target}" for each in podman.mounts()]
    if index.startswith("file:"):
        mounts.append(unquote(urlsplit(index).path))
    shown = output_of(
        "container_roundtrip.py",
        SKYWARD_CONTAINER_IMAGE=podman.IMAGE,
        SKYWARD_CONTAINER_MOUNTS=",".join(mounts),
        SKYWARD_TORCH_INDEX=index,
        SKYWARD_EXAMPLE_QUICK="1",
    )

    assert re.search(r"Model: 235,146 parameters", shown)
    assert re.search(r"node 0: installing packages", shown)
    assert re.search(r"\[node 0\] epoch +1/4: loss=", shown)
    assert re.search(r"Round trip: \d+\.\d% -> (8[89]|9\d)\.\d% \(MNISTClassifier\)", shown)


@only_in_all
@pytest.mark.slow
def test_a_model_is_trained_on_two_ssh_hosts(sshd: Sshd) -> None:
    """Slow the first time: installs PyTorch on the hosts, which keep it."""
    shown = output_of(
        "ssh_ddp.py",
        SKY_SSH_HOSTS=",".join(sshd.hosts),
        SKY_SSH_PORT=str(sshd.port),
        SKY_SSH_USER=sshd.user,
        SKY_SSH_KEY=sshd.key,
        SKY_SSH_KNOWN_HOSTS=sshd.known_hosts,
        SKYWARD_TORCH_INDEX=torch_index(),
    )

    assert re.search(r"\[node 0\] epoch 10/10: loss=0\.", shown)
    assert "rank 0 on 127.0.0.1: 674 digits an epoch\nrank 1 on 127.0.0.2: 673 digits" in shown
    assert re.search(r"Held-out accuracy: 9\d\.\d%, the same weights on both hosts", shown)
    assert "NumPy" not in shown


@only_in_all
def test_without_hosts_the_example_says_how_to_name_them() -> None:
    done = run("ssh_ddp.py", SKY_SSH_HOSTS="")

    assert done.returncode == 1
    assert done.stderr == "name two hosts: python examples/ssh_ddp.py me@gpu1 me@gpu2\n"


def run(name: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLES / name)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=280,
    )


def output_of(name: str, **environment: str) -> str:
    done = run(name, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr
