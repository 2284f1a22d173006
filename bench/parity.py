"""Ordinary models through the sky device and on the same GPU: the same losses, and how fast.

python bench/parity.py              # needs a GPU here; part of `bench/device.py --device cuda`
python bench/parity.py --only LSTM --only GRU --rows rows.json
"""

from __future__ import annotations

import argparse
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from elsewhere import Elsewhere
from measure import interleave, p50, say
from models import LOOPS, Loop
from report import Row, absolute, compared, save

import skyward as sky

STEPS_COMPARED = 20
READ_EVERY_STEP = ("pinned batches of 3 MiB", "DataLoader, pinned batches of 3 MiB", "LSTM")
BARS = {
    "ViT-base, bf16": ">= 1.5x",
    "BERT-base with dropout, bf16": ">= 1.5x",
    "Llama with LoRA, bf16": ">= 1.5x",
    "GPT-2 generation": ">= 1.5x",
}


def begin(name: str, device: torch.device) -> Loop:
    """A loop from its first step, the same wherever it runs."""
    torch.manual_seed(0)
    return LOOPS[name](device)


def losses(name: str, device: torch.device) -> list[float]:
    """The losses of the first steps, read at the end."""
    loop = begin(name, device)
    return [loss.item() for loss in [next(loop) for _ in range(STEPS_COMPARED)]]


class Timed:
    """A loop that has warmed up and measures its steps."""

    def __init__(self, name: str, device: torch.device, steps: int, *, item: bool) -> None:
        self._loop, self._steps, self._item = begin(name, device), steps, item
        for _ in range(3):
            next(self._loop).item()

    def __call__(self) -> float:
        """Seconds a step."""
        start = time.perf_counter()
        for _ in range(self._steps):
            loss = next(self._loop)
            if self._item:
                loss.item()
        loss.item()
        return (time.perf_counter() - start) / self._steps


def serve(pipe: Connection) -> None:
    """Time loops on the local GPU, for `Elsewhere`."""
    device = torch.device("cuda", 0)
    timed: dict[Any, Callable[[], float]] = {}
    while (question := pipe.recv()) is not None:
        what, name, *details = question
        try:
            if what == "losses":
                pipe.send(losses(name, device))
            elif what == "forget":
                timed.clear()
                torch.cuda.empty_cache()
                pipe.send(None)
            elif what in ("chain", "reading"):
                if question not in timed:
                    timed[question] = {"chain": chain, "reading": reading}[what](device, *details)
                pipe.send(timed[question]())
            else:
                key = (name, *details)
                if key not in timed:
                    timed[key] = Timed(name, device, details[0], item=details[1])
                pipe.send(timed[key]())
        except Exception as problem:
            pipe.send(RuntimeError(f"{name}: {problem!r}"))


def parity(steps: int, rounds: int, *, only: Sequence[str] = ("",)) -> Iterator[Row]:
    """A row for the losses and one or two for the speed of each model, as they come."""
    with sky.Compute(options=sky.Options(console=False)) as compute, Elsewhere(serve) as here:
        device = compute.device("cuda")
        for name in (name for name in LOOPS if any(part in name for part in only)):
            say(f"  {name}")
            try:
                yield from _compare(name, device, here, steps, rounds)
            except Exception as problem:
                say(f"  {name}: {problem!r}")
                yield Row(name, f"failed: {problem!r}"[:200], failed=True)


def _compare(
    name: str, device: torch.device, here: Elsewhere, steps: int, rounds: int
) -> Sequence[Row]:
    first, second = (here.ask("losses", name) for _ in range(2))
    ours = losses(name, device)
    rows = [_equality(name, ours, first, second)]
    for item in (False, True) if name in READ_EVERY_STEP else (False,):
        seconds: dict[str, Callable[[], float]] = {
            "sky": Timed(name, device, steps, item=item),
            "local": functools.partial(here.ask, "time", name, steps, item),
        }
        samples = interleave(seconds, rounds=rounds)
        sky_rate, rate = (samples[k].per(1, "tasks/s") for k in ("sky", "local"))
        what = f"{name}: steps a second" + (", loss.item() every step" if item else "")
        rows.append(compared(what, sky_rate, "local GPU", rate, BARS.get(name, ">= 1.0x")))
        del seconds
    here.ask("forget", name)
    torch.sky.empty_cache()
    return rows


def _equality(name: str, ours: list[float], first: list[float], second: list[float]) -> Row:
    what = f"{name}: losses of {STEPS_COMPARED} steps"
    if first != second:
        step = next(i for i, (a, b) in enumerate(zip(first, second, strict=True)) if a != b)
        apart = max(abs(a - b) for a, b in zip(ours, first, strict=True))
        local = max(abs(a - b) for a, b in zip(first, second, strict=True))
        said = f"two local runs differ from step {step} on, by {local:.2g}; ours by {apart:.2g}"
        return Row(what, said)
    same = ours == first
    if same:
        return Row(what, "the same bits as on the local GPU", bar="bit-equal", met=True)
    step = next(i for i, (a, b) in enumerate(zip(ours, first, strict=True)) if a != b)
    said = f"differ from step {step} on: {ours[step]!r}, local {first[step]!r}"
    return Row(what, said, bar="bit-equal", met=False)


def chain(device: torch.device, operations: int) -> Callable[[], float]:
    """Seconds an operation in a chain of small ones, from the first until all are done."""
    x = torch.ones(64, 64, device=device)

    def run() -> float:
        start = time.perf_counter()
        y = x
        for _ in range(operations):
            y = y + 1
        y[0, 0].item()
        return (time.perf_counter() - start) / operations

    return run


def reading(device: torch.device, reads: int) -> Callable[[], float]:
    """The median seconds of one `.item()` of a value that is there."""
    x = torch.ones(1, device=device)

    def run() -> float:
        x.item()
        return p50(x.item, reads)

    return run


def small(rounds: int) -> Sequence[Row]:
    """A chain of small operations, and reading one value."""
    quiet = sky.Options(console=False)
    with (
        sky.Compute(options=quiet) as compute,
        sky.Compute(sky.Local(transport="tcp"), options=quiet) as over_tls,
        Elsewhere(serve) as here,
    ):
        device, far = compute.device("cuda"), over_tls.device("cuda")
        chains = interleave(
            {
                "sky": chain(device, 5000),
                "local": functools.partial(here.ask, "chain", "", 5000),
            },
            rounds=3 * rounds,
        )
        reads = interleave(
            {
                "sky": reading(device, 300),
                "TLS": reading(far, 300),
                "local": functools.partial(here.ask, "reading", "", 300),
            },
            rounds=rounds,
        )
    return [
        compared("x + 1 in a chain", chains["sky"], "local GPU", chains["local"], "<= 1.0x"),
        absolute(".item(), p50", reads["sky"], "<= 40 us", 40e-6),
        absolute(".item(), p50, TLS on loopback", reads["TLS"], "<= 100 us", 100e-6),
        absolute(".item(), p50, local GPU", reads["local"]),
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", help="models whose name contains this")
    parser.add_argument("--rows", type=Path, help="write the rows there as JSON, too")
    options = parser.parse_args()
    rows = []
    for row in itertools.chain(
        () if options.only else small(5), parity(20, 5, only=options.only or [""])
    ):
        print(" | ".join(row.cells()), flush=True)
        rows.append(row)
        if options.rows:
            save(rows, options.rows)
