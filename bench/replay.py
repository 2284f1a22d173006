"""Training steps replayed, beside the same steps as they are, and a whole step as a CUDA graph.

On a GPU also the steps as they are, but for the graphs that the worker makes of them by itself.

python bench/replay.py                  # on the processor: this machine is client and worker
python bench/replay.py --device cuda    # beside the local GPU
python bench/replay.py --link           # the MLP over a round trip of 100 ms, here
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from elsewhere import Elsewhere
from measure import Sample, interleave, say
from models import Tagger
from report import Row, compared, save
from slow_link import far_and_near, slow_link, taken_behind, tell
from thin_link import GPT, WORDS
from torch import nn
from torch.nn import functional
from training import QUIET, mlp

import skyward as sky

STEPS_COMPARED = 30
WARM = 6
PATIENCE = 12.0
"""Seconds within which the worker has made up its mind about a loop."""
UNCAPTURED = sky.Image(env={"SKYWARD_CAPTURE": "0"})
ROUND_TRIP = 0.1
STEPS_OVER_A_LINK = 4000
"""At the end of so many one loss is read, and one round trip waited for."""
Step = Callable[..., torch.Tensor]
Made = tuple[Step, list[tuple[torch.Tensor, ...]]]
"""A training step, and batches for it."""


class UNet(nn.Module):
    """A small network that removes noise from pictures, with a time for each."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(1, 4 * width), nn.SiLU(), nn.Linear(4 * width, width))
        self.begin = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(_block(width * 2**n, width * 2 ** (n + 1)) for n in range(2))
        self.middle = _block(4 * width, 4 * width)
        self.up = nn.ModuleList(_block(width * 2 ** (n + 2), width * 2**n) for n in (1, 0))
        self.end = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x: torch.Tensor, when: torch.Tensor) -> torch.Tensor:
        x = self.begin(x) + self.time(when)[:, :, None, None]
        kept = []
        for block in self.down:
            x = block(x)
            kept.append(x)
            x = functional.avg_pool2d(x, 2)
        x = self.middle(x)
        for block, other in zip(self.up, reversed(kept), strict=True):
            x = functional.interpolate(x, scale_factor=2.0)
            x = block(torch.cat([x[:, : other.shape[1]], other], 1))
        return self.end(x)


def _block(before: int, after: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(before, after, 3, padding=1),
        nn.GroupNorm(8, after),
        nn.SiLU(),
        nn.Conv2d(after, after, 3, padding=1),
        nn.GroupNorm(8, after),
        nn.SiLU(),
    )


