"""Filling a module with a stored version: all of it fits, or nothing is changed."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from skyward.errors import ModelMismatchError, StoreError
from skyward.store import matching, tree
from skyward.store.files import Files
from skyward.store.layout import tensor_at
from skyward.store.loading import Loading, manifest_place
from skyward.store.manifest import Manifest, View
from skyward.store.progress import UNWATCHED, Progress

if TYPE_CHECKING:
    import torch

_log = logging.getLogger("skyward.store")


def fill(
    module: torch.nn.Module,
    files: Files,
    manifest: Manifest,
    device: torch.device,
    strict: bool,
    progress: Progress = UNWATCHED,
) -> torch.nn.Module:
    """Load a version into a module; parameters on the meta device are made on `device`."""
    import torch

    stored, extra = _state(files, manifest)
    state = module.state_dict()
    model = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    found = matching.match(stored, model)
    if not found.exact:
        title = f"{manifest.name!r} version {manifest.version} does not fit {type(module).__name__}"
        told = matching.report(found, stored, model, title)
        if strict:
            raise ModelMismatchError(
                f"{told}\nnothing was loaded; pass strict=False to load what fits"
            )
        _log.warning("%s\nthe rest was loaded", told)
    pairs = {name: (stored[name], model[name]) for name in found.fits}
    _copy(_Slots(module), pairs, Loading(files, manifest, progress), device)
    extra = {name: value for name, value in extra.items() if name in state}
    if extra:
        module.load_state_dict(extra, strict=False)
    return module


def _state(files: Files, manifest: Manifest) -> tuple[dict[str, View], dict[str, Any]]:
    """The names in a stored state dict: those of tensors, and those of other values."""
    views = manifest.tensors
    value = tree.outline(manifest.tree, len(views), manifest_place(files, manifest))
    nested = isinstance(value, dict) and any(_holds_tensors(each) for each in value.values())
    if not isinstance(value, dict) or nested:
        names = f"a dict of {', '.join(map(str, value))[:200]}" if nested else ""
        raise ModelMismatchError(
            f"{manifest.name!r} version {manifest.version} is no state dict but "
            f"{names or type(value).__name__}; "
            "load it without into=, and give the part you want to module.load_state_dict"
        )
    tensors = {
        name: views[each.index] for name, each in value.items() if isinstance(each, tree.Number)
    }
    return tensors, {name: each for name, each in value.items() if name not in tensors}


def _holds_tensors(value: object) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    return isinstance(value, list | tuple) and any(
        isinstance(each, tree.Number) or _holds_tensors(each) for each in value
    )


def _copy(
    slots: _Slots,
    pairs: dict[str, tuple[View, torch.Tensor]],
    loading: Loading,
    device: torch.device,
) -> None:
    import torch

    by_region: dict[int, list[str]] = {}
    for name, (view, target) in pairs.items():
        if view.region is not None:
            by_region.setdefault(view.region, []).append(name)
        elif target.device.type == "meta":
            slots.give(name, torch.empty(view.shape, dtype=target.dtype, device=device))
    loading.begin(by_region)
    loading.verify(by_region)
    done = 0
    try:
        for region, flat in loading.regions(by_region):
            names = by_region[region]
            made = [name for name in names if pairs[name][1].device.type == "meta"]
            moved = flat.to(device) if made else flat
            for name in names:
                view, target = pairs[name]
                if name in made:
                    slots.give(name, tensor_at(view, moved).to(target.dtype))
                else:
                    target.copy_(tensor_at(view, flat))
            done += len(names)
    except StoreError as problem:
        if done:
            problem.add_note(
                f"{done} of {len(pairs)} tensors had been loaded before: "
                "load another version before you use the model"
            )
        raise


class _Slots:
    """Where a module's parameters and buffers hang, tied ones together."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._was = dict(module.named_parameters(remove_duplicate=False))
        self._made: dict[int, torch.nn.Parameter] = {}

    def give(self, name: str, tensor: torch.Tensor) -> None:
        """Hang a tensor where a meta tensor hung."""
        import torch

        prefix, _, leaf = name.rpartition(".")
        owner = self._module.get_submodule(prefix)
        if leaf not in owner._parameters:
            owner._buffers[leaf] = tensor
            return
        was = self._was[name]
        if id(was) not in self._made:
            self._made[id(was)] = torch.nn.Parameter(tensor, requires_grad=was.requires_grad)
        owner._parameters[leaf] = self._made[id(was)]
