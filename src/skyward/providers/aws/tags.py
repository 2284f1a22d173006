"""Tags: how everything that Skyward makes on AWS says which pool it belongs to."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from skyward.providers import Order, signature

PREFIX = "skyward:"
POOL = f"{PREFIX}pool"
NODES = f"{PREFIX}nodes"
"""The nodes of instances that were launched together, in the order of their launch index."""
USER = f"{PREFIX}user"
"""The user to log in as."""


_POOL_ID = re.compile(r"[A-Za-z0-9_-]{1,40}")


def is_pool(name: str) -> bool:
    """Whether a name may be that of a pool: one from a tag may be anything."""
    return _POOL_ID.fullmatch(name) is not None


def resource_name(pool: str) -> str:
    """The name of a pool's security group, key pair and placement group."""
    return f"skyward-{pool}"


def specification(kind: str, order: Order, **more: str) -> dict[str, Any]:
    """The tags of a new resource, in the form that requests take."""
    tags = {
        "Name": f"skyward {order.name or order.pool}"[:256],
        **signature(PREFIX, order.pool, order.name[:256]),
        **more,
    }
    return {
        "ResourceType": kind,
        "Tags": [{"Key": key, "Value": value} for key, value in tags.items()],
    }


def listed(nodes: Sequence[int]) -> str:
    """Numbers in the form of a tag, which has 256 characters at most.

    >>> listed([0, 1, 2, 5, 7, 8])
    '0-2 5 7-8'
    """
    ranges: list[list[int]] = []
    for node in nodes:
        if ranges and node == ranges[-1][-1] + 1:
            ranges[-1][1:] = [node]
        else:
            ranges.append([node])
    return " ".join("-".join(map(str, each)) for each in ranges)


def numbers(text: str) -> list[int]:
    """The numbers of such a list; none if it is no such list.

    >>> numbers("0-2 5")
    [0, 1, 2, 5]
    """
    found: list[int] = []
    for part in text.split():
        first, _, last = part.partition("-")
        if not first.isdigit() or not (last or first).isdigit():
            return []
        found += range(int(first), int(last or first) + 1)
    return found


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
