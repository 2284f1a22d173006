"""Checkpoints of torch devices: every tensor that lives on a device, saved and brought back.

A checkpoint is two versions in a store. `NAME.device` has the memory of the device, storage by
storage. `NAME` is written after it, and has the objects that the user named, the states of the
device's generators, and which storage of this process each piece of the memory was.
"""

from __future__ import annotations

import contextlib
import functools
import uuid
import warnings
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from skyward.device.core import core, index_of
from skyward.device.library import Life
from skyward.device.recovery import Recovery, recoveries, summary
from skyward.errors import ConfigurationError, DeviceError
from skyward.store import values
from skyward.store.catalog import manifest_url
from skyward.store.manifest import Manifest
from skyward.store.models import ModelStore, ModelVersion
from skyward.store.progress import UNWATCHED
from skyward.store.values import tensor_at

if TYPE_CHECKING:
    import torch


_PROCESS = uuid.uuid4().hex
"""Slots mean something to the process that made them, and to no other."""
_KEY = "skyward.checkpoint"
"""Under which the metadata of a version says that it is a checkpoint."""


def checkpoint(
    device: str | torch.device, store: ModelStore, /, *, name: str = "checkpoint", **objects: Any
) -> ModelVersion:
    """Save every tensor that lives on a device, and the states of its generators.

    The device's node saves them, and only what has changed since the last checkpoint. If the
    device's process is lost, `compute.device()` comes back with these tensors. What is named in
    `objects` is saved as well, for `restore`: objects with a `state_dict`, such as modules and
    optimisers, and plain values.

    Tensors that an operation failed on have no contents: they are left out, with a warning. If an
    object in `objects` has such a tensor, `DeviceError` names the tensor, and nothing is saved.

    >>> sky.checkpoint(device, store, model=model, optimizer=optimizer, step=step)
    """
    import torch

    index = index_of(device, "checkpoint")
    place = torch.device("sky", index)
    _check_store("checkpoint", store)
    torch.accelerator.synchronize(index)
    states = {key: _state(value) for key, value in objects.items()}
    serial = core().serial(index)
    held, failed = _held(index, serial)
    if failed:
        _tell_failed(index, failed, states)
    saved = store.save_model(list(held.values()), f"{name}.device") if held else None
    generators = {
        str(number): torch.frombuffer(
            bytearray(core().generator_state(index, number)), dtype=torch.uint8
        )
        for number in core().generators(index)
    }
    value = {"objects": states, "generators": generators}
    _, tensors = values.encode(value)
    facts = {
        "device": None if saved is None else saved.version,
        "lineage": _lineage(serial),
        "lives": [list(life) for life in held],
        "host": [n for n, (_, tensor) in enumerate(tensors) if tensor.device.type != "sky"],
    }
    version = store.save_model(value, name, {_KEY: facts})
    title = f"the checkpoint {name!r} (version {version.version}) in {store.url}"
    fill = functools.partial(_bring_back, place, store, name, version.version)
    recoveries.remember(index, Recovery(title, tuple(held), frozenset(failed), fill))
    return version


def restore(
    device: str | torch.device,
    store: ModelStore,
    /,
    *,
    name: str = "checkpoint",
    version: int | None = None,
    **objects: Any,
) -> dict[str, Any]:
    """Set a device back to a checkpoint, and load the state of the objects that are given.

    In the process that made the checkpoint, every tensor of the checkpoint that still lives gets
    its contents back, also if an operation on it has failed since. In another process, the objects
    that are given do: those with a `load_state_dict`. Returns what else was saved by name: plain
    values as they were, and the state of objects that are not given. The states of the device's
    generators are set.

    >>> step = sky.restore(device, store, model=model, optimizer=optimizer)["step"]
    """
    import torch

    index = index_of(device, "restore")
    place = torch.device("sky", index)
    _check_store("restore", store)
    manifest, facts = _read(store, name, version)
    stuck = [key for key, value in objects.items() if not hasattr(value, "load_state_dict")]
    if stuck:
        raise ConfigurationError(
            f"restore({stuck[0]}={objects[stuck[0]]!r}): it has no load_state_dict; leave it out, "
            "and take it from what restore returns"
        )
    torch.accelerator.synchronize(index)
    _bring_back(place, store, name, manifest.version)
    saved = _loaded(place, store, manifest, facts["host"])["objects"]
    missing = sorted(objects.keys() - saved.keys())
    if missing:
        raise ConfigurationError(
            f"restore({', '.join(missing)}=...): the checkpoint {name!r} has "
            f"{', '.join(sorted(saved)) or 'no objects'}; give sky.checkpoint the objects by name"
        )
    for key, value in objects.items():
        value.load_state_dict(saved.pop(key))
    return dict(saved)


def _state(value: Any) -> Any:
    return value.state_dict() if hasattr(value, "state_dict") else value


def _held(index: int, serial: int) -> tuple[dict[Life, torch.Tensor], dict[Life, str]]:
    """The storages that live on a device, with the memory of each, which stays allocated.

    Those whose contents a failed operation should have made come apart, with what went wrong.
    """
    lost = recoveries.lost(index)
    # One that was lost before has no memory to save, and is told by its own error.
    flats = _flats(serial, [life for life in core().living(serial) if life not in lost])
    failed = _failed(index, flats)
    return {life: flat for life, flat in flats.items() if life not in failed}, failed


