"""Import and export: files of other tools, safetensors and files of `torch.save`."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import tempfile
import textwrap
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import msgspec

from skyward.checks import argument
from skyward.errors import ConfigurationError, StoreError
from skyward.objects import memory
from skyward.store import values
from skyward.store.catalog import manifest_url
from skyward.store.load import Loading
from skyward.store.local import LocalFiles, mapped
from skyward.store.manifest import DTYPES, Manifest, View
from skyward.store.places import Files
from skyward.store.progress import Progress
from skyward.store.values import Number, tensor_at

if TYPE_CHECKING:
    import torch

SAFETENSORS = ".safetensors"
_ZIP, _PICKLE, _TAR = b"PK\x03\x04", b"\x80", b"ustar"
"""How a file of torch.save begins: today, before torch 1.6, and in its first year."""
_TAR_AT = 257
_BEGINNING = _TAR_AT + len(_TAR)
INDEX = "model.safetensors.index.json"
"""The file in a folder that says which of the folder's files holds which tensor."""
TIED = "skyward.tied"
"""The metadata field with the names that are left out because they are tied, as JSON."""
_DTYPES = {*DTYPES, "complex64", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"}
"""What a safetensors file can hold; objects hold those that only recent versions of the library
know as plain bytes."""


def read(path: Path) -> tuple[Any, dict[str, str]]:
    """The contents of a file and its metadata; only tensors and plain values are read."""
    if path.is_dir():
        return read_folder(path)
    if path.suffix == SAFETENSORS:
        return read_safetensors(path)
    return _read_pickled(path), {}


def _read_pickled(path: Path) -> Any:
    import torch

    try:
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # files from before torch 1.6 cannot be mapped
            return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise
    except Exception as problem:
        raise _refusal(path, problem) from problem


def _refusal(path: Path, problem: Exception) -> StoreError:
    """What is wrong with the file, without torch's advice to trust it."""
    if isinstance(problem, OSError):
        reason = problem.strerror or str(problem)
        return StoreError(f"{path}: cannot be read: {reason}; check the file, and that you may")
    refused = f"{path}: cannot be imported, because it"
    with path.open("rb") as file:
        start = file.read(_BEGINNING)
    if not start.startswith((_ZIP, _PICKLE)) and start[_TAR_AT:] != _TAR:
        return StoreError(
            f"{refused} is not a file of torch.save; check which file it is, "
            "and let the name of a safetensors file end in .safetensors"
        )
    reason = str(problem)
    if found := re.search(r"Unsupported (?:global|class): (?:GLOBAL )?([\w.]+)", reason):
        return StoreError(
            f"{refused} holds more than tensors and plain values: {found[1]}; "
            "load it where you trust it, and save its state_dict()"
        )
    return StoreError(
        f"{refused} is damaged or holds more than tensors and plain values ({_gist(problem)}); "
        "load it where you trust it, and save its state_dict()"
    )


def _gist(problem: Exception) -> str:
    """The sentence of the message that says what is wrong with the file."""
    lines = [line.strip() for line in str(problem).splitlines()] or [""]
    telling = next((line for line in lines if "Unsupported" in line), lines[0])
    sentence = telling.removeprefix("WeightsUnpickler error: ").partition(". ")[0].rstrip(".")
    kind = type(problem).__name__
    if isinstance(problem, LookupError):  # its message is the key alone
        return f"{kind}: {sentence}"
    return textwrap.shorten(sentence, 200, placeholder=" ...") or kind


def write_pickled(value: object, path: Path) -> None:
    """Write a file as `torch.save` does, whole or not at all."""
    import torch

    with _whole(path) as temporary:
        try:
            torch.save(value, temporary)
        except RuntimeError as problem:  # torch raises this for a full disk
            raise OSError(str(problem).splitlines()[0].rstrip(".")) from problem


@contextlib.contextmanager
def _whole(path: Path) -> Iterator[Path]:
    """A temporary file beside the path, renamed when it is complete and removed when it is not."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        yield temporary
        os.replace(temporary, path)
    except StoreError:
        raise
    except OSError as problem:
        raise StoreError(
            f"{path}: writing failed: {problem.strerror or problem}; "
            "check that the folder is there, that you may write to it, and that it has room"
        ) from problem
    finally:
        with contextlib.suppress(OSError):  # it may never have been made
            temporary.unlink()


# Safetensors, which their library reads and writes.


def _library() -> ModuleType:
    """The library, imported when a file needs it."""
    try:
        import safetensors.torch
    except ImportError as problem:
        raise ConfigurationError(
            f"a .safetensors file needs the package safetensors ({problem}); "
            "install skyward-torch[torch]"
        ) from None
    return safetensors


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def read_safetensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors of a file, mapped and not yet read, and its metadata."""
    library = _library()
    try:
        with library.safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            facts = dict(file.metadata() or {})
    except library.SafetensorError as problem:
        reason = str(problem).removeprefix("Error while deserializing header: ")
        raise _refused(path, f"its header is damaged: {textwrap.shorten(reason, 200)}") from None
    try:
        tied = msgspec.json.decode(facts.pop(TIED, "{}"), type=dict[str, str])
    except msgspec.MsgspecError as problem:
        raise _refused(path, f"its header is damaged: {problem}") from None
    for name, kept in tied.items():
        if name in tensors or kept not in tensors:
            raise _refused(path, f"it ties {name!r} to {kept!r}, which cannot be")
        tensors[name] = tensors[kept]
        if facts.get(name) == kept:
            del facts[name]
    facts.pop("format", None)
    return tensors, facts


def read_folder(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors of a checkpoint in several files, as Hugging Face's tools write them."""
    index = folder / INDEX
    if not index.is_file():
        whole = folder / "model.safetensors"
        if whole.is_file():
            return read_safetensors(whole)
        raise StoreError(
            f"{folder}: cannot be imported, because it holds neither {INDEX} nor "
            "model.safetensors; name the file you mean"
        )
    try:
        places = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as problem:
        raise _refused(index, f"it does not say which file holds what: {problem}") from None
    tensors: dict[str, torch.Tensor] = {}
    facts: dict[str, str] = {}
    for shard in sorted(set(places.values())):
        if shard != Path(shard).name or not (folder / shard).is_file():
            raise _refused(index, f"it names {shard!r}, which is not a file beside it")
        found, about = read_safetensors(folder / shard)
        tensors |= found
        facts |= about
    missing = sorted(set(places) - set(tensors))
    if missing:
        raise _refused(index, f"it promises {missing[0]!r}, which no file holds")
    return tensors, facts


def write_safetensors(files: Files, manifest: Manifest, path: Path, progress: Progress) -> None:
    """Write a version as a safetensors file, whole or not at all.

    Of several tied tensors, the first name is kept. The metadata maps each omitted name to the kept
    one, as `safetensors.torch.save_model` writes it and `load_model` expects it.
    """
    value = values.outline(manifest.tree, len(manifest.tensors), manifest_url(files, manifest))
    obstacle = _unsuited(value, manifest.tensors)
    if obstacle:
        pt = path.with_suffix(".pt").name
        raise StoreError(
            f"{manifest.name!r} version {manifest.version} holds {obstacle}, and a safetensors "
            f"file has named tensors only; write a .pt file: {argument('output', pt, python=pt)}"
        )
    named = {name: each.index for name, each in value.items()}
    kept, tied = _untied(named, manifest.tensors)
    library = _library()
    with _whole(path) as temporary, tempfile.TemporaryFile(dir=path.parent, buffering=0) as spool:
        tensors = _mapped_tensors(files, manifest, kept, spool.fileno(), progress)
        try:
            library.torch.save_file(tensors, temporary, _facts(manifest.metadata, tied))
        except library.SafetensorError as problem:  # the library raises this for a full disk
            raise OSError(str(problem)) from problem


def _mapped_tensors(
    files: Files, manifest: Manifest, kept: Mapping[str, View], spool: int, progress: Progress
) -> dict[str, torch.Tensor]:
    """The tensors to write, none of them in memory that other programs lack.

    The library takes all tensors at once. They are the mapped objects of a folder themselves;
    fetched ones and those with gaps go through a temporary file, which is mapped in turn.
    """
    import torch

    by_region: dict[int, list[str]] = {}
    for name, view in kept.items():
        if view.region is not None:
            by_region.setdefault(view.region, []).append(name)
    loading = Loading(files, manifest, progress)
    loading.begin(by_region)
    tensors = {
        name: tensor_at(view, torch.empty(0, dtype=torch.uint8))
        for name, view in kept.items()
        if view.region is None
    }
    starts: dict[str, int] = {}
    end = 0
    for region, flat in loading.regions(by_region):
        for name in by_region[region]:
            tensor = tensor_at(kept[name], flat)
            # The library refuses tensors that share memory, as those that overlap in part do.
            alone = len(by_region[region]) == 1
            if isinstance(files, LocalFiles) and alone and tensor.is_contiguous():
                tensors[name] = tensor
                continue
            packed = tensor.contiguous()
            size = kept[name].packed_size
            block = (ctypes.c_char * size).from_address(packed.data_ptr())
            memory.write_all(spool, end, memoryview(block).cast("B"))
            starts[name] = end
            end += memory.rounded_up(size)
    data = mapped(spool)
    for name, start in starts.items():
        flat = torch.frombuffer(data[start : start + kept[name].packed_size], dtype=torch.uint8)
        tensors[name] = flat.view(getattr(torch, kept[name].dtype)).view(kept[name].shape)
    return tensors


def _unsuited(value: object, views: Iterable[View]) -> str:
    """Why a safetensors file cannot hold an outlined value; empty if it can."""
    if not isinstance(value, dict):
        kind = type(value).__name__
        return "a tensor without a name" if isinstance(value, Number) else f"a value of type {kind}"
    for name, each in value.items():
        if not isinstance(name, str) or name == "__metadata__":
            return f"the name {name!r}"
        if not isinstance(each, Number):
            return f"{name!r}, of type {type(each).__name__}"
    strange = next((view.dtype for view in views if view.dtype not in _DTYPES), None)
    return f"a tensor of dtype {strange}" if strange else ""


def _untied(named: Mapping[str, int], views: list[View]) -> tuple[dict[str, View], dict[str, str]]:
    """The tensors to write, by name; and each omitted name with the name that it is tied to."""
    kept: dict[str, View] = {}
    tied: dict[str, str] = {}
    first: dict[bytes, str] = {}
    for name, number in sorted(named.items()):
        view = views[number]
        # A tensor with two names has two equal views; tensors that only overlap are written whole.
        same = msgspec.json.encode(view) if view.region is not None else None
        if same is not None and first.setdefault(same, name) != name:
            tied[name] = first[same]
        else:
            kept[name] = view
    return kept, tied


def _facts(metadata: Mapping[str, Any], tied: dict[str, str]) -> dict[str, str]:
    """Metadata as safetensors has it: texts only, with the framework that other tools look for."""
    facts = {
        key: value if isinstance(value, str) else msgspec.json.encode(value).decode()
        for key, value in metadata.items()
    }
    facts = {"format": "pt"} | tied | facts
    return facts | {TIED: msgspec.json.encode(tied).decode()} if tied else facts


def _refused(path: Path, what: str) -> StoreError:
    return StoreError(
        f"{path}: cannot be imported, because {what}; "
        "get the file again, or write it anew with the tool that made it"
    )
