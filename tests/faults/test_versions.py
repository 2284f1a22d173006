"""Two ends that run different versions: refused at the handshake, with what to install."""

from __future__ import annotations

import shutil
import sys
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import skyward as sky
from skyward.providers import Wish
from skyward.wire.channel import Channel
from skyward.wire.identity import check_compatible, my_versions
from skyward.wire.listener import Listener
from skyward.wire.messages import Hello
from skyward.worker.config import AgentConfig

MINOR = f"{sys.version_info.major}.{sys.version_info.minor}"


def test_the_same_versions_are_compatible_without_a_word() -> None:
    assert check_compatible(my_versions(), my_versions(), "node 0") == []


def test_another_patch_release_of_python_is_compatible() -> None:
    worker = {**my_versions(), "python": f"{MINOR}.99"}
    assert check_compatible(my_versions(), worker, "node 0") == []


def test_another_minor_version_of_python_is_refused_with_both_versions_and_two_ways_out() -> None:
    worker = {**my_versions(), "python": "3.99.1"}
    with pytest.raises(sky.VersionMismatchError) as caught:
        check_compatible(my_versions(), worker, "node 3")
    message = str(caught.value)
    assert "node 3 runs Python 3.99.1" in message
    assert f"this end Python {MINOR}" in message
    assert f"sky.Image(python='{MINOR}')" in message
    assert "run this script with Python 3.99" in message
    assert isinstance(caught.value, sky.PoolStartError)


def test_another_protocol_is_refused_before_anything_else() -> None:
    worker = {**my_versions(), "python": "3.99.1", "protocol": "999", "skyward": "9.0"}
    with pytest.raises(sky.VersionMismatchError) as caught:
        check_compatible(my_versions(), worker, "node 0")
    assert "node 0 speaks protocol 999 (skyward 9.0)" in str(caught.value)
    assert "install the same skyward on both" in str(caught.value)


def test_another_major_version_of_cloudpickle_is_refused() -> None:
    worker = {**my_versions(), "cloudpickle": "99.0"}
    with pytest.raises(sky.VersionMismatchError, match=r"node 0 has cloudpickle 99\.0.*same major"):
        check_compatible(my_versions(), worker, "node 0")


def test_another_major_version_of_numpy_is_a_warning() -> None:
    mine = {**my_versions(), "numpy": "2.0"}
    (warning,) = check_compatible(mine, {**mine, "numpy": "1.26"}, "node 0")
    assert "node 0 has numpy 1.26, this end 2.0" in warning


def test_an_end_that_says_nothing_of_its_versions_is_refused() -> None:
    with pytest.raises(sky.VersionMismatchError):
        check_compatible(my_versions(), {}, "node 0")


class FromTheFuture:
    """A machine whose agent shakes hands like any other, but runs another Python."""

    hostname = "here"
    accelerators = 0
    accelerator = None
    address = "127.0.0.1"
    endpoint = ""

    def __init__(self) -> None:
        self.stopped = threading.Event()
        self._folder = tempfile.mkdtemp(prefix="skyf-", dir="/tmp")
        self._listener: Listener | None = None
        self.channels: list[Channel] = []

    def start(self, config: AgentConfig) -> None:
        where = f"unix:{Path(self._folder, 'agent.sock')}"
        self._listener = Listener(where, config.pool, None, self._accept)
        self._listener._versions = {**my_versions(), "python": "3.99.0"}
        self.endpoint = self._listener.endpoint

    def _accept(self, channel: Channel, hello: Hello) -> None:
        self.channels.append(channel)

    def looks_dead(self) -> bool:
        return False

    def stop(self, seconds: float) -> None:
        if self._listener is not None:
            self._listener.close()
        for channel in self.channels:
            channel.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        self.stopped.set()


@dataclass
class Future:
    """A provider of such machines; with `healthy`, only its second one is like that."""

    made: list[FromTheFuture] = field(default_factory=list)
    healthy: bool = False
    encrypted: bool = False

    def check(self, wish: Wish) -> None:
        pass

    def machine(self, node: int, pool: str, wish: Wish) -> object:
        if self.healthy and node == 0:
            return sky.Local().machine(node, pool, wish)
        machine = FromTheFuture()
        self.made.append(machine)
        return machine


@pytest.mark.parametrize("healthy", [False, True], ids=["alone", "beside-a-healthy-node"])
def test_a_pool_does_not_start_on_another_python_and_takes_everything_down(healthy: bool) -> None:
    provider = Future(healthy=healthy)
    compute = sky.Compute(
        provider,  # type: ignore[arg-type]
        nodes=2 if healthy else 1,
        options=sky.Options(console=False),
    )
    with pytest.raises(sky.VersionMismatchError, match=r"runs Python 3\.99\.0") as caught:
        compute.__enter__()
    assert f"node {int(healthy)} " in str(caught.value)
    assert all(machine.stopped.is_set() for machine in provider.made)