def _failed(index: int, flats: dict[Life, torch.Tensor]) -> dict[Life, str]:
    lives = list(flats)
    return {lives[at]: why for at, why in failures(index, list(flats.values())).items()}


def _tell_failed(index: int, failed: dict[Life, str], states: dict[str, Any]) -> None:
    """Refuse to save objects without the contents of their tensors; warn of other tensors."""
    slots = {life.slot: why for life, why in failed.items()}
    for path, tensor in values.encode(states)[1]:
        if tensor.device.type == "sky" and tensor.numel():
            slot = core().slot(index, tensor.untyped_storage().data_ptr())
            if slot in slots:
                raise DeviceError(
                    f"checkpoint: {path} has no contents, since an operation on it failed "
                    f"({slots[slot]}); make it again, or set it back with sky.restore"
                )
    count, listed = summary(core(), index, failed)
    why = next(iter(failed.values()))
    warnings.warn(
        f"the checkpoint is without {count} that an operation failed on: {listed} ({why}); drop "
        "what you do not need, or make it again",
        stacklevel=3,
    )


def _flats(serial: int, lives: Iterable[Life]) -> dict[Life, torch.Tensor]:
    """The memory of storages, without those that are freed or empty by now."""
    import torch

    found: dict[Life, torch.Tensor] = {}
    for life in lives:
        # Another thread may free the storage at any time.
        with contextlib.suppress(RuntimeError):
            if life.bytes:
                storage = core().alias(serial, life.slot)
                empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
                found[life] = empty.set_(storage)
    # A slot that is held keeps its storage: what is the same now was the same before.
    living = set(core().living(serial))
    return {life: flat for life, flat in found.items() if life in living}


def _bring_back(place: torch.device, store: ModelStore, name: str, version: int) -> None:
    """Fill the storages of this process that a checkpoint has, and set the generators."""
    manifest, facts = _read(store, name, version)
    serial = core().serial(place.index)
    ours = facts["lineage"] == _lineage(serial)
    if ours and facts["device"] is not None:
        memory = store._manifest(f"{name}.device", facts["device"])
        _fill(place, store, memory, [Life(*life) for life in facts["lives"]])
    alive = core().generators(place.index) if ours else [0]
    states = _loaded(place, store, manifest, facts["host"])["generators"]
    for number, state in states.items():
        if int(number) in alive:
            core().set_generator_state(place.index, int(number), bytes(state.numpy()))


def _fill(place: torch.device, store: ModelStore, memory: Manifest, lives: list[Life]) -> None:
    serial = core().serial(place.index)
    targets = _flats(serial, lives)
    failed = _failed(place.index, targets)
    wanted: dict[int, list[int]] = {}
    for number, life in enumerate(lives):
        region = memory.tensors[number].region
        if life in targets and region is not None:
            wanted.setdefault(region, []).append(number)
    loading = store._loading(memory, UNWATCHED, place)
    for region, flat in loading.regions(wanted):
        for number in wanted[region]:
            saved = tensor_at(memory.tensors[number], flat.to(place))
            life = lives[number]
            if life in failed:
                core().renew(serial, life.slot)
            targets[life].copy_(saved)
    recoveries.found(place.index, targets)


def _loaded(place: torch.device, store: ModelStore, manifest: Manifest, host: list[int]) -> Any:
    """The saved value; tensors that were on the host are there again."""
    loading = store._loading(manifest, UNWATCHED, place)
    tensors = loading.tensors(place)
    for number in host:
        tensors[number] = tensors[number].cpu()
    return values.decode(manifest.tree, tensors.__getitem__, manifest_url(store._files, manifest))


def _read(store: ModelStore, name: str, version: int | None) -> tuple[Manifest, dict[str, Any]]:
    manifest = store._manifest(name, version)
    facts = manifest.metadata.get(_KEY)
    if facts is None:
        raise ConfigurationError(
            f"{name!r} in {store.url} is a model, and no checkpoint; load it with "
            "store.load_model, or give the name of what sky.checkpoint has saved"
        )
    return manifest, facts


def _lineage(serial: int) -> str:
    return f"{_PROCESS}.{serial}"


def _check_store(asked: str, store: object) -> None:
    if not isinstance(store, ModelStore):
        raise ConfigurationError(f"{asked}(..., {store!r}): give a sky.ModelStore")


_TOGETHER = 128
"""How many tensors one operation looks at."""


def failures(index: int, flats: Sequence[torch.Tensor]) -> dict[int, str]:
    """Which of these tensors of a device failed, by their positions, and what went wrong.

    The tensors have one dimension and are not empty. Costs one wait if there is none; errors that
    nobody has seen yet must have been raised before.
    """
    found: dict[int, str] = {}
    parts = [range(len(flats))] if flats else []
    while parts:
        part = parts.pop()
        problem = _problem(index, [flats[at] for at in part])
        if problem is not None and len(part) == 1:
            found[part[0]] = problem
        elif problem is not None:
            half = len(part) // 2
            parts += [part[:half], part[half:]]
    return found


def _problem(index: int, flats: list[torch.Tensor]) -> str | None:
    import torch

    try:
        firsts = [
            torch.cat([flat[:1] for flat in flats[at : at + _TOGETHER]])
            for at in range(0, len(flats), _TOGETHER)
        ]
        torch.cat(firsts).cpu()
    except Exception as problem:
        core().stats(index)  # raises if the device itself is gone
        return str(problem).partition("\n")[0]
    return None
