"""Filling a module with a stored version: all of it fits, or nothing is changed."""

from __future__ import annotations

import difflib
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from skyward.errors import ConfigurationError, ModelMismatchError, StoreError
from skyward.store import values
from skyward.store.catalog import manifest_url
from skyward.store.load import Loading
from skyward.store.manifest import Manifest, View
from skyward.store.places import Files
from skyward.store.progress import UNWATCHED, Progress
from skyward.store.values import tensor_at

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

    `loading_for` returns the reader of the regions for a device.
    """
    import torch

    state = _State(files, manifest)
    present = {
        name: value if isinstance(value, torch.Tensor) else None
        for name, value in module.state_dict().items()
    }
    found = match(state.views, present)
    if not found.exact:
        title = f"{manifest.name!r} version {manifest.version} does not fit {type(module).__name__}"
        differences = report(found, state.views, present, title)
        if strict:
            raise ModelMismatchError(
                f"{differences}\nnothing was loaded; pass strict=False to load what fits"
                + _own_loading_advice(module, manifest)
            )
        _log.warning("%s\nthe rest was loaded", differences)
    filling = _Filling(module, state, device)
    filling.sort({name: present[name] for name in found.fits})
    filling.load(loading_for, progress)
    filling.let_module_load()
    left = filling.on_meta()
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
        value = values.outline(manifest.tree, len(manifest.tensors), self._where)
        if not isinstance(value, dict):
            raise self._refused(type(value).__name__)
        odd = next((name for name in value if not isinstance(name, str)), None)
        if odd is not None:
            raise self._refused(f"a dict with the key {odd!r}")
        inner = {
            name: [number for _, number in values.numbers(each)] for name, each in value.items()
        }
        self.numbers = {name: numbers for name, numbers in inner.items() if numbers}
        """The numbers of each name's tensors: one, or any number for extra state."""
        self.views: dict[str, View | None] = {
            name: manifest.tensors[each.index] if isinstance(each, values.Number) else None
            for name, each in value.items()
        }
        if any(self.views[name] is None and not is_extra(name) for name in self.numbers):
            raise self._refused(f"a dict of {', '.join(value)[:200]}")
        about = getattr(value, "_metadata", None)
        self.about: dict[str, Any] = about if isinstance(about, dict) else {}
        """The metadata of the saved modules, such as their version."""

    def view(self, number: int) -> View:
        return self._manifest.tensors[number]

    def entries(self, names: Mapping[str, object], tensors: dict[int, torch.Tensor]) -> Any:
        """The entries with these names, for `load_state_dict`; `tensors` has their tensors."""
        value = values.decode(self._manifest.tree, tensors.get, self._where)
        part = OrderedDict((name, value[name]) for name in names)
        part._metadata = self.about  # type: ignore[attr-defined]
        return part

    def _refused(self, what: str) -> ModelMismatchError:
        return ModelMismatchError(
            f"{self._manifest.name!r} version {self._manifest.version} is no state dict but "
            f"{what}; load it without into=, and give the part you want to module.load_state_dict"
        )


def _own_code(module: torch.nn.Module) -> Iterator[str]:
    """The names of the submodules that have their own code to load a state dict."""
    import torch

    ordinary = torch.nn.Module
    for name, each in module.named_modules():
        if (
            type(each)._load_from_state_dict is not ordinary._load_from_state_dict
            or type(each).load_state_dict is not ordinary.load_state_dict
            or each._load_state_dict_pre_hooks
        ):
            yield name


def _own_loading_advice(module: torch.nn.Module, manifest: Manifest) -> str:
    if next(_own_code(module), None) is None:
        return ""
    loaded = f"load_model({manifest.name!r}, version={manifest.version})"
    return (
        "; if the module itself can read a state dict of an older version, let it: "
        f"module.load_state_dict(store.{loaded})"
    )


