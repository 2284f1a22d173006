"""Results that stay remote: a function's tensors, on the device of the compute it ran on."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from skytorch.client.state_dict import StateDict, load_module_into

if TYPE_CHECKING:
    import torch


class Placement:
    """Moves the tensors of one result to a device; those that share memory share it there too."""

    def __init__(self, device: Callable[[], torch.device]) -> None:
        self._device = device
        self._placed: dict[Any, torch.Tensor] = {}
        self._kept: list[Any] = []
        """The tensors whose addresses are keys of `_placed`; freed, their addresses could recur."""

    def of(self, value: Any) -> Any:
        """The value with its tensors and modules on the device.

        A state dict becomes a `StateDict`, a module gets a `load_into` unless it has one. Looks
        into dicts, lists and tuples; objects of other classes are left as they are.
        """
        import torch

        if isinstance(value, torch.nn.Module):
            # By way of the host: a function's cuda tensors belong to another process.
            module = value.cpu().to(self._device())
            if not hasattr(module, "load_into"):
                # A partial, unlike a bound method, is copied and pickled with the module.
                vars(module)["load_into"] = functools.partial(load_module_into, module)
            return module
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, dict):
            items = {key: self.of(item) for key, item in value.items()}
            if items and all(
                isinstance(key, str) and isinstance(item, torch.Tensor)
                for key, item in items.items()
            ):
                return StateDict(items)
            return items if type(value) in (dict, StateDict) else _refilled(value, items)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(self.of, value))
        if type(value) in (list, tuple):
            return type(value)(map(self.of, value))
        return value

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        import torch

        self._kept.append(tensor)
        key = (
            tensor.untyped_storage()._cdata,
            tensor.storage_offset(),
            tensor.shape,
            tensor.stride(),
            tensor.dtype,
            isinstance(tensor, torch.nn.Parameter),
            tensor.requires_grad,
        )
        placed = self._placed.get(key)
        if placed is None:
            placed = tensor.detach().cpu().to(self._device())
            if isinstance(tensor, torch.nn.Parameter):
                placed = torch.nn.Parameter(placed, tensor.requires_grad)
            elif tensor.requires_grad:
                placed.requires_grad_()
            self._placed[key] = placed
        return placed


def _refilled(mapping: dict[Any, Any], items: dict[Any, Any]) -> dict[Any, Any]:
    mapping.update(items)
    return mapping
