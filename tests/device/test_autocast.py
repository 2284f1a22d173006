"""Autocast on the device has PyTorch's own policies: which operations are cast, and to what."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

HALF, FLOAT = torch.bfloat16, torch.float32
Operation = Callable[..., torch.Tensor]


def policies() -> dict[str, list[str]]:
    """The lists in torch's header, with the names that the dispatcher uses."""
    header = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    found = {}
    for name, body in re.findall(
        r"^#define AT_FORALL_(\w+)\(_\)((?:.*\\\n)*.*)\n", header.read_text(), re.MULTILINE
    ):
        body = body.replace("\\\n", " ")
        if name == "DIFFERENT_REDISPATCH_SIGNATURE":
            found[name] = re.findall(r'"([\w.]+)"', body)
        elif name != "DEPRECATED_AUTOCAST_BACKENDS":
            found[name] = [re.sub(r",\s*", ".", op) for op in re.findall(r"_\(([^()]+)\)", body)]
    return found


def test_every_operation_that_pytorch_casts_is_cast_here(device: torch.device) -> None:
    wanted = {f"aten::{name}" for names in policies().values() for name in names}
    assert len(wanted) > 100
    cast = {
        name
        for name in torch._C._dispatch_get_registrations_for_dispatch_key("AutocastPrivateUse1")
        if name.startswith("aten::")
    }
    # For CUDA, PyTorch keeps this one with cuDNN's kernels and not in those lists.
    assert cast == wanted | {"aten::_cudnn_rnn"}


def _of(*dtypes: torch.dtype) -> Callable[[torch.device], list[torch.Tensor]]:
    torch.manual_seed(0)
    made = [torch.rand(4, 4).to(dtype) for dtype in dtypes]
    return lambda where: [tensor.to(where) for tensor in made]


CASES: dict[str, tuple[Operation, tuple[torch.dtype, ...], torch.dtype]] = {
    "matmul": (torch.matmul, (FLOAT, HALF), HALF),
    "mm": (torch.mm, (FLOAT, FLOAT), HALF),
    "bmm": (lambda a, b: torch.bmm(a[None], b[None]), (FLOAT, HALF), HALF),
    "linear": (lambda a, b, c: torch.nn.functional.linear(a, b, c[0]), (FLOAT,) * 3, HALF),
    "linear without bias": (torch.nn.functional.linear, (FLOAT, HALF), HALF),
    "addmm": (torch.addmm, (FLOAT, HALF, FLOAT), HALF),
    "a list of tensors": (lambda *a: torch.linalg.multi_dot(a), (FLOAT, HALF, FLOAT), HALF),
    "einsum": (lambda a, b: torch.einsum("ij,jk->ik", a, b), (FLOAT, HALF), HALF),
    "double stays": (torch.mm, (torch.float64, torch.float64), torch.float64),
    "exp": (torch.exp, (HALF,), FLOAT),
    "an overload": (lambda a: a.pow(2.5), (HALF,), FLOAT),
    "two results": (
        lambda a: torch.native_layer_norm(a, (4,), None, None, 1e-5)[0],
        (HALF,),
        FLOAT,
    ),
    "softmax": (lambda a: torch.softmax(a, 0), (HALF,), FLOAT),
    "a dtype that was chosen": (lambda a: torch.softmax(a, 0, HALF), (HALF,), HALF),
    "norm": (lambda a: torch.ops.aten.norm.Scalar(a, 2), (HALF,), FLOAT),
    "norm of rows": (lambda a: torch.ops.aten.norm.ScalarOpt_dim(a, 2, [1]), (HALF,), FLOAT),
    "norm of doubles": (
        lambda a: torch.ops.aten.norm.Scalar(a, 2),
        (torch.float64,),
        torch.float64,
    ),
    "the wider of two": (lambda a, b, c: torch.addcmul(a, b, c), (HALF, FLOAT, HALF), FLOAT),
    "all narrow": (lambda a, b, c: torch.addcmul(a, b, c), (HALF,) * 3, HALF),
    "a bias follows": (
        lambda a, b, c: torch.nn.functional.bilinear(a, b, c[None], c[0, :1]),
        (HALF, HALF, HALF),
        HALF,
    ),
    "not on a list": (torch.relu, (FLOAT,), FLOAT),
}


@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_autocast(device: torch.device, name: str) -> None:
    operation, dtypes, expected = CASES[name]
    inputs = _of(*dtypes)
    with torch.autocast("sky", dtype=HALF):
        ours = operation(*inputs(device))
    assert ours.dtype is expected
    wide = operation(*(tensor.double() for tensor in inputs(torch.device("cpu"))))
    torch.testing.assert_close(ours.cpu().double(), wide.double(), rtol=0.03, atol=0.03)


def test_a_dtype_that_autocast_cannot_join_is_named(device: torch.device) -> None:
    a, b = torch.ones(3, device=device, dtype=torch.float16), torch.ones(3, device=device)
    with (
        torch.autocast("sky", dtype=HALF),
        pytest.raises(RuntimeError, match=r"autocast to BFloat16 .* dtype Half; convert it"),
    ):
        torch.addcmul(a.to(HALF), a, b.to(HALF))


def test_gradients_come_back_in_the_dtype_of_the_weights(device: torch.device) -> None:
    weight = torch.rand(4, 4, device=device, requires_grad=True)
    x = torch.rand(4, 4, device=device)
    with torch.autocast("sky", dtype=HALF):
        first = torch.linalg.multi_dot([x, weight, weight]) + x @ weight
    first.sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype is FLOAT
