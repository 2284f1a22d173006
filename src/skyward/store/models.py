"""`ModelStore`, the object that the user holds: saves, loads, lists and deletes models."""

from __future__ import annotations

import builtins
import contextlib
import functools
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from skyward.errors import ConfigurationError, ModelNotFoundError, SerializationError
from skyward.store import exchange, values
from skyward.store.address import address_of, open_files
from skyward.store.catalog import GRACE, Catalog, check_name, manifest_url
from skyward.store.fill import fill
from skyward.store.load import Loading
from skyward.store.manifest import Manifest
from skyward.store.node import NodeLoading, save_on_node
from skyward.store.places import Files
from skyward.store.progress import Progress, Watch, watched
from skyward.store.save import Saving

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class ModelVersion:
    """One published version of a model, and its description.

    `size` is the number of bytes in its tensors; `added` bytes of them were new in the store.
    """

    name: str
    version: int
    created: datetime
    size: int
    added: int
    tensors: int
    class_path: str | None
    torch: str
    skyward: str
    metadata: Mapping[str, Any] = field(hash=False)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a version: its path in the saved value, its dtype, shape and size."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size: int


class ModelStore:
    """Models by name and version, in a folder, on a model server or at any URL of fsspec.

    Tensors are stored by content, so a new version takes space only for the tensors that changed. A
    version appears whole or not at all, its bytes are verified when they are loaded, and nothing is
    ever unpickled. With `durable`, a save to a folder returns when the bytes are on the disk.
    Without it, a power failure may damage versions that were saved moments before; a load reports
    the damage. A save or load that takes a while shows a bar on a terminal, unless `progress` is
    False. If `progress` is a function, it is called with a title for each save or load, and returns
    a `skyward.store.progress.Progress`.

    >>> import tempfile, torch
    >>> store = ModelStore(tempfile.mkdtemp())
    >>> store.save_model({"weight": torch.ones(2)}, "mnist", metadata={"accuracy": 0.99}).version
    1
    >>> store.load_model("mnist")
    {'weight': tensor([1., 1.])}
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        token: str | None = None,
        *,
        durable: bool = False,
        progress: bool | Watch = True,
    ) -> None:
        self._files: Files = open_files(url, token, durable)
        self._address = address_of(self._files, url, token, durable)
        self._catalog = Catalog(self._files)
        self._progress = progress

    def __repr__(self) -> str:
        return f"ModelStore({self._files.url!r})"

    @property
    def url(self) -> str:
        """The store's place: a folder's absolute path, or the address, without credentials."""
        return self._files.url

    @property
    def absent(self) -> bool:
        """Whether the store is a folder that does not exist, as before the first save."""
        return self._files.absent

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the address and the token: other processes open the same place.

        A function given as `progress` stays in this process, and the other process draws no bar.
        """
        where = self._address
        progress = self._progress is True
        opened = functools.partial(type(self), durable=where.durable, progress=progress)
        return opened, (where.url, where.token)

    def save_model(
        self,
        model: torch.nn.Module | object,
        name: str,
        metadata: Mapping[str, Any] | None = None,
    ) -> ModelVersion:
        """Store a module, a state dict, or any nesting of tensors and plain values, as a version.

        Returns when the version can be loaded. If a save was interrupted, repeat it: objects that
        were uploaded are not uploaded again. Tensors on a device of `compute.device()` are saved by
        the device's node, if the node can reach the store.
        """
        import torch

        check_name(name)
        facts = _checked_metadata(metadata)
        class_path = None
        value: object = model
        if isinstance(model, torch.nn.Module):
            kind = type(model)
            class_path = f"{kind.__module__}.{kind.__qualname__}"
            value = model.state_dict()
        with watched(self._progress, f"saving {name}") as progress:
            tree, tensors = values.encode(value)
            described = name, tree, tensors, facts, class_path
            saved = save_on_node(self._address, self._files, *described)
            if saved is None:
                saving = Saving(self._catalog, name, progress)
                saved = saving.save(tree, tensors, facts, class_path)
        return _version(saved)

    def load_model(
        self,
        name: str,
        into: torch.nn.Module | None = None,
        version: int | None = None,
        device: str | torch.device = "cpu",
        strict: bool = True,
    ) -> Any:
        """Load the newest version, or version `version`.

        Without `into`, returns the saved value (for a module, its state dict), on `device`. With
        `into`, fills that module's own tensors and returns the module. Names, shapes and dtypes
        must be the same; otherwise nothing is changed, and the error lists every difference. With
        `strict=False`, loads the tensors that fit, converts dtypes, and logs the others. Parameters
        on the meta device are made on `device`. The node of a device of `compute.device()` reads
        the tensors for that device itself.
        """
        import torch

        manifest = self._manifest(name, version)
        place = _usable(device)
        if into is None:
            with watched(self._progress, f"loading {name}") as progress:
                tensors = self._loading(manifest, progress, place).tensors(place)
            return values.decode(
                manifest.tree, _numbered(tensors), manifest_url(self._files, manifest)
            )
        if not isinstance(into, torch.nn.Module):
            raise ConfigurationError(
                f"load_model({name!r}, into={type(into).__name__}): into takes a torch.nn.Module; "
                "leave it out to get what was saved, and load that yourself"
            )
        with watched(self._progress, f"loading {name}") as progress:
            loading_for = functools.partial(self._loading, manifest, progress)
            return fill(into, loading_for, self._files, manifest, place, strict, progress)

    def list(self) -> tuple[ModelVersion, ...]:
        """The newest version of every model, by name."""
        newest = (
            next(self._read(name, reversed(numbers)), None)
            for name, numbers in self._catalog.numbers().items()
        )
        return tuple(version for version in newest if version is not None)

    def versions(self, name: str) -> tuple[ModelVersion, ...]:
        """Every version of a model, oldest first."""
        self._catalog.resolve(check_name(name), None)
        found = tuple(self._read(name, self._catalog.numbers(name).get(name, [])))
        if not found:
            raise ModelNotFoundError(
                f"{self._files.url} has no model {name!r} any more: "
                "it was deleted a moment ago; save it again"
            )
        return found

    def _read(self, name: str, numbers: Iterable[int]) -> Iterator[ModelVersion]:
        """The versions that still exist; some may have been deleted since they were listed."""
        for number in numbers:
            with contextlib.suppress(ModelNotFoundError):
                yield _version(self._catalog.read(name, number))

    def numbers(self, name: str | None = None) -> dict[str, builtins.list[int]]:
        """The version numbers of every model or of one, oldest first; reads no version."""
        return self._catalog.numbers(None if name is None else check_name(name))

    def describe(
        self, name: str, version: int | None = None
    ) -> tuple[ModelVersion, tuple[StoredTensor, ...]]:
        """The newest version or version `version`, and its tensors; reads no tensor's bytes."""
        manifest = self._manifest(name, version)
        views = manifest.tensors
        where = manifest_url(self._files, manifest)
        found = values.numbers(values.outline(manifest.tree, len(views), where))
        return _version(manifest), tuple(
            StoredTensor(
                path,
                views[index].dtype,
                tuple(views[index].shape),
                views[index].packed_size,
            )
            for path, index in found
        )

    def delete(self, name: str, version: int | None = None) -> None:
        """Delete a model, or one version; `gc` then frees the bytes that no other version needs."""
        self._catalog.resolve(check_name(name), version)
        numbers = self._catalog.numbers(name).get(name, []) if version is None else [version]
        self._catalog.withdraw(name, numbers)

    def gc(self, older_than: float = GRACE) -> int:
        """Delete the files that no version names, and return how many bytes they had.

        Files younger than `older_than` seconds stay, because a running save may be about to name
        them: give less than the default of a day only while nobody saves. The marks of deleted
        versions, and the leases of saves, stay for a day in any case.
        """
        if isinstance(older_than, bool) or not isinstance(older_than, int | float):
            raise ConfigurationError(
                f"gc(older_than={older_than!r}): takes seconds; write older_than=3600 for an hour"
            )
        if math.isnan(older_than):
            raise ConfigurationError("gc(older_than=nan): takes seconds; nan is no number of them")
        return self._catalog.collect(older_than)

    def import_file(
        self,
        path: str | os.PathLike[str],
        name: str,
        metadata: Mapping[str, Any] | None = None,
    ) -> ModelVersion:
        """Store the contents of a file as the next version, with the file's own metadata.

        The file may be a `.safetensors` file, or a folder with several of them and their index.
        Any other file must be one of `torch.save`; it is always read with `weights_only=True`.
        """
        check_name(name)
        facts = _checked_metadata(metadata)
        value, found = exchange.read(Path(path))
        return self.save_model(value, name, found | facts)

    def export_file(
        self, name: str, path: str | os.PathLike[str], version: int | None = None
    ) -> ModelVersion:
        """Write a version to a file for other tools; the file appears when it is complete.

        The safetensors library writes a file that ends in `.safetensors`, which takes no memory
        for the tensors. It can hold a state dict or any other dict of tensors, and one of several
        tied weights, as `safetensors.torch.load_model` expects. Any other file is one for
        `torch.load(path, weights_only=True)`.
        """
        manifest = self._manifest(name, version)
        target = Path(path)
        if target.suffix == exchange.SAFETENSORS:
            with watched(self._progress, f"loading {name}") as progress:
                exchange.write_safetensors(self._files, manifest, target, progress)
        else:
            exchange.write_pickled(self.load_model(name, version=manifest.version), target)
        return _version(manifest)

    def _manifest(self, name: str, version: int | None) -> Manifest:
        number = self._catalog.resolve(check_name(name), version)
        return self._catalog.keep(self._catalog.read(name, number))

    def _loading(self, manifest: Manifest, progress: Progress, device: torch.device) -> Loading:
        """The reader for a device: this process, or the node of a sky device."""
        if device.type != "sky":
            return Loading(self._files, manifest, progress)
        return NodeLoading(self._address, self._files, manifest, progress, device)


