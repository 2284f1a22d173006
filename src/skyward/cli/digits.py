"""The program of `sky demo`: a model that learns to read digits, which the program draws itself."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

import skyward as sky

# Seven rows of five dots for each digit.
_GLYPHS = (
    "01110 10001 10011 10101 11001 10001 01110",
    "00100 01100 00100 00100 00100 00100 01110",
    "01110 10001 00001 00010 00100 01000 11111",
    "11111 00010 00100 00010 00001 10001 01110",
    "00010 00110 01010 10010 11111 00010 00010",
    "11111 10000 11110 00001 00001 10001 01110",
    "00110 01000 10000 11110 10001 10001 01110",
    "11111 00001 00010 00100 01000 01000 01000",
    "01110 10001 10001 01110 10001 10001 01110",
    "01110 10001 10001 01111 00001 00010 01100",
)
SIDE, BATCH = 16, 256


class DigitReader(nn.Module):
    """Two layers: enough for digits of a printer, and quick on a processor."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(SIDE * SIDE, 128), nn.ReLU(), nn.Linear(128, 10)
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.layers(images)
        return scores


def drawn(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """So many digits, of different sizes, at different places, on paper with spots."""
    random = torch.Generator().manual_seed(seed)
    dots = torch.tensor([[[int(dot) for dot in row] for row in text.split()] for text in _GLYPHS])
    digits = torch.randint(10, (count,), generator=random)
    # Where each pixel of an image lies in its glyph, from -1 to 1.
    scale = 1.2 + 0.8 * torch.rand(count, 2, generator=random)
    moved = 0.5 * (torch.rand(count, 2, generator=random) - 0.5)
    places = torch.zeros(count, 2, 3)
    places[:, 0, 0], places[:, 1, 1], places[:, :, 2] = scale[:, 0] * 1.4, scale[:, 1], moved
    grid = functional.affine_grid(places, [count, 1, SIDE, SIDE], align_corners=False)
    images = functional.grid_sample(dots[digits][:, None].float(), grid, align_corners=False)
    return images + 0.25 * torch.randn(images.shape, generator=random), digits


@sky.function
def train(
    model: nn.Module, images: torch.Tensor, digits: torch.Tensor, epochs: int, talk: bool
) -> nn.Module:
    """Train the model on the worker, and return it with the weights that it has learned."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, images, digits = model.to(device), images.to(device), digits.to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for epoch in range(epochs):
        total, order = 0.0, torch.randperm(len(digits)).to(device)
        for first in range(0, len(digits), BATCH):
            batch = order[first : first + BATCH]
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(images[batch]), digits[batch])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            total += loss.item() * len(batch)
        if talk:
            print(f"epoch {epoch + 1}/{epochs}: loss {total / len(digits):.3f}")
    return model.cpu()


@torch.no_grad()
def accuracy(model: nn.Module, images: torch.Tensor, digits: torch.Tensor) -> float:
    """How many of the digits the model reads, in per cent."""
    model.eval()
    return 100.0 * float((model(images).argmax(1) == digits).float().mean())
