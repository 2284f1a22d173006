"""Versions: the programs that both ends of a channel run, and whether they can work together."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
from importlib.util import find_spec

from skyward.errors import VersionMismatchError
from skyward.wire.frames import PROTOCOL


@functools.cache
def my_versions() -> dict[str, str]:
    """The versions that this end runs; the handshake sends them to the other end."""
    versions = {
        "python": ".".join(map(str, sys.version_info[:3])),
        "protocol": str(PROTOCOL),
        # Of the code that runs here: an installer may know it by another name, or not at all.
        "skyward": sys.modules["skyward"].__version__,
    }
    for package in ("cloudpickle", "numpy", "torch"):
        if version := _version(package):
            versions[package] = version
    return versions


def _version(package: str) -> str:
    """The version of a package; empty if it is not installed.

    Taken from the name of the folder that installers make. `importlib.metadata` reads the files in
    it, for which an agent would spend a tenth of its start.
    """
    named = re.compile(rf"{package}-(\d.*)\.dist-info")
    for folder in sys.path:
        with contextlib.suppress(OSError):
            for name in os.listdir(folder or "."):
                if found := named.fullmatch(name):
                    return found[1]
    if find_spec(package) is None:
        return ""
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


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
