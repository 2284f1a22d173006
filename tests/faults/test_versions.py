"""Two ends that run different versions: refused at the handshake, with what to install."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import pytest

import skyward as sky
from skyward.providers import Machine, Order
from skyward.providers.local import LocalMachine
from skyward.wire.handshake import check_compatible, my_versions

MINOR = f"{sys.version_info.major}.{sys.version_info.minor}"


def test_the_same_versions_are_compatible_without_a_word() -> None:
    assert check_compatible(my_versions(), my_versions(), "node 0") == []


def test_versions_are_those_of_the_installed_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = {name: metadata.version(name) for name in ("cloudpickle", "numpy")}
    assert my_versions().items() >= installed.items()
    assert my_versions()["skyward"] == sky.__version__
    # The first of two on the path counts, as it does for `import`.
    (tmp_path / "numpy-7.1.dist-info").mkdir()
    (tmp_path / "numpy_more-8.1.dist-info").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert my_versions.__wrapped__()["numpy"] == "7.1"


def test_agents_and_executors_import_little_before_they_work() -> None:
    """Every node of every pool would wait for it."""
    heavy = {"asyncio", "psutil", "importlib.metadata", "numpy", "torch", "rich"}
    parts = "skyward.worker.agent, skyward.worker.executor"
    code = f"import sys, {parts}; print(*{heavy} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_another_patch_release_of_python_is_compatible() -> None:
    worker = {**my_versions(), "python": f"{MINOR}.99"}
    assert check_compatible(my_versions(), worker, "node 0") == []


def test_another_minor_version_of_python_is_refused_with_both_versions_and_two_ways_out() -> None:
    worker = {**my_versions(), "python": "3.99.1"}
    with pytest.raises(sky.errors.VersionMismatchError) as caught:
        check_compatible(my_versions(), worker, "node 3")
    message = str(caught.value)
    assert "node 3 runs Python 3.99.1" in message
    assert f"this end Python {MINOR}" in message
    assert f"sky.Image(python='{MINOR}')" in message
    assert "run this script with Python 3.99" in message
    assert isinstance(caught.value, sky.errors.PoolStartError)


def test_another_protocol_is_refused_before_anything_else() -> None:
    worker = {**my_versions(), "python": "3.99.1", "protocol": "999", "skyward": "9.0"}
    with pytest.raises(sky.errors.VersionMismatchError) as caught:
        check_compatible(my_versions(), worker, "node 0")
    assert "node 0 speaks protocol 999 (skyward 9.0)" in str(caught.value)
    assert "install the same skyward on both" in str(caught.value)


def test_another_major_version_of_cloudpickle_is_refused() -> None:
    worker = {**my_versions(), "cloudpickle": "99.0"}
    with pytest.raises(
        sky.errors.VersionMismatchError, match=r"node 0 has cloudpickle 99\.0.*same major"
    ):
        check_compatible(my_versions(), worker, "node 0")


def test_another_major_version_of_numpy_is_a_warning() -> None:
    mine = {**my_versions(), "numpy": "2.0"}
    (warning,) = check_compatible(mine, {**mine, "numpy": "1.26"}, "node 0")
    assert "node 0 has numpy 1.26, this end 2.0" in warning


def test_an_end_that_says_nothing_of_its_versions_is_refused() -> None:
    with pytest.raises(sky.errors.VersionMismatchError):
        check_compatible(my_versions(), {}, "node 0")


AGENT = """
import skyward.worker.agent as agent
mine = agent.my_versions()
agent.my_versions = lambda: {**mine, "python": "3.99.0"}
agent.main()
"""


@dataclass(frozen=True)
class Future(sky.Local):
    """A provider of nodes whose agents say that they run another Python; the first may be sound."""

    python: str = ""
    healthy: bool = False
    machines: list[Machine] = field(default_factory=list, compare=False)

    async def create(self, order: Order) -> LocalMachine:
        """Make a machine with a Python that is not what it seems."""
        machine = await super().create(order)
        if order.node or not self.healthy:
            machine.python = self.python
        self.machines.append(machine)
        return machine


@pytest.mark.parametrize("healthy", [False, True], ids=["alone", "beside-a-healthy-node"])
def test_a_pool_does_not_start_on_another_python_and_takes_everything_down(
    healthy: bool, tmp_path: Path
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nexec '{sys.executable}' -P -c '{AGENT}'\n")
    python.chmod(0o755)
    provider = Future(python=str(python), healthy=healthy)
    compute = sky.Compute(provider, nodes=2 if healthy else 1, options=sky.Options(console=False))
    with pytest.raises(sky.errors.VersionMismatchError, match=r"runs Python 3\.99\.0") as caught:
        compute.__enter__()
    assert f"node {int(healthy)} " in str(caught.value)
    assert provider.machines
    assert not any(asyncio.run(machine.alive()) for machine in provider.machines)
