"""Comparison of what an operation gives on a sky device with what it gives on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map


class Different(AssertionError):
    """The device's answer is not the CPU's."""


def moved(value: Any, device: torch.device) -> Any:
    """A copy of every tensor in a value, with the same strides and offset, on that device."""

    def move(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return _moved_tensor(leaf, device)
        # Where there is a GPU, some samples name it.
        if isinstance(leaf, torch.device) or leaf in ("cpu", "cuda", "cuda:0"):
            return device
        return leaf

    return tree_map(move, value)


def _moved_tensor(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    plain = tensor.detach()
    conjugated, negated = plain.is_conj(), plain.is_neg()
    plain = plain.conj() if conjugated else plain
    plain = torch._neg_view(plain) if negated else plain
    whole = torch.empty(0, dtype=plain.dtype).set_(plain.untyped_storage()).clone()
    result = whole.to(device).as_strided(plain.size(), plain.stride(), plain.storage_offset())
    result = torch._neg_view(result) if negated else result
    result = result.conj() if conjugated else result
    return result.requires_grad_(tensor.requires_grad)


def compare(
    ours: Any,
    theirs: Any,
    device: torch.device,
    what: str = "result",
    *,
    values: bool = True,
    rtol: float | None = None,
) -> None:
    """Raise `Different` unless both are alike: values, dtype, shape, strides, and the place."""
    mine, my_shape = tree_flatten(ours)
    right, right_shape = tree_flatten(theirs)
    if len(mine) != len(right):
        raise Different(f"{what}: {my_shape} instead of {right_shape}")
    for index, (a, b) in enumerate(zip(mine, right, strict=True)):
        _compare_leaf(a, b, device, f"{what}[{index}]", values, rtol)


def _compare_leaf(
    a: Any, b: Any, device: torch.device, what: str, values: bool, rtol: float | None
) -> None:
    if not isinstance(b, torch.Tensor):
        if isinstance(b, torch.device):
            return
        if type(a) is not type(b) or not (a == b or (a != a and b != b)):
            raise Different(f"{what}: {a!r} instead of {b!r}")
        return
    if not isinstance(a, torch.Tensor):
        raise Different(f"{what}: {a!r} instead of a tensor")
    if a.device != device:
        raise Different(f"{what}: on {a.device}")
    for name in ("dtype", "shape", "layout"):
        if getattr(a, name) != getattr(b, name):
            raise Different(f"{what}: {name} {getattr(a, name)} instead of {getattr(b, name)}")
    if a.stride() != b.stride():
        raise Different(f"{what}: strides {a.stride()} instead of {b.stride()} for {b.shape}")
    if a.is_conj() != b.is_conj() or a.is_neg() != b.is_neg():
        raise Different(f"{what}: another lazy conjugation or negation")
    if not values:
        return
    host, right = a.detach().cpu(), b.detach()
    if b.dtype is not torch.complex32 and torch.equal(host, right):
        return
    tolerance = {} if rtol is None else {"rtol": rtol, "atol": 1e-5}
    try:
        torch.testing.assert_close(host, right, equal_nan=True, **tolerance)
    except AssertionError as problem:
        raise Different(f"{what}: {problem}") from None


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in a value, in order."""
    for leaf in tree_flatten(value)[0]:
        if isinstance(leaf, torch.Tensor):
            yield leaf


def gradients(result: Any, inputs: Any) -> list[torch.Tensor | None]:
    """The gradients of the sum of all differentiable results, by every input that wants one."""
    wanted = [t for t in tensors(inputs) if t.requires_grad]
    roots = [t for t in tensors(result) if t.requires_grad]
    if not wanted or not roots:
        return []
    # A gradient that differs from element to element, or a mixed-up one would look right.
    weights = [
        torch.linspace(0.5, 1.5, t.numel(), dtype=torch.float32).reshape(t.shape).to(t.dtype)
        for t in roots
    ]
    return list(
        torch.autograd.grad(
            roots,
            wanted,
            [w.to(root.device) for w, root in zip(weights, roots, strict=True)],
            allow_unused=True,
        )
    )
