"""The model store a user holds: save a model, load it back, list, delete."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

from skyward.errors import ConfigurationError, SerializationError, StoreError
from skyward.store import tree
from skyward.store.catalog import Catalog, check_name
from skyward.store.collecting import collect
from skyward.store.files import Files, open_files
from skyward.store.filling import fill
from skyward.store.loading import Loading, manifest_place
from skyward.store.manifest import Manifest
from skyward.store.saving import GRACE, Saving

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class ModelVersion:
    """One published version of a model, and what is known of it.

    `size` counts the bytes of its tensors, `added` those that the store did not have before it.
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


class ModelStore:
    """Models by name and version, in a folder, on a model server or at any URL of fsspec.

    Tensors are stored by content, so a version costs what changed in it. A version appears whole
    or not at all, its bytes are verified when they are loaded, and nothing is ever unpickled.
    With `durable`, a save to a folder returns when the disk has it; without, a power failure may
    cost versions saved moments before it, which is noticed when they are loaded.

    >>> import tempfile, torch
    >>> store = ModelStore(tempfile.mkdtemp())
    >>> store.save_model({"weight": torch.ones(2)}, "mnist", metadata={"accuracy": 0.99}).version
    1
    >>> store.load_model("mnist")
    {'weight': tensor([1., 1.])}
    """

    def __init__(
        self, url: str | os.PathLike[str], token: str | None = None, *, durable: bool = False
    ) -> None:
        self._files: Files = open_files(url, token, durable)
        self._catalog = Catalog(self._files)

    def __repr__(self) -> str:
        return f"ModelStore({self._files.url!r})"

    def save_model(
        self,
        model: torch.nn.Module | object,
        name: str,
        metadata: Mapping[str, Any] | None = None,
    ) -> ModelVersion:
        """Store a module, a state dict, or any nesting of tensors and plain values, as a version.

        Returns once the version can be loaded. A save that was interrupted can be repeated: what
        had been uploaded is not uploaded again.
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
        saving = Saving(self._files, self._catalog, name)
        return _version(saving.save(value, facts, class_path))

    def load_model(
        self,
        name: str,
        into: torch.nn.Module | None = None,
        version: int | None = None,
        device: str | torch.device = "cpu",
        strict: bool = True,
    ) -> Any:
        """The newest version, or the one asked for.

        Without `into`, returns what was saved (for a module, its state dict), on `device`. With
        it, fills that module where it is and returns it; names, shapes and dtypes must be the
        same, or nothing is changed and the error lists every difference. `strict=False` loads
        what fits, converting dtypes, and logs the rest. Parameters on the meta device are made
        on `device`.
        """
        import torch

        check_name(name)
        manifest = self._catalog.read(name, self._catalog.resolve(name, version))
        place = torch.device(device)
        if into is None:
            tensors = Loading(self._files, manifest).tensors(place)
            return tree.decode(
                manifest.tree, _numbered(tensors), manifest_place(self._files, manifest)
            )
        if not isinstance(into, torch.nn.Module):
            raise ConfigurationError(
                f"load_model({name!r}, into={type(into).__name__}): into takes a torch.nn.Module; "
                "leave it out to get what was saved, and load that yourself"
            )
        return fill(into, self._files, manifest, place, strict)

    def list(self) -> tuple[ModelVersion, ...]:
        """The newest version of every model, by name."""
        return tuple(
            _version(self._catalog.read(name, numbers[-1]))
            for name, numbers in self._catalog.numbers().items()
        )

    def versions(self, name: str) -> tuple[ModelVersion, ...]:
        """Every version of a model, oldest first."""
        self._catalog.resolve(check_name(name), None)
        numbers = self._catalog.numbers(name)[name]
        return tuple(_version(self._catalog.read(name, number)) for number in numbers)

    def delete(self, name: str, version: int | None = None) -> None:
        """Delete a model, or one version of it; `gc` then frees what no other version needs."""
        self._catalog.resolve(check_name(name), version)
        numbers = self._catalog.numbers(name)[name] if version is None else [version]
        self._catalog.withdraw(name, numbers)

    def gc(self, older_than: float = GRACE) -> int:
        """Remove the bytes that no version names, and say how many they were.

        What is younger than `older_than` seconds stays, because a save in flight may be about to
        name it: go below the default of a day only while nobody saves.
        """
        return collect(self._files, self._catalog, older_than)

    def import_file(
        self,
        path: str | os.PathLike[str],
        name: str,
        metadata: Mapping[str, Any] | None = None,
    ) -> ModelVersion:
        """Store what a file of `torch.save` holds; it is read with `weights_only=True`, always."""
        import torch

        check_name(name)
        try:
            try:
                value = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            except RuntimeError:  # files from before torch 1.6 cannot be mapped
                value = torch.load(path, map_location="cpu", weights_only=True)
        except FileNotFoundError:
            raise
        except Exception as problem:
            raise StoreError(
                f"{os.fspath(path)}: cannot be imported, because it is damaged or holds more "
                f"than tensors and plain values ({_gist(problem)}); "
                "load it where you trust it, and save its state_dict()"
            ) from problem
        return self.save_model(value, name, metadata)

    def export_file(
        self, name: str, path: str | os.PathLike[str], version: int | None = None
    ) -> None:
        """Write a version as a file that `torch.load(path, weights_only=True)` reads."""
        import torch

        torch.save(self.load_model(name, version=version), path)


def _gist(problem: Exception) -> str:
    """The line that tells what was wrong; the others advise to trust the file."""
    lines = [line.strip() for line in str(problem).splitlines()] or [""]
    telling = next((line for line in lines if "Unsupported" in line), lines[0])
    return telling.removeprefix("WeightsUnpickler error: ")[:120] or type(problem).__name__


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
    except (TypeError, ValueError, RecursionError) as problem:
        raise SerializationError(
            f"metadata cannot be written as JSON: {problem}; use text, numbers, lists and dicts"
        ) from None
    return kept
