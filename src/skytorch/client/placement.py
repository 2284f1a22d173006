"""Results that stay remote: what `execute` adds to a function's state dicts and modules."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from skytorch.client.state_dict import StateDict, load_module_into

if TYPE_CHECKING:
    import torch


def with_load_into(value: Any, found: Callable[[torch.device], None]) -> Any:
    """The value, in which state dicts and modules have a `load_into`.

    A state dict becomes a `StateDict`, a module gets a `load_into` unless it has one. Looks into
    dicts, lists and tuples; objects of other classes are left as they are. Calls `found` with the
    device of every tensor.
    """
    import torch

    def again(part: Any) -> Any:
        return with_load_into(part, found)

    if isinstance(value, torch.nn.Module):
        for parameter in value.parameters():
            found(parameter.device)
        if not hasattr(value, "load_into"):
            # A partial, unlike a bound method, is copied and pickled with the module.
            vars(value)["load_into"] = functools.partial(load_module_into, value)
        return value
    if isinstance(value, torch.Tensor):
        found(value.device)
        return value
    if isinstance(value, dict):
        items = {key: again(item) for key, item in value.items()}
        if items and all(
            isinstance(key, str) and isinstance(item, torch.Tensor) for key, item in items.items()
        ):
            return StateDict(items)
        return items if type(value) in (dict, StateDict) else _refilled(value, items)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(again, value))
    if type(value) in (list, tuple):
        return type(value)(map(again, value))
    return value


def _refilled(mapping: dict[Any, Any], items: dict[Any, Any]) -> dict[Any, Any]:
    mapping.update(items)
    return mapping
