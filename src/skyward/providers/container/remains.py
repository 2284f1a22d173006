"""Remains: the containers and networks of any pool that a service still has, for `sky gc`."""

from __future__ import annotations

import os
from typing import Any

from skyward.providers import Order, Remains, owner
from skyward.providers.container.service import NAME, OWNER, PID, POOL


def labels(order: Order) -> dict[str, str]:
    """The labels that say whose a container or a network is."""
    return {POOL: order.pool, NAME: order.name, OWNER: owner(), PID: str(os.getpid())}


def remains(docker: Any) -> list[Remains]:
    """What there is of each pool, whoever made it; with a client of the docker package."""
    marked = {"label": POOL}
    # Sparse: the description of a container that ends meanwhile would be an error.
    containers = docker.containers.list(all=True, sparse=True, filters=marked)
    found: dict[str, Remains] = {}
    for each in containers:
        told = each.attrs.get("Labels") or {}
        name = str((each.attrs.get("Names") or [each.id])[0]).removeprefix("/")
        _note(found, told, f"container {name}")
    for each in docker.networks.list(filters=marked):
        _note(found, each.attrs.get("Labels") or {}, f"network {each.name}")
    return list(found.values())


def _note(found: dict[str, Remains], told: dict[str, str], resource: str) -> None:
    pool, pid = told.get(POOL, ""), told.get(PID, "")
    before = found[pool].resources if pool in found else ()
    if pool:
        found[pool] = Remains(
            pool=pool,
            name=told.get(NAME, ""),
            owner=told.get(OWNER, ""),
            pid=int(pid) if pid.isdigit() else 0,
            resources=(*before, resource),
        )
