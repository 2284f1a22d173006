"""Matching: compares a stored version with a model, and reports every difference."""

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
"""A name's tensor in the store; None for a value that is no tensor."""
Present: TypeAlias = "torch.Tensor | None"
"""A name's tensor in the model; None for a value that is no tensor."""


@dataclass(frozen=True, slots=True)
class Match:
    """Names by how they match; those in `fits` can be loaded, those in `recast` are among them."""

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
    """Compare the names, and the shapes and dtypes of tensors."""
    both = [name for name in model if name in stored]
    reshaped = [name for name in both if not _same_shape(name, stored[name], model[name])]
    unfit = set(reshaped)
    fits = [name for name in both if name not in unfit]
    return Match(
        fits=tuple(fits),
        missing=tuple(name for name in model if name not in stored),
        unexpected=tuple(name for name in stored if name not in model),
        reshaped=tuple(reshaped),
        recast=tuple(name for name in fits if _recast(stored[name], model[name])),
    )


def _same_shape(name: str, stored: Stored, model: Present) -> bool:
    if is_extra(name):  # the module decides what extra state it accepts
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
    """Every difference; a name without a partner is listed with the nearest name."""

    def in_model(name: str) -> str:
        tensor = model[name]
        return _NO_TENSOR if tensor is None else f"{list(tensor.shape)} {_dtype(tensor)}"

    def in_store(name: str) -> str:
        view = stored[name]
        return _NO_TENSOR if view is None else f"{view.shape} {view.dtype}"

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


def _last(words: str) -> str:
    return words.rpartition(" ")[2]


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