def _usable(device: str | torch.device) -> torch.device:
    import torch

    try:
        place = torch.device(device)
        if place.type not in ("cpu", "meta", "sky"):
            torch.empty(0, device=place)
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as problem:
        reason = (str(problem).splitlines() or [""])[0].rstrip(".")
        raise ConfigurationError(
            f"device={str(device)!r}: cannot be used here: {reason}; "
            "pass a device of this machine, such as 'cpu', or one of compute.device()"
        ) from problem
    return place


def _numbered(tensors: list[torch.Tensor]) -> Callable[[int], torch.Tensor]:
    def tensor(number: int) -> torch.Tensor:
        if not 0 <= number < len(tensors):
            raise ValueError(f"tensor {number} of {len(tensors)}")
        return tensors[number]

    return tensor


def _version(manifest: Manifest) -> ModelVersion:
    return ModelVersion(
        name=manifest.name,
        version=manifest.version,
        created=manifest.created,
        size=sum(region.size for region in manifest.regions),
        added=manifest.added,
        tensors=len(manifest.tensors),
        class_path=manifest.class_path,
        torch=manifest.torch,
        skyward=manifest.skyward,
        metadata=manifest.metadata,
    )


def _checked_metadata(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    if metadata is None:
        return {}
    if not isinstance(metadata, Mapping) or not all(isinstance(key, str) for key in metadata):
        raise ConfigurationError(
            f"metadata={metadata!r}: must be a mapping with text for keys; "
            "write metadata={'accuracy': 0.99}"
        )
    try:
        kept: dict[str, Any] = json.loads(json.dumps(dict(metadata), allow_nan=False))
        msgspec.json.encode(kept)  # refuses half a surrogate pair, which json lets pass
    except (TypeError, ValueError, OverflowError, RecursionError) as problem:
        raise SerializationError(
            f"metadata cannot be written as JSON: {problem}; use text, numbers, lists and dicts"
        ) from None
    return kept
