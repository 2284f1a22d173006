"""State dicts that stay remote: names and tensors, and how they are loaded into a model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from skyward.errors import ConfigurationError

if TYPE_CHECKING:
    import torch

M = TypeVar("M", bound="torch.nn.Module")


class StateDict(dict[str, "torch.Tensor"]):
    """Names and tensors of a model, remote; `execute` makes one of a returned state dict."""

    def load_into(self, model: M) -> M:
        """Copy every tensor into the model's parameter or buffer of that name.

        Non-persistent buffers are loaded if they are here: `Module.state_dict` leaves them out. A
        parameter or buffer on the meta device has no memory to copy into and becomes the remote
        tensor itself. Nothing is changed unless all names and shapes fit.

        >>> with torch.device("meta"):
        ...     model = Net()
        >>> (await node.execute(load_weights)).load_into(model)
        """
        import torch

        if not isinstance(model, torch.nn.Module):
            raise ConfigurationError(f"load_into({model!r}): give an nn.Module")
        persistent = {
            name: tensor
            for name, tensor in model.state_dict(keep_vars=True).items()
            if isinstance(tensor, torch.Tensor)
        }
        others = {
            name: tensor
            for name, tensor in model.named_buffers(remove_duplicate=False)
            if name not in persistent
        }
        self._check(type(model).__name__, persistent, others)
        # Tied weights are one tensor under several names, and stay one.
        become: dict[int, torch.Tensor] = {}
        with torch.no_grad():
            for name, target in (persistent | others).items():
                if name not in self:
                    continue
                if target.device.type == "meta":
                    _assign(model, name, become.setdefault(id(target), self._like(name, target)))
                else:
                    target.copy_(self[name])
        return model

    def _like(self, name: str, target: torch.Tensor) -> torch.Tensor:
        import torch

        tensor = self[name].detach().to(target.dtype)
        if isinstance(target, torch.nn.Parameter):
            return torch.nn.Parameter(tensor, target.requires_grad)
        return tensor

    def _check(
        self,
        model: str,
        persistent: Mapping[str, torch.Tensor],
        others: Mapping[str, torch.Tensor],
    ) -> None:
        targets = {**persistent, **others}
        problems = []
        if missing := persistent.keys() - self.keys():
            problems.append(f"it lacks {_listed(missing)}")
        if empty := {name for name in others.keys() - self.keys() if others[name].is_meta}:
            problems.append(
                f"it lacks {_listed(empty)}, which are not persistent and are on the meta device, "
                "so return the module itself, which has them"
            )
        if unexpected := self.keys() - targets.keys():
            problems.append(f"{model} has no {_listed(unexpected)}")
        problems += [
            f"{name} is {tuple(self[name].shape)} here and {tuple(target.shape)} in {model}"
            for name, target in targets.items()
            if name in self and self[name].shape != target.shape
        ]
        if problems:
            raise ConfigurationError(
                f"this state dict does not fit {model}: {'; '.join(problems)}; build the model "
                "that the tensors were taken from"
            )

    def __repr__(self) -> str:
        return f"<state dict of {len(self)} tensors>"


def load_module_into(module: torch.nn.Module, model: M) -> M:
    """Load all parameters and buffers of one module, persistent or not, into another.

    >>> load_module_into(remote, model)
    """
    tensors = StateDict(module.named_parameters(remove_duplicate=False))
    tensors.update(module.named_buffers(remove_duplicate=False))
    return tensors.load_into(model)


def _listed(names: Iterable[str]) -> str:
    shown = sorted(names)
    return ", ".join(shown[:5]) + (f" and {len(shown) - 5} more" if len(shown) > 5 else "")


def _assign(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    path, _, last = name.rpartition(".")
    setattr(model.get_submodule(path), last, tensor)


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
