"""GPUs for containers: how Docker and Podman are asked for them, and why they may refuse."""

from __future__ import annotations

import re
from typing import Any

from skyward.accelerators import Accelerator
from skyward.errors import ConfigurationError

_PODMAN_SINCE = (5, 4)
"""Older versions accept requests for devices in their Docker API, and ignore them."""
_TOOLKIT = "install the NVIDIA container toolkit there"


def check(accelerator: Accelerator) -> None:
    """Refuse accelerators that no container service hands out."""
    if not accelerator.is_nvidia:
        raise ConfigurationError(
            f"Container(): accelerator={accelerator}: containers are given NVIDIA GPUs only; name "
            "one of these, or use sky.SSH(...) for a machine that has it"
        )


def request(docker: Any, accelerator: Accelerator, node: int) -> Any:
    """Ask for the GPUs of one node; each node gets others, as all share the service's machine.

    Other pools are not known: their nodes get GPUs of the same numbers.
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
    """The message for a container that was refused its GPUs; None for any other refusal."""
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
