"""A call of a compiled function as one operation of the core: AOTAutograd's Python is left out.

Around the two graphs of a function AOTAutograd runs some hundred lines of Python in each call. They
take longer than the eager operations of a small model. Where these lines only pass tensors on, the
core does what they do, with a node of autograd of its own (`csrc/client/graphs.cpp`).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from skyward.device.graphs.sizes import KNOWN_MAX, Recent

PLAIN_RESULTS = ("non_alias", "unsafe_view_alias", "custom_function_view")
"""Results that are no views of inputs or of other results, by AOTAutograd's names."""
_numbers = itertools.count(1)


@dataclass(frozen=True)
class Ends:
    """What goes into a graph and what comes out, by the names of its nodes."""

    inputs: list[str]
    dense: list[bool]
    """For each input, whether it is a contiguous tensor."""
    read: list[int]
    written: list[int]
    numbers: list[int]
    results: list[str | None]
    places: list[int | None]
    """For each result, where it is among the tensors that are made, the inputs, the sizes."""
    made: int
    """How many tensors the graph makes."""
    metadata: Any
    """What AOTAutograd knows of the function."""
    is_recorded: bool


class Shipped(Protocol):
    """A graph on a worker."""

    ends: Ends
    is_backward: bool
    is_used: bool
    number: int
    opening: int
    token: Any

    @property
    def generation(self) -> Callable[[], int]:
        """Counts the calls of compiled functions, if the worker is to know."""

    @property
    def sizes(self) -> Callable[[Sequence[int]], list[int]]:
        """The sizes among the results, for those given."""

    def promise(self, numbers: Sequence[int]) -> None:
        """See that the core knows what a call with these sizes returns."""


class _LongerError(Exception):
    """The function needs what AOTAutograd does around its graphs."""


def short(made: Callable[..., Any], core: Any, shipped: Sequence[Shipped]) -> Callable[..., Any]:
    """The function that AOTAutograd has made, or in its place the core's operation that does it.

    The first call is AOTAutograd's: it compiles the backward graph when that is wanted first.
    `shipped` are the graphs of the function, as far as they are compiled.
    """
    from torch._dynamo import compiled_autograd as other_autograd

    plan: _Plan | None = None
    is_settled = False

    def found(count: int) -> _Plan | None:
        nonlocal is_settled
        is_settled = False
        if not all(graph.is_used for graph in shipped):
            return None
        try:
            settled: _Plan | None = _Plan(core, shipped, count)
        except _NotYetError:
            return None
        except _LongerError:
            settled = None
        is_settled = True
        return settled

    @functools.wraps(made)
    def call(*given: Any) -> Any:
        nonlocal plan
        # It traces what AOTAutograd has made, and cannot look into a node of the core.
        if getattr(other_autograd, "compiled_autograd_enabled", False):
            return made(*given)
        if plan is None or core.openings[plan.device] != plan.opening:
            if plan is not None or not is_settled:
                plan = found(len(given))
            if plan is None:
                return made(*given)
        return plan(given)

    return call


class _NotYetError(Exception):
    """The graphs are not all there, or not on the worker that the device has now."""


class _Plan:
    """How the graphs of a function fit together."""

    def __init__(self, core: Any, shipped: Sequence[Shipped], count: int) -> None:
        import torch

        forward, backward = _pair(shipped)
        ends = forward.ends
        metadata = ends.metadata
        if len(ends.inputs) != count or not _is_plain(metadata):
            raise _LongerError
        self.opening, self.device = forward.opening, forward.token.device.index
        openings = {graph.opening for graph in (forward, backward) if graph is not None}
        if openings != {core.openings[self.device]}:
            raise _NotYetError
        self._numbers = ends.numbers
        self._tensors = [at for at in range(count) if at not in ends.numbers]
        place = {at: index for index, at in enumerate(self._tensors)}
        users = metadata.num_outputs
        results = ends.places[:users]
        if len(results) != users or any(at is None or at >= ends.made for at in results):
            raise _LongerError
        if len(set(results)) != users:
            raise _LongerError  # one tensor returned twice
        differentiable = [
            int(backward is not None and info.requires_grad) for info in metadata.output_info
        ]
        saved, gradients = list[int](), [-1] * len(place)
        self._backward_sizes: list[int] = []
        if backward is not None:
            saved, self._backward_sizes = _saved(ends, backward.ends, place, sum(differentiable))
            gradients = _gradients(ends, backward.ends, place)
        elif len(ends.results) != users:
            raise _LongerError
        self._forward, self._backward = forward, backward
        self._sizes: Recent[tuple[int, ...], list[int]] = Recent(KNOWN_MAX)
        self._number = next(_numbers)
        self._token, self._generation = forward.token, forward.generation
        self._run = torch.ops.skyward.call.default
        self._mark = _marks(metadata)
        torch.ops.skyward.plan.default(
            forward.token,
            self._number,
            forward.number,
            None if backward is None else backward.token,
            -1 if backward is None else backward.number,
            ends.is_recorded,
            [place[at] for at in ends.read],
            [place[at] for at in ends.written],
            [place[at] for at in metadata.mutated_graph_handled_indices_seen_by_autograd],
            results,
            differentiable,
            saved,
            gradients,
        )

    def __call__(self, given: tuple[Any, ...]) -> Any:
        if not self._numbers:
            results = self._run(self._token, self._number, self._generation(), given, [], [])
        else:
            numbers = [given[at] for at in self._numbers]
            results = self._run(
                self._token,
                self._number,
                self._generation(),
                [given[at] for at in self._tensors],
                numbers,
                self._told(tuple(numbers)),
            )
        for at, dims in self._mark:
            _mark_dynamic(results[at], dims)
        return results

    def _told(self, numbers: tuple[int, ...]) -> list[int]:
        """The sizes that the backward graph gets; the core knows then what both return."""
        found = self._sizes.find(numbers)
        if found is not None:
            return found
        self._forward.promise(numbers)
        known = [*numbers, *self._forward.sizes(numbers)]
        found = [known[at] for at in self._backward_sizes]
        if self._backward is not None:
            self._backward.promise(found)
        return self._sizes.keep(numbers, found)


