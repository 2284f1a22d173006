"""A process of its own that answers questions: the same PyTorch without a sky device.

PyTorch's autograd engine knows one accelerator a process: once there is a sky device, a local GPU's
backward no longer finds its streams.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any


class Elsewhere:
    """Runs `serve` with a pipe and the arguments; `serve` ends when it receives None."""

    def __init__(self, serve: Callable[..., None], *arguments: Any, daemon: bool = True) -> None:
        """`daemon` must be False if `serve` starts processes."""
        context = multiprocessing.get_context("spawn")
        self._near, far = context.Pipe()
        self._process = context.Process(target=serve, args=(far, *arguments), daemon=daemon)
        self._process.start()

    def ask(self, *question: Any) -> Any:
        """The answer, or an exception that `serve` sent in its place."""
        self._near.send(question)
        answer = self._near.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def __enter__(self) -> Elsewhere:
        return self

    def __exit__(self, *_: object) -> None:
        self._near.send(None)
        self._process.join()
