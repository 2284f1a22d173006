"""PyTorch's own samples of every operation give on a sky device what they give on the CPU."""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from .comparison import Different, compare, gradients, moved, tensors
from .exclusions import EXCLUSIONS, Exclusion, exclusion_of
from .tally import Tally

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_methods_invocations import op_db

ALL_DTYPES = "float32,int64,bool,complex64,bfloat16"
# The dtypes of this run: `make test` names float32, `make test-all` all.
DTYPES = [
    getattr(torch, name) for name in (os.environ.get("SKYWARD_OPS_DTYPES") or ALL_DTYPES).split(",")
]
CPU = torch.device("cpu")

pytestmark = pytest.mark.filterwarnings("ignore")

Call = Callable[[torch.device], Any]


def _seed(seed: int) -> None:
    """As `torch.manual_seed`, which notes the stack of calls for each kind of GPU there is not."""
    torch.default_generator.manual_seed(seed)
    torch.sky.manual_seed_all(seed)


def _samples(op: Any, dtype: torch.dtype, *, wants_gradients: bool) -> list[Any]:
    """The first sample and a late one; of several dtypes, one in the middle too."""
    _seed(1)
    # Not `op.sample_inputs`, which looks through the stack of calls, at 0.2 s each time.
    made = op.sample_inputs_func(op, "cpu", dtype, wants_gradients)
    some = list(itertools.islice(made, 16))
    middle = {len(some) // 2} if len(DTYPES) > 1 else set()
    return [some[i] for i in sorted({0, len(some) - 1} | middle)] if some else []


def _spread(value: Any) -> Any:
    """The same values with gaps between them."""

    def spread(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() == 0 or tensor.layout is not torch.strided:
            return tensor
        wide = torch.empty(*tensor.shape, 2, dtype=tensor.dtype)
        wide[..., 0] = tensor.detach()
        return wide[..., 0].requires_grad_(tensor.requires_grad)

    return torch.utils._pytree.tree_map_only(torch.Tensor, spread, value)


def _plainly(op: Any, arguments: Any, keywords: Any, *, backward: bool) -> Call:
    def call(device: torch.device) -> Any:
        args, kwargs = moved(arguments, device), moved(keywords, device)
        _seed(0)
        result = op(*args, **kwargs)
        grads = gradients(result, (args, kwargs)) if backward else []
        return result, args, kwargs, grads

    return call


def _into(op: Any, arguments: Any, keywords: Any, *, resized: bool) -> Call:
    def call(device: torch.device) -> Any:
        with torch.no_grad():
            args, kwargs = moved(arguments, device), moved(keywords, device)
            _seed(0)
            outs = list(tensors(op(*args, **kwargs)))
            made = [
                torch.zeros(0 if resized else t.shape, dtype=t.dtype, device=device) for t in outs
            ]
            _seed(0)
            returned = op(*args, **kwargs, out=made[0] if len(made) == 1 else tuple(made))
            return returned, made

    return call


def _ways(op: Any, sample: Any, *, backward: bool, first: bool) -> Iterator[tuple[str, Call]]:
    """The ways to call an operation with one sample."""
    arguments, keywords = (sample.input, *sample.args), sample.kwargs
    yield "plain", _plainly(op.op, arguments, keywords, backward=backward)
    if not first:
        return
    yield "spread", _plainly(op.op, _spread(arguments), _spread(keywords), backward=backward)
    if op.supports_out and "out" not in keywords:
        yield "out", _into(op.op, arguments, keywords, resized=False)
        yield "resized out", _into(op.op, arguments, keywords, resized=True)
    if in_place := op.get_inplace():
        plain = tuple(a.detach() if isinstance(a, torch.Tensor) else a for a in arguments)
        yield "in place", _plainly(in_place, plain, keywords, backward=False)


def _judge(call: Call, device: torch.device, excluded: Exclusion | None) -> bool | Exception:
    """Whether the CPU can do it at all, or what is different on the device."""
    values, rtol = (excluded.values, excluded.rtol) if excluded is not None else (True, None)
    try:
        right = call(CPU)
    except Exception as problem:
        if "Cannot access storage" in str(problem):
            return problem
        return False
    try:
        # The first time the worker is asked for the shapes, the second time they are known.
        for _ in range(2):
            compare(call(device), right, device, values=values, rtol=rtol)
    except Exception as problem:
        return problem
    return True


@pytest.mark.parametrize("op", op_db, ids=lambda op: op.formatted_name)
def test_an_operation_gives_what_the_cpu_gives(op: Any, device: torch.device, tally: Tally) -> None:
    failures = []
    tally.tested.add(op.formatted_name)
    for dtype in DTYPES:
        if dtype not in op.dtypes:
            continue
        excluded = exclusion_of(op.name, str(dtype).removeprefix("torch."))
        backward = dtype is torch.float32 and op.supports_autograd
        for number, sample in enumerate(_samples(op, dtype, wants_gradients=backward)):
            for way, call in _ways(op, sample, backward=backward, first=number == 0):
                verdict = _judge(call, device, excluded)
                if verdict is False:
                    continue
                kind = "passed"
                if isinstance(verdict, Exception):
                    loud = not isinstance(verdict, Different)
                    known = excluded.error if excluded is not None and loud else ""
                    kind = "excluded" if known and known in str(verdict) else "failed"
                tally.add(op.name, dtype, kind)
                if kind == "failed":
                    text = f"{type(verdict).__name__}: {verdict}"
                    failures.append(f"{dtype} sample {number}, {way}: {text[:600]}")
    assert not failures, "\n".join(failures)


@pytest.fixture
def whole_tally(tally: Tally) -> Tally:
    """The tally of a run that tested every operation."""
    if len(tally.tested) < len({op.formatted_name for op in op_db}):
        pytest.skip("not all operations were tested in this run")
    return tally


def test_every_operation_has_a_sample_that_was_compared(whole_tally: Tally) -> None:
    """What the CPU refuses is left out: an operation of which nothing is left would pass unseen."""
    expected = {(op.name, dtype) for op in op_db for dtype in DTYPES if dtype in op.dtypes}
    excluded = {exclusion.op for exclusion in EXCLUSIONS if exclusion.error}
    unseen = {name for name, _ in expected - whole_tally.passed} - excluded
    # PyTorch compiles these for a GPU when they are called.
    assert {name for name in unseen if not name.startswith("jiterator_")} == set()


def test_every_exclusion_is_still_needed(whole_tally: Tally) -> None:
    errors = {exclusion.op for exclusion in EXCLUSIONS if exclusion.error}
    assert {name for name, _ in whole_tally.excluded} == errors


@pytest.mark.skipif(
    torch.torch_version.TorchVersion(torch.__version__) < (2, 13),
    reason="an older PyTorch has fewer operations",
)
def test_every_exclusion_is_of_an_operation_there_is() -> None:
    assert {e.op for e in EXCLUSIONS} <= {op.name for op in op_db}
