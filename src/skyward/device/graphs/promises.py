"""What a graph's results will be, for any sizes: the client's core is told, and asks no worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from skyward.device.graphs.sizes import KNOWN_MAX, Following, Recent, expression_of, parsed


class UnknownError(Exception):
    """Something of a result does not follow from the sizes that a graph gets."""


class Promises:
    """The results of one graph.

    Their sizes are those that the tracer found, their strides those that the worker has told of the
    code that it compiled first. If the code for other sizes lays out results in another way, the
    worker copies them to the layout that is promised here.
    """

    def __init__(
        self,
        number: int,
        given: Sequence[Any],
        results: Sequence[Any],
        strides: Sequence[Sequence[str] | None],
    ) -> None:
        """`given` are the sizes that the graph gets, `results` the traced tensors that it returns.

        Raises UnknownError where the worker has to be asked.
        """
        self._number = number
        self._following = Following(given)
        self._results = [
            (
                traced.dtype,
                [self._place(expression_of(size)) for size in traced.shape],
                [self._place(self._parsed(stride)) for stride in told or ()],
            )
            for traced, told in zip(results, strides, strict=True)
        ]
        if any(len(sizes) != len(told) for _, sizes, told in self._results):
            raise UnknownError
        self._made: Recent[tuple[int, ...], bool] = Recent(KNOWN_MAX)

    def _place(self, expression: Any) -> int:
        place = self._following.add(expression)
        if place is None:
            raise UnknownError
        return place

    def _parsed(self, stride: str) -> Any:
        try:
            return parsed(stride, self._following.symbols)
        except (SyntaxError, ValueError):
            raise UnknownError from None

    def make(self, numbers: Sequence[int]) -> None:
        """Tell the core what a call with these sizes returns, unless it was told lately."""
        import torch

        key = tuple(numbers)
        if self._made.find(key):
            return
        values = self._following.computed(key)
        results = [
            torch.empty_strided(
                [values[place] for place in sizes],
                [values[place] for place in strides],
                dtype=dtype,
                device="meta",
            )
            for dtype, sizes, strides in self._results
        ]
        torch.ops.skyward.promise.default(results, self._number, list(key))
        self._made.keep(key, True)

    def begin_again(self) -> None:
        """Note that another worker has the graph now: the core knows nothing of it."""
        self._made.clear()


def forget(number: int) -> None:
    """Take back what was promised of a graph, which is gone."""
    import torch

    torch.ops.skyward.promise.default(None, number, [])
