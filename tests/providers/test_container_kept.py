"""Kept pools in containers: used by another process, stopped, started, ended."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest

import skyward as sky
from skyward.nodes import records
from skyward.nodes.records import Journal

from ..conftest import only_in_all
from . import kept_pools, podman
from .leftovers import podman_says

pytestmark = pytest.mark.usefixtures("engine")


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No container and no network may be left."""
    yield
    assert podman_says("ps", "-a", "--format", "{{.Names}}") == ""
    assert podman_says("network", "ls", "--format", "{{.Name}}") == "podman"


@only_in_all
def test_a_pool_stays_in_containers_is_stopped_and_starts_again_with_its_files() -> None:
    workers = kept_pools.start(podman.provider(), "boxes", nodes=2)
    kept_pools.use_elsewhere("boxes", workers)
    with sky.attach("boxes") as compute:
        assert kept_pools.marked("/var/tmp/mark", "mine") @ compute == ["mine", "mine"]
    assert kept_pools.shown("boxes")["state"].startswith("kept, idle for")

    assert kept_pools.says("stop", "boxes").startswith("boxes: stopped; `sky start boxes`")

    assert podman_says("ps", "--format", "{{.Names}}") == ""
    assert kept_pools.shown("boxes")["state"] == "stopped"
    with pytest.raises(sky.errors.PoolError, match="boxes is stopped; `sky start boxes`"):
        sky.attach("boxes")

    assert kept_pools.says("start", "boxes") == "boxes: 2 nodes started\n"

    with sky.attach("boxes") as compute:
        assert kept_pools.marked("/var/tmp/mark") @ compute == ["mine", "mine"]
    kept_pools.says("stop", "boxes")
    kept_pools.end("boxes", machines=2)


@only_in_all
def test_a_client_that_attached_replaces_a_container_that_was_killed(
    eventually: Callable[..., None],
) -> None:
    kept_pools.start(podman.provider(), "box")
    with sky.attach("box") as compute:
        (name,) = podman_says("ps", "--format", "{{.Names}}").split()
        podman_says("kill", name)
        eventually(lambda: compute.stats().nodes_lost, 60, "the loss")
        eventually(lambda: compute.nodes[0].state == "ready", 60, "the same container again")
        assert podman_says("ps", "--format", "{{.Names}}") == name
        assert kept_pools.pid() >> compute
    podman_says("kill", name)
    assert kept_pools.shown("box")["state"] == "stopped"
    with pytest.raises(sky.errors.PoolError, match=f"box is stopped: .*{name}.*`sky start box`"):
        sky.attach("box")
    assert kept_pools.says("start", "box") == "box: 1 node started\n"
    with sky.attach("box") as compute:
        assert kept_pools.pid() >> compute
    podman_says("kill", name)
    kept_pools.end("box")


@only_in_all
def test_gc_removes_containers_and_networks_that_no_record_knows() -> None:
    kept_pools.start(podman.provider(), "box", nodes=2)
    listed = kept_pools.says("gc", "--provider", "container")
    assert re.search("box +container .* may be in use +container sky-.*, network sky-", listed)
    records.forget("box")
    (pool,) = Journal().pools()
    Journal().forget(pool.id)
    # The process that made it, which is this one, runs still.
    assert "may be in use" in kept_pools.says("gc", "--provider", "container")
    removed = kept_pools.says("gc", "--provider", "container", "--all", "--yes")
    assert removed == f"box ({pool.id}): 2 machines, network sky-{pool.id} removed\n"
    assert "nothing of any pool: container at" in kept_pools.says("gc", "--provider", "container")
