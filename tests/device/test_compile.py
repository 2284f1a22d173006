"""torch.compile traces models on a sky device, and what it makes of them computes the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention

pytestmark = [
    pytest.mark.filterwarnings("ignore:enable_nested_tensor:UserWarning"),
    # Of torch's own, where it imports its compiler.
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),
]


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


@pytest.mark.parametrize("options", [{}, {"mode": "reduce-overhead"}, {"dynamic": True}])
def test_a_graph_that_inductor_makes_no_code_for_runs_as_it_is(
    device: torch.device, options: dict[str, object]
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 2)).to(device)
    rows = torch.randn(5, 3, device=device)
    plain = _loss_and_gradients(model, model, rows)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, **options)
    with pytest.warns(UserWarning, match=r"Inductor makes no code for sky:\d+; .*aot_eager"):
        ours = _loss_and_gradients(model, compiled, rows)
    torch.testing.assert_close(ours, plain)


@pytest.mark.filterwarnings("ignore:torch.compile. Inductor makes no code:UserWarning")
def test_a_graph_without_inputs_may_make_its_tensors_on_the_device(device: torch.device) -> None:
    torch.compiler.reset()
    assert torch.compile(lambda: torch.arange(5, device=device).sum())().item() == 10


@pytest.mark.filterwarnings("ignore:torch.compile. Inductor makes no code:UserWarning")
def test_flex_attention_is_compiled_as_libraries_compile_it(device: torch.device) -> None:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def causal(
        batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        return query >= key

    torch.compiler.reset()
    query = torch.randn(1, 2, 128, 8, device=device, requires_grad=True)
    mask = torch.compile(create_block_mask)(causal, None, None, 128, 128, device=device)
    ours = torch.compile(flex_attention)(query, query, query, block_mask=mask)
    plain = scaled_dot_product_attention(query, query, query, is_causal=True)
    torch.testing.assert_close(ours.cpu(), plain.cpu())
    gradients = [torch.autograd.grad(out.square().sum(), query)[0].cpu() for out in (ours, plain)]
    torch.testing.assert_close(*gradients)


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