def training(
    model: nn.Module,
    loss_of: Callable[..., torch.Tensor],
    device: torch.device,
    *,
    whole: bool,
    cast: bool = False,
) -> Step:
    """Zero, forward, backward, Adam. A `whole` step keeps its count on the GPU."""
    optimizer = torch.optim.Adam(model.parameters(), 1e-4, foreach=True, capturable=whole)

    def step(*batch: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=cast):
            loss = loss_of(*batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def small(device: torch.device, *, whole: bool) -> Made:
    """The MLP 784-256-128-10 with a batch of 64."""
    model = mlp()[0].to(device)
    batches = [(torch.randn(64, 784), torch.randint(0, 10, (64,))) for _ in range(4)]

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(model(x), y)

    return training(model, loss_of, device, whole=whole), _on(device, batches)


def recurrent(device: torch.device, *, whole: bool, width: int = 256) -> Made:
    """Two layers of an LSTM, which names each position."""
    model = Tagger(nn.LSTM, width).to(device)
    batches = [(torch.randint(0, 5000, (64, 64)), torch.randint(0, 50, (64, 64))) for _ in range(4)]

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(model(x).flatten(0, 1), y.flatten())

    return training(model, loss_of, device, whole=whole), _on(device, batches)


def language(device: torch.device, *, whole: bool) -> Made:
    """A language model of 6 blocks of width 384, a batch of 16 times 128 words, bfloat16."""
    model = GPT(384, 6).to(device)
    batches = [(torch.randint(0, WORDS, (16, 128)),) for _ in range(4)]
    return training(model, model, device, whole=whole, cast=True), _on(device, batches)


def diffusion(device: torch.device, *, whole: bool) -> Made:
    """A UNet, and a second one whose weights follow its own."""
    model, follower = UNet().to(device), UNet().to(device)
    ours, theirs = list(model.parameters()), list(follower.parameters())
    batches = [(torch.randn(16, 3, 32, 32), torch.rand(16, 1)) for _ in range(4)]

    def loss_of(x: torch.Tensor, when: torch.Tensor) -> torch.Tensor:
        noise = torch.randn_like(x)
        return functional.mse_loss(model(x + noise * when[:, :, None, None], when), noise)

    train = training(model, loss_of, device, whole=whole)

    def step(*batch: torch.Tensor) -> torch.Tensor:
        loss = train(*batch)
        with torch.no_grad():
            torch._foreach_lerp_(theirs, ours, 0.001)
        return loss

    return step, _on(device, batches)


def _on(
    device: torch.device, batches: list[tuple[torch.Tensor, ...]]
) -> list[tuple[torch.Tensor, ...]]:
    return [tuple(each.to(device) for each in batch) for batch in batches]


MODELS = {
    "MLP": (small, 1000),
    "LSTM 2x256": (recurrent, 100),
    "LSTM 2x512": (functools.partial(recurrent, width=512), 100),
    "GPT-2 6x384, bf16": (language, 60),
    "UNet with EMA": (diffusion, 60),
}
"""And how many steps are timed at once on a GPU."""


def losses(make: Callable[..., Made], device: torch.device, *, replayed: bool) -> list[float]:
    """The losses of the first steps, read at the end."""
    torch.manual_seed(0)
    step, batches = make(device, whole=False)
    if replayed:
        step = sky.replay(step)
    kept = [step(*batch) for batch in itertools.islice(itertools.cycle(batches), STEPS_COMPARED)]
    return [loss.item() for loss in kept]


class Timed:
    """Steps after some to warm up, by a clock."""

    def __init__(
        self,
        make: Callable[..., Made],
        device: torch.device,
        steps: int,
        how: str,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        torch.manual_seed(0)
        self._steps, self._clock = steps, clock
        step, batches = make(device, whole=how == "graph")
        self._step = {"eager": lambda: step, "replay": lambda: sky.replay(step)}.get(
            how, lambda: captured(step, batches[0])
        )()
        self._batches = itertools.cycle(batches)
        for _ in range(WARM):
            loss = self._step(*next(self._batches))
        loss.item()

    def __call__(self) -> float:
        """Seconds a step, everything done."""
        start = self._clock()
        for _ in range(self._steps):
            loss = self._step(*next(self._batches))
        if self._clock is time.perf_counter:
            loss.item()
        taken = (self._clock() - start) / self._steps
        loss.item()
        return taken


def captured(step: Step, batch: tuple[torch.Tensor, ...]) -> Step:
    """A whole step as a CUDA graph of the local GPU, given its batches by copies."""
    given = tuple(each.clone() for each in batch)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(*given)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step(*given)

    def run(*batch: torch.Tensor) -> torch.Tensor:
        for to, each in zip(given, batch, strict=True):
            to.copy_(each)
        graph.replay()
        return loss.clone()

    return run


def serve(pipe: Connection, kind: str) -> None:
    """Time steps on the local device, for `Elsewhere`."""
    device = torch.device(kind)
    timed: dict[Any, Timed] = {}
    while (question := pipe.recv()) is not None:
        name, steps, how = question
        try:
            if question not in timed:
                timed[question] = Timed(MODELS[name][0], device, steps, how)
            pipe.send(timed[question]())
        except Exception as problem:
            pipe.send(RuntimeError(f"{name}: {problem!r}"))


def settled(
    make: Callable[..., Made], device: torch.device, steps: int, patience: float
) -> tuple[Timed, float]:
    """A loop about which the worker has made up its mind, and the memory that it has taken."""
    gc.collect()
    with torch.sky.device(device):
        torch.sky.empty_cache()
    torch.sky.reset_peak_memory_stats(device)
    timed, end = Timed(make, device, steps, "eager"), time.monotonic() + patience
    timed()
    known = sky.device_stats(device).captured
    while time.monotonic() < end and sky.device_stats(device).captured == known:
        timed()
    return timed, torch.sky.max_memory_reserved(device)


def rows(kind: str, rounds: int, only: list[str]) -> Iterator[Row]:
    """Each model: its losses, and its steps a second."""
    with (
        sky.Compute(image=UNCAPTURED, options=QUIET) as compute,
        sky.Compute(options=QUIET) as capturing,
        Elsewhere(serve, kind) as here,
    ):
        device = compute.device(kind)
        other = capturing.device(kind) if kind == "cuda" else None
        for name, (make, many) in MODELS.items():
            if not any(part in name for part in only):
                continue
            say(f"  {name}")
            steps = many if kind == "cuda" else max(3, many // 40)
            try:
                yield from _compare(name, make, device, here, steps, rounds, kind)
                if other is not None:
                    yield from _captured(name, make, device, other, steps, rounds)
            except Exception as problem:
                yield Row(name, f"failed: {problem!r}"[:300], failed=True)


def _compare(
    name: str,
    make: Callable[..., Made],
    device: torch.device,
    here: Elsewhere,
    steps: int,
    rounds: int,
    kind: str,
) -> Iterator[Row]:
    same = losses(make, device, replayed=False) == losses(make, device, replayed=True)
    said = "the same bits as eager" if same else "not the bits of eager"
    yield Row(f"{name}: losses of {STEPS_COMPARED} steps", said, bar="bit-equal", met=same)
    contenders: dict[str, Callable[[], float]] = {
        "replay": Timed(make, device, steps, "replay"),
        "eager": Timed(make, device, steps, "eager"),
        "local": functools.partial(here.ask, name, steps, "eager"),
    }
    if kind == "cuda":
        contenders["graph"] = functools.partial(here.ask, name, steps, "graph")
    taken = {
        each: sample.per(1, "tasks/s")
        for each, sample in interleave(contenders, rounds=rounds).items()
    }
    what = f"{name}: steps a second"
    if kind == "cuda":
        yield compared(what, taken["replay"], "local CUDA graph", taken["graph"], ">= 0.85x")
    bar = ">= 1.0x" if kind == "cpu" else ""
    yield compared(what, taken["replay"], "ours, eager", taken["eager"], bar)
    yield compared(what, taken["replay"], "local, eager", taken["local"])
    cost = {
        each: Timed(make, device, steps, each, time.thread_time) for each in ("replay", "eager")
    }
    spent = interleave(cost, rounds=rounds)
    what = f"{name}: client's processor time a step"
    yield compared(what, spent["replay"], "ours, eager", spent["eager"], "<= 0.2x")


def _captured(
    name: str,
    make: Callable[..., Made],
    device: torch.device,
    other: torch.device,
    steps: int,
    rounds: int,
) -> Iterator[Row]:
    """The loop as it is, on a device whose worker makes graphs of it, and on one that does not."""
    as_it_is, memory = settled(make, device, steps, patience=0)
    by_itself, more = settled(make, other, steps, PATIENCE)
    say(f"    {sky.device_stats(other).captured}")
    taken = interleave({"captured": by_itself, "eager": as_it_is}, rounds=rounds)
    rate = {each: sample.per(1, "tasks/s") for each, sample in taken.items()}
    bar = ">= 1.0x"
    what = f"{name}, captured without being asked"
    yield compared(f"{what}: steps a second", rate["captured"], "ours, eager", rate["eager"], bar)
    sizes = [Sample((float(size),), "B") for size in (more, memory)]
    yield compared(f"{what}: memory", sizes[0], "ours, eager", sizes[1], "<= 1.2x")


def over_a_link(rounds: int) -> Iterator[Row]:
    """The MLP behind a delay, and beside."""
    with slow_link(ROUND_TRIP) as ends:
        details = ["--behind", ends.far, ends.far_address, "--rounds", str(rounds)]
        taken = taken_behind(ends, __file__, *details)
    rate = {name: sample.per(1, "tasks/s") for name, sample in taken.items()}
    what = f"MLP over {ROUND_TRIP * 1e3:.0f} ms: steps a second"
    yield compared(
        what, rate["far replay"], "replayed without delay", rate["near replay"], ">= 0.95x"
    )
    yield compared(what, rate["far replay"], "ours, eager, over it", rate["far eager"])


def behind(namespace: str, address: str, rounds: int) -> None:
    """Measure seconds a step, over the link and not, and print the samples."""
    with far_and_near(namespace, address) as pools:
        contenders = {
            f"{place} {how}": Timed(small, pools[place].device("cpu"), STEPS_OVER_A_LINK, how)
            for place, how in (("far", "replay"), ("near", "replay"), ("far", "eager"))
        }
        tell(interleave(contenders, rounds=rounds))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", action="append", help="models whose name contains this")
    parser.add_argument("--quick", action="store_true", help="one model, one round")
    parser.add_argument("--link", action="store_true", help="over a round trip of 100 ms")
    parser.add_argument("--behind", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=Path, help="write the rows there as JSON, too")
    options = parser.parse_args()
    if options.behind:
        behind(*options.behind, options.rounds)
        sys.exit()
    if options.quick:
        options.rounds, options.only = 1, ["MLP"]
    found = []
    for row in (
        over_a_link(options.rounds)
        if options.link
        else rows(options.device, options.rounds, options.only or [""])
    ):
        print(" | ".join(row.cells()), flush=True)
        found.append(row)
        if options.rows:
            save(found, options.rows)