def _converted(module: torch.nn.Module, about: dict[str, Any]) -> Iterator[str]:
    """The name prefixes of submodules that were saved at another version and may convert that."""
    for name in _own_code(module):
        saved = about.get(name)
        version = saved.get("version") if isinstance(saved, dict) else None
        if saved is not None and version != module.get_submodule(name)._version:
            yield f"{name}." if name else ""


class _Filling:
    """The tensors of a module by name, sorted by how they are loaded."""

    def __init__(self, module: torch.nn.Module, state: _State, device: torch.device) -> None:
        self._module = module
        self._members = _Members(module)
        self._state = state
        self._device = device
        self._copied: dict[str, torch.Tensor] = {}
        """Filled in place."""
        self._made: dict[str, torch.Tensor] = {}
        """On the meta device; replaced by new tensors."""
        self._given: dict[str, torch.Tensor | None] = {}
        """Loaded by the module's `load_state_dict`: its state dict does not share their memory."""
        self._loaded: dict[int, torch.Tensor] = {}
        """The stored tensors for `_given`, by number."""

    def sort(self, targets: Mapping[str, Present]) -> None:
        """Sort the entries of the module's state dict that are to be loaded."""
        converted = tuple(_converted(self._module, self._state.about))
        for name, target in targets.items():
            view = self._state.views[name]
            if target is None or view is None or (converted and name.startswith(converted)):
                self._given[name] = target
            elif target.device.type == "meta" and hasattr(target, "device_mesh"):
                raise ConfigurationError(
                    f"load_model(into=...): {name} is sharded and has no memory yet; call "
                    "to_empty(device=mesh.device) on the model first"
                )
            elif target.device.type == "meta" and self._members.holds(name, target):
                self._made[name] = target
            elif target.device.type != "meta" and self._members.shares(target):
                self._copied[name] = target
            else:
                self._given[name] = target

    def load(self, loading_for: Callable[[torch.device], Loading], progress: Progress) -> None:
        """Read what the module needs, and fill all but what its own code has to place."""
        import torch

        cpu = torch.device("cpu")
        by_reader: dict[torch.device, dict[int, list[tuple[str, int]]]] = {}
        targets = self._copied | self._made | self._given
        for name, target in targets.items():
            place = cpu if target is None else target.device
            place = self._device if place.type == "meta" else place
            reader = place if place.type == "sky" else cpu
            for number in self._state.numbers.get(name, ()):
                region = self._state.view(number).region
                if region is None:
                    self._fill_empty(name, number)
                    continue
                by_region = by_reader.setdefault(reader, {})
                by_region.setdefault(region, []).append((name, number))
        loadings = {reader: loading_for(reader) for reader in by_reader}
        progress.begin(sum(loadings[reader].size(wanted) for reader, wanted in by_reader.items()))
        for reader, loading in loadings.items():
            loading.verify(by_reader[reader])
        done = 0
        try:
            for reader, by_region in by_reader.items():
                for region, flat in loadings[reader].regions(by_region):
                    self._fill(by_region[region], flat)
                    done += sum(name not in self._given for name, _ in by_region[region])
        except StoreError as problem:
            if done:
                problem.add_note(
                    f"{done} of {len(targets)} tensors had been "
                    "loaded before: load another version before you use the model"
                )
            raise

    def _fill_empty(self, name: str, number: int) -> None:
        import torch

        view = self._state.view(number)
        if name in self._made:
            dtype = self._made[name].dtype
            self._members.replace(name, torch.empty(view.shape, dtype=dtype, device=self._device))
        elif name in self._given:
            self._loaded[number] = tensor_at(view, torch.empty(0, dtype=torch.uint8))

    def _fill(self, parts: list[tuple[str, int]], flat: torch.Tensor) -> None:
        memory: dict[int, torch.Tensor] = {}
        for name, number in parts:
            view = self._state.view(number)
            if name in self._made:
                # Tensors that were saved tied may be separate in the module: each of the module's
                # storages gets its own memory.
                storage = self._members.storage(name)
                if storage not in memory:
                    moved = flat.to(self._device)
                    memory[storage] = moved.clone() if memory and moved is flat else moved
                made = tensor_at(view, memory[storage]).to(self._made[name].dtype)
                self._members.replace(name, made)
            elif name in self._copied:
                _copy(self._copied[name], tensor_at(view, flat))
            else:
                self._loaded[number] = tensor_at(view, flat)

    def let_module_load(self) -> None:
        """Have the module load the tensors that only its own code can place."""
        on_meta = {
            name: target
            for name, target in self._given.items()
            if target is not None and target.device.type == "meta"
        }
        others = {name: target for name, target in self._given.items() if name not in on_meta}
        kind = type(self._module).__name__
        for names, assign in ((on_meta, True), (others, False)):
            if not names:
                continue
            try:
                taken = self._module.load_state_dict(
                    self._state.entries(names, self._loaded), strict=False, assign=assign
                )
            except RuntimeError as problem:
                raise ModelMismatchError(
                    f"{kind} does not load what its own state_dict() names: {problem}"
                ) from problem
            refused = sorted(set(taken.unexpected_keys) & set(names))
            if refused:
                _log.warning(
                    "%s names %s in its state_dict() and does not load it; it was left out",
                    kind,
                    ", ".join(refused[:_SHOWN]),
                )

    def on_meta(self) -> list[str]:
        """The parameters and buffers that stay on the meta device, if others left it."""
        return self._members.on_meta() if self._made else []


