"""Each worker's part of a data set: every node splits alike, and the data keeps its type."""

from __future__ import annotations

import operator
import random
import sys
from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, SupportsIndex, TypeVar, TypeVarTuple, overload

__all__ = ["shard"]

T = TypeVar("T")
S = TypeVar("S")
Rest = TypeVarTuple("Rest")


@overload
def shard(
    data: T,
    /,
    *,
    shuffle: bool = False,
    seed: int = 0,
    drop_last: bool = False,
    node: int | None = None,
    total_nodes: int | None = None,
) -> T: ...


@overload
def shard(
    first: T,
    second: S,
    /,
    *rest: *Rest,
    shuffle: bool = False,
    seed: int = 0,
    drop_last: bool = False,
    node: int | None = None,
    total_nodes: int | None = None,
) -> tuple[T, S, *Rest]: ...


# mypy does not see that `*data: Any` accepts what a variadic overload may pass.
def shard(  # type: ignore[misc]
    *data: Any,
    shuffle: bool = False,
    seed: int = 0,
    drop_last: bool = False,
    node: int | None = None,
    total_nodes: int | None = None,
) -> Any:
    """Take this worker's part of the data, of the same type as the data.

    Worker `r` of `n` gets items `r, r + n, r + 2n, ...`; with `drop_last` every worker gets an
    equally long contiguous block and what does not divide is left out. Several arguments stay
    aligned. `shuffle` first permutes the items in an order that depends only on `seed` and the
    length, so every worker agrees on it; pass `seed=epoch` for a new order in each epoch. The
    worker's place comes from `instance_info()` unless `node` and `total_nodes` give another.

    >>> shard([10, 11, 12, 13, 14], node=1, total_nodes=2)
    [11, 13]
    >>> shard("abcd", [1, 2, 3, 4], node=0, total_nodes=2)
    ('ac', [1, 3])
    """
    if not data:
        raise TypeError("shard() needs at least one data set; write shard(x) or shard(x, y)")
    lengths = [_length(each) for each in data]
    if len(set(lengths)) > 1:
        listed = ", ".join(map(str, lengths))
        raise ValueError(
            f"shard() needs data of equal lengths to keep it aligned, and got {listed}; "
            "trim the longer ones, or shard them in separate calls"
        )
    rank, world = _place(node, total_nodes)
    order = _permutation(lengths[0], seed) if shuffle else range(lengths[0])
    if drop_last:
        size = len(order) // world
        part = order[rank * size : (rank + 1) * size]
    else:
        part = order[rank::world]
    parts = tuple(_take(each, part) for each in data)
    return parts[0] if len(parts) == 1 else parts


def _place(node: int | None, total_nodes: int | None) -> tuple[int, int]:
    if node is None and total_nodes is None:
        from skyward.context import instance_info

        info = instance_info()
        return info.global_worker_index, info.total_workers
    if node is None or total_nodes is None:
        raise ValueError(
            f"shard(node={node}, total_nodes={total_nodes}): one without the other says nothing; "
            "give both, or neither to use this worker's own place"
        )
    rank, world = _whole("node", node), _whole("total_nodes", total_nodes)
    if not 0 <= rank < world:
        raise ValueError(
            f"shard(node={rank}, total_nodes={world}): node counts from 0 and must be less than "
            "total_nodes"
        )
    return rank, world


def _whole(name: str, value: SupportsIndex) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(
            f"shard({name}={value!r}): {name} must be an int, not {type(value).__name__}"
        ) from None


def _permutation(length: int, seed: int) -> list[int]:
    # Sorting by `random()` and not `Random.shuffle`: Python promises the same numbers for a seed
    # in every version of the former alone, and this is the faster of the two.
    draw = random.Random(_whole("seed", seed)).random
    keys = [draw() for _ in range(length)]
    return sorted(range(length), key=keys.__getitem__)


