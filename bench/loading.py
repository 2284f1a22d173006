"""Training on data that is read where the device is, beside the same loop with a local DataLoader.

python bench/loading.py                  # CPU workers
python bench/loading.py --device cuda    # GPU workers
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from elsewhere import Elsewhere
from measure import interleave
from models import Loop, _small_pictures
from report import Row, compared, run_suite
from throttle import Throttle
from training import QUIET

import skyward as sky
from skyward.nodes import host

KIND = sys.argv[sys.argv.index("--device") + 1] if "--device" in sys.argv else "cpu"
THIN = 100e6 / 8
"""100 Mbit/s, in bytes."""
WORKERS = max(1, min(8, (os.cpu_count() or 1) // 2))
BATCH = 64


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    rounds: int
    steps: int


FULL = Size(rounds=15, steps=100)
QUICK = Size(rounds=3, steps=30)


class Pictures(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """Pictures of 48 KiB, each at random the other way round; an epoch is long."""

    def __init__(self) -> None:
        self.pixels = torch.randn(1024, 3, 64, 64)

    def __len__(self) -> int:
        return 200_000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        picture = self.pixels[index % len(self.pixels)]
        return (picture.flip(-1) if torch.rand(()) < 0.5 else picture), index % 10


OPTIONS: dict[str, Any] = {"batch_size": BATCH, "shuffle": True, "num_workers": WORKERS}


def local(device: torch.device) -> Loop:
    """The loop with a DataLoader of this process, whose batches are pinned for a GPU."""
    loader = torch.utils.data.DataLoader(
        Pictures(), pin_memory=device.type == "cuda", persistent_workers=True, **OPTIONS
    )
    return _small_pictures(device, itertools.chain.from_iterable(itertools.repeat(loader)))


def there(device: torch.device) -> Loop:
    """The loop with a loader on the device's node."""
    loader = sky.loader(Pictures, device=device, persistent_workers=True, **OPTIONS)
    return _small_pictures(device, itertools.chain.from_iterable(itertools.repeat(loader)))


class Timed:
    """A loop that has warmed up and measures its steps, each with its loss."""

    def __init__(self, loop: Loop, steps: int) -> None:
        self._loop, self._steps = loop, steps
        for _ in range(3):
            next(loop).item()

    def __call__(self) -> float:
        """Seconds a step."""
        start = time.perf_counter()
        for _ in range(self._steps):
            next(self._loop).item()
        return (time.perf_counter() - start) / self._steps


def serve(pipe: Connection, kind: str) -> None:
    """Time the loop without any sky device, for `Elsewhere`."""
    timed: Callable[[], float] | None = None
    while (question := pipe.recv()) is not None:
        try:
            timed = timed or Timed(local(torch.device(kind)), question[0])
            pipe.send(timed())
        except Exception as problem:
            pipe.send(RuntimeError(repr(problem)))


@contextlib.contextmanager
def narrowed(rate: float) -> Iterator[None]:
    """What is connected meanwhile is reached through a link of so many bytes a second each way."""
    throttle, plain = Throttle(rate), host.Approach
    ends: dict[str, str] = {}

    def redirected(endpoint: str, *rest: Any, **options: Any) -> Any:
        if endpoint.startswith("tcp:"):
            if endpoint not in ends:
                ends[endpoint] = throttle.between("client", "node", endpoint)
            endpoint = ends[endpoint]
        return plain(endpoint, *rest, **options)

    host.Approach = redirected  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        host.Approach = plain  # type: ignore[misc]
        throttle.close()


def loading(size: Any, kind: str = KIND) -> Sequence[Row]:
    """The loop over TLS, at 100 Mbit/s, over shared memory, and with a local DataLoader.

    `size` says how many rounds and steps are measured.
    """

    def far() -> sky.Compute:
        return sky.Compute(sky.Local(transport="tcp"), options=QUIET)

    contenders: dict[str, Callable[[], float]] = {}

    def contend(name: str, pool: sky.Compute) -> torch.device:
        device = pool.device(kind)
        contenders[name] = Timed(there(device), size.steps)
        return device

    with contextlib.ExitStack() as stack:
        tls = stack.enter_context(far())
        device = contend("tls", tls)
        contend("shared", stack.enter_context(sky.Compute(options=QUIET)))
        here = stack.enter_context(Elsewhere(serve, kind, daemon=False))
        contenders["local"] = functools.partial(here.ask, size.steps)
        with narrowed(THIN):
            contend("thin", stack.enter_context(far()))
            samples = interleave(contenders, rounds=size.rounds)
        moved = _bytes_of_a_step(tls, device, size.steps)
    rates = {name: sample.per(1, "tasks/s") for name, sample in samples.items()}
    what = (
        f"sky.loader, batches of 3 MiB, {WORKERS} workers, loss.item() every step: steps a second"
    )
    against = f"local {'GPU' if kind == 'cuda' else 'CPU'} with a local DataLoader"
    bar = ">= 1.3x" if kind == "cuda" else ""
    return [
        compared(f"{what}, over TLS", rates["tls"], against, rates["local"], bar),
        compared(f"{what}, over 100 Mbit/s", rates["thin"], against, rates["local"], bar),
        compared(f"{what}, over TLS", rates["tls"], "over shared memory", rates["shared"]),
        Row("sky.loader: bytes between client and node for a batch", f"{moved:.0f} B"),
    ]


def _bytes_of_a_step(compute: sky.Compute, device: torch.device, steps: int) -> float:
    """What a batch takes of the link, both ways, with the operations that copy it."""
    with sky.loader(Pictures, device=device, **OPTIONS) as loader:
        batches = iter(loader)
        for _ in range(20):
            next(batches)
        calls = compute._open_fleet.dispatcher.traffic
        before = sum(calls()), sky.device_stats(device).bytes_coded
        for _ in range(steps):
            next(batches)
        after = sum(calls()), sky.device_stats(device).bytes_coded
        batches.close()
    return (sum(after) - sum(before)) / steps


if __name__ == "__main__":
    if "--device" in sys.argv:
        at = sys.argv.index("--device")
        del sys.argv[at : at + 2]
    run_suite("loading", [loading], full=FULL, quick=QUICK)
