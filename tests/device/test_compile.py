"""torch.compile traces models on a sky device, and what it makes of them computes the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention

pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor:UserWarning")


class Model(nn.Module):
    """Attention and all that goes with it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.out = nn.Linear(16, 11)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return self.out(self.encoder(self.embedding(tokens), src_mask=mask))


def _loss_and_gradients(
    model: nn.Module, run: nn.Module, *inputs: torch.Tensor
) -> list[torch.Tensor]:
    model.zero_grad()
    loss = run(*inputs).square().mean()
    loss.backward()
    return [loss.detach().cpu(), *(p.grad.cpu() for p in model.parameters())]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_with_attention_learns_as_it_does_uncompiled(
    device: torch.device, backend: str
) -> None:
    torch.manual_seed(0)
    model = Model().to(device)
    torch.compiler.reset()
    compiled = torch.compile(model, backend=backend)
    for length in (5, 7):
        tokens = torch.arange(2 * length, device=device).view(2, length) % 11
        for mask in (None, torch.ones(length, length, dtype=torch.bool, device=device).triu(1)):
            plain = _loss_and_gradients(model, model, tokens, mask)
            torch.testing.assert_close(_loss_and_gradients(model, compiled, tokens, mask), plain)
            with torch.inference_mode():
                torch.testing.assert_close(compiled(tokens, mask).cpu(), model(tokens, mask).cpu())


@pytest.mark.parametrize("shape", [(2, 3, 5, 8), (3, 5, 8)])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"dropout_p": 0.5}])
def test_attention_on_tensors_without_memory_has_the_right_shape(
    device: torch.device, shape: tuple[int, ...], options: dict[str, float]
) -> None:
    with FakeTensorMode():
        query = torch.randn(shape, device=device, requires_grad=True)
        out = scaled_dot_product_attention(query, query, query, **options)
        (gradient,) = torch.autograd.grad(out.sum(), query)
        with torch.inference_mode():
            still = scaled_dot_product_attention(query, query, query, **options)
    assert out.shape == gradient.shape == still.shape == shape
    assert out.device == still.device == torch.device(device)
