"""What the sky device costs against the same PyTorch run here: operations, training steps, bytes.

python bench/device.py                  # a CPU worker against local CPU eager
python bench/device.py --device cuda    # a GPU worker against the same GPU used locally
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from measure import Sample, interleave, p50, timed
from report import Row, absolute, compared, run_suite
from torch import nn

import skyward as sky

QUIET = sky.Options(console=False)
MIB = 2**20
KIND = sys.argv[sys.argv.index("--device") + 1] if "--device" in sys.argv else "cpu"


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    rounds: int
    steps: int
    operations: int
    payload: int


FULL = Size(rounds=9, steps=50, operations=3000, payload=256 * MIB)
QUICK = Size(rounds=3, steps=10, operations=500, payload=32 * MIB)


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


def local() -> torch.device:
    """The device a user would otherwise use here."""
    return torch.device("cuda", 0) if KIND.startswith("cuda") else torch.device("cpu")


MODELS = {"MLP": mlp, "4-block transformer": transformer}


class Local:
    """The same PyTorch without skyward, in a process of its own.

    PyTorch's autograd engine knows one accelerator a process: once there is a sky device, a local
    GPU's backward no longer finds its streams.
    """

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._near, far = context.Pipe()
        self._process = context.Process(target=_serve_local, args=(far, KIND), daemon=True)
        self._process.start()

    def ask(self, *question: Any) -> Callable[[], float]:
        """A contender that measures itself over there."""

        def measure() -> float:
            self._near.send(question)
            return float(self._near.recv())

        return measure

    def __enter__(self) -> Local:
        return self

    def __exit__(self, *_: object) -> None:
        self._near.send(None)
        self._process.join()


def _serve_local(pipe: Connection, kind: str) -> None:
    global KIND
    KIND = kind
    known: dict[Any, Callable[[], float]] = {}
    while (question := pipe.recv()) is not None:
        if question not in known:
            known[question] = _local_contender(*question)
        pipe.send(known[question]())


def _local_contender(what: str, *details: Any) -> Callable[[], float]:
    if what == "steps":
        name, steps, item, of_thread = details
        clock = time.thread_time if of_thread else time.perf_counter
        return stepper(MODELS[name], local(), steps, item=item, clock=clock)
    if what == "adding":
        return adding(local(), *details)
    (payload,) = details
    up, down = copying(local(), payload)
    return up if what == "up" else down


def adding(device: torch.device, operations: int) -> Callable[[], float]:
    """Seconds to issue one small operation."""
    x = torch.ones(4, 4, device=device)

    def run() -> float:
        start = time.perf_counter()
        y = x
        for _ in range(operations):
            y = y + 1
        return (time.perf_counter() - start) / operations

    return run


def copying(device: torch.device, payload: int) -> tuple[Callable[[], float], Callable[[], float]]:
    """Seconds for a copy to the device, and for one back."""
    host = torch.randn(payload // 4)
    landing = torch.empty_like(host)
    there = torch.empty_like(host, device=device)

    def up() -> None:
        there.copy_(host)
        there[:1].item()

    return lambda: timed(up), lambda: timed(lambda: landing.copy_(there))


def training(size: Size) -> Sequence[Row]:
    """Training steps, with and without reading the loss every time."""
    rows = []
    with sky.Compute(options=QUIET) as compute, Local() as here:
        remote = compute.device(KIND)
        for name, make in MODELS.items():
            for item in (False, True):
                samples = interleave(
                    {
                        "sky": stepper(make, remote, size.steps, item=item),
                        "local": here.ask("steps", name, size.steps, item, False),
                    },
                    rounds=size.rounds,
                )
                bar = "" if KIND == "cpu" else (">= 0.95x" if item else ">= 1.5x")
                ours, theirs = (samples[k].per(1, "tasks/s") for k in ("sky", "local"))
                reading = "loss.item() every step" if item else "no .item()"
                what = f"{name} training steps a second, {reading}"
                rows.append(compared(what, ours, f"local {KIND} eager", theirs, bar))
    return rows


def client_cost(size: Size) -> Sequence[Row]:
    """What the user's own thread spends."""
    if KIND != "cpu":
        return []
    with sky.Compute(options=QUIET) as compute, Local() as here:
        remote = compute.device(KIND)
        adds = interleave(
            {
                "sky": adding(remote, size.operations),
                "local": here.ask("adding", size.operations),
            },
            rounds=4 * size.rounds,
        )
        steps = interleave(
            {
                "sky": stepper(mlp, remote, size.steps, item=False, clock=time.thread_time),
                "local": here.ask("steps", "MLP", size.steps, False, True),
            },
            rounds=size.rounds,
        )
        before = sky.device_stats(remote)
        adding(remote, size.operations)()
        after = sky.device_stats(remote)
        per_op = (after.bytes_sent - before.bytes_sent) / (after.operations - before.operations)
        scalar = torch.ones(1, device=remote)
        waits = tuple(p50(scalar.item, 300) for _ in range(size.rounds))
    return [
        compared("issuing x + 1", adds["sky"], "local CPU eager", adds["local"], "<= 0.9x"),
        compared(
            "client thread's CPU time per MLP step",
            steps["sky"],
            "local CPU eager",
            steps["local"],
            "<= 1.0x",
        ),
        absolute("bytes per operation on the wire", Sample((per_op,), "B"), "<= 48 B", 48),
        absolute(".item(), p50", Sample(waits), "<= 40 us", 40e-6),
    ]


def bytes_each_way(size: Size) -> Sequence[Row]:
    """Large copies to and from the device."""
    with sky.Compute(options=QUIET) as compute, Local() as here:
        up, down = copying(compute.device(KIND), size.payload)
        samples = interleave(
            {
                "up": up,
                "down": down,
                "local up": here.ask("up", size.payload),
                "local down": here.ask("down", size.payload),
            },
            rounds=size.rounds,
        )
    rates = {name: sample.per(size.payload, "B/s") for name, sample in samples.items()}
    megabytes = f"{size.payload // MIB} MiB"
    down_bar, down_limit = ("3 GB/s", 3e9) if KIND == "cpu" else ("1 GB/s", 1e9)
    return [
        absolute(f"{megabytes} host to device", rates["up"], ">= 3 GB/s", 3e9),
        absolute(f"{megabytes} device to host", rates["down"], f">= {down_bar}", down_limit),
        absolute(f"{megabytes} host to device, local {KIND}", rates["local up"]),
        absolute(f"{megabytes} device to host, local {KIND}", rates["local down"]),
    ]


if __name__ == "__main__":
    if "--device" in sys.argv:
        at = sys.argv.index("--device")
        del sys.argv[at : at + 2]
    run_suite(
        "what the torch device costs",
        [client_cost, training, bytes_each_way],
        full=FULL,
        quick=QUICK,
    )
