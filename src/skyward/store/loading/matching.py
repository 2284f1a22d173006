"""What of a stored version fits a model, and one readable report of what does not."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from skyward.store.format.manifest import View

if TYPE_CHECKING:
    import torch

_SHOWN = 20
_NO_TENSOR = "a value that is no tensor"

Stored = View | None
"""A name's tensor in the store; None where that holds another value."""
Present: TypeAlias = "torch.Tensor | None"
"""A name's tensor in the model; None where that has another value."""


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


def match(stored: Mapping[str, Stored], model: Mapping[str, Present]) -> Match:
    """Compare names, and of tensors shapes and dtypes."""
    both = [name for name in model if name in stored]
    reshaped = [name for name in both if not _alike(name, stored[name], model[name])]
    unfit = set(reshaped)
    fits = [name for name in both if name not in unfit]
    return Match(
        fits=tuple(fits),
        missing=tuple(name for name in model if name not in stored),
        unexpected=tuple(name for name in stored if name not in model),
        reshaped=tuple(reshaped),
        recast=tuple(name for name in fits if _recast(stored[name], model[name])),
    )


def _alike(name: str, stored: Stored, model: Present) -> bool:
    if is_extra(name):  # the module says what it takes there
        return True
    if stored is None or model is None:
        return stored is None and model is None
    return stored.shape == list(model.shape)


def _recast(stored: Stored, model: Present) -> bool:
    return stored is not None and model is not None and stored.dtype != _dtype(model)


def is_extra(name: str) -> bool:
    """Whether a name is that of a module's `get_extra_state`."""
    return name.rpartition(".")[2] == "_extra_state"


def report(
    found: Match, stored: Mapping[str, Stored], model: Mapping[str, Present], title: str
) -> str:
    """Every difference, the nearest names beside those that have no partner."""

    def in_model(name: str) -> str:
        there = model[name]
        return _NO_TENSOR if there is None else f"{list(there.shape)} {_dtype(there)}"

    def in_store(name: str) -> str:
        there = stored[name]
        return _NO_TENSOR if there is None else f"{there.shape} {there.dtype}"

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
            lambda name: f"stored {_last(in_store(name))}, model {_last(in_model(name))}",
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


def _last(looks: str) -> str:
    return looks.rpartition(" ")[2]


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
