"""Versions: the programs that both ends of a channel run, and whether they can work together."""

from __future__ import annotations

import contextlib
import functools
import sys
from importlib import metadata

from skyward.errors import VersionMismatchError
from skyward.wire.frames import PROTOCOL


@functools.cache
def my_versions() -> dict[str, str]:
    """The versions that this end runs; the handshake sends them to the other end."""
    versions = {
        "python": ".".join(map(str, sys.version_info[:3])),
        "protocol": str(PROTOCOL),
    }
    for package in ("skyward", "cloudpickle", "numpy", "torch"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return versions


def check_compatible(client: dict[str, str], worker: dict[str, str], where: str) -> list[str]:
    """Raise if client and worker cannot work together; otherwise return warnings for the user."""
    if client.get("protocol") != worker.get("protocol"):
        raise VersionMismatchError(
            f"{where} speaks protocol {worker.get('protocol')} (skyward "
            f"{worker.get('skyward', '?')}), this end {client.get('protocol')} (skyward "
            f"{client.get('skyward', '?')}); install the same skyward on both"
        )
    mine, theirs = client.get("python", "?"), worker.get("python", "?")
    minor, their_minor = (".".join(version.split(".")[:2]) for version in (mine, theirs))
    if minor != their_minor:
        raise VersionMismatchError(
            f"{where} runs Python {theirs}, this end Python {mine}: functions cannot travel "
            f"between minor versions; ask for sky.Image(python={minor!r}) or run this script with "
            f"Python {their_minor}"
        )
    if client.get("cloudpickle", "").split(".")[:1] != worker.get("cloudpickle", "").split(".")[:1]:
        raise VersionMismatchError(
            f"{where} has cloudpickle {worker.get('cloudpickle')}, this end "
            f"{client.get('cloudpickle')}; install the same major version on both"
        )
    warnings = []
    for package in ("numpy", "torch"):
        mine, theirs = client.get(package, ""), worker.get(package, "")
        if mine and theirs and mine.split(".")[0] != theirs.split(".")[0]:
            warnings.append(
                f"{where} has {package} {theirs}, this end {mine}: objects other than plain "
                "arrays and tensors may not survive the trip"
            )
    return warnings
