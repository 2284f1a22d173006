"""What of a stored version fits a model, and one readable report of what does not."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from skyward.store.manifest import View

if TYPE_CHECKING:
    import torch

_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Match:
    """Names by what became of them; `fits` are those that can be loaded as they are."""

    fits: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    reshaped: tuple[str, ...]
    recast: tuple[str, ...]

    @property
    def exact(self) -> bool:
        """Whether every name is on both sides, with the same shape and dtype."""
        return not (self.missing or self.unexpected or self.reshaped or self.recast)


def match(stored: Mapping[str, View], model: Mapping[str, torch.Tensor]) -> Match:
    """Compare names, shapes and dtypes."""
    both = [name for name in model if name in stored]
    reshaped = [name for name in both if stored[name].shape != list(model[name].shape)]
    fits = [name for name in both if name not in set(reshaped)]
    return Match(
        fits=tuple(fits),
        missing=tuple(name for name in model if name not in stored),
        unexpected=tuple(name for name in stored if name not in model),
        reshaped=tuple(reshaped),
        recast=tuple(name for name in fits if stored[name].dtype != _dtype(model[name])),
    )


def report(
    found: Match, stored: Mapping[str, View], model: Mapping[str, torch.Tensor], title: str
) -> str:
    """Every difference, the nearest names beside those that have no partner."""

    def in_model(name: str) -> str:
        return f"{list(model[name].shape)} {_dtype(model[name])}"

    def in_store(name: str) -> str:
        return f"{stored[name].shape} {stored[name].dtype}"

    def nearest(name: str, others: Sequence[str]) -> str:
        close = difflib.get_close_matches(name, others[:2000], n=1)
        return f"; nearest: {close[0]}" if close else ""

    sections: list[tuple[str, tuple[str, ...], Callable[[str], str]]] = [
        (
            "missing from the store",
            found.missing,
            lambda name: in_model(name) + nearest(name, found.unexpected or list(stored)),
        ),
        (
            "unexpected, not in the model",
            found.unexpected,
            lambda name: in_store(name) + nearest(name, found.missing or list(model)),
        ),
        (
            "of another shape",
            found.reshaped,
            lambda name: f"stored {in_store(name)}, model {in_model(name)}",
        ),
        (
            "of another dtype",
            found.recast,
            lambda name: f"stored {stored[name].dtype}, model {_dtype(model[name])}",
        ),
    ]
    counts = ", ".join(f"{len(names)} {what}" for what, names, _ in sections if names)
    lines = [f"{title}: {counts}"]
    for what, names, describe in sections:
        if names:
            lines.append(f"  {what}:")
            lines += [f"    {name}  {describe(name)}" for name in names[:_SHOWN]]
        if len(names) > _SHOWN:
            lines.append(f"    and {len(names) - _SHOWN} more")
    return "\n".join(lines)


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
