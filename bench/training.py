"""The models that the device's benchmarks train, and a loop that times their steps."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import nn

import skyward as sky

QUIET = sky.Options(console=False)


class Block(nn.Module):
    """One block of a small transformer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


def mlp() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """The MLP 784-256-128-10 with a batch of 64."""
    model = nn.Sequential(
        nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10)
    )
    return model, torch.randn(64, 784), torch.randint(0, 10, (64,))


def transformer() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Four blocks of width 128 over 32 positions, a batch of 16."""
    model = nn.Sequential(*(Block(128, 4) for _ in range(4)), nn.Flatten(), nn.Linear(32 * 128, 10))
    return model, torch.randn(16, 32, 128), torch.randint(0, 10, (16,))


def stepper(
    make: Callable[[], tuple[nn.Module, torch.Tensor, torch.Tensor]],
    device: torch.device,
    steps: int,
    *,
    item: bool,
    clock: Callable[[], float] = time.perf_counter,
) -> Callable[[], float]:
    """Seconds per training step, everything done at the end of the run."""
    torch.manual_seed(0)
    model, x, y = make()
    model.to(device)
    x, y = x.to(device), y.to(device)
    optimizer = torch.optim.Adam(model.parameters(), foreach=True)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    def run() -> float:
        start = clock()
        for _ in range(steps):
            loss = step()
            if item:
                loss.item()
        if clock is time.perf_counter:
            loss.item()
        return (clock() - start) / steps

    step().item()
    return run
