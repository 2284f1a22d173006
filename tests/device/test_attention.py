"""Attention in all its variants gives what the CPU gives, gradients included."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

CPU = torch.device("cpu")
SHAPE = (2, 3, 5, 8)

# Raised inside PyTorch by encoders that are made to be small.
pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor:UserWarning")


def _random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def _attend(
    device: torch.device,
    shape: tuple[int, ...] = SHAPE,
    dtype: torch.dtype = torch.float32,
    mask: torch.Tensor | None = None,
    heads: int | None = None,
    **options: Any,
) -> list[torch.Tensor]:
    """The result, and the gradients of all that has one."""
    inputs = [_random(*shape, seed=i, dtype=dtype) for i in range(3)]
    if heads is not None:
        inputs[1:] = [t[:, :heads] for t in inputs[1:]]
    inputs = [t.to(device, copy=True).requires_grad_() for t in inputs]
    if mask is not None:
        options["attn_mask"] = mask.detach().to(device).requires_grad_(mask.requires_grad)
        if mask.requires_grad:
            inputs.append(options["attn_mask"])
    torch.manual_seed(4)
    out = scaled_dot_product_attention(*inputs[:3], **options)
    return [t.detach().cpu() for t in (out, *torch.autograd.grad(out.square().sum(), inputs))]


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_attention_is_differentiated_by_functions(device: torch.device) -> None:
    def loss(t: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(t, t, t).square().sum()

    for x in (_random(3, *SHAPE), _random(2, 3, 5, 8)):
        for transform in (torch.func.vmap(torch.func.grad(loss)), torch.func.grad(loss)):
            torch.testing.assert_close(transform(x.to(device)).cpu(), transform(x))


def test_attention_without_a_batch_is_traced(device: torch.device) -> None:
    x = _random(3, 5, 8)

    def attend(t: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(t, t, t)

    traced = make_fx(attend)(x.to(device))
    torch.testing.assert_close(traced(x.to(device)).cpu(), attend(x))


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "scaled": {"scale": 0.3},
    "boolean mask": {"mask": _random(2, 1, 5, 5, seed=9) > 0},
    "rows that see nothing": {"mask": torch.arange(5)[:, None] > torch.arange(5)},
    "additive mask": {"mask": _random(5, 5, seed=9)},
    "mask with a gradient": {"mask": _random(5, 5, seed=9).requires_grad_()},
    "causal and masked": {"mask": _random(5, 5, seed=9), "is_causal": True},
    "dropout": {"dropout_p": 0.3},
    "grouped heads": {"heads": 1, "enable_gqa": True},
    "three axes": {"shape": (3, 5, 8)},
    "three axes, masked": {"shape": (3, 5, 8), "mask": _random(3, 5, 5, seed=9) > 0},
    "two axes": {"shape": (5, 8)},
    "odd width": {"shape": (2, 2, 4, 7)},
    "bfloat16": {"dtype": torch.bfloat16},
    "float64": {"dtype": torch.float64},
}


# Dropout comes after the same call without it: the kernel chosen for one does not fit the other.
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_of_attention(device: torch.device, variant: str) -> None:
    try:
        right = _attend(CPU, **VARIANTS[variant])
    except RuntimeError as refusal:
        # Since 2.14, a mask rules out `is_causal`.
        with pytest.raises(RuntimeError, match=re.escape(str(refusal))):
            _attend(device, **VARIANTS[variant])
        return
    for _ in range(2):
        assert all(map(torch.equal, _attend(device, **VARIANTS[variant]), right))


@pytest.mark.parametrize("kernel", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
def test_the_kernel_may_be_chosen(device: torch.device, kernel: SDPBackend) -> None:
    with sdpa_kernel(kernel):
        assert all(map(torch.equal, _attend(device), _attend(CPU)))


def test_no_kernel_is_left(device: torch.device) -> None:
    for where in (CPU, device):
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            with pytest.raises(RuntimeError, match="No available kernel"):
                _attend(where, dropout_p=0.3)


def test_gradients_of_gradients_with_the_plain_kernel(device: torch.device) -> None:
    def second(where: torch.device) -> torch.Tensor:
        x = _random(*SHAPE).to(where).requires_grad_()
        with sdpa_kernel(SDPBackend.MATH):
            out = scaled_dot_product_attention(x, x, x)
        (first,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0].cpu()

    torch.testing.assert_close(second(device), second(CPU))


WRONG: dict[str, Callable[[torch.Tensor], object]] = {
    "dtypes": lambda x: scaled_dot_product_attention(x, x.double(), x),
    "a mask of integers": lambda x: scaled_dot_product_attention(
        x, x, x, (x[0, 0] @ x[0, 0].T).long()
    ),
    "one axis": lambda x: scaled_dot_product_attention(x[0, 0, 0], x[0, 0, 0], x[0, 0, 0]),
    "a mask of another size": lambda x: scaled_dot_product_attention(x, x, x, x[0, 0, :3, :5]),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_arguments_are_refused_in_the_same_words(device: torch.device, wrong: str) -> None:
    with pytest.raises(RuntimeError) as right:
        WRONG[wrong](_random(*SHAPE))
    with pytest.raises(RuntimeError) as ours:
        WRONG[wrong](_random(*SHAPE).to(device))
    assert str(right.value).splitlines()[0] in str(ours.value)


def test_multihead_attention(device: torch.device) -> None:
    torch.manual_seed(0)
    layer, padding = (
        nn.MultiheadAttention(8, 2, batch_first=True),
        torch.tensor([[0, 0, 0, 1, 1]] * 2),
    )
    causal = nn.Transformer.generate_square_subsequent_mask(5)

    def run(where: torch.device) -> list[torch.Tensor]:
        x, placed = _random(2, 5, 8).to(where).requires_grad_(), layer.to(where)
        out, weights = placed(x, x, x, key_padding_mask=padding.bool().to(where))
        quick, _ = placed(x, x, x, need_weights=False, is_causal=True, attn_mask=causal.to(where))
        total = out.sum() + weights.square().sum() + quick.square().sum()
        return [t.detach().cpu() for t in (out, weights, quick, *torch.autograd.grad(total, x))]

    assert all(map(torch.equal, run(device), run(CPU)))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_an_encoder_that_is_not_training_heeds_its_padding_mask(device: torch.device) -> None:
    """PyTorch makes nested tensors of padded batches then, which cannot be on our device."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).eval()
    padding = torch.tensor([[0, 0, 0, 1, 1], [0, 0, 0, 0, 0]]).bool()

    def run(where: torch.device) -> list[torch.Tensor]:
        x = _random(2, 5, 8).to(where)
        with torch.no_grad():
            padded = encoder.to(where)(x, src_key_padding_mask=padding.to(where))
            return [encoder(x).cpu(), padded.cpu()[~padding]]

    for ours, right in zip(run(device), run(CPU), strict=True):
        torch.testing.assert_close(ours, right)
