"""Containers: pools in them, their limits and networks, and nothing left of them."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward.nodes.records import Journal

from ..conftest import only_in_all
from ..network.network import OUTAGE_SECONDS
from . import podman
from .leftovers import (
    Script,
    phases,
    podman_says,
    press_ctrl_c,
    show_and_remove_after_a_kill,
)

QUIET = sky.Options(console=False)
pytestmark = pytest.mark.usefixtures("engine")


@sky.function
def where() -> tuple[str, str, tuple[str, ...]]:
    import os
    import socket

    info = sky.instance_info()
    assert info.hostname == socket.gethostname()
    return socket.gethostname(), os.getcwd(), tuple(peer.address for peer in info.peers)


@sky.function
def total(values: Any) -> float:
    return float(values.sum())


@sky.function
def greeting(address: str) -> str:
    """What a peer's server says, over the network between the containers."""
    import socket
    import time

    info = sky.instance_info()
    if info.node == 0:
        with socket.create_server((info.peers[0].address, 4747)) as server:
            server.settimeout(60)
            end, _ = server.accept()
            end.sendall(b"hello from node 0")
            end.close()
        return ""
    deadline = time.monotonic() + 60
    while True:
        try:
            with socket.create_connection((address, 4747), 20) as end:
                return end.recv(100).decode()
        except ConnectionRefusedError:
            assert time.monotonic() < deadline, "node 0 does not listen"
            time.sleep(0.05)


def test_a_pool_runs_in_containers_that_see_each_other(
    tmp_path: Path, eventually: Callable[..., None]
) -> None:
    """With volumes and the limits of the pool; one of them is replaced when it is killed."""
    import torch

    @sky.function
    def note() -> str:
        return Path("/data/note").read_text()

    @sky.function
    def limits() -> tuple[str, str]:
        for memory in ("memory/memory.limit_in_bytes", "memory.max"):
            if os.path.exists(f"/sys/fs/cgroup/{memory}"):
                limit = Path("/sys/fs/cgroup", memory).read_text().strip()
        return limit, os.environ.get("GREETING", "")

    (tmp_path / "note").write_text("from outside")
    with sky.Compute(
        podman.provider(),
        nodes=2,
        memory_gb=1.5,
        vcpus=1,
        image=sky.Image(env={"GREETING": "hello"}),
        volumes=[sky.Volume(str(tmp_path), "/data", read_only=True)],
        options=QUIET,
    ) as compute:
        places = where() @ compute
        addresses = [node.address for node in compute.nodes]

        assert [place[0] for place in places] == ["node-0", "node-1"]
        assert [list(place[2]) for place in places] == [addresses, addresses]
        assert len(set(addresses)) == 2
        assert total(torch.ones(1 << 20)) >> compute == 1 << 20
        assert (greeting(addresses[0]) @ compute)[1] == "hello from node 0"
        assert note() >> compute == "from outside"
        assert limits() >> compute == (str(int(1.5 * 2**30)), "hello")

        podman_says("kill", podman_says("ps", "--format", "{{.Names}}").split()[0])
        eventually(lambda: compute.stats().nodes_lost, 60, "the loss")
        eventually(lambda: {n.state for n in compute.nodes} == {"ready"}, 120, "another container")
        assert [place[0] for place in where() @ compute] == ["node-0", "node-1"]
    assert podman_says("ps", "-a", "--format", "{{.Names}}") == ""
    assert podman_says("network", "ls", "--format", "{{.Name}}") == "podman"


@only_in_all
def test_torch_trains_across_containers() -> None:
    @sky.function
    def summed() -> float:
        import torch
        import torch.distributed as dist

        value = torch.ones(1)
        dist.all_reduce(value)
        return float(value)

    plugins = [sky.plugins.torch()]
    with sky.Compute(podman.provider(), nodes=2, plugins=plugins, options=QUIET) as compute:
        assert summed() @ compute == [2.0, 2.0]


@only_in_all
def test_an_image_nobody_has_is_named(state: Journal) -> None:
    provider = podman.provider(image="localhost/nowhere:1")

    with pytest.raises(sky.errors.PoolStartError, match=r"localhost/nowhere:1.*Container\(image="):
        with sky.Compute(provider, options=QUIET):
            pass
    assert state.pools() == []


def test_without_a_service_the_error_says_what_was_tried(state: Journal) -> None:
    provider = podman.provider(host="unix:///nowhere/docker.sock")

    with pytest.raises(
        sky.errors.ConfigurationError, match=r"no Docker or Podman answers at unix:///now"
    ):
        with sky.Compute(provider, options=QUIET):
            pass
    assert state.pools() == []


SCRIPT = Script("podman.provider()", setup="from tests.providers import podman")


@pytest.mark.parametrize("phase", phases("creating"))
def test_what_a_killed_script_leaves_is_shown_and_removed(state: Journal, phase: str) -> None:
    show_and_remove_after_a_kill(SCRIPT, phase, state)

    assert podman_says("ps", "-a", "--format", "{{.Names}}") == ""
    assert podman_says("network", "ls", "--format", "{{.Name}}") == "podman"


@pytest.mark.parametrize("phase", phases("starting the agent"))
def test_ctrl_c_leaves_nothing(state: Journal, phase: str) -> None:
    press_ctrl_c(SCRIPT, phase, state)

    assert podman_says("ps", "-a", "--format", "{{.Names}}") == ""


@sky.function
def slept(seconds: float) -> int:
    time.sleep(seconds)
    return os.getpid()


@sky.function
def counting(count: int) -> Iterator[int]:
    for number in range(count):
        time.sleep(0.02)
        yield number


@only_in_all
@pytest.mark.slow
def test_a_container_that_has_no_network_for_a_while_keeps_its_tasks(
    eventually: Callable[..., None],
) -> None:
    """Slow: the containers' network is away for long enough to be noticed."""
    with sky.Compute(podman.provider(), nodes=2, options=QUIET) as compute:
        before = slept(0) @ compute
        outcome: dict[str, Any] = {}
        threads = [
            threading.Thread(target=lambda: outcome.update(broadcast=slept(5) @ compute)),
            threading.Thread(target=lambda: outcome.update(stream=list(counting(300) >> compute))),
        ]
        for thread in threads:
            thread.start()
        time.sleep(1)
        for change in ("down", "up"):
            for name in podman_says("ps", "--format", "{{.Names}}").split():
                pid = podman_says("inspect", "--format", "{{.State.Pid}}", name)
                command = ["nsenter", "--target", pid, "--net", "ip", "link", "set", "eth0"]
                subprocess.run([*command, change], check=True)
            if change == "down":
                time.sleep(OUTAGE_SECONDS)
                eventually(
                    lambda: all(node.state == "reconnecting" for node in compute.nodes),
                    60,
                    "the notice",
                )
        for thread in threads:
            thread.join()
        assert outcome["broadcast"] == before
        assert outcome["stream"] == list(range(300))
        assert compute.stats().nodes_lost == 0
