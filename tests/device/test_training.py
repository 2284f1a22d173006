"""Models trained on a sky device end exactly as they do on the CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

STEPS = 4

# Raised inside PyTorch by models that are made to be small.
pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor:UserWarning")


class Recurrent(nn.Module):
    """A recurrent layer with a linear head on its last state."""

    def __init__(self, cell: type[nn.LSTM] | type[nn.GRU]) -> None:
        super().__init__()
        self.layer = cell(6, 8, num_layers=2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Class scores of a batch of sequences."""
        return self.head(self.layer(x)[0][:, -1])


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 3))


def _normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 3))


def _dropped() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 64), nn.Dropout(0.5), nn.Tanh(), nn.Linear(64, 3))


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 6, 3),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 3),
    )


def _transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True, norm_first=True)
    return nn.Sequential(
        nn.Linear(6, 8), nn.TransformerEncoder(layer, 2), nn.Flatten(), nn.Linear(40, 3)
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (_mlp, (12,)),
    "batch norm": (_normalised, (12,)),
    "dropout": (_dropped, (12,)),
    "cnn": (_cnn, (2, 8, 8)),
    "lstm": (lambda: Recurrent(nn.LSTM), (5, 6)),
    "gru": (lambda: Recurrent(nn.GRU), (5, 6)),
    "transformer": (_transformer, (5, 6)),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd momentum": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, 0.01),
    "adamw fused": lambda p: torch.optim.AdamW(p, 0.01, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01),
}


def _train(
    model: nn.Module,
    optimizer: Callable[[Any], torch.optim.Optimizer],
    batches: list[tuple[torch.Tensor, torch.Tensor]],
    device: torch.device,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = copy.deepcopy(model).to(device)
    steps = optimizer(model.parameters())
    torch.manual_seed(7)
    losses = []
    for x, y in batches:
        loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
        steps.zero_grad()
        loss.backward()
        steps.step()
        losses.append(loss.item())
    return losses, {name: t.cpu() for name, t in model.state_dict().items()}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", MODELS)
def test_training_ends_as_on_the_cpu(model: str, optimizer: str, device: torch.device) -> None:
    make, shape = MODELS[model]
    torch.manual_seed(3)
    start = make()
    batches = [(torch.randn(8, *shape), torch.randint(3, (8,))) for _ in range(STEPS)]
    ours, state = _train(start, OPTIMIZERS[optimizer], batches, device)
    theirs, right = _train(start, OPTIMIZERS[optimizer], batches, torch.device("cpu"))
    if model in ("lstm", "gru"):
        # The CPU has fused recurrent kernels of its own, which round differently from plain ones.
        assert ours == pytest.approx(theirs, rel=1e-5)
        torch.testing.assert_close(state, right, rtol=1e-3, atol=1e-5)
        return
    assert ours == theirs
    assert [name for name, value in right.items() if not torch.equal(state[name], value)] == []


def test_a_model_keeps_its_parameters_and_ties_when_moved(device: torch.device) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    before = list(model.parameters())
    model.to(device)
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    assert model[1].weight is model[0].weight


def test_a_model_moves_while_a_graph_of_it_is_alive(device: torch.device) -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(3, 2), torch.ones(1, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    twin = copy.deepcopy(model)
    kept = model(x).sum()
    kept.backward(retain_graph=True)
    before = dict(model.named_parameters())
    grads = [p.grad for p in model.parameters()]
    model.to(device)
    assert all(p is before[name] and p.device == device for name, p in model.named_parameters())
    assert all(
        p.grad is grad and grad.device == device
        for p, grad in zip(before.values(), grads, strict=True)
    )
    model(x.to(device)).sum().backward()
    optimizer.step()
    model.cpu()
    for _ in range(2):
        twin(x).sum().backward()
    torch.optim.SGD(twin.parameters(), 0.1).step()
    assert torch.equal(model.weight, twin.weight)


def test_a_parameter_takes_data_of_another_device(device: torch.device) -> None:
    parameter = nn.Parameter(torch.arange(3.0))
    parameter.sum().backward()
    parameter.data = parameter.data.to(device)
    parameter.grad = None
    (parameter * 2).sum().backward()
    assert parameter.grad.device == device
    assert parameter.grad.tolist() == [2.0, 2.0, 2.0]
    with pytest.raises(RuntimeError, match="incompatible tensor type"):
        parameter.data = torch.eye(2).to_sparse()


def test_packed_sequences_pass_through_an_lstm(device: torch.device) -> None:
    torch.manual_seed(0)
    layer, x, lengths = nn.LSTM(4, 5, batch_first=True), torch.randn(3, 6, 4), [6, 3, 2]

    def run(where: torch.device) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x.to(where), lengths, batch_first=True)
        out, _ = copy.deepcopy(layer).to(where)(packed)
        return nn.utils.rnn.pad_packed_sequence(out, batch_first=True)[0]

    torch.testing.assert_close(run(device).cpu(), run(torch.device("cpu")))
