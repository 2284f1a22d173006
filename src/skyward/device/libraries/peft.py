"""peft: adapters are loaded to the device that it finds."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

from skyward.device.libraries.choice import Choice
from skyward.device.libraries.patches import wrap


def _other(module: ModuleType, choice: Choice) -> None:
    def infer_device(original: Callable[[], str]) -> Callable[[], str]:
        return lambda: str(choice.device() or original())

    wrap(module, "infer_device", infer_device)


PATCHES: dict[str, Callable[..., None]] = {"peft.utils.other": _other}
