"""A GPT trained over a long link: its rate, its bytes a step, its first step, and its questions.

As in slow_link.py, the parent puts up the testbed's link and runs this file inside the client's
namespace, with one pool behind the delay and one on the loopback.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

import torch
from measure import Sample, interleave
from slow_link import Beyond, Ends
from torch import nn
from training import QUIET

import skyward as sky
from skyward.providers import Provider

WORDS, WIDTH, HEADS, LAYERS = 1024, 256, 4, 4
BATCH, LENGTH = 4, 128
READ_EVERY = 20
LENGTHS = 200


class Block(nn.Module):
    """A block of a GPT."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        wide = 4 * width
        self.mlp = nn.Sequential(nn.Linear(width, wide), nn.GELU(), nn.Linear(wide, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.project(self.norm1(x)).chunk(3, -1)
        heads = [part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts]
        seen = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A small language model, which returns its loss."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(512, width)
        self.blocks = nn.Sequential(*(Block(width, HEADS) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.words(words) + self.places(torch.arange(words.shape[1], device=words.device))
        scores = self.head(self.norm(self.blocks(x)))
        return nn.functional.cross_entropy(scores.flatten(0, 1), words.flatten())


def step_of(
    device: torch.device, width: int = WIDTH, layers: int = LAYERS
) -> Callable[[torch.Tensor], torch.Tensor]:
    """A training step with a fused optimizer."""
    torch.manual_seed(0)
    model = GPT(width, layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step(words: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(words)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def batch(device: torch.device, length: int = LENGTH) -> torch.Tensor:
    """The same words every time."""
    choose = torch.Generator().manual_seed(length)
    return torch.randint(0, WORDS, (BATCH, length), generator=choose).to(device)


def reading(step: Callable[[torch.Tensor], torch.Tensor], words: torch.Tensor) -> None:
    """As many steps as are made for one look at the loss."""
    for _ in range(READ_EVERY):
        loss = step(words)
    loss.item()


def first_step(provider: Provider) -> float:
    """Seconds of the first step of a new device, from its call to its loss."""
    with sky.Compute(provider, image=one_thread(), options=QUIET) as compute:
        device = compute.device("cpu")
        step, words = step_of(device), batch(device)
        torch.sky.synchronize(device)
        start = time.perf_counter()
        step(words).item()
        return time.perf_counter() - start


def one_thread() -> sky.Image:
    """On a machine of few cores the link's own process needs one, too."""
    return sky.Image(env={"OMP_NUM_THREADS": "1"})


def rates(far: Provider, rounds: int) -> Mapping[str, Sequence[float]]:
    """Seconds a step at both places, and bytes a step over the link."""
    places = {"far": far, "near": sky.Local(transport="tcp")}
    with ExitStack() as pools:
        contenders, devices = {}, {}
        for place, provider in places.items():
            compute = pools.enter_context(sky.Compute(provider, image=one_thread(), options=QUIET))
            device = devices[place] = compute.device("cpu")
            contenders[place] = _timed(step_of(device), batch(device))
        samples = interleave(contenders, rounds=rounds)
        sizes = []
        for _ in range(rounds):
            before = sky.device_stats(devices["far"]).bytes_on_wire
            contenders["far"]()
            sent = sky.device_stats(devices["far"]).bytes_on_wire - before
            sizes.append(sent / READ_EVERY)
    return {**{name: sample.values for name, sample in samples.items()}, "bytes": sizes}


def _timed(
    step: Callable[[torch.Tensor], torch.Tensor], words: torch.Tensor
) -> Callable[[], float]:
    def run() -> float:
        start = time.perf_counter()
        reading(step, words)
        return (time.perf_counter() - start) / READ_EVERY

    return run


def questions() -> float:
    """How often a loop with many lengths asks the worker."""
    with sky.Compute(options=QUIET) as compute:
        device = compute.device("cpu")
        step = step_of(device, 64, 2)
        for length in range(2, 2 + LENGTHS):
            loss = step(batch(device, length))
        loss.item()
        return float(sky.device_stats(device).asked)


def over(ends: Ends, rounds: int, *, first: bool) -> Mapping[str, Sample]:
    """The figures over a link: see `rates`; with `first` those of first steps instead."""
    command = ["ip", "netns", "exec", ends.near, sys.executable, __file__]
    details = [ends.far, ends.far_address, str(rounds), "first" if first else "rates"]
    with tempfile.TemporaryDirectory(prefix="skybench-") as cache:
        # Nothing is remembered from earlier runs, but the cores are where they were.
        done = subprocess.run(
            [*command, *details],
            stdout=subprocess.PIPE,
            env=os.environ | {"SKYWARD_SHAPES": cache},
            check=True,
        )
    return {name: Sample(tuple(values)) for name, values in json.loads(done.stdout).items()}


def main(far: str, far_address: str, rounds: int, what: str) -> None:
    """Measure, and print the figures."""
    provider = Beyond(far, far_address)
    if what == "first":
        figures: Mapping[str, Sequence[float]] = {
            "cold": [first_step(provider)],
            "warm": [first_step(provider) for _ in range(rounds)],
        }
    else:
        figures = rates(provider, rounds)
    print(json.dumps(figures))


if __name__ == "__main__":
    main(*sys.argv[1:3], int(sys.argv[3]), sys.argv[4])
