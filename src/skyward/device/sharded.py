"""DTensors of a mesh, shard by shard: where each is, what it holds, and how it is written."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from skyward.device.mesh import Mesh

# Without PyTorch's types, which say nothing of how it is made.
_DispatchMode: Any = TorchDispatchMode


@dataclass(frozen=True, slots=True)
class Shard:
    """A part of a DTensor, which one rank has, or several."""

    start: tuple[int, ...]
    """Where it begins in the whole tensor."""
    size: tuple[int, ...]
    """Without the padding that each rank's tensor may have."""
    place: tuple[int, ...]
    """Of the first rank that has it, along each dimension of the DTensor's mesh."""


def is_sharded(tensor: Any) -> bool:
    """Whether a tensor is a DTensor of a mesh."""
    return isinstance(getattr(tensor, "device_mesh", None), Mesh)


def shards(tensor: Any) -> dict[tuple[int, ...], Shard]:
    """All shards of a DTensor, each once, by where it begins; PyTorch's checkpoints have the same.

    Raises for one that is yet to be summed up.
    """
    tensor._raise_if_contains_partial_placements()
    return _shards(tensor._spec)


def _shards(spec: Any) -> dict[tuple[int, ...], Shard]:
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

    sizes, placements = spec.mesh.shape, spec.placements
    rows = [range(size if dim in _sharded(spec) else 1) for dim, size in enumerate(sizes)]
    found: dict[tuple[int, ...], Shard] = {}
    for place in itertools.product(*rows):
        # It reckons with tensors, which have no values in what is traced.
        with _disable_current_modes():
            size, start = _compute_local_shape_and_global_offset(
                spec.shape, sizes, list(place), placements
            )
        found.setdefault(tuple(start), Shard(tuple(start), tuple(size), place))
    return found


def _sharded(spec: Any) -> list[int]:
    """The dimensions of the mesh along which the ranks have different shards."""
    return [
        dim
        for dim, placement in enumerate(spec.placements)
        if not placement.is_replicate() and not placement.is_partial()
    ]


def read_shard(tensor: Any, shard: Shard) -> torch.Tensor:
    """A shard, as a tensor of the CPU."""
    mesh = tensor.device_mesh
    own = tensor.to_local().detach()[_box([0] * tensor.dim(), shard.size)]
    return mesh.root.on(own, int(mesh.mesh[shard.place]))  # type: ignore[no-any-return]


def write_shard(
    tensor: Any, shard: Shard, values: torch.Tensor, at: Iterable[int] | None = None
) -> None:
    """Write into a shard on the ranks that have it, from its beginning or `at` on."""
    starts = [0] * tensor.dim() if at is None else at
    _write(tensor._spec, tensor.to_local().detach(), shard, values, starts)


def _write(
    spec: Any, local: torch.Tensor, shard: Shard, values: torch.Tensor, starts: Iterable[int]
) -> None:
    own = local[_box(starts, values.shape)]
    there = values.to(own.device, own.dtype)
    for dim in _sharded(spec):
        there = torch.where(spec.mesh._sym_get_coordinate(dim) == shard.place[dim], there, own)
    own.copy_(there)


def read(tensor: Any) -> torch.Tensor:
    """The whole of a DTensor, as a tensor of the CPU; the ranks have no more of it than before."""
    whole = torch.empty(tensor.shape, dtype=tensor.dtype)
    for shard in shards(tensor).values():
        whole[_box(shard.start, shard.size)] = read_shard(tensor, shard)
    return whole


def write(tensor: Any, whole: torch.Tensor) -> None:
    """Write the whole of a DTensor."""
    for shard in shards(tensor).values():
        write_shard(tensor, shard, whole[_box(shard.start, shard.size)])


def _box(starts: Iterable[int], size: Iterable[int]) -> tuple[slice, ...]:
    return tuple(slice(at, at + count) for at, count in zip(starts, size, strict=True))


class WholeDraws(_DispatchMode):  # type: ignore[misc]
    """Has each rank draw the random numbers of a whole DTensor, and keep those of its shard.

    The ranks' generators are alike: without this, all shards would be the same.
    """

    def __init__(self, spec: Any, generator: torch.Generator | None) -> None:
        super().__init__()
        self._spec, self._generator = spec, generator

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name, own = func.overloadpacket.__name__, args[0]
        if self._generator is not None:
            kwargs["generator"] = self._generator
        if name in ("rand", "randn"):
            whole = func(list(self._spec.shape), *args[1:], **kwargs)
            return self._part(whole, own)
        if name in ("normal_", "uniform_", "bernoulli_"):
            func(whole := self._empty(own), *args[1:], **kwargs)
            return own.copy_(self._part(whole, own.shape))
        if name in ("rand_like", "randn_like", "randint_like"):
            return self._part(func(self._empty(own), *args[1:], **kwargs), own.shape)
        if name == "bernoulli":
            whole = self._empty(own).uniform_(**kwargs)
            return (self._part(whole, own.shape) < own).to(own.dtype)
        if name == "native_dropout" and args[2] is not False:
            factors, kept = func(self._empty(own).fill_(1), *args[1:], **kwargs)
            return own * self._part(factors, own.shape), self._part(kept, own.shape)
        return func(*args, **kwargs)

    def _empty(self, own: torch.Tensor) -> torch.Tensor:
        return own.new_empty(self._spec.shape)

    def _part(self, whole: torch.Tensor, shape: Iterable[int]) -> torch.Tensor:
        part = whole.new_zeros(tuple(shape))
        for shard in _shards(self._spec).values():
            values = whole[_box(shard.start, shard.size)]
            _write(self._spec, part, shard, values, [0] * whole.dim())
        return part
