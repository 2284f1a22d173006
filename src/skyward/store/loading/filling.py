"""Filling a module with a stored version: all of it fits, or nothing is changed."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from skyward.errors import ModelMismatchError, StoreError
from skyward.store.catalog import manifest_url
from skyward.store.format import tree
from skyward.store.format.layout import tensor_at
from skyward.store.format.manifest import Manifest, View
from skyward.store.loading import Loading, matching
from skyward.store.places.files import Files
from skyward.store.progress import UNWATCHED, Progress

if TYPE_CHECKING:
    import torch

_log = logging.getLogger("skyward.store")


_SHOWN = 10


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

    state = _State(files, manifest)
    present = {
        name: value if isinstance(value, torch.Tensor) else None
        for name, value in module.state_dict().items()
    }
    found = matching.match(state.views, present)
    if not found.exact:
        title = f"{manifest.name!r} version {manifest.version} does not fit {type(module).__name__}"
        told = matching.report(found, state.views, present, title)
        if strict:
            raise ModelMismatchError(
                f"{told}\nnothing was loaded; pass strict=False to load what fits"
                + _own_way(module, manifest)
            )
        _log.warning("%s\nthe rest was loaded", told)
    slots = _Slots(module)
    work = _Work({}, {}, {})
    converted = tuple(_converted(module, state.about))
    for name in found.fits:
        target, view = present[name], state.views[name]
        if target is None or view is None or (converted and name.startswith(converted)):
            work.given[name] = target
        elif target.device.type == "meta" and slots.holds(name, target):
            work.made[name] = target
        elif target.device.type != "meta" and slots.shares(target):
            work.copied[name] = target
        else:
            work.given[name] = target
    _carry_out(work, state, slots, loading_for, device, progress)
    _give(module, work, state)
    left = slots.on_meta() if work.made else []
    if left:
        _log.warning(
            "%r version %d holds nothing for %s, still on the meta device; give %s values before "
            "you use the model",
            manifest.name,
            manifest.version,
            ", ".join(left[:_SHOWN]) + (f" and {len(left) - _SHOWN} more" * (len(left) > _SHOWN)),
            "it" if len(left) == 1 else "them",
        )
    return module


class _State:
    """A stored state dict, of which no tensor has been read."""

    def __init__(self, files: Files, manifest: Manifest) -> None:
        self._manifest = manifest
        self._where = manifest_url(files, manifest)
        value = tree.outline(manifest.tree, len(manifest.tensors), self._where)
        if not isinstance(value, dict):
            raise self._refused(type(value).__name__)
        odd = next((name for name in value if not isinstance(name, str)), None)
        if odd is not None:
            raise self._refused(f"a dict with the key {odd!r}")
        inner = {name: [number for _, number in tree.numbers(each)] for name, each in value.items()}
        self.numbers = {name: numbers for name, numbers in inner.items() if numbers}
        """The tensors of each name: one, or as many as its extra state has."""
        self.views: dict[str, View | None] = {
            name: manifest.tensors[each.index] if isinstance(each, tree.Number) else None
            for name, each in value.items()
        }
        if any(self.views[name] is None and not matching.is_extra(name) for name in self.numbers):
            raise self._refused(f"a dict of {', '.join(value)[:200]}")
        about = getattr(value, "_metadata", None)
        self.about: dict[str, Any] = about if isinstance(about, dict) else {}
        """What the modules that were saved said of themselves, such as their version."""

    def view(self, number: int) -> View:
        return self._manifest.tensors[number]

    def given(self, names: Mapping[str, object], tensors: dict[int, torch.Tensor]) -> Any:
        """A part of it, as `load_state_dict` takes it; `tensors` has all that it needs."""
        value = tree.decode(self._manifest.tree, tensors.get, self._where)
        part = OrderedDict((name, value[name]) for name in names)
        part._metadata = self.about  # type: ignore[attr-defined]
        return part

    def _refused(self, what: str) -> ModelMismatchError:
        return ModelMismatchError(
            f"{self._manifest.name!r} version {self._manifest.version} is no state dict but "
            f"{what}; load it without into=, and give the part you want to module.load_state_dict"
        )


def _own_code(module: torch.nn.Module) -> Iterator[str]:
    """The names of those submodules that have code of their own to load a state dict."""
    import torch

    ordinary = torch.nn.Module
    for name, each in module.named_modules():
        if (
            type(each)._load_from_state_dict is not ordinary._load_from_state_dict
            or type(each).load_state_dict is not ordinary.load_state_dict
            or each._load_state_dict_pre_hooks
        ):
            yield name


def _own_way(module: torch.nn.Module, manifest: Manifest) -> str:
    if next(_own_code(module), None) is None:
        return ""
    loaded = f"load_model({manifest.name!r}, version={manifest.version})"
    return (
        "; if the module itself knows how to read what older ones saved, give it all: "
        f"module.load_state_dict(store.{loaded})"
    )


def _converted(module: torch.nn.Module, about: dict[str, Any]) -> Iterator[str]:
    """The prefixes of what another version of a module saved, which it may have to convert."""
    for name in _own_code(module):
        saved = about.get(name)
        version = saved.get("version") if isinstance(saved, dict) else None
        if saved is not None and version != module.get_submodule(name)._version:
            yield f"{name}." if name else ""


@dataclass(frozen=True, slots=True)
class _Work:
    """Names and what the module has there, by what is to be done."""

    copied: dict[str, torch.Tensor]
    """Written to where they are."""
    made: dict[str, torch.Tensor]
    """On the meta device, and to be real."""
    given: dict[str, torch.Tensor | None]
    """For the module itself to load: what its state dict shows is not where it is kept."""
    loaded: dict[int, torch.Tensor] = field(default_factory=dict)
    """The tensors of those that are given, by number."""


def _carry_out(
    work: _Work,
    state: _State,
    slots: _Slots,
    loading_for: Callable[[torch.device], Loading],
    device: torch.device,
    progress: Progress,
) -> None:
    import torch

    here = torch.device("cpu")
    by_place: dict[torch.device, dict[int, list[tuple[str, int]]]] = {}
    for name, target in (work.copied | work.made | work.given).items():
        place = here if target is None else target.device
        place = device if place.type == "meta" else place
        for number in state.numbers.get(name, ()):
            region = state.view(number).region
            if region is None:
                _put_empty(work, state, slots, name, number, device)
                continue
            by_region = by_place.setdefault(place if place.type == "sky" else here, {})
            by_region.setdefault(region, []).append((name, number))
    loadings = {place: loading_for(place) for place in by_place}
    progress.begin(sum(loadings[place].size(wanted) for place, wanted in by_place.items()))
    for place, loading in loadings.items():
        loading.verify(by_place[place])
    done = 0
    try:
        for place, by_region in by_place.items():
            for region, flat in loadings[place].regions(by_region):
                _put(work, state, slots, by_region[region], flat, device)
                done += sum(name not in work.given for name, _ in by_region[region])
    except StoreError as problem:
        if done:
            problem.add_note(
                f"{done} of {len(work.copied) + len(work.made) + len(work.given)} tensors had been "
                "loaded before: load another version before you use the model"
            )
        raise


def _put_empty(
    work: _Work, state: _State, slots: _Slots, name: str, number: int, device: torch.device
) -> None:
    import torch

    view = state.view(number)
    if name in work.made:
        dtype = work.made[name].dtype
        slots.give(name, torch.empty(view.shape, dtype=dtype, device=device))
    elif name in work.given:
        work.loaded[number] = tensor_at(view, torch.empty(0, dtype=torch.uint8))


def _put(
    work: _Work,
    state: _State,
    slots: _Slots,
    parts: list[tuple[str, int]],
    flat: torch.Tensor,
    device: torch.device,
) -> None:
    memory: dict[int, torch.Tensor] = {}
    for name, number in parts:
        view = state.view(number)
        if name in work.made:
            # What was tied when it was saved need not be here: each storage gets its own memory.
            storage = slots.storage(name)
            if storage not in memory:
                moved = flat.to(device)
                memory[storage] = moved.clone() if memory and moved is flat else moved
            slots.give(name, tensor_at(view, memory[storage]).to(work.made[name].dtype))
        elif name in work.copied:
            work.copied[name].copy_(tensor_at(view, flat))
        else:
            work.loaded[number] = tensor_at(view, flat)


def _give(module: torch.nn.Module, work: _Work, state: _State) -> None:
    """Let the module load the rest."""
    on_meta = {
        name: target
        for name, target in work.given.items()
        if target is not None and target.device.type == "meta"
    }
    others = {name: target for name, target in work.given.items() if name not in on_meta}
    for names, assign in ((on_meta, True), (others, False)):
        if not names:
            continue
        try:
            taken = module.load_state_dict(
                state.given(names, work.loaded), strict=False, assign=assign
            )
        except RuntimeError as problem:
            raise ModelMismatchError(
                f"{type(module).__name__} does not load what its own state_dict() names: {problem}"
            ) from problem
        refused = sorted(set(taken.unexpected_keys) & set(names))
        if refused:
            _log.warning(
                "%s names %s in its state_dict() and does not load it; it was left out",
                type(module).__name__,
                ", ".join(refused[:_SHOWN]),
            )


class _Slots:
    """Where a module's parameters and buffers hang, tied ones together."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._was: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
        self._was |= dict(module.named_buffers(remove_duplicate=False))
        self._storages = {_storage(tensor) for tensor in self._was.values()} - {None}
        self._made: dict[int, torch.Tensor] = {}

    def storage(self, name: str) -> int:
        """Which storage a parameter or buffer had."""
        return _storage(self._was[name]) or id(self._was[name])

    def shares(self, tensor: torch.Tensor) -> bool:
        """Whether writing to a tensor writes to a parameter or buffer."""
        return _storage(tensor) in self._storages

    def holds(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether a tensor is the parameter or buffer of this name."""
        was = self._was.get(name)
        return (
            was is not None
            and was.shape == tensor.shape
            and _storage(tensor) is not None
            and _storage(was) == _storage(tensor)
        )

    def give(self, name: str, tensor: torch.Tensor) -> None:
        """Hang a tensor where a meta tensor hung."""
        import torch

        prefix, _, leaf = name.rpartition(".")
        owner = self._module.get_submodule(prefix)
        was = self._was[name]
        if id(was) not in self._made:
            self._made[id(was)] = (
                torch.nn.Parameter(tensor, requires_grad=was.requires_grad)
                if isinstance(was, torch.nn.Parameter)
                else tensor
            )
        hung: dict[str, Any] = owner._parameters if leaf in owner._parameters else owner._buffers
        hung[leaf] = self._made[id(was)]

    def on_meta(self) -> list[str]:
        """The parameters and buffers that are still not real."""
        named = [*self._module.named_parameters(), *self._module.named_buffers()]
        return [name for name, tensor in named if tensor.device.type == "meta"]


def _storage(tensor: torch.Tensor) -> int | None:
    """What tells a tensor's storage from others, also on the meta device; None without one."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse ones, and some subclasses
        return None
