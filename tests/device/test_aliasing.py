"""Random programs of views and writes leave a sky device's tensors exactly as the CPU's."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import skyward as sky

# PyTorch warns of half of what is tried here: writes through expanded tensors, `.T` of many axes.
pytestmark = pytest.mark.filterwarnings("ignore")

T = TypeVar("T")
CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.int64, torch.complex64, torch.int16, torch.bool, torch.float64)
# Bytes that are not 0 or 1 are no booleans, so nothing is looked at as one.
NUMBERS = tuple(dtype for dtype in DTYPES if dtype is not torch.bool)
SHAPES = ((2, 3, 4), (5,), (), (4, 4), (1, 6), (3, 0), (2, 1, 3, 2))
POOL = 8


class Numbers:
    """The choices of one step: the same on both sides, as long as their tensors are alike."""

    def __init__(self, drawn: Sequence[int]) -> None:
        self._left = list(drawn)

    def below(self, count: int) -> int:
        """A number from 0 up to, not including, the count."""
        return self._left.pop(0) % count if self._left and count > 0 else 0

    def pick(self, choices: Sequence[T]) -> T:
        """One of them."""
        return choices[self.below(len(choices))]


Pool = list[torch.Tensor]
View = Callable[[torch.Tensor, Numbers], torch.Tensor]
Write = Callable[[torch.Tensor, Numbers, Pool], object]


def _axis(t: torch.Tensor, n: Numbers) -> int:
    return n.below(max(t.dim(), 1))


def _size(t: torch.Tensor, axis: int) -> int:
    return t.shape[axis] if t.dim() else 0


def _values(like: torch.Tensor, shape: Sequence[int], n: Numbers) -> torch.Tensor:
    """Small numbers, made on the host and brought over."""
    count, first = math.prod(shape), n.below(7)
    made = (torch.arange(first, first + count) % 7 - 3).reshape(shape)
    return made.to(like.dtype).to(like.device, copy=True)


def _cut(t: torch.Tensor, n: Numbers) -> tuple[slice, ...]:
    axis = _axis(t, n)
    start, stop, step = n.below(4), n.below(8), 1 + n.below(3)
    return (slice(None),) * axis + (slice(start, stop, step),)


def _indices(t: torch.Tensor, n: Numbers) -> torch.Tensor:
    """Positions along the first axis, on the host or on the device."""
    size = t.shape[0]
    made = torch.tensor([n.below(size) - n.below(2) * size for _ in range(1 + n.below(3))])
    return made if n.below(2) else made.to(t.device)


def _strided(t: torch.Tensor, n: Numbers) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """A layout that may reach beyond the storage, which is an error."""
    rank = n.below(4)
    sizes = tuple(n.below(4) for _ in range(rank))
    return sizes, tuple(n.below(5) for _ in range(rank)), n.below(6)


def _order(t: torch.Tensor, n: Numbers) -> list[int]:
    axes = list(range(t.dim()))
    return [axes.pop(n.below(len(axes))) for _ in range(t.dim())]


def _factors(t: torch.Tensor, n: Numbers) -> tuple[int, ...]:
    return n.pick(((-1,), (2, -1), (-1, 3), (t.numel(),), (1, -1, 1), (2, 3, -1)))


VIEWS: dict[str, View] = {
    "slice": lambda t, n: t[_cut(t, n)],
    "select": lambda t, n: t.select(_axis(t, n), n.below(3)),
    "index": lambda t, n: t[n.below(3) - 1],
    "narrow": lambda t, n: t.narrow(_axis(t, n), n.below(3), n.below(4)),
    "transpose": lambda t, n: t.transpose(_axis(t, n), _axis(t, n)),
    "permute": lambda t, n: t.permute(_order(t, n)),
    "movedim": lambda t, n: t.movedim(_axis(t, n), _axis(t, n)),
    "T": lambda t, n: t.T,
    "mT": lambda t, n: t.mT,
    "expand": lambda t, n: t.expand(1 + n.below(3), *t.shape),
    "expand ones": lambda t, n: t.expand([n.below(4) if s == 1 else s for s in t.shape]),
    "as_strided": lambda t, n: t.as_strided(*_strided(t, n)),
    "unfold": lambda t, n: t.unfold(_axis(t, n), n.below(4), 1 + n.below(2)),
    "view": lambda t, n: t.view(_factors(t, n)),
    "reshape": lambda t, n: t.reshape(_factors(t, n)),
    "flatten": lambda t, n: t.flatten(_axis(t, n)),
    "unflatten": lambda t, n: t.unflatten(_axis(t, n), (n.below(3), -1)),
    "diagonal": lambda t, n: t.diagonal(n.below(3) - 1, _axis(t, n), _axis(t, n)),
    "squeeze": lambda t, n: t.squeeze() if n.below(2) else t.squeeze(_axis(t, n)),
    "unsqueeze": lambda t, n: t.unsqueeze(n.below(t.dim() + 1)),
    "chunk": lambda t, n: n.pick(t.chunk(1 + n.below(3), _axis(t, n))),
    "split": lambda t, n: n.pick(t.split(n.below(3), _axis(t, n))),
    "unbind": lambda t, n: n.pick(t.unbind(_axis(t, n))),
    "tensor_split": lambda t, n: n.pick(t.tensor_split(1 + n.below(3), _axis(t, n))),
    "view as dtype": lambda t, n: t.view(t.dtype if t.dtype is torch.bool else n.pick(NUMBERS)),
    "view_as_real": lambda t, n: torch.view_as_real(t),
    "view_as_complex": lambda t, n: torch.view_as_complex(t),
    "real": lambda t, n: t.real,
    "imag": lambda t, n: t.imag,
    "conj": lambda t, n: t.conj(),
    "detach": lambda t, n: t.detach(),
    "data": lambda t, n: t.data,
    "alias": lambda t, n: t[...],
}

COPIES: dict[str, View] = {
    "clone": lambda t, n: t.clone(),
    "contiguous": lambda t, n: t.contiguous(),
    "to": lambda t, n: t.to(t.dtype, copy=bool(n.below(2))),
    "sum": lambda t, n: t.sum(_axis(t, n)),
    "masked": lambda t, n: t[_values(t, t.shape, n) != 0],
    "gathered": lambda t, n: t[_indices(t, n)],
    "like": lambda t, n: torch.zeros_like(t),
    "fresh": lambda t, n: _values(t.new_empty(0, dtype=n.pick(DTYPES)), n.pick(SHAPES), n),
}


def _into(t: torch.Tensor, n: Numbers, pool: Pool) -> object:
    return torch.add(_values(t, t.shape, n), _values(t, t.shape, n), out=t)


def _from_pool(t: torch.Tensor, n: Numbers, pool: Pool) -> object:
    source = n.pick(pool)
    # Reading and writing the same memory is undefined; reinterpreted bytes convert as they please.
    source = source.clone() if source.dtype is t.dtype else _values(t, source.shape, n)
    return t.copy_(source)


def _resize(t: torch.Tensor, n: Numbers, pool: Pool) -> object:
    # New memory is as it was, so it is filled.
    return t.resize_(n.pick(SHAPES)).fill_(n.below(5))


def _set(t: torch.Tensor, n: Numbers, pool: Pool) -> object:
    if not n.below(3):
        return t.set_()
    other = n.pick(pool)
    if other.dtype is torch.bool or t.dtype is torch.bool:
        return t.set_(other)
    if n.below(2):
        return t.set_(other)
    return t.set_(other.untyped_storage())


def _swap(t: torch.Tensor, n: Numbers, pool: Pool) -> object:
    other = n.pick(pool)
    t.data, other.data = other.data, t.data
    return t


def _scatter(t: torch.Tensor, n: Numbers, pool: Pool) -> object:
    axis = _axis(t, n)
    index = torch.zeros(t.shape, dtype=torch.int64, device=t.device) + n.below(_size(t, axis))
    return t.scatter_(axis, index, _values(t, t.shape, n))


WRITES: dict[str, Write] = {
    "add_": lambda t, n, pool: t.add_(n.below(5)),
    "add_ broadcast": lambda t, n, pool: t.add_(_values(t, t.shape[1:], n)),
    "mul_": lambda t, n, pool: t.mul_(_values(t, t.shape, n)),
    "neg_": lambda t, n, pool: t.neg_(),
    "copy_": _from_pool,
    "copy_ host": lambda t, n, pool: t.copy_(_values(t, t.shape, n).cpu()),
    "fill_": lambda t, n, pool: t.fill_(n.below(5)),
    "zero_": lambda t, n, pool: t.zero_(),
    "masked_fill_": lambda t, n, pool: t.masked_fill_(_values(t, t.shape, n) != 0, n.below(5)),
    "set slice": lambda t, n, pool: t.__setitem__(_cut(t, n), n.below(5)),
    "set slice to values": lambda t, n, pool: t.__setitem__(
        cut := _cut(t, n), _values(t, t[cut].shape, n)
    ),
    "set mask": lambda t, n, pool: t.__setitem__(_values(t, t.shape, n) != 0, n.below(5)),
    "set indices": lambda t, n, pool: t.__setitem__(_indices(t, n), n.below(5)),
    "set element": lambda t, n, pool: t.__setitem__(n.below(3), n.below(5)),
    "index_put_": lambda t, n, pool: t.index_put_(
        (_indices(t, n),), _values(t, t.shape[1:], n), accumulate=bool(n.below(2))
    ),
    "index_fill_": lambda t, n, pool: t.index_fill_(0, _indices(t, n).to(t.device), n.below(5)),
    "scatter_": _scatter,
    "out": _into,
    "resize_": _resize,
    "set_": _set,
    "swap": _swap,
    "t_": lambda t, n, pool: t.t_(),
    "transpose_": lambda t, n, pool: t.transpose_(_axis(t, n), _axis(t, n)),
    "squeeze_": lambda t, n, pool: t.squeeze_(),
    "unsqueeze_": lambda t, n, pool: t.unsqueeze_(n.below(t.dim() + 1)),
    "as_strided_": lambda t, n, pool: t.as_strided_(*_strided(t, n)),
}

Step = tuple[str, tuple[int, ...]]
NAMES = sorted({*VIEWS, *COPIES, *WRITES})
# What changes a tensor behind the back of autograd.
BEHIND = {"data", "swap", "set_", "resize_", "as_strided_", "view as dtype"}
DIFFERENTIABLE = sorted({*NAMES} - BEHIND)
SETTINGS = settings(
    derandomize=True,
    max_examples=400,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


def _steps(names: Sequence[str]) -> st.SearchStrategy[Step]:
    return st.tuples(st.sampled_from(names), st.tuples(*(st.integers(0, 23) for _ in range(8))))


def _start(device: torch.device) -> Pool:
    return [
        torch.arange(24.0).reshape(2, 3, 4).to(device, copy=True),
        torch.arange(6).to(device),
        torch.arange(12.0).view(torch.complex64).reshape(2, 3).to(device, copy=True),
        torch.eye(3, 4, dtype=torch.bool).to(device),
    ]


def _take(step: Step, pool: Pool) -> type[Exception] | None:
    """One step on one side; the class of the error it raised."""
    name, drawn = step
    n = Numbers(drawn)
    target = n.pick(pool)
    try:
        if name in WRITES:
            WRITES[name](target, n, pool)
            made = None
        else:
            made = {**VIEWS, **COPIES}[name](target, n)
    except Exception as problem:
        return RuntimeError if isinstance(problem, sky.errors.DeviceError) else type(problem)
    if made is not None:
        if len(pool) < POOL:
            pool.append(made)
        else:
            pool[n.below(POOL)] = made
    return None


def _groups(ids: Sequence[int | None]) -> list[int | None]:
    """For each, the first that is the same."""
    return [None if one is None else ids.index(one) for one in ids]


def _structure(pool: Pool) -> list[object]:
    """All there is to say of tensors without looking at their values."""
    bases = [t._base for t in pool]
    return [
        [
            (t.dtype, t.shape, t.stride(), t.storage_offset(), t.untyped_storage().nbytes())
            for t in pool
        ],
        [(t._version, t.is_conj(), t.is_neg(), t.is_contiguous(), t._is_view()) for t in pool],
        _groups([t.untyped_storage()._cdata for t in pool]),
        _groups([None if base is None else base._cdata for base in bases]),
    ]


def _run(program: Sequence[Step], ours: Pool, theirs: Pool) -> None:
    for number, step in enumerate(program):
        error, right = _take(step, ours), _take(step, theirs)
        where = f"after step {number} {step}"
        assert error == right, f"{where}: {error} instead of {right}"
        assert _structure(ours) == _structure(theirs), where
    _compare(ours, theirs)


def _compare(ours: Pool, theirs: Pool) -> None:
    for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        torch.testing.assert_close(
            a.data.cpu(),
            b.data,
            rtol=0,
            atol=0,
            equal_nan=True,
            msg=lambda text, index=index: f"tensor {index}: {text}",
        )


def _leaves(device: torch.device) -> Pool:
    return [t.requires_grad_() for t in _start(device) if t.is_floating_point() or t.is_complex()]


def _gradients(pool: Pool, leaves: Pool) -> Pool | type[Exception]:
    """Of a sum in which every element counts differently, so that none can be taken for another."""
    total = torch.zeros((), device=leaves[0].device)
    try:
        for t in pool:
            if t.requires_grad:
                weights = torch.arange(1.0, t.numel() + 1).reshape(t.shape).to(t.device)
                total = total + (t.abs() * weights).sum()
        found = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
    except Exception as problem:
        return RuntimeError if isinstance(problem, sky.errors.DeviceError) else type(problem)
    return list(found)


@SETTINGS
@given(program=st.lists(_steps(NAMES), min_size=1, max_size=20))
def test_programs_of_views_and_writes_end_as_on_the_cpu(
    program: list[Step], device: torch.device
) -> None:
    _run(program, _start(device), _start(CPU))


@SETTINGS
@given(program=st.lists(_steps(DIFFERENTIABLE), min_size=1, max_size=10))
def test_gradients_flow_through_views_and_writes_as_on_the_cpu(
    program: list[Step], device: torch.device
) -> None:
    our_leaves, their_leaves = _leaves(device), _leaves(CPU)
    ours, theirs = [t * 1 for t in our_leaves], [t * 1 for t in their_leaves]
    _run(program, ours, theirs)
    found, right = _gradients(ours, our_leaves), _gradients(theirs, their_leaves)
    if isinstance(found, list) and isinstance(right, list):
        _compare(found, right)
    else:
        assert found == right


@pytest.mark.parametrize("name", NAMES)
def test_every_step_alone(name: str, device: torch.device) -> None:
    for target in range(4):
        for rest in ((0, 0, 0, 0), (1, 2, 1, 3), (2, 1, 3, 1), (5, 4, 2, 2)):
            _run([(name, (target, *rest))], _start(device), _start(CPU))