def _pair(shipped: Sequence[Shipped]) -> tuple[Shipped, Shipped | None]:
    """The forward and the backward graph; a function without gradients has only the first."""
    forward = [graph for graph in shipped if not graph.is_backward]
    backward = [graph for graph in shipped if graph.is_backward]
    if len(forward) != 1 or len(backward) > 1:
        raise _LongerError
    metadata = forward[0].ends.metadata
    needs_backward = metadata is not None and len(forward[0].ends.results) != metadata.num_outputs
    if needs_backward and not backward:
        raise _NotYetError
    return forward[0], backward[0] if backward else None


def _is_plain(metadata: Any) -> bool:
    """Whether all that is done around the graphs is to pass tensors on.

    By names that PyTorch may change: where one is missing, AOTAutograd does it.
    """
    try:
        return (
            not metadata.tokens
            and not metadata.num_mutated_inp_runtime_indices
            and not metadata.num_intermediate_bases
            and not metadata.num_graphsafe_rng_states
            and not metadata.is_rng_op_functionalized
            and metadata.grad_enabled_mutation is None
            and not metadata.indices_of_inputs_that_requires_grad_with_mutations_in_bw
            and isinstance(metadata.mutated_graph_handled_indices_seen_by_autograd, list)
            and all(info.output_type.name in PLAIN_RESULTS for info in metadata.output_info)
            and all(_is_plain_tensor(each) for each in metadata.subclass_inp_meta)
            and all(_is_plain_tensor(each) for each in metadata.subclass_fw_graph_out_meta)
            and isinstance(metadata.num_outputs, int)
        )
    except AttributeError:
        return False


def _is_plain_tensor(meta: Any) -> bool:
    return isinstance(meta, int) or type(meta).__name__ == "PlainTensorMeta"


def _saved(
    forward: Ends, backward: Ends, place: dict[int, int], tangents: int
) -> tuple[list[int], list[int]]:
    """Where the inputs of the backward graph come from: its tensors, and its numbers.

    Tensors are counted from those given, then those made, and a tangent is -1; numbers from those
    given, then those that follow from them.
    """
    if backward.written:
        raise _LongerError
    users = forward.metadata.num_outputs
    kept = dict(zip(forward.results[users:], forward.places[users:], strict=True))
    inputs = forward.made + len(forward.inputs)
    tensors, numbers, wanted = list[int](), list[int](), list[str]()
    for at, name in enumerate(backward.inputs):
        found = kept.get(name)
        if found is None:
            if at in backward.numbers or not name.startswith("tangents_") or not backward.dense[at]:
                raise _LongerError
            wanted.append(name)
            tensors.append(-1)
        elif at in backward.numbers:
            if found >= inputs:
                numbers.append(len(forward.numbers) + found - inputs)
            elif found - forward.made in forward.numbers:
                numbers.append(forward.numbers.index(found - forward.made))
            else:
                raise _LongerError
        elif found < forward.made:
            tensors.append(len(place) + found)
        elif found - forward.made in place:
            tensors.append(place[found - forward.made])
        else:
            raise _LongerError
    order = [int(name.removeprefix("tangents_")) for name in wanted]
    if len(wanted) != tangents or order != sorted(order):
        raise _LongerError
    return tensors, numbers


def _gradients(forward: Ends, backward: Ends, place: dict[int, int]) -> list[int]:
    """For each tensor given: where its gradient is among those made, then those read; or -1."""
    if len(backward.results) != len(forward.inputs):
        raise _LongerError
    gradients = []
    for at in place:
        found = backward.places[at]
        if found is None:
            gradients.append(-1)
        elif found < backward.made:
            gradients.append(found)
        elif found - backward.made in backward.read:
            gradients.append(backward.made + backward.read.index(found - backward.made))
        else:
            raise _LongerError
    return gradients


def _marks(metadata: Any) -> list[tuple[int, set[int]]]:
    """The results of which the next graph's tracing is to know that their sizes change."""
    infos = enumerate(metadata.output_info)
    found = [(at, getattr(info, "dynamic_dims", None)) for at, info in infos]
    return [(at, dims) for at, dims in found if dims]


def _mark_dynamic(result: Any, dims: set[int]) -> None:
    from torch._functorch._aot_autograd import runtime_wrappers

    mark = getattr(runtime_wrappers, "mark_dynamo_propagated_dynamic_indices", None)
    if mark is not None:
        mark(result, dims)
    elif hasattr(result, "_dynamo_weak_dynamic_indices"):
        result._dynamo_weak_dynamic_indices |= dims
    else:
        result._dynamo_weak_dynamic_indices = dims.copy()
