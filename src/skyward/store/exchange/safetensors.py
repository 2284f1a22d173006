"""Safetensors files of other tools: read mapped, written a tensor at a time."""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from skyward.errors import StoreError
from skyward.objects import memory
from skyward.store.format.layout import tensor_at
from skyward.store.format.manifest import ITEM_SIZES, RANK_LIMIT, Size, View
from skyward.store.format.safetensors import HEADER_LIMIT, RECENT_DTYPES, head_of_views
from skyward.store.format.tree import Number
from skyward.store.loading import Loading
from skyward.store.places.mapping import mapped

if TYPE_CHECKING:
    import torch

INDEX = "model.safetensors.index.json"
"""The file in a folder that says which of the folder's files holds which tensor."""
TIED = "skyward.tied"
"""The metadata field with the names that are left out because they are tied, as JSON."""

_TORCH_DTYPES = {name: dtype for dtype, name in RECENT_DTYPES.items()}


class _Listed(msgspec.Struct):
    dtype: str
    shape: Annotated[list[Size], msgspec.Meta(max_length=RANK_LIMIT)]
    data_offsets: tuple[Size, Size]

    @property
    def size(self) -> int:
        return math.prod(self.shape) * ITEM_SIZES[_TORCH_DTYPES[self.dtype]]


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def read(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors of a file, mapped and not yet read, and its metadata."""
    with path.open("rb") as file:
        length = os.fstat(file.fileno()).st_size
        if length < 8:
            raise _refused(path, "it is too short for a header")
        data = mapped(file.fileno())
    end = 8 + int.from_bytes(data[:8], "little")
    if end > min(length, HEADER_LIMIT):
        raise _refused(path, "it does not begin with a whole header")
    try:
        table = msgspec.json.decode(data[8:end], type=dict[str, msgspec.Raw])
        facts = msgspec.json.decode(table.pop("__metadata__", b"{}"), type=dict[str, str])
        entries = {name: msgspec.json.decode(raw, type=_Listed) for name, raw in table.items()}
        tied = msgspec.json.decode(facts.pop(TIED, "{}"), type=dict[str, str])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as problem:
        raise _refused(path, f"its header is damaged: {problem}") from None
    _check_extents(path, entries, length - end)
    tensors = {name: _tensor(entry, data[end:]) for name, entry in entries.items()}
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
            return read(whole)
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
        found, about = read(folder / shard)
        tensors |= found
        facts |= about
    missing = sorted(set(places) - set(tensors))
    if missing:
        raise _refused(index, f"it promises {missing[0]!r}, which no file holds")
    return tensors, facts


def _check_extents(path: Path, entries: Mapping[str, _Listed], length: int) -> None:
    """Each tensor begins where the one before it ends, as the format demands."""
    at = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        if entry.dtype not in _TORCH_DTYPES:
            raise _refused(path, f"{name!r} has the dtype {entry.dtype!r}, unknown here")
        if entry.data_offsets != (at, at + entry.size):
            raise _refused(path, f"{name!r} does not lie where its shape says")
        at += entry.size
    if at != length:
        raise _refused(path, f"it has {length} bytes of data where its header says {at}")


def _tensor(entry: _Listed, data: memoryview) -> torch.Tensor:
    import torch

    dtype = getattr(torch, _TORCH_DTYPES[entry.dtype])
    first, last = entry.data_offsets
    if first == last:
        return torch.empty(entry.shape, dtype=dtype)
    count = math.prod(entry.shape)
    return torch.frombuffer(data, dtype=dtype, count=count, offset=first).reshape(entry.shape)


def write(
    path: Path,
    named: Mapping[str, int],
    views: list[View],
    metadata: Mapping[str, Any],
    loading: Loading,
) -> None:
    """Write tensors, given by name and number, as they are loaded; one object is held at a time.

    Of several tied tensors, the first name is kept. The metadata maps each omitted name to the kept
    one, as `safetensors.torch.save_model` writes it and `load_model` expects it.
    """
    kept, tied = _untied(named, views)
    head, starts = head_of_views(kept, _facts(metadata, tied))
    by_region: dict[int, list[str]] = {}
    for name in starts:
        region = kept[name].region
        if region is not None:
            by_region.setdefault(region, []).append(name)
    loading.begin(by_region)
    with path.open("xb", buffering=0) as file:
        memory.write_all(file.fileno(), 0, memoryview(head))
        os.truncate(file.fileno(), len(head) + sum(view.packed_size for view in kept.values()))
        for region, flat in loading.regions(by_region):
            for name in by_region[region]:
                tensor = tensor_at(kept[name], flat).contiguous()
                block = (ctypes.c_char * kept[name].packed_size).from_address(tensor.data_ptr())
                memory.write_all(file.fileno(), starts[name], memoryview(block).cast("B"))


def unsuited(value: object, views: Iterable[View]) -> str:
    """Why a safetensors file cannot hold an outlined value; empty if it can."""
    if not isinstance(value, dict):
        kind = type(value).__name__
        return "a tensor without a name" if isinstance(value, Number) else f"a value of type {kind}"
    for name, each in value.items():
        if not isinstance(name, str) or name == "__metadata__":
            return f"the name {name!r}"
        if not isinstance(each, Number):
            return f"{name!r}, of type {type(each).__name__}"
    strange = next((view.dtype for view in views if view.dtype not in RECENT_DTYPES), None)
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
