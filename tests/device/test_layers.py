"""The rest of PyTorch in a training graph: what it computes on a sky device equals the CPU's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

F = nn.functional
CPU = torch.device("cpu")
Graph = Callable[[torch.Tensor], list[torch.Tensor]]


def _random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def _host(value: Any) -> Any:
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.detach().cpu(), value)


def _differentiated(graph: Graph, x: torch.Tensor, device: torch.device) -> list[torch.Tensor]:
    """What a graph gives, and the gradient of a sum of it all."""
    x = x.to(device, copy=True).requires_grad_()
    torch.manual_seed(5)
    out = graph(x)
    total = sum(t.abs().square().sum() for t in out if t.requires_grad)
    return _host([*out, *torch.autograd.grad(total, x)])


def _assert_alike(graph: Graph, x: torch.Tensor, device: torch.device, **tolerance: float) -> None:
    right = _differentiated(graph, x, CPU)
    # The first time the worker is asked for the shapes, the second time they are known.
    for _ in range(2):
        ours = _differentiated(graph, x, device)
        torch.testing.assert_close(ours, right, **(tolerance or {"rtol": 0, "atol": 0}))


SCALES: tuple[dict[str, Any], ...] = (
    {"mode": "nearest", "scale_factor": 2},
    {"mode": "nearest", "scale_factor": 3},
    {"mode": "nearest-exact", "scale_factor": (0.5, 2.0)},
    {"mode": "bilinear", "scale_factor": 1.7},
    {"mode": "bilinear", "scale_factor": 1.7, "recompute_scale_factor": True},
    {"mode": "bilinear", "size": 2, "antialias": True},
    {"mode": "bicubic", "size": (7, 5), "align_corners": True},
    {"mode": "area", "size": 3},
)


def test_interpolation(device: torch.device) -> None:
    _assert_alike(
        lambda x: [F.interpolate(x, **options) for options in SCALES], _random(1, 2, 4, 4), device
    )


def test_fourier_transforms(device: torch.device) -> None:
    def graph(x: torch.Tensor) -> list[torch.Tensor]:
        spectrum = torch.fft.rfft2(x)
        window = torch.hann_window(8, device=x.device)
        short = torch.stft(x.flatten(), 8, return_complex=True, window=window)
        return [
            spectrum,
            torch.fft.irfft2(spectrum * spectrum),
            torch.fft.fftshift(torch.fft.fft(x)),
            short,
            torch.istft(short, 8, window=window),
            torch.fft.fftfreq(5, device=x.device),
        ]

    _assert_alike(graph, _random(4, 4), device)


def test_einsum(device: torch.device) -> None:
    def graph(x: torch.Tensor) -> list[torch.Tensor]:
        other = _random(4, 5, 2, seed=1).to(x.device)
        return [
            torch.einsum("bij,jkb->bik", x, other),
            torch.einsum("bii->b", x[:, :3, :3]),
            torch.einsum("...j,...j", x, x),
        ]

    _assert_alike(graph, _random(2, 3, 4), device)


def test_linear_algebra(device: torch.device) -> None:
    def graph(x: torch.Tensor) -> list[torch.Tensor]:
        definite = x @ x.mT + 4 * torch.eye(4, dtype=x.dtype, device=x.device)
        linalg = torch.linalg
        return [
            linalg.cholesky(definite),
            linalg.inv(definite),
            linalg.slogdet(definite)[1],
            linalg.solve(definite, x),
            linalg.lstsq(definite, x).solution,
            linalg.svdvals(x),
            linalg.eigvalsh(definite),
            linalg.qr(x)[1],
            linalg.pinv(x),
            linalg.matrix_exp(x),
            linalg.matrix_power(x, 3),
            linalg.matrix_norm(x),
            linalg.vector_norm(x, 3),
            linalg.matrix_rank(x),
            linalg.lu(x)[2],
        ]

    # LAPACK's last bit depends on where in memory a matrix begins.
    _assert_alike(graph, _random(4, 4, dtype=torch.float64), device, rtol=1e-9, atol=1e-12)


def test_losses(device: torch.device) -> None:
    def graph(x: torch.Tensor) -> list[torch.Tensor]:
        y, r = torch.tensor([0, 1, 2, 3, 4, 0]).to(x.device), _random(6, 5, seed=1).to(x.device)
        signs = torch.ones(6, device=x.device)
        return [
            F.cross_entropy(x, y, label_smoothing=0.1, weight=torch.arange(1.0, 6).to(x.device)),
            F.nll_loss(x.log_softmax(1), y, ignore_index=2),
            F.kl_div(x.log_softmax(1), r.softmax(1), reduction="batchmean"),
            F.binary_cross_entropy_with_logits(x, r.sigmoid()),
            F.smooth_l1_loss(x, r),
            F.huber_loss(x, r),
            F.cosine_embedding_loss(x, r, signs),
            F.triplet_margin_loss(x, r, r.flip(0)),
            F.margin_ranking_loss(x[:, 0], x[:, 1], signs),
            F.multi_margin_loss(x, y),
            F.poisson_nll_loss(x, r.abs()),
            F.gaussian_nll_loss(x, r, r.abs() + 0.1),
            F.hinge_embedding_loss(x, r.sign()),
            F.ctc_loss(
                x.log_softmax(1)[:, None],
                torch.tensor([[1, 2]]).to(x.device),
                torch.tensor([6]),
                torch.tensor([2]),
            ),
        ]

    _assert_alike(graph, _random(6, 5), device)


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "grouped convolution": (lambda: nn.Conv1d(4, 6, 3, groups=2, padding="same"), (2, 4, 9)),
    "dilated convolution": (
        lambda: nn.Conv2d(3, 4, 3, stride=2, padding=1, dilation=2, padding_mode="circular"),
        (2, 3, 9, 9),
    ),
    "convolution in space": (lambda: nn.Conv3d(1, 2, 2), (1, 1, 4, 4, 4)),
    "transposed convolution": (
        lambda: nn.ConvTranspose2d(3, 2, 3, stride=2, output_padding=1),
        (1, 3, 4, 4),
    ),
    "group norm": (lambda: nn.GroupNorm(2, 4), (2, 4, 3)),
    "instance norm": (lambda: nn.InstanceNorm2d(3, affine=True), (2, 3, 4, 4)),
    "layer norm": (lambda: nn.LayerNorm(4), (2, 4)),
    "rms norm": (lambda: nn.RMSNorm(4), (2, 4)),
    "cumulative batch norm": (lambda: nn.BatchNorm2d(3, momentum=None), (2, 3, 4, 4)),
    "pooling": (lambda: nn.AdaptiveMaxPool2d(2), (1, 2, 5, 5)),
    "fold": (lambda: nn.Fold((4, 4), 2), (1, 4, 9)),
    "unfold": (lambda: nn.Unfold(2), (1, 2, 4, 4)),
    "pixel shuffle": (lambda: nn.PixelShuffle(2), (1, 4, 2, 2)),
    "weight norm": (lambda: parametrizations.weight_norm(nn.Linear(3, 4)), (2, 3)),
    "spectral norm": (lambda: parametrizations.spectral_norm(nn.Linear(4, 4)), (2, 4)),
    "orthogonal": (lambda: parametrizations.orthogonal(nn.Linear(4, 4)), (2, 4)),
    "dropout of channels": (lambda: nn.Dropout2d(0.5), (2, 6, 2, 2)),
    "alpha dropout": (lambda: nn.AlphaDropout(0.5), (4, 8)),
    "random leak": (lambda: nn.RReLU(), (4, 8)),
}


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer(device: torch.device, layer: str) -> None:
    make, shape = LAYERS[layer]
    torch.manual_seed(0)
    start = make()

    def graph(x: torch.Tensor) -> list[torch.Tensor]:
        placed = copy.deepcopy(start).to(x.device)
        out = placed(x)
        grads = torch.autograd.grad(
            out.square().sum(), [x, *placed.parameters()], retain_graph=True
        )
        return [out, *grads, *placed.buffers()]

    _assert_alike(graph, _random(*shape), device)


def test_embeddings(device: torch.device) -> None:
    torch.manual_seed(0)
    table = nn.Embedding(10, 4, padding_idx=2, max_norm=1.0)
    bag = nn.EmbeddingBag(10, 4, mode="mean")
    rows = torch.tensor([[1, 2], [3, 9]])

    def run(where: torch.device) -> Any:
        a, b, i = copy.deepcopy(table).to(where), copy.deepcopy(bag).to(where), rows.to(where)
        out = [a(i), b(i), b(i.flatten(), torch.tensor([0, 1]).to(where))]
        sum(t.square().sum() for t in out).backward()
        return _host([*out, a.weight, a.weight.grad, b.weight.grad])

    torch.testing.assert_close(run(device), run(CPU), rtol=0, atol=0)


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_packed_sequences_of_different_lengths(device: torch.device, kind: Any) -> None:
    torch.manual_seed(0)
    layer = kind(4, 5, num_layers=2, bidirectional=True, batch_first=True)

    def run(where: torch.device) -> Any:
        placed = copy.deepcopy(layer).to(where)
        given = [_random(length, 4, seed=length).to(where) for length in (3, 6, 2)]
        padded = nn.utils.rnn.pad_sequence(given, batch_first=True)
        packed = nn.utils.rnn.pack_padded_sequence(
            padded, torch.tensor([3, 6, 2]), batch_first=True, enforce_sorted=False
        )
        out, lengths = nn.utils.rnn.pad_packed_sequence(placed(packed)[0], batch_first=True)
        out.square().sum().backward()
        again = nn.utils.rnn.unpack_sequence(
            nn.utils.rnn.pack_sequence(given, enforce_sorted=False)
        )
        grads = [p.grad for p in placed.parameters()]
        return _host([padded, out, lengths, again, grads])

    torch.testing.assert_close(run(device), run(CPU))


@pytest.mark.parametrize("kind", [nn.RNNCell, nn.LSTMCell, nn.GRUCell])
def test_a_recurrent_cell(device: torch.device, kind: Any) -> None:
    torch.manual_seed(0)
    cell = kind(3, 4)

    def graph(x: torch.Tensor) -> list[torch.Tensor]:
        placed, state = copy.deepcopy(cell).to(x.device), None
        for step in x:
            state = placed(step, state)
        return [*state] if isinstance(state, tuple) else [state]

    _assert_alike(graph, _random(5, 2, 3), device, rtol=1e-5, atol=1e-6)


def test_pruning(device: torch.device) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(4, 4)

    def run(where: torch.device) -> Any:
        placed = copy.deepcopy(layer).to(where)
        prune.l1_unstructured(placed, "weight", 0.5)
        out = placed(torch.ones(1, 4, device=where))
        prune.remove(placed, "weight")
        return _host([out, placed.weight])

    torch.testing.assert_close(run(device), run(CPU), rtol=0, atol=0)


def test_random_numbers_of_every_kind(device: torch.device) -> None:
    def run(where: torch.device) -> list[torch.Tensor]:
        p = torch.tensor([0.1, 0.2, 0.7]).to(where)
        torch.manual_seed(3)
        return _host(
            [
                torch.multinomial(p, 2),
                torch.bernoulli(p),
                torch.normal(0.0, p),
                torch.poisson(p),
                torch.randint(10, (4,), device=where),
                torch.randn(2, 2, dtype=torch.complex64, device=where),
                F.gumbel_softmax(p),
                F.dropout(torch.ones(8, device=where)),
                torch.empty(3, device=where).uniform_(),
                torch.empty(3, device=where).exponential_(),
                torch.empty(3, device=where).geometric_(0.5),
                torch.empty(3, device=where).cauchy_(),
                torch.empty(3, device=where).log_normal_(),
                torch.empty(3, dtype=torch.int64, device=where).random_(),
                nn.init.trunc_normal_(torch.empty(3, 3, device=where)),
                nn.init.orthogonal_(torch.empty(3, 3, device=where)),
                nn.init.kaiming_uniform_(torch.empty(3, 3, device=where)),
            ]
        )

    torch.testing.assert_close(run(device), run(CPU), rtol=0, atol=0)


def test_distributions(device: torch.device) -> None:
    kinds = torch.distributions

    def graph(x: torch.Tensor) -> list[torch.Tensor]:
        positive = x.abs() + 1
        drawn = [
            kinds.Normal(x, positive),
            kinds.Bernoulli(logits=x),
            kinds.Categorical(logits=x),
            kinds.Gamma(positive, positive),
            kinds.Beta(positive, positive),
            kinds.Dirichlet(positive),
            kinds.Exponential(positive),
            kinds.Poisson(positive),
            kinds.Laplace(x, positive),
            kinds.StudentT(positive + 1),
            kinds.MultivariateNormal(x, torch.eye(2, device=x.device)),
        ]
        samples = [d.rsample() if d.has_rsample else d.sample() for d in drawn]
        chances = [d.log_prob(s.detach()) for d, s in zip(drawn, samples, strict=True)]
        return samples + chances

    _assert_alike(graph, _random(2), device)


def test_sorting_and_counting(device: torch.device) -> None:
    def run(where: torch.device) -> Any:
        x, edges = torch.tensor([3.0, 1, 2, 1]).to(where), torch.tensor([1.5, 2.5]).to(where)
        return _host(
            [
                tuple(x.sort(stable=True)),
                tuple(x.topk(2)),
                x.unique(return_counts=True),
                x.median(),
                tuple(x.kthvalue(2)),
                torch.histc(x, 3),
                torch.bucketize(x, edges),
                torch.searchsorted(edges, x),
                tuple(x.cummax(0)),
                torch.combinations(x),
                torch.quantile(x, 0.3),
                torch.bincount(x.long()),
            ]
        )

    torch.testing.assert_close(run(device), run(CPU), rtol=0, atol=0)


def test_numbers_of_python_and_the_host_keep_their_types(device: torch.device) -> None:
    def run(where: torch.device) -> list[torch.Tensor]:
        x = torch.ones(2, dtype=torch.int32).to(where)
        return _host(
            [
                x + 1.5,
                x * True,
                x / 2,
                2**x,
                x + torch.tensor(1.5),
                x.float() + torch.tensor(1.0, dtype=torch.float64),
                x + torch.tensor([1.5]).to(where),
                torch.where(x > 0, 1.0, 2),
                1 - x,
                x.bool() | False,
                x * 1j,
            ]
        )

    torch.testing.assert_close(run(device), run(CPU), rtol=0, atol=0)