def _length(data: Any) -> int:
    kind = type(data)
    if _is_a(data, "torch.utils.data", "IterableDataset"):
        raise _unsplittable(
            kind, "it is read in sequence; shard the list of files or rows that it reads from"
        )
    if _is_a(data, "datasets.iterable_dataset", "IterableDataset"):
        raise _unsplittable(
            kind,
            "it is read in sequence; use datasets.distributed.split_dataset_by_node(data, "
            "info.global_worker_index, info.total_workers) with info = sky.instance_info()",
        )
    if isinstance(data, Mapping):
        splits = _is_a(data, "datasets.dataset_dict", "DatasetDict")
        way_out = (
            "shard the split to train on, as in shard(data['train'])"
            if splits
            else "shard its values, as in shard(data['x'], data['y'])"
        )
        raise _unsplittable(kind, f"it has names, not positions; {way_out}")
    if isinstance(data, Set):
        raise _unsplittable(kind, "its order may differ between nodes; pass sorted(data)")
    if _is_array(data):
        # Not `len`, which scipy's sparse matrices refuse.
        if len(data.shape) == 0:
            raise _unsplittable(kind, "it has no dimensions; pass one of at least one dimension")
        return int(data.shape[0])
    if hasattr(kind, "__getitem__") and hasattr(kind, "__len__"):
        return len(data)
    if isinstance(data, Iterable):
        raise _unsplittable(kind, "it has no length or no positions; pass list(data)")
    if hasattr(kind, "__getitem__"):
        raise _unsplittable(kind, "it has no length; give its class a __len__")
    raise _unsplittable(kind, "pass a sequence, an array, a tensor, a DataFrame or a data set")


def _unsplittable(kind: type, reason: str) -> TypeError:
    return TypeError(f"shard() cannot split data of type {kind.__name__}: {reason}")


def _take(data: Any, part: Sequence[int]) -> Any:
    """The items at the positions in `part`, which is a range unless the data is shuffled."""
    at = slice(part.start, part.stop, part.step) if isinstance(part, range) else None
    if _is_a(data, "pandas", "DataFrame", "Series"):
        return data.iloc[part if at is None else at]
    if _is_a(data, "datasets.arrow_dataset", "Dataset"):
        return data.select(part)
    if _is_a(data, "torch.utils.data", "Dataset"):
        from torch.utils.data import Subset

        return Subset(data, part)
    if _is_array(data):
        return data[_positions(data, part) if at is None else at]
    if at is not None:
        piece = _sliced(data, at)
        if type(piece) is type(data) and len(piece) == len(part):
            return piece
    return _gathered(data, part)


def _positions(data: Any, part: Sequence[int]) -> Any:
    if _is_a(data, "torch", "Tensor"):
        import torch

        return torch.tensor(part, dtype=torch.long, device=data.device)
    import numpy

    return numpy.array(part, dtype=numpy.intp)


def _sliced(data: Any, at: slice) -> Any:
    try:
        return data[at]
    except Exception:
        # Sequences need not take slices, and may answer one with any error of their own; an
        # error that is not about slices comes up again when the items are fetched one by one.
        return None


def _gathered(data: Any, part: Sequence[int]) -> Any:
    """The items one by one, in the data's own type if that can be made from them."""
    items = [data[i] for i in part]
    plain: Any
    match data:
        case str():
            plain = "".join(items)
        case tuple():
            plain = tuple(items)
        case bytes():
            plain = bytes(items)
        case bytearray():
            plain = bytearray(items)
        case array():
            plain = array(data.typecode, items)
        case deque():
            plain = deque(items, data.maxlen)
        case _:
            plain = items
    if type(plain) is type(data):
        return plain
    try:
        rebuilt = type(data)(plain)
        faithful = type(rebuilt) is type(data) and list(rebuilt) == items
    except Exception:
        # The constructor of an unknown class may raise anything, or return anything.
        return plain
    return rebuilt if faithful else plain


def _is_array(data: Any) -> bool:
    """Whether slices and arrays of positions select along the first dimension, as in numpy."""
    return (hasattr(type(data), "__array__") and hasattr(data, "shape")) or _is_a(
        data, "scipy.sparse", "sparray", "spmatrix"
    )


def _is_a(value: object, module: str, *names: str) -> bool:
    # A value of a library's type can only exist once that library is loaded; importing it here
    # would cost seconds to those who do not use it.
    loaded = sys.modules.get(module)
    types = (getattr(loaded, name, None) for name in names)
    return isinstance(value, tuple(each for each in types if isinstance(each, type)))
