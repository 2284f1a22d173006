"""Images of machines on AWS: which AMI an instance boots, and what it takes to log in."""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from skyward.accelerators import Accelerator
from skyward.errors import ConfigurationError, UnavailableError
from skyward.providers.aws.account import Account

CANONICAL = "099720109477"
_Names = tuple[str, tuple[str, ...]]
_PLAIN: _Names = (
    CANONICAL,
    (
        "ubuntu/images/hvm-ssd-gp3/ubuntu-noble-24.04-{arch}-server-*",
        "ubuntu/images/hvm-ssd/ubuntu-jammy-22.04-{arch}-server-*",
        "ubuntu/images/hvm-ssd*/ubuntu-*-{arch}-server-*",
    ),
)
_NVIDIA: _Names = (
    "amazon",
    (
        "Deep Learning Base OSS Nvidia Driver GPU AMI (Ubuntu 24.04)*",
        "Deep Learning ARM64 Base OSS Nvidia Driver GPU AMI (Ubuntu 24.04)*",
        "Deep Learning Base OSS Nvidia Driver GPU AMI (Ubuntu 22.04)*",
        "Deep Learning ARM64 Base OSS Nvidia Driver GPU AMI (Ubuntu 22.04)*",
        "Deep Learning*Ubuntu*",
    ),
)
_NVIDIA_OLD: _Names = (
    "amazon",
    ("Deep Learning Base Proprietary Nvidia Driver GPU AMI (Ubuntu*", "Deep Learning*Ubuntu*"),
)
"""NVIDIA's open kernel modules begin with Turing."""
_TURING = (7, 5)
_NEURON: _Names = (
    "amazon",
    ("Deep Learning Base Neuron AMI (Ubuntu 22.04)*", "Deep Learning*Neuron*Ubuntu*"),
)
"""Whose AMIs, and their names, the best first. Ubuntu, since images may ask for packages of apt."""
_NEURON_MODELS = ("TRAINIUM", "TRAINIUM2", "INFERENTIA", "INFERENTIA2")
_DEBIAN_ARCH = {"x86_64": "amd64", "arm64": "arm64"}
_USERS = (
    (re.compile("ubuntu", re.IGNORECASE), "ubuntu"),
    (re.compile("debian", re.IGNORECASE), "admin"),
    (re.compile("rocky", re.IGNORECASE), "rocky"),
    (re.compile("fedora", re.IGNORECASE), "fedora"),
)


@dataclass(frozen=True, slots=True)
class MachineImage:
    """An AMI."""

    id: str
    name: str
    architecture: str
    root_device: str
    disk_gb: int
    more_devices: tuple[str, ...] = ()
    """The names of its other volumes."""

    @property
    def user(self) -> str:
        """The user to log in as: what images of that kind have."""
        return next((user for names, user in _USERS if names.search(self.name)), "ec2-user")


@functools.lru_cache(maxsize=32)
def given_image(account: Account, ami: str) -> MachineImage:
    """The AMI that the user named; asked for once, since an AMI never changes."""
    found = account.call("ec2", "describe_images", ImageIds=[ami])["Images"]
    if not found:
        raise ConfigurationError(
            f"AWS(ami={ami!r}): {account.region} has no such AMI, or it is not shared with you; "
            "AMIs have other names in other regions"
        )
    return _image(found[0])


def usual_image(
    account: Account, architecture: str, accelerator: Accelerator | None
) -> MachineImage:
    """The newest AMI that has what the accelerator needs: a driver, if any."""
    owner, names = _PLAIN
    if accelerator is not None:
        old = accelerator.cuda is not None and accelerator.cuda.compute_capability < _TURING
        nvidia = _NVIDIA_OLD if old else _NVIDIA
        if not accelerator.is_nvidia and accelerator.name not in _NEURON_MODELS:
            raise UnavailableError(
                f"AWS: there is no usual AMI with a driver for {accelerator.name}; name one with "
                "ami="
            )
        owner, names = nvidia if accelerator.is_nvidia else _NEURON
    patterns = [name.format(arch=_DEBIAN_ARCH.get(architecture, architecture)) for name in names]
    found = account.pages(
        "ec2",
        "describe_images",
        "Images",
        Owners=[owner],
        Filters=[
            {"Name": "name", "Values": patterns},
            {"Name": "architecture", "Values": [architecture]},
            {"Name": "state", "Values": ["available"]},
        ],
    )
    for pattern in patterns:
        matching = [each for each in found if fnmatch.fnmatchcase(each["Name"], pattern)]
        if matching:
            return _image(max(matching, key=lambda each: str(each.get("CreationDate", ""))))
    raise UnavailableError(
        f"AWS: {account.region} has no AMI called {patterns[0]!r} for {architecture}; name one "
        "with ami="
    )


def _image(found: Mapping[str, Any]) -> MachineImage:
    root = str(found.get("RootDeviceName") or "/dev/sda1")
    sizes = [
        int(each.get("Ebs", {}).get("VolumeSize") or 0)
        for each in found.get("BlockDeviceMappings", ())
        if each.get("DeviceName") == root
    ]
    return MachineImage(
        str(found["ImageId"]),
        str(found.get("Name", "")),
        str(found.get("Architecture", "x86_64")),
        root,
        max(sizes, default=0),
        tuple(
            str(each["DeviceName"])
            for each in found.get("BlockDeviceMappings", ())
            if "Ebs" in each and each.get("DeviceName") != root
        ),
    )