class _Members:
    """The parameters and buffers of a module; tied ones stay tied when they are replaced."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._tensors: dict[str, torch.Tensor] = {
            **dict(module.named_parameters(remove_duplicate=False)),
            **dict(module.named_buffers(remove_duplicate=False)),
        }
        self._storages = {_storage(tensor) for tensor in self._tensors.values()} - {None}
        self._replaced: dict[int, torch.Tensor] = {}

    def storage(self, name: str) -> int:
        """A number that identifies the storage of a parameter or buffer."""
        return _storage(self._tensors[name]) or id(self._tensors[name])

    def shares(self, tensor: torch.Tensor) -> bool:
        """Whether writing to a tensor writes to a parameter or buffer."""
        return _storage(tensor) in self._storages

    def holds(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether a tensor is the parameter or buffer of this name."""
        original = self._tensors.get(name)
        return (
            original is not None
            and original.shape == tensor.shape
            and _storage(tensor) is not None
            and _storage(original) == _storage(tensor)
        )

    def replace(self, name: str, tensor: torch.Tensor) -> None:
        """Replace a meta tensor by a tensor with values."""
        import torch

        prefix, _, leaf = name.rpartition(".")
        owner = self._module.get_submodule(prefix)
        original = self._tensors[name]
        if id(original) not in self._replaced:
            self._replaced[id(original)] = (
                torch.nn.Parameter(tensor, requires_grad=original.requires_grad)
                if isinstance(original, torch.nn.Parameter)
                else tensor
            )
        owned: dict[str, Any] = owner._parameters if leaf in owner._parameters else owner._buffers
        owned[leaf] = self._replaced[id(original)]

    def on_meta(self) -> list[str]:
        """The names of the parameters and buffers that are still on the meta device."""
        named = [*self._module.named_parameters(), *self._module.named_buffers()]
        return [name for name, tensor in named if tensor.device.type == "meta"]


def _copy(target: torch.Tensor, saved: torch.Tensor) -> None:
    if not values.is_sharded(target):
        target.copy_(saved)
        return
    from skyward.device import sharded

    sharded.write(target, saved)


def _storage(tensor: torch.Tensor) -> int | None:
    """A number that identifies a tensor's storage, also on the meta device; None without one."""
    try:
        return values.storage_of(tensor)
    except (NotImplementedError, RuntimeError):  # sparse tensors, and some subclasses
        return None


