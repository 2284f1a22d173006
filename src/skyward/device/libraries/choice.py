"""The choice of a device: whether libraries that look for one should use a sky device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skyward.device.library import Core

if TYPE_CHECKING:
    import torch


class Choice:
    """Follows the user's choice between sky devices and a GPU of this machine."""

    def __init__(self, core: Core) -> None:
        self.core = core

    def device(self) -> torch.device | None:
        """The sky device to use; None if none is open, or if a GPU of this machine is preferred.

        Beside a GPU of this machine, a sky device is used when it is the default device, or when
        `torch.accelerator.set_device_index` or `torch.sky.set_device` has made it the current one.
        """
        import torch

        if self.core.in_bad_fork or not self.core.open_devices:
            return None
        default = torch.get_default_device()
        if default.type == "sky":
            return torch.device(
                "sky", self.core.current if default.index is None else default.index
            )
        if _is_gpu(default.type) or (self.core.chosen is None and _has_gpu()):
            return None
        return torch.device("sky", self.core.current)

    def note(self, index: int) -> None:
        """Remember that the user has made a device the current one."""
        if index in self.core.open_devices:
            self.core.chosen = index

    def is_closed(self, device: torch.device) -> bool:
        """Whether a device that a library remembers is one of ours and gone."""
        return device.type == "sky" and device.index not in self.core.open_devices


def _is_gpu(kind: str) -> bool:
    return kind in ("cuda", "mps", "xpu")


def _has_gpu() -> bool:
    import torch

    return (
        torch.cuda.is_available() or torch.backends.mps.is_available() or torch.xpu.is_available()
    )
