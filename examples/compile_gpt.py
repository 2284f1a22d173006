"""Train a small GPT that the worker compiles.

`torch.compile` works on a model on a sky device as it does on a local one. The graphs of the
forward and the backward pass are sent once; the worker compiles them for its own hardware, and
from then on each pass is one message. The first compilation takes a while; the worker keeps the
code, and the next program that compiles the same model starts with it.

Exits with an error if the compiled model does not learn to copy, or not as the plain one does.
"""

import math
import os
import sys
import time

import torch
from torch import nn
from torch.nn import functional

import skyward as sky

# Enough to show that it learns, for the tests: they run every example.
QUICK = bool(os.environ.get("SKYWARD_EXAMPLE_QUICK"))
STEPS = 40 if QUICK else 300
WORDS, LENGTH, WIDTH, HEADS, LAYERS, BATCH = 16, 16, 32, 2, 2, 32


class Block(nn.Module):
    """Causal attention and an MLP, each beside a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Predicts the next word at every position; its last layer is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        for embedding in (self.words, self.places):
            nn.init.normal_(embedding.weight, std=0.1)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        places = torch.arange(words.shape[1], device=words.device)
        x = self.norm(self.blocks(self.words(words) + self.places(places)))
        logits = functional.linear(x[:, :-1], self.words.weight)
        return functional.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())


def train(device: torch.device, *, compiled: bool) -> float:
    """Train on texts whose second half repeats the first; return the loss at the end."""
    torch.manual_seed(0)
    model = GPT().to(device)
    run = torch.compile(model, backend="sky") if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    start, half = time.perf_counter(), LENGTH // 2
    for step in range(STEPS):
        words = torch.randint(WORDS, (BATCH, half), device=device).repeat(1, 2)
        optimizer.zero_grad()
        loss = run(words)
        loss.backward()
        optimizer.step()
        if step == 0:
            print(f"  first step: loss={loss.item():.3f}, {time.perf_counter() - start:.1f} s")
            start = time.perf_counter()
    last = loss.item()
    rate = (STEPS - 1) / (time.perf_counter() - start)
    print(f"  step {STEPS}: loss={last:.3f}, {rate:.0f} steps a second")
    return last


def main() -> int:
    with sky.Compute() as compute:
        device = compute.device("auto")
        before = sky.device_stats(device).operations
        print("Operation by operation:")
        plain = train(device, compiled=False)
        middle = sky.device_stats(device).operations
        print("Compiled by the worker:")
        compiled = train(device, compiled=True)
        after = sky.device_stats(device).operations
        print(
            f"Operations a step: {(middle - before) / STEPS:.0f} plain, "
            f"{(after - middle) / STEPS:.0f} compiled"
        )
    # A model that has learned nothing has a loss of log(WORDS).
    learned = compiled < 0.9 * math.log(WORDS)
    return 0 if (learned or QUICK) and abs(plain - compiled) < 0.1 else 1


if __name__ == "__main__":
    sys.exit(main())
