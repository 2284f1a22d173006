"""diffusers: asks `torch.accelerator` once and remembers, though devices are opened and closed."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

from skyward.device.libraries.choice import Choice
from skyward.device.libraries.patches import wrap


def _torch_utils(module: ModuleType, choice: Choice) -> None:
    def detect(original: Callable[[], str]) -> Callable[[], str]:
        def by_choice() -> str:
            import torch

            if choice.device() is not None:
                return "sky"
            # Sky devices stay `torch.accelerator`'s after they were closed.
            return "cuda" if torch.cuda.is_available() else "cpu"

        return by_choice

    wrap(module.TorchDeviceBackend, "_detect_device_type", detect)


PATCHES: dict[str, Callable[..., None]] = {"diffusers.utils.torch_utils": _torch_utils}
