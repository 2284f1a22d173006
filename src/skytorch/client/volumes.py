"""Volumes of a compute, as its user writes them: on this machine, or on a cluster."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import skyward as sky
from skytorch.client import resources
from skyward import checks

_KEYS = ("name", "path", "storage", "claim")
_HOW = (
    "write {'name': 'data', 'storage': '10Gi', 'path': '/data'} for storage of the compute's own, "
    "{'claim': 'datasets', 'path': '/data'} for a claim that exists, or {'path': '/data'} for a "
    "folder of the cluster's machines"
)


def here(owner: object, given: object) -> list[sky.Volume]:
    """Paths of this machine, which must exist."""
    volumes = []
    for volume in _each(given):
        path = volume.get("path") if isinstance(volume, Mapping) else None
        if not isinstance(path, str) or not os.path.exists(path):
            raise checks.refused(
                owner,
                {"volumes": given},
                f"{volume!r} names no path that exists, and a local compute sees this machine's "
                "files where they are; create it, and write [{'name': 'data', 'path': '/data'}]",
            )
        volumes.append(sky.Volume(path))
    return volumes


def on_cluster(owner: object, compute: str, given: object) -> list[sky.Volume]:
    """Claims and folders of a cluster.

    A claim with storage of its own is kept while the compute is suspended, and deleted with it.
    """
    volumes = []
    for volume in _each(given):
        problem = _problem(volume)
        if problem:
            raise checks.refused(owner, {"volumes": given}, f"{volume!r} {problem}; {_HOW}")
        path, storage, claim = (volume.get(key) for key in ("path", "storage", "claim"))
        if storage is not None:
            source = f"pvc://{compute}-{volume['name']}?size={storage}&remove=yes"
        else:
            source = path if claim is None else f"pvc://{claim}"
        volumes.append(sky.Volume(source, path))
    return volumes


def _problem(volume: object) -> str:
    """What is wrong with a volume of a cluster; empty if nothing is."""
    if not isinstance(volume, Mapping):
        return "is no mapping"
    if unknown := [key for key in volume if key not in _KEYS]:
        return f"has the unknown key {unknown[0]!r}"
    path, storage, claim = (volume.get(key) for key in ("path", "storage", "claim"))
    if not isinstance(path, str) or not path.startswith("/"):
        return "has no absolute path"
    if storage is not None and claim is not None:
        return "has both storage and a claim"
    if storage is not None and not resources.is_quantity(storage):
        return "has no amount such as '10Gi' for its storage"
    if storage is not None and not resources.is_name(volume.get("name")):
        return f"has no name that Kubernetes would take: it {resources.NAME_RULE}"
    if claim is not None and not resources.is_name(claim):
        return f"names no claim: its name {resources.NAME_RULE}"
    return ""


def _each(given: object) -> Sequence[Any]:
    return given if isinstance(given, list | tuple) else [given]
