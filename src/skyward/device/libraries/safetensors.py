"""safetensors: its own code knows a list of devices, so tensors are read here and then moved."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from skyward.device.libraries.choice import Choice
from skyward.device.libraries.patches import wrap


class _Moving:
    """An open file, or a slice of one, whose tensors go to a device as they are read."""

    def __init__(self, opened: Any, device: str) -> None:
        self._opened, self._device = opened, device

    def __enter__(self) -> _Moving:
        self._opened.__enter__()
        return self

    def __exit__(self, *problem: Any) -> Any:
        return self._opened.__exit__(*problem)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._opened, name)

    def __getitem__(self, where: Any) -> Any:
        return self._opened[where].to(self._device)

    def get_tensor(self, name: str) -> Any:
        return self._opened.get_tensor(name).to(self._device)

    def get_tensors(self) -> dict[str, Any]:
        return {name: self.get_tensor(name) for name in self._opened.keys()}  # noqa: SIM118

    def get_slice(self, name: str) -> _Moving:
        return _Moving(self._opened.get_slice(name), self._device)


def _safe_open(module: ModuleType, choice: Choice) -> None:
    def safe_open(original: Any) -> Callable[..., Any]:
        class OpeningType(type):
            def __instancecheck__(cls, value: object) -> bool:
                return isinstance(value, (original, _Moving))

        class Opening(metaclass=OpeningType):
            def __new__(
                cls, filename: Any, framework: Any, device: Any = "cpu", **more: Any
            ) -> Any:
                name = str(device)
                if name.partition(":")[0] != "sky":
                    return original(filename, framework, device, **more)
                return _Moving(original(filename, framework, "cpu", **more), name)

        # A function that uses it names it so when it travels to a node.
        Opening.__module__, Opening.__name__ = module.__name__, "safe_open"
        Opening.__qualname__, Opening.__doc__ = "safe_open", original.__doc__
        return Opening

    wrap(module, "safe_open", safe_open)


PATCHES: dict[str, Callable[..., None]] = {"safetensors": _safe_open}
