"""The properties of a device: read on its node, and shown by `torch.sky.get_device_properties`."""

from __future__ import annotations

import os
import platform
import types
from pathlib import Path
from typing import Any

from skyward.device import driver
from skyward.device.torch_build import TorchBuild

CPUINFO = Path("/proc/cpuinfo")


class DeviceProperties(types.SimpleNamespace):
    """What a device is: `name`, `total_memory`, `major`, `minor`, `multi_processor_count`, ...

    On a GPU these are the properties that `torch.cuda.get_device_properties` has on the node. On a
    CPU, the memory is the machine's, a core counts as a multiprocessor, and the version is 0.0.
    """

    type: str
    """The type of the device on its node: "cuda", "cpu" or "mps"."""
    name: str
    total_memory: int
    major: int
    minor: int
    multi_processor_count: int
    is_bf16_supported: bool
    torch_version: str
    """The version of PyTorch on the node.

    A GPU also has `cuda_version`, that of the CUDA or ROCm which this PyTorch was built with, and a
    CPU has `instructions`, the newest of its vector instructions that PyTorch uses.
    """


def read(kind: str) -> dict[str, Any]:
    """The properties of a device of this machine, as values that JSON can carry."""
    import torch

    version = str(torch.__version__)
    if "cuda" not in kind:
        return of_host(kind, version, torch.backends.cpu.get_cpu_capability())
    return {"type": "cuda", "torch_version": version, **_of_gpu(kind)}


def of_gpu(index: int, torch: TorchBuild, cudnn: int) -> dict[str, Any] | None:
    """As `read` for a GPU, from its driver; None if only torch knows."""
    try:
        found = driver.read(index)
    except (OSError, AttributeError):
        return None
    if found["major"] < 8:
        # Torch tries whether it can do bfloat16.
        return None
    return {
        "type": "cuda",
        "torch_version": torch.version,
        **found,
        "gcnArchName": found["name"],
        "cudnn_version": cudnn,
        "is_bf16_supported": True,
        "cuda_version": str(torch.cuda),
    }


def of_host(kind: str, version: str, instructions: str) -> dict[str, Any]:
    """The properties of a device that has the memory of its host."""
    name = kind.partition(":")[0]
    return {
        "type": name,
        "torch_version": version,
        "name": _processor() if name == "cpu" else f"{name} of {_processor()}",
        "total_memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "major": 0,
        "minor": 0,
        "multi_processor_count": os.cpu_count() or 1,
        "is_bf16_supported": True,
        "instructions": instructions,
    }


def _of_gpu(kind: str) -> dict[str, Any]:
    import torch

    found = torch.cuda.get_device_properties(kind)
    values = {name: getattr(found, name) for name in dir(found) if not name.startswith("_")}
    plain = {name: value for name, value in values.items() if isinstance(value, (str, int, float))}
    if "uuid" in values:
        plain["uuid"] = str(values["uuid"])
    if (cudnn := torch.backends.cudnn.version()) is not None:  # type: ignore[no-untyped-call]
        plain["cudnn_version"] = cudnn
    with torch.cuda.device(kind):
        plain["is_bf16_supported"] = torch.cuda.is_bf16_supported()
    return {**plain, "cuda_version": str(torch.version.cuda or torch.version.hip)}


def _processor() -> str:
    """The name of the processor, or of its architecture: the kernel knows no names of ARM's."""
    lines = CPUINFO.read_text().splitlines() if CPUINFO.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()
