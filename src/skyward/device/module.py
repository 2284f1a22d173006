"""The `torch.sky` module: what PyTorch and its users expect beside a device."""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from skyward.device.core import Core


def install(core: Core) -> None:
    """Name the backend "sky" and give it its module; once per process."""
    import torch
    from torch.utils import backend_registration

    backend_registration.rename_privateuse1_backend("sky")
    torch._register_device_module("sky", _SkyModule(core))  # type: ignore[no-untyped-call]
    backend_registration.generate_methods_for_privateuse1_backend(for_storage=True)


class _SkyModule(types.ModuleType):
    # PyTorch's checkpointing keeps the state of the generator only where this is set.
    _initialized = True

    def __init__(self, core: Core) -> None:
        super().__init__("torch.sky", "Devices of Skyward's workers.")
        self._core = core

    # Devices.

    def is_available(self) -> bool:
        """Whether there is a sky device."""
        return self._core.count > 0

    def is_initialized(self) -> bool:
        """Always: the core is loaded before this module is."""
        return True

    def _lazy_init(self) -> None:
        """Nothing is left to do."""

    def _is_in_bad_fork(self) -> bool:
        return self._core.in_bad_fork

    def device_count(self) -> int:
        """How many sky devices there are."""
        return self._core.count

    def current_device(self) -> int:
        """This thread's current device."""
        return self._core.current

    def set_device(self, device: Any) -> None:
        """Choose this thread's current device."""
        self._core.current = self._index(device)

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        """Choose the current device for a block."""
        before = self._core.current
        self._core.current = self._index(device)
        try:
            yield
        finally:
            self._core.current = before

    def synchronize(self, device: Any = None) -> None:
        """Wait until everything so far is done; raises the first error since the last time."""
        self._core.synchronize(self._index(device))

    def get_device_name(self, device: Any = None) -> str:
        """How people call a device."""
        return f"sky:{self._index(device)}"

    def _index(self, device: Any) -> int:
        import torch

        if device is None:
            return self._core.current
        if isinstance(device, int):
            return device
        index = torch.device(device).index
        return self._core.current if index is None else index

    # Random numbers.

    def manual_seed(self, seed: int) -> None:
        """Seed the current device."""
        self._core.seed(self._core.current, seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seed every device."""
        for index in self._core.open_devices:
            self._core.seed(index, seed)

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        """The state of the worker's generator."""
        import torch

        return torch.frombuffer(
            bytearray(self._core.rng_state(self._index(device))), dtype=torch.uint8
        )

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        """Set the state of the worker's generator."""
        self._core.set_rng_state(self._index(device), bytes(state.cpu().tolist()))

    # Autocast.

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """What autocast may cast to."""
        import torch

        return [torch.float16, torch.bfloat16]
