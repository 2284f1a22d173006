"""GPUs for containers: what Docker and Podman have to be told, and why they may refuse."""

from __future__ import annotations

import re
from typing import Any

from skyward.accelerators import Accelerator
from skyward.errors import ConfigurationError

_PODMAN_SINCE = (5, 4)
"""Before, Podman's Docker API takes requests for devices and does nothing about them."""
_TOOLKIT = "install the NVIDIA container toolkit there"


def check(accelerator: Accelerator) -> None:
    """Raise for what no container service hands out."""
    if accelerator.cuda is None:
        raise ConfigurationError(
            f"Container(): accelerator={accelerator}: containers are given NVIDIA GPUs only; name "
            "one of these, or use sky.SSH(...) for a machine that has it"
        )


def request(docker: Any, accelerator: Accelerator, node: int) -> Any:
    """As many GPUs as asked for, and others for every node: they share the service's machine.

    What other pools have there is not known: their nodes get the same numbers.
    """
    from docker.types import DeviceRequest

    first = node * accelerator.count
    numbers = [str(number) for number in range(first, first + accelerator.count)]
    podman = _podman_version(docker)
    if podman is None:
        return DeviceRequest(device_ids=numbers, capabilities=[["gpu"]])
    if podman < _PODMAN_SINCE:
        raise ConfigurationError(
            f"Container(): accelerator={accelerator}: Podman {'.'.join(map(str, podman))} gives no "
            "GPUs to those who use its Docker API; take Podman 5.4 or newer, or Docker"
        )
    return DeviceRequest(driver="cdi", device_ids=[f"nvidia.com/gpu={each}" for each in numbers])


def refusal(accelerator: Accelerator, node: int, said: str) -> str | None:
    """What it means when a container was refused; None where that is not about GPUs."""
    if not re.search(r"device driver|nvidia|\bCDI\b", said, re.IGNORECASE):
        return None
    first = node * accelerator.count
    wanted = f"GPU {first}"
    if accelerator.count > 1:
        wanted = f"GPUs {first} to {first + accelerator.count - 1}"
    if re.search(r"could not select device driver|executable file not found", said):
        advice = f"{_TOOLKIT}, with `nvidia-ctk runtime configure --runtime=docker`"
    elif re.search(r"\bCDI\b", said):
        advice = (
            f"{_TOOLKIT}, with `nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml`; "
            "`nvidia-ctk cdi list` shows what there is"
        )
    else:
        advice = "`nvidia-smi -L` there shows what there is"
    return (
        f"accelerator={accelerator}: node {node} needs {wanted} of the machine that runs the "
        f"containers, which it did not get: {said}; {advice}; or use fewer nodes, another "
        "provider, or no accelerator="
    )


def _podman_version(docker: Any) -> tuple[int, ...] | None:
    for component in docker.version().get("Components") or ():
        if component.get("Name") == "Podman Engine":
            return tuple(map(int, re.findall(r"\d+", component.get("Version", ""))[:3]))
    return None
