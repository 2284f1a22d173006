"""Values as a store has them: nested values as JSON, and their tensors as runs of bytes.

In the tree of a value, tensors stand by number and everything else by value; there is never a
pickle. Tensors that overlap in memory share one region, also when they are loaded.
"""

from __future__ import annotations

import base64
import binascii
import ctypes
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from skyward.errors import SerializationError, StoreDamagedError
from skyward.objects import memory
from skyward.store.manifest import ITEM_SIZES, RANK_LIMIT, View, contiguous

if TYPE_CHECKING:
    import torch

DEPTH_LIMIT = 100
_EXACT = 1 << 53
"""A reader of JSON may use doubles, which hold whole numbers exactly up to this one."""


def encode(value: object) -> tuple[Any, list[tuple[str, torch.Tensor]]]:
    """The tree of a value, and its tensors in order, each with the path to it."""
    tensors: list[tuple[str, torch.Tensor]] = []
    return _encode(value, "", tensors, 0), tensors


def _encode(value: Any, path: str, tensors: list[tuple[str, torch.Tensor]], depth: int) -> Any:
    import torch

    if depth > DEPTH_LIMIT:
        raise SerializationError(
            f"{path[:80]}...: nested more than {DEPTH_LIMIT} deep, or contains itself; flatten it"
        )

    def inside(items: Iterable[Any]) -> list[Any]:
        return [
            _encode(item, f"{path}[{index}]", tensors, depth + 1)
            for index, item in enumerate(items)
        ]

    def pairs(items: Iterable[tuple[Any, Any]]) -> list[list[Any]]:
        return [
            [_key(key, path), _encode(item, _join(path, key), tensors, depth + 1)]
            for key, item in items
        ]

    kind = type(value)
    if isinstance(value, torch.Tensor):
        tensors.append((path or "the tensor", value))
        return {"tensor": len(tensors) - 1}
    if value is None or kind is bool:
        return value
    if kind is str:
        return _text(value, path)
    if kind is int:
        return value if -_EXACT <= value <= _EXACT else {"int": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if kind is list:
        return inside(value)
    if kind is tuple:
        return {"tuple": inside(value)}
    if kind is torch.Size:
        return {"size": list(value)}
    if isinstance(value, dict):
        if kind is not OrderedDict:
            return {"dict": pairs(value.items())}
        described = getattr(value, "_metadata", None)
        if described is None:
            return {"ordered": pairs(value.items())}
        about = _encode(described, f"{path}._metadata", tensors, depth + 1)
        return {"state": pairs(value.items()), "about": about}
    if kind is complex:
        return {"complex": [_encode(x, path, tensors, depth) for x in (value.real, value.imag)]}
    if kind is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    if kind is torch.dtype:
        return {"dtype": str(value).removeprefix("torch.")}
    if kind is torch.device:
        return {"device": str(value)}
    if kind.__module__ == "numpy" and getattr(value, "shape", None) == ():
        return _encode(value.item(), path, tensors, depth + 1)
    advice = "leave it out, or turn it into tensors and plain values"
    if kind.__module__ == "numpy":
        advice = "turn it into a tensor with torch.from_numpy"
    elif isinstance(value, torch.nn.Module):
        advice = "save its state_dict()"
    raise SerializationError(
        f"{path or 'the value'}: a {kind.__module__}.{kind.__qualname__} cannot be stored, "
        f"only tensors, dicts, lists, tuples and plain values can; {advice}"
    )


def _key(key: Any, path: str) -> Any:
    if type(key) is str:
        return _text(key, path)
    if key is None or type(key) in (bool, int, float):
        return _encode(key, path, [], 0)
    raise SerializationError(
        f"{path or 'the value'}: the key {key!r} cannot be stored; use text or a number"
    )


def _text(text: str, path: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise SerializationError(
            f"{path or 'the value'}: the text {text[:80]!r} is not valid Unicode; "
            "store it as bytes instead"
        ) from None
    return text


def _join(path: str, key: object) -> str:
    if not isinstance(key, str):
        return f"{path}[{key!r}]"
    return f"{path}.{key}" if path else key


@dataclass(frozen=True, slots=True)
class Number:
    """Stands for a tensor that has not been read."""

    index: int


def outline(tree: Any, count: int, where: str, *, values: bool = True) -> Any:
    """The value that a tree describes, with a `Number` in place of each of its `count` tensors.

    Without `values`, a value that JSON has no type for stays in its written form, and torch is not
    needed.
    """

    def take(index: int) -> Number:
        if not 0 <= index < count:
            raise ValueError(f"tensor {index} of {count}")
        return Number(index)

    return _decoded(tree, take, where, _decode_plain if values else _as_written)


def numbers(
    outlined: Any, path: str = "", join: Callable[[str, object], str] = _join
) -> Iterator[tuple[str, int]]:
    """The path to every tensor of an outline, and its number."""
    if isinstance(outlined, Number):
        yield path or "the tensor", outlined.index
        return
    if isinstance(outlined, dict):
        inner: Iterable[tuple[Any, Any]] = outlined.items()
    elif isinstance(outlined, list | tuple):
        inner = enumerate(outlined)
    else:
        return
    for key, value in inner:
        yield from numbers(value, join(path, key), join)


_Plain = Callable[[str, Any], Any]
"""Makes a value that is neither a tensor nor a container from its kind and its content."""


def decode(tree: Any, tensor: Callable[[int], Any], where: str) -> Any:
    """The value that a tree describes; `tensor` returns the tensor with a given number."""
    return _decoded(tree, tensor, where, _decode_plain)


def _decoded(tree: Any, tensor: Callable[[int], Any], where: str, plain: _Plain) -> Any:
    try:
        return _decode(tree, tensor, plain, 0)
    except (_MalformedError, ValueError, TypeError, binascii.Error) as problem:
        raise StoreDamagedError(
            f"{where}: the manifest is damaged: its tree has {str(problem)[:200]}; "
            "load another version, or delete this one and save the model again"
        ) from None


class _MalformedError(Exception):
    """The tree has an entry that `encode` never writes."""


def _decode(node: Any, tensor: Callable[[int], Any], plain: _Plain, depth: int) -> Any:
    if depth > DEPTH_LIMIT + 1:
        raise _MalformedError(f"more than {DEPTH_LIMIT} levels")
    if node is None or isinstance(node, bool | str | int | float):
        return node
    if isinstance(node, list):
        return [_decode(item, tensor, plain, depth + 1) for item in node]
    if not isinstance(node, dict) or not node:
        raise _MalformedError("an entry that is no value")
    kind, content = next(iter(node.items()))
    if list(node) != (["state", "about"] if kind == "state" else [kind]):
        raise _MalformedError("an entry of two kinds")
    if kind == "tensor" and type(content) is int:
        return tensor(content)
    if kind == "tuple" and isinstance(content, list):
        return tuple(_decode(item, tensor, plain, depth + 1) for item in content)
    if kind in ("dict", "ordered", "state") and isinstance(content, list):
        made: dict[Any, Any] = {} if kind == "dict" else OrderedDict()
        for pair in content:
            if not isinstance(pair, list) or len(pair) != 2:
                raise _MalformedError("a dict entry that is no pair")
            made[_decode(pair[0], tensor, plain, depth + 1)] = _decode(
                pair[1], tensor, plain, depth + 1
            )
        if kind == "state":
            made._metadata = _decode(node["about"], tensor, plain, depth + 1)  # type: ignore[attr-defined]
        return made
    return plain(kind, content)


def _as_written(kind: str, content: Any) -> Any:
    return content


def _decode_plain(kind: str, content: Any) -> Any:
    import torch

    if kind == "int" and isinstance(content, str):
        return int(content, 16)
    if kind == "float" and content in ("nan", "inf", "-inf"):
        return float(content)
    if kind == "complex" and isinstance(content, list) and len(content) == 2:
        real, imaginary = (_decode(part, lambda _: None, _decode_plain, 0) for part in content)
        return complex(real, imaginary)
    if kind == "bytes" and isinstance(content, str):
        return base64.b64decode(content, validate=True)
    if kind == "size" and isinstance(content, list):
        return torch.Size(content)
    if kind == "dtype" and content in ITEM_SIZES:
        return getattr(torch, content)
    if kind == "device" and isinstance(content, str):
        try:
            return torch.device(content)
        except RuntimeError:
            raise _MalformedError(f"the unknown device {content[:40]!r}") from None
    raise _MalformedError(f"an entry of unknown kind {kind[:40]!r}")


# Tensors.

_LARGE = 1 << 20
"""The smallest copy that gets pages of its own."""


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """The bytes of one region as they lie in memory; `read` is called when they are needed."""

    tensor: torch.Tensor
    first: int
    last: int
    packed: bool
    """Whether only the tensor's elements are stored, in order, without the bytes between them."""
    dtype: str
    shape: Sequence[int]

    @property
    def size(self) -> int:
        """How many bytes are stored."""
        return self.last - self.first

    @property
    def copied(self) -> bool:
        """Whether `read` makes a copy, which the user's code cannot change."""
        return self.packed or self.tensor.device.type != "cpu"

    def read(self) -> memoryview:
        """The bytes: the tensor's own memory if it is on the CPU and without gaps, else a copy."""
        import torch

        tensor = self.tensor.detach()
        on_cpu = tensor.device.type == "cpu"
        if self.packed:
            flat = _fresh(self.size)
            # Packed on its own device, so that the bytes between the elements do not travel.
            together = tensor if on_cpu else _whole(tensor)
            flat.view(tensor.dtype).view(tensor.shape).copy_(together)
        else:
            storage = tensor.untyped_storage()
            whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            flat = whole[self.first : self.last]
            flat = flat if on_cpu else _fresh(self.size).copy_(flat)
        block = (ctypes.c_char * flat.numel()).from_address(flat.data_ptr())
        block.tensor = flat  # type: ignore[attr-defined]  # keeps the memory alive
        return memoryview(block).cast("B")


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a DTensor of `compute.mesh()`, of which each rank has a shard."""
    return hasattr(tensor, "device_mesh") and tensor.device.type == "sky"


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    if not is_sharded(tensor):
        return tensor.contiguous()
    from skyward.device import sharded

    return sharded.read(tensor)


def _fresh(size: int) -> torch.Tensor:
    """Memory for a copy; when freed, large memory goes back to the system, not to torch's cache."""
    import torch

    if size < _LARGE:
        return torch.empty(size, dtype=torch.uint8)
    return torch.frombuffer(memory.fresh(size), dtype=torch.uint8)


@dataclass(slots=True)
class _Placed:
    index: int
    tensor: torch.Tensor
    first: int
    last: int


def lay_out(tensors: Sequence[tuple[str, torch.Tensor]]) -> tuple[list[Span], list[View]]:
    """The regions that hold these tensors, in order of first use, and a view for each tensor."""
    storages: dict[int, list[_Placed]] = {}
    plain = [plain_tensor(path, tensor) for path, tensor in tensors]
    views: list[View | None] = [None] * len(plain)
    for index, tensor in enumerate(plain):
        if tensor.numel() == 0:
            views[index] = View(dtype=_name(tensor), shape=list(tensor.shape))
            continue
        item = tensor.element_size()
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        first = int(tensor.storage_offset()) * item
        reach = sum((extent - 1) * step for extent, step in steps)
        last = first + (reach + 1) * item
        placed = _Placed(index, tensor, first, last)
        storages.setdefault(storage_of(tensor), []).append(placed)
    groups = [group for placed in storages.values() for group in _overlapping(placed)]
    groups.sort(key=lambda group: min(placed.index for placed in group))
    spans = []
    for region, group in enumerate(groups):
        span = _span(group)
        spans.append(span)
        for placed in group:
            views[placed.index] = _view(placed, region, span)
    return spans, [view for view in views if view is not None]


def storage_of(tensor: torch.Tensor) -> int:
    """A number that identifies a tensor's storage; of a DTensor, that of its shards."""
    local: torch.Tensor = tensor._local_tensor if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return int(local.untyped_storage()._cdata)


def _overlapping(placed: list[_Placed]) -> list[list[_Placed]]:
    """Group the tensors of one storage that overlap; so saving a slice saves only the slice."""
    groups: list[list[_Placed]] = []
    end = -1
    for each in sorted(placed, key=lambda placed: placed.first):
        if each.first < end:
            groups[-1].append(each)
        else:
            groups.append([each])
        end = max(end, each.last)
    return groups


def _span(group: list[_Placed]) -> Span:
    lead = min(group, key=lambda placed: placed.index)
    dtype, item = _name(lead.tensor), lead.tensor.element_size()
    # Every view must begin at a multiple of its element's size, counted from the region's start.
    largest = max(placed.tensor.element_size() for placed in group)
    first = group[0].first // largest * largest
    last = max(placed.last for placed in group)
    payload = lead.tensor.numel() * item
    if is_sharded(lead.tensor) or (len(group) == 1 and last - first > 2 * payload):
        # The tensor is mostly gaps, such as one column of a matrix: packing saves more than half.
        # Or its shards are on several ranks.
        return Span(lead.tensor, 0, payload, True, dtype, list(lead.tensor.shape))
    if any(placed.tensor.dtype != lead.tensor.dtype for placed in group):
        return Span(lead.tensor, first, last, False, "uint8", [last - first])
    whole = lead.tensor.is_contiguous() and payload == last - first
    shape = list(lead.tensor.shape) if whole else [(last - first) // item]
    return Span(lead.tensor, first, last, False, dtype, shape)


def _view(placed: _Placed, region: int, span: Span) -> View:
    tensor = placed.tensor
    shape = list(tensor.shape)
    strides = list(tensor.stride())
    default = span.packed or all(
        extent == 1 or step == expected
        for extent, step, expected in zip(shape, strides, contiguous(shape), strict=True)
    )
    return View(
        dtype=_name(tensor),
        shape=shape,
        region=region,
        offset=0 if span.packed else placed.first - span.first,
        strides=None if default else strides,
    )


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def plain_tensor(path: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in a form that can be stored; raises for a tensor that has none."""
    import torch

    def refused(what: str, advice: str) -> SerializationError:
        return SerializationError(f"{path}: {what} cannot be stored; {advice}")

    plain_types = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
    if type(tensor) not in plain_types and not is_sharded(tensor):
        raise refused(f"a {type(tensor).__qualname__}", "turn it into a plain tensor first")
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        raise refused(f"a tensor of layout {tensor.layout}", "turn it into a dense tensor first")
    if tensor.device.type == "meta":
        raise refused("a tensor on the meta device has no values and", "give it values first")
    if _name(tensor) not in ITEM_SIZES:
        raise refused(f"a tensor of dtype {tensor.dtype}", "convert it first")
    if tensor.dim() > RANK_LIMIT:
        raise refused(f"a tensor of {tensor.dim()} dimensions", "reshape it first")
    plain = tensor.detach()
    if plain.is_conj() or plain.is_neg():
        plain = plain.resolve_conj().resolve_neg()
    return plain


def tensor_at(view: View, flat: torch.Tensor) -> torch.Tensor:
    """The tensor that a checked view describes, in the bytes of its region."""
    import torch

    dtype = getattr(torch, view.dtype)
    empty = torch.empty(0, dtype=dtype, device=flat.device)
    if view.region is None:
        return torch.empty(view.shape, dtype=dtype, device=flat.device)
    item = ITEM_SIZES[view.dtype]
    with torch.no_grad():
        return empty.set_(flat.untyped_storage(), view.offset // item, view.shape, view.steps)
