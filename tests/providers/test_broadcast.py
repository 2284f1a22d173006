"""A large argument for many machines leaves the client once, whatever the way to them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import skyward as sky

from ..conftest import only_in_all, other_case
from . import podman
from .ssh_hosts import Sshd

MIB = 1 << 20


@sky.function
def total(values: Any) -> tuple[int, tuple[str, ...]]:
    return int(values.sum()), tuple(peer.address for peer in sky.instance_info().peers)


def broadcast(provider: sky.SSH | sky.Container, image: sky.Image, *, cluster: bool) -> float:
    """MiB that left this process so that two nodes had 16; checks what they got."""
    values = np.random.default_rng(1).integers(0, 255, 16 * MIB, np.uint8)
    options = sky.Options(console=False, cluster=cluster)
    with sky.Compute(provider, nodes=2, image=image, options=options) as compute:
        addresses = tuple(node.address for node in compute.nodes) if cluster else ()
        assert total(values) @ compute == [(int(values.sum()), addresses)] * 2
        return compute.stats().bytes_sent / MIB


@pytest.mark.parametrize(
    "direct", [True, pytest.param(False, marks=other_case)], ids=["direct", "through SSH"]
)
def test_to_ssh_hosts(sshd: Sshd, direct: bool) -> None:
    image = sky.Image(pip=["numpy"])
    assert 16 <= broadcast(sshd.provider(direct=direct), image, cluster=True) < 17
    assert 32 <= broadcast(sshd.provider(direct=direct), image, cluster=False) < 33


@only_in_all
def test_to_containers(engine: None) -> None:
    assert 16 <= broadcast(podman.provider(), sky.Image(), cluster=True) < 17
