"""The contents of a store's files: manifests, and the objects that manifests name.

A manifest has the tensors and values of one version of a model, and says where their bytes are. An
object is a safetensors file. Its head lists the digest of every tensor, and the object's name is
the digest of the head, so the name guards every byte. A random ending makes each upload a file of
its own: no save ever writes to a name that the garbage collector is about to delete.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any

import msgspec
import xxhash

from skyward.errors import StoreDamagedError
from skyward.objects.memory import ALIGNMENT

FORMAT = 1
MANIFEST_LIMIT = 256 << 20
RANK_LIMIT = 64
SIZE_LIMIT = 1 << 48

# The dtypes that a manifest may name, and the bytes of one element.
ITEM_SIZES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "uint16": 2,
    "int16": 2,
    "uint32": 4,
    "int32": 4,
    "uint64": 8,
    "int64": 8,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
}

Size = Annotated[int, msgspec.Meta(ge=0, le=SIZE_LIMIT)]
Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]
ObjectName = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}-[0-9a-f]{8}$")]

_ENVELOPE = re.compile(rb'\{"checksum":"([0-9a-f]{32})","manifest":')
_END = b"}\n"


class StoredObject(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One safetensors file: its name below `objects/` and its length."""

    name: ObjectName
    size: Size


class Region(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A run of bytes that holds one tensor, or several that overlap; it becomes one storage."""

    digest: Digest
    size: Annotated[int, msgspec.Meta(ge=1, le=SIZE_LIMIT)]
    object: Size
    start: Size


class View(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A tensor: where it begins in its region, and its layout; an empty tensor has no region."""

    dtype: str
    shape: list[Size]
    region: Size | None = None
    offset: Size = 0
    strides: list[Size] | None = None

    @property
    def steps(self) -> list[int]:
        """The strides in elements; without `strides`, those of a contiguous tensor."""
        return contiguous(self.shape) if self.strides is None else self.strides

    @property
    def packed_size(self) -> int:
        """How many bytes the elements have, without the gaps between them."""
        return math.prod(self.shape) * ITEM_SIZES[self.dtype]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One published version."""

    format: int
    name: str
    version: Annotated[int, msgspec.Meta(ge=1)]
    created: datetime
    skyward: str
    torch: str
    class_path: str | None
    metadata: dict[str, Any]
    added: Size
    objects: list[StoredObject]
    regions: list[Region]
    tensors: list[View]
    tree: Any


class _Format(msgspec.Struct):
    format: int


# Made now: msgspec ends the process if two threads are the first to read a struct that has others.
_manifests = msgspec.json.Decoder(Manifest)


def contiguous(shape: list[int]) -> list[int]:
    """The strides of a contiguous tensor, in elements."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * max(shape[axis + 1], 1)
    return strides


def object_path(name: str) -> str:
    """The path of an object in the store."""
    return f"objects/{name[:2]}/{name}"


def encode(manifest: Manifest) -> bytes:
    """A JSON document that begins with the checksum of its contents."""
    body = msgspec.json.encode(manifest)
    checksum = xxhash.xxh3_128_hexdigest(body).encode()
    return b'{"checksum":"' + checksum + b'","manifest":' + body + _END


def decode(data: bytes, where: str) -> Manifest:
    """Read and check a manifest from any source: every index and extent in the result is valid."""
    start = _ENVELOPE.match(data)
    if start is None or not data.endswith(_END):
        raise _damaged(where, "it is not a whole manifest")
    body = data[start.end() : -len(_END)]
    if xxhash.xxh3_128_hexdigest(body).encode() != start[1]:
        raise _damaged(where, "its checksum does not match")
    try:
        kind = msgspec.json.decode(body, type=_Format).format
        if kind != FORMAT:
            raise StoreDamagedError(
                f"{where}: a manifest of format {kind}, and this version of skyward reads "
                f"{FORMAT}; update skyward"
            )
        manifest = _manifests.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as problem:
        raise _damaged(where, str(problem)) from None
    for flaw in flaws(manifest):
        raise _damaged(where, flaw)
    return manifest


def _damaged(where: str, what: str) -> StoreDamagedError:
    return StoreDamagedError(
        f"{where}: the manifest is damaged: {what}; load another version, "
        "or delete this one and save the model again"
    )


def flaws(manifest: Manifest) -> Iterator[str]:
    """The faults of a manifest; a reader refuses a manifest that has one."""
    for index, region in enumerate(manifest.regions):
        if region.object >= len(manifest.objects):
            yield f"region {index} lies in object {region.object} of {len(manifest.objects)}"
        elif region.start + region.size > manifest.objects[region.object].size:
            yield f"region {index} ends behind the end of its object"
    for index, view in enumerate(manifest.tensors):
        flaw = _flaw(view, manifest.regions)
        if flaw is not None:
            yield f"tensor {index} {flaw}"


def _flaw(view: View, regions: list[Region]) -> str | None:
    item = ITEM_SIZES.get(view.dtype)
    if item is None:
        return f"has the unknown dtype {view.dtype!r}"
    if len(view.shape) > RANK_LIMIT or len(view.steps) != len(view.shape):
        return "has more or fewer dimensions than it may"
    if 0 in view.shape or view.region is None:
        return None if 0 in view.shape and view.region is None else "has no bytes"
    if view.region >= len(regions):
        return f"lies in region {view.region} of {len(regions)}"
    if view.offset % item:
        return "begins between two elements"
    last = sum((extent - 1) * step for extent, step in zip(view.shape, view.steps, strict=True))
    if view.offset + (last + 1) * item > regions[view.region].size:
        return "ends behind the end of its region"
    return None


# Objects.

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

Listed = tuple[str, Sequence[int], int]
"""A tensor as the head of a file lists it: its dtype in safetensors, its shape and its length."""


def head(tensors: Mapping[str, Listed], metadata: Mapping[str, str]) -> tuple[bytes, list[int]]:
    """The head of a file that holds tensors in this order, and where in the file each begins."""
    table: dict[str, Any] = {"__metadata__": metadata}
    offsets = []
    at = 0
    for name, (dtype, shape, size) in tensors.items():
        table[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        offsets.append(at)
        at += size
    text = msgspec.json.encode(table)
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    start = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, [start + offset for offset in offsets]


def object_identity(head: bytes) -> str:
    """The part of an object's name that depends on its contents."""
    return xxhash.xxh3_128_hexdigest(head)


_distrusted: set[str] = set()


def distrust(names: Iterable[str]) -> None:
    """Note the objects of a damaged version.

    From now on, saves of this process do not reuse these objects, even if a manifest names them. So
    the user can save the right tensors again and gets an undamaged version.
    """
    _distrusted.update(names)


def is_distrusted(name: str) -> bool:
    """Whether an object was in a damaged version; the name of an object is unique everywhere."""
    return name in _distrusted
