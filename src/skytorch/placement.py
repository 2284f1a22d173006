"""Results that stay remote: a function's tensors, on the device of the compute it ran on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from skyward.errors import ConfigurationError

if TYPE_CHECKING:
    import torch

M = TypeVar("M", bound="torch.nn.Module")


class StateDict(dict[str, "torch.Tensor"]):
    """Names and tensors of a model, remote; what `execute` makes of a returned state dict."""

    def load_into(self, model: M) -> M:
        """Copy every tensor into the model's parameter or buffer of that name.

        What is on the meta device has no memory to copy into and becomes the remote tensor itself.
        Nothing is changed unless all names and shapes fit.

        >>> with torch.device("meta"):
        ...     model = Net()
        >>> (await node.execute(load_weights)).load_into(model)
        """
        import torch

        if not isinstance(model, torch.nn.Module):
            raise ConfigurationError(f"load_into({model!r}): give an nn.Module")
        targets = {
            name: tensor
            for name, tensor in model.state_dict(keep_vars=True).items()
            if isinstance(tensor, torch.Tensor)
        }
        self._check(type(model).__name__, targets)
        # Tied weights are one tensor under several names, and stay one.
        become: dict[int, torch.Tensor] = {}
        with torch.no_grad():
            for name, target in targets.items():
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

    def _check(self, model: str, targets: dict[str, torch.Tensor]) -> None:
        problems = []
        if missing := targets.keys() - self.keys():
            problems.append(f"it lacks {_listed(missing)}")
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


def _listed(names: Iterable[str]) -> str:
    shown = sorted(names)
    return ", ".join(shown[:5]) + (f" and {len(shown) - 5} more" if len(shown) > 5 else "")


def _assign(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    path, _, last = name.rpartition(".")
    setattr(model.get_submodule(path), last, tensor)


class Placement:
    """Moves the tensors of one result to a device; those that share memory share it there too."""

    def __init__(self, device: Callable[[], torch.device]) -> None:
        self._device = device
        self._placed: dict[Any, torch.Tensor] = {}
        self._kept: list[Any] = []
        """What `_placed` knows by address must not be freed meanwhile."""

    def of(self, value: Any) -> Any:
        """The value with its tensors and modules on the device; a state dict as a `StateDict`.

        Looks into dicts, lists and tuples; objects of other classes are left as they are.
        """
        import torch

        if isinstance(value, torch.nn.Module):
            # By way of the host: a function's cuda tensors are of another process.
            return value.cpu().to(self._device())
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