# What fits, and every difference.

_DIFFERENCES = 20
_NO_TENSOR = "a value that is no tensor"

Stored = View | None
"""A name's tensor in the store; None for a value that is no tensor."""
Present: TypeAlias = "torch.Tensor | None"
"""A name's tensor in the model; None for a value that is no tensor."""


@dataclass(frozen=True, slots=True)
class Match:
    """Names by how they match; those in `fits` can be loaded, those in `recast` are among them."""

    fits: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    reshaped: tuple[str, ...]
    recast: tuple[str, ...]

    @property
    def exact(self) -> bool:
        """Whether every name is on both sides, with the same shape and dtype."""
        return not (self.missing or self.unexpected or self.reshaped or self.recast)


def match(stored: Mapping[str, Stored], model: Mapping[str, Present]) -> Match:
    """Compare the names, and the shapes and dtypes of tensors."""
    both = [name for name in model if name in stored]
    reshaped = [name for name in both if not _same_shape(name, stored[name], model[name])]
    unfit = set(reshaped)
    fits = [name for name in both if name not in unfit]
    return Match(
        fits=tuple(fits),
        missing=tuple(name for name in model if name not in stored),
        unexpected=tuple(name for name in stored if name not in model),
        reshaped=tuple(reshaped),
        recast=tuple(name for name in fits if _recast(stored[name], model[name])),
    )


def _same_shape(name: str, stored: Stored, model: Present) -> bool:
    if is_extra(name):  # the module decides what extra state it accepts
        return True
    if stored is None or model is None:
        return stored is None and model is None
    return stored.shape == list(model.shape)


def _recast(stored: Stored, model: Present) -> bool:
    return stored is not None and model is not None and stored.dtype != _dtype(model)


def is_extra(name: str) -> bool:
    """Whether a name is that of a module's `get_extra_state`."""
    return name.rpartition(".")[2] == "_extra_state"


def report(
    found: Match, stored: Mapping[str, Stored], model: Mapping[str, Present], title: str
) -> str:
    """Every difference; a name without a partner is listed with the nearest name."""

    def in_model(name: str) -> str:
        tensor = model[name]
        return _NO_TENSOR if tensor is None else f"{list(tensor.shape)} {_dtype(tensor)}"

    def in_store(name: str) -> str:
        view = stored[name]
        return _NO_TENSOR if view is None else f"{view.shape} {view.dtype}"

    def nearest(name: str, others: Sequence[str]) -> str:
        close = difflib.get_close_matches(name, others[:2000], n=1)
        return f"; nearest: {close[0]}" if close else ""

    sections: list[tuple[str, tuple[str, ...], Callable[[str], str]]] = [
        (
            "missing from the store",
            found.missing,
            lambda name: in_model(name) + nearest(name, found.unexpected or list(stored)),
        ),
        (
            "unexpected, not in the model",
            found.unexpected,
            lambda name: in_store(name) + nearest(name, found.missing or list(model)),
        ),
        (
            "of another shape",
            found.reshaped,
            lambda name: f"stored {in_store(name)}, model {in_model(name)}",
        ),
        (
            "of another dtype",
            found.recast,
            lambda name: f"stored {_last(in_store(name))}, model {_last(in_model(name))}",
        ),
    ]
    counts = ", ".join(f"{len(names)} {what}" for what, names, _ in sections if names)
    lines = [f"{title}: {counts}"]
    for what, names, describe in sections:
        if names:
            lines.append(f"  {what}:")
            lines += [f"    {name}  {describe(name)}" for name in names[:_DIFFERENCES]]
        if len(names) > _DIFFERENCES:
            lines.append(f"    and {len(names) - _DIFFERENCES} more")
    return "\n".join(lines)


def _last(words: str) -> str:
    return words.rpartition(" ")[2]


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
