"""Volumes: which the provider mounts, which nodes mount or copy, and which the client sends."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from skyward.errors import ConfigurationError
from skyward.files.copying import PACKAGES
from skyward.nodes.deliveries import SentFolder
from skyward.providers import Provider, is_here
from skyward.spec import Image, Volume

PROVIDERS_OWN = frozenset({"pvc", "emptydir"})
"""Schemes that a provider understands."""


@dataclass(frozen=True, slots=True)
class VolumePlan:
    """Who makes each volume of a pool."""

    providers: tuple[Volume, ...]
    nodes: tuple[Volume, ...]
    sent: tuple[SentFolder, ...]


def plan(provider: Provider, volumes: Sequence[Volume]) -> VolumePlan:
    """Say who makes each volume; refuses folders of this machine that are not there."""
    providers, nodes, sent = [], [], []
    targets: set[str] = set()
    for volume in volumes:
        if volume.target in targets:
            raise ConfigurationError(
                f"Compute(volumes=[...]): two of them have the target {volume.target!r}; give each "
                "its own"
            )
        targets.add(volume.target)
        scheme = volume.source.partition("://")[0] if "://" in volume.source else ""
        if scheme and scheme not in PROVIDERS_OWN:
            nodes.append(volume)
        elif scheme or volume.source == volume.target or provider.capabilities.mounts_folders:
            providers.append(volume)
        else:
            source = Path(volume.source).expanduser().resolve()
            if not source.is_dir():
                raise ConfigurationError(
                    f"{volume}: there is no folder {source} on this machine, and it would be sent "
                    "to the nodes; name one, or leave target out for a path of the nodes"
                )
            if is_here(provider):
                nodes.append(Volume(str(source), volume.target, volume.read_only))
            else:
                back = not volume.read_only
                sent.append(SentFolder(source, volume.target, everything=True, back=back))
    return VolumePlan(tuple(providers), tuple(nodes), tuple(sent))


def equipped(image: Image, provider: Provider, volumes: Sequence[Volume]) -> Image:
    """The image with the packages that copy volumes, in case a node cannot mount them."""
    needed = list(image.pip)
    for volume in volumes:
        scheme = volume.source.partition("://")[0]
        if "://" not in volume.source or scheme == "nfs":
            continue
        package = PACKAGES.get(scheme, "fsspec")
        if is_here(provider) and importlib.util.find_spec(package) is not None:
            continue
        if package not in needed:
            needed.append(package)
    return image if needed == list(image.pip) else replace(image, pip=needed)
