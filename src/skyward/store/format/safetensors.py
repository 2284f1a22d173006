"""The head of a safetensors file: one writer for objects, exported files and downloads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from skyward.objects.memory import ALIGNMENT
from skyward.store.format.manifest import ITEM_SIZES, View

HEADER_LIMIT = 100 << 20
"""The limit of the safetensors library."""

DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
"""The names that safetensors has for torch's dtypes; objects hold other dtypes as plain bytes."""

RECENT_DTYPES = DTYPES | {
    "complex64": "C64",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
}
"""The same with the dtypes that only recent versions of safetensors know."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor as the head of a file lists it."""

    name: str
    dtype: str
    shape: Sequence[int]
    size: int


def head(tensors: Sequence[TensorEntry], metadata: Mapping[str, str]) -> tuple[bytes, list[int]]:
    """The head of a file that holds tensors in this order, and where in the file each begins."""
    table: dict[str, Any] = {"__metadata__": metadata}
    offsets = []
    at = 0
    for tensor in tensors:
        table[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": [at, at + tensor.size],
        }
        offsets.append(at)
        at += tensor.size
    text = msgspec.json.encode(table)
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    start = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, [start + offset for offset in offsets]


def head_of_views(
    views: Mapping[str, View], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, int]]:
    """The head of a file that holds views by name, and where each begins, in the file's order."""
    # The order of safetensors itself: each tensor begins at a multiple of its element's size.
    order = sorted(views, key=lambda name: (-ITEM_SIZES[views[name].dtype], name))
    entries = [
        TensorEntry(
            name, RECENT_DTYPES[views[name].dtype], views[name].shape, views[name].packed_size
        )
        for name in order
    ]
    text, starts = head(entries, metadata)
    return text, dict(zip(order, starts, strict=True))
