"""What NVIDIA's driver says of a GPU: the values of `torch.cuda.get_device_properties`.

They are read from the driver so that a device process need not import torch for them.
"""

from __future__ import annotations

import ctypes
import uuid
from typing import Any

ATTRIBUTES = {
    "max_threads_per_block": 1,
    "shared_memory_per_block": 8,
    "warp_size": 10,
    "clock_rate": 13,
    "multi_processor_count": 16,
    "is_integrated": 18,
    "pci_bus_id": 33,
    "pci_device_id": 34,
    "memory_clock_rate": 36,
    "memory_bus_width": 37,
    "L2_cache_size": 38,
    "max_threads_per_multi_processor": 39,
    "pci_domain_id": 50,
    "major": 75,
    "minor": 76,
    "shared_memory_per_multiprocessor": 81,
    "regs_per_multiprocessor": 82,
    "is_multi_gpu_board": 84,
    "shared_memory_per_block_optin": 97,
}
"""The driver's numbers for what torch calls so."""


def read(index: int) -> dict[str, Any]:
    """The properties of the GPU that this process sees as number `index`; raises OSError."""
    driver = ctypes.CDLL("libcuda.so.1")

    def ask(function: str, *arguments: Any) -> None:
        if code := getattr(driver, function)(*arguments):
            raise OSError(f"{function} of NVIDIA's driver failed with {code}")

    ask("cuInit", 0)
    device = ctypes.c_int()
    ask("cuDeviceGet", ctypes.byref(device), index)
    name = ctypes.create_string_buffer(256)
    ask("cuDeviceGetName", name, len(name), device)
    memory = ctypes.c_size_t()
    ask("cuDeviceTotalMem_v2", ctypes.byref(memory), device)
    identity = ctypes.create_string_buffer(16)
    ask("cuDeviceGetUuid_v2", identity, device)
    found: dict[str, Any] = {
        "name": name.value.decode(),
        "total_memory": memory.value,
        "uuid": str(uuid.UUID(bytes=identity.raw)),
    }
    number = ctypes.c_int()
    for attribute, code in ATTRIBUTES.items():
        ask("cuDeviceGetAttribute", ctypes.byref(number), code, device)
        found[attribute] = number.value
    return found
