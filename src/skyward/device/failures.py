"""Failures: the tensors of a device without contents, since an operation on them failed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from skyward.device.core import core

if TYPE_CHECKING:
    import torch

_TOGETHER = 128
"""How many tensors one operation looks at."""


def failures(index: int, flats: Sequence[torch.Tensor]) -> dict[int, str]:
    """Which of these tensors of a device failed, by their positions, and what went wrong.

    The tensors have one dimension and are not empty. Costs one wait if there is none; errors that
    nobody has seen yet must have been raised before.
    """
    found: dict[int, str] = {}
    parts = [range(len(flats))] if flats else []
    while parts:
        part = parts.pop()
        problem = _problem(index, [flats[at] for at in part])
        if problem is not None and len(part) == 1:
            found[part[0]] = problem
        elif problem is not None:
            half = len(part) // 2
            parts += [part[:half], part[half:]]
    return found


def _problem(index: int, flats: list[torch.Tensor]) -> str | None:
    import torch

    try:
        firsts = [
            torch.cat([flat[:1] for flat in flats[at : at + _TOGETHER]])
            for at in range(0, len(flats), _TOGETHER)
        ]
        torch.cat(firsts).cpu()
    except Exception as problem:
        core().stats(index)  # raises if the device itself is gone
        return str(problem).partition("\n")[0]
    return None
