"""Tags: how everything that Skyward makes on AWS says which pool it belongs to."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from skyward.providers import Order, owner

POOL = "skyward:pool"
NAME = "skyward:name"
OWNER = "skyward:owner"
PID = "skyward:pid"
NODES = "skyward:nodes"
"""The nodes of instances that were launched together, in the order of their launch index."""

USER = "skyward:user"
"""The user to log in as."""


def resource_name(pool: str) -> str:
    """The name of a pool's security group, key pair and placement group."""
    return f"skyward-{pool}"


def specification(kind: str, order: Order, **more: str) -> dict[str, Any]:
    """The tags of a new resource, in the form that requests take."""
    tags = {
        "Name": f"skyward {order.name or order.pool}"[:256],
        POOL: order.pool,
        NAME: order.name[:256],
        OWNER: owner()[:256],
        PID: str(os.getpid()),
        **more,
    }
    return {
        "ResourceType": kind,
        "Tags": [{"Key": key, "Value": value} for key, value in tags.items()],
    }


def of_pool(pool: str) -> dict[str, Any]:
    """The filter that finds what belongs to a pool."""
    return {"Name": f"tag:{POOL}", "Values": [pool]}


def of_any_pool() -> dict[str, Any]:
    """The filter that finds what belongs to any pool."""
    return {"Name": "tag-key", "Values": [POOL]}


def tags_of(resource: Mapping[str, Any]) -> dict[str, str]:
    """The tags of a resource in an answer."""
    found: Sequence[Mapping[str, str]] = resource.get("Tags") or ()
    return {each["Key"]: each["Value"] for each in found}
