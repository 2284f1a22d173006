"""Filling a module with a stored version: all of it fits, or nothing is changed."""

from __future__ import annotations

import logging
from collections.abc import Callable
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
    loading_for: Callable[[torch.device], Loading],
    files: Files,
    manifest: Manifest,
    device: torch.device,
    strict: bool,
    progress: Progress = UNWATCHED,
) -> torch.nn.Module:
    """Load a version into a module; parameters on the meta device are made on `device`.

    `loading_for` says who reads what a device gets.
    """
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
    _copy(_Slots(module), pairs, loading_for, device, progress)
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
    loading_for: Callable[[torch.device], Loading],
    device: torch.device,
    progress: Progress,
) -> None:
    import torch

    here = torch.device("cpu")
    by_place: dict[torch.device, dict[int, list[str]]] = {}
    for name, (view, target) in pairs.items():
        place = device if target.device.type == "meta" else target.device
        if view.region is not None:
            by_region = by_place.setdefault(place if place.type == "sky" else here, {})
            by_region.setdefault(view.region, []).append(name)
        elif target.device.type == "meta":
            slots.give(name, torch.empty(view.shape, dtype=target.dtype, device=device))
    loadings = {place: loading_for(place) for place in by_place}
    progress.begin(sum(loadings[place].size(wanted) for place, wanted in by_place.items()))
    for place, loading in loadings.items():
        loading.verify(by_place[place])
    done = 0
    try:
        for place, by_region in by_place.items():
            for region, flat in loadings[place].regions(by_region):
                _copy_region(slots, {name: pairs[name] for name in by_region[region]}, flat, device)
                done += len(by_region[region])
    except StoreError as problem:
        if done:
            problem.add_note(
                f"{done} of {len(pairs)} tensors had been loaded before: "
                "load another version before you use the model"
            )
        raise


def _copy_region(
    slots: _Slots,
    pairs: dict[str, tuple[View, torch.Tensor]],
    flat: torch.Tensor,
    device: torch.device,
) -> None:
    made = [name for name, (_, target) in pairs.items() if target.device.type == "meta"]
    moved = flat.to(device) if made else flat
    for name, (view, target) in pairs.items():
        if name in made:
            slots.give(name, tensor_at(view, moved).to(target.dtype))
        else:
            target.copy_(tensor_at(view, flat))


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
