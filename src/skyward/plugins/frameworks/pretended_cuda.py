"""Pretended CUDA: lets code that asks for CUDA run on a machine that has none.

With `SKYWARD_DEVICE=cpu`, `.cuda()` and `.to("cuda")` mean the processor.
"""

from __future__ import annotations

import functools
import os
from typing import Any

VARIABLE = "SKYWARD_DEVICE"


def is_wanted() -> bool:
    """Whether the user asked to try GPU code without a GPU."""
    return os.environ.get(VARIABLE) == "cpu"


def install() -> None:
    """Make `.cuda()` and `.to("cuda")` of tensors and modules mean the processor, in this process.

    Does nothing where there is CUDA.
    """
    import torch

    if torch.cuda.is_available():
        return
    kinds: tuple[Any, ...] = (torch.Tensor, torch.nn.Module)
    for kind in kinds:
        if getattr(kind.cuda, "pretended", False):
            return
        kind.cuda = _on_processor(kind.cuda)
        kind.to = _moved(kind.to)


def _on_processor(original: Any) -> Any:
    @functools.wraps(original)
    def cuda(self: Any, *_: object, **__: object) -> Any:
        return self.to("cpu")

    cuda.pretended = True  # type: ignore[attr-defined]
    return cuda


def _moved(original: Any) -> Any:
    @functools.wraps(original)
    def to(self: Any, *given: Any, **named: Any) -> Any:
        return original(
            self,
            *(_meant(each) for each in given),
            **{name: _meant(each) for name, each in named.items()},
        )

    return to


def _meant(value: Any) -> Any:
    import torch

    if isinstance(value, str) and value.partition(":")[0] == "cuda":
        return "cpu"
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    return value
