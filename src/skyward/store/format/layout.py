"""Tensors as runs of bytes: tensors that overlap in memory share one region, also when loaded."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from skyward.errors import SerializationError
from skyward.objects import memory
from skyward.store.format.manifest import ITEM_SIZES, RANK_LIMIT, View, contiguous

if TYPE_CHECKING:
    import torch

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
            together = tensor if on_cpu else tensor.contiguous()
            flat.view(tensor.dtype).view(tensor.shape).copy_(together)
        else:
            storage = tensor.untyped_storage()
            whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            flat = whole[self.first : self.last]
            flat = flat if on_cpu else _fresh(self.size).copy_(flat)
        block = (ctypes.c_char * flat.numel()).from_address(flat.data_ptr())
        block.tensor = flat  # type: ignore[attr-defined]  # keeps the memory alive
        return memoryview(block).cast("B")


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
        storages.setdefault(tensor.untyped_storage()._cdata, []).append(placed)
    groups = [group for placed in storages.values() for group in _overlapping(placed)]
    groups.sort(key=lambda group: min(placed.index for placed in group))
    spans = []
    for region, group in enumerate(groups):
        span = _span(group)
        spans.append(span)
        for placed in group:
            views[placed.index] = _view(placed, region, span)
    return spans, [view for view in views if view is not None]


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
    if len(group) == 1 and last - first > 2 * payload:
        # The tensor is mostly gaps, such as one column of a matrix: packing saves more than half.
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

    if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
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
