"""torch.compile through the sky device against torch.compile on the same device used locally.

python bench/compiled.py                   # a CPU worker
python bench/compiled.py --device cuda     # part of `bench/device.py --device cuda`
python bench/compiled.py --starts          # the first step of a new process, cold and warm
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from elsewhere import Elsewhere
from measure import Sample, interleave, say
from models import Loop
from report import Row, compared, save
from thin_link import GPT, WORDS
from torch import nn
from torch.nn import functional
from training import mlp

import skyward as sky

LENGTHS = 32


def gpt(device: torch.device, options: dict[str, Any], *, layers: int, width: int) -> Loop:
    """GPT-2 of some size in bfloat16 by autocast, a batch of 8 times 512."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=layers, n_embd=width, n_head=width // 64, use_cache=False)
    model = GPT2LMHeadModel(config).to(device)
    x = torch.randint(0, 50257, (8, 512)).to(device)
    compiled = torch.compile(model, **options) if options else model
    return _steps(model, device, lambda: compiled(input_ids=x, labels=x).loss, cast=torch.bfloat16)


def small(device: torch.device, options: dict[str, Any]) -> Loop:
    """The MLP 784-256-128-10 with a batch of 64."""
    model, x, y = mlp()
    model.to(device)
    x, y = x.to(device), y.to(device)
    compiled = torch.compile(model, **options) if options else model
    return _steps(model, device, lambda: functional.cross_entropy(compiled(x), y))


def changing(device: torch.device, options: dict[str, Any]) -> Loop:
    """A language model of 6 blocks of width 384 in bfloat16, a batch of 16, a length for each step.

    The lengths come again in the order in which they came first.
    """
    model = GPT(384, 6).to(device)
    compiled = torch.compile(model, **options) if options else model
    lengths = torch.randperm(192)[:LENGTHS] + 65
    batches = itertools.cycle(
        [torch.randint(0, WORDS, (16, int(length))).to(device) for length in lengths]
    )
    return _steps(model, device, lambda: compiled(next(batches)), cast=torch.bfloat16)


def _steps(
    model: nn.Module,
    device: torch.device,
    loss_of: Callable[[], torch.Tensor],
    *,
    cast: torch.dtype | None = None,
) -> Loop:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    while True:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, cast, enabled=cast is not None):
            loss = loss_of()
        loss.backward()
        optimizer.step()
        yield loss.detach()


class Trained(NamedTuple):
    """A model, how it is compiled, and what its rate is held against."""

    make: Callable[..., Loop]
    options: dict[str, Any]
    bar: str
    """Beside local torch.compile."""
    warm: int = 12
    """Steps before anything is measured: the compiler works in the first, CUDA graphs are recorded
    in the next few, and a model of changing lengths is to know all of them."""
    beside_eager: str = ""
    """Beside our own eager steps, if these are of interest."""


COMPILED = {
    "GPT-2 124M, bf16, compiled": Trained(
        functools.partial(gpt, layers=12, width=768), {}, ">= 0.97x"
    ),
    "GPT-2 6x384, bf16, compiled": Trained(
        functools.partial(gpt, layers=6, width=384), {}, ">= 1.3x"
    ),
    "GPT 6x384 of changing lengths, bf16, compiled": Trained(
        changing, {}, ">= 1.2x", warm=2 * LENGTHS, beside_eager=">= 1x"
    ),
    "MLP, compiled": Trained(small, {}, "", beside_eager=">= 1x"),
    "MLP, compiled with reduce-overhead": Trained(
        small, {"mode": "reduce-overhead"}, ">= 2.5x", beside_eager=">= 1x"
    ),
}


class Timed:
    """A compiled loop that has warmed up and measures its steps."""

    def __init__(self, name: str, device: torch.device, steps: int, backend: str) -> None:
        model = COMPILED[name]
        torch.compiler.reset()
        torch.manual_seed(0)
        options = {"backend": backend, **model.options} if backend else {}
        self._loop = model.make(device, options)
        self._steps = steps
        self.losses = [next(self._loop).item() for _ in range(model.warm)]

    def __call__(self) -> float:
        """Seconds a step."""
        start = time.perf_counter()
        for _ in range(self._steps):
            loss = next(self._loop)
        loss.item()
        return (time.perf_counter() - start) / self._steps


def _serve(pipe: Connection, kind: str) -> None:
    device = torch.device(kind)
    timed: dict[Any, Timed] = {}
    while (question := pipe.recv()) is not None:
        try:
            if question[0] == "forget":
                timed.clear()
                pipe.send(None)
                continue
            name, steps, backend, what = question
            if (name, backend) not in timed:
                timed[name, backend] = Timed(name, device, steps, backend)
            found = timed[name, backend]
            pipe.send(found.losses if what == "losses" else found())
        except Exception as problem:
            pipe.send(RuntimeError(f"{question[0]}: {problem!r}"))


def compiled(kind: str, steps: int, rounds: int, *, only: Sequence[str] = ("",)) -> Iterator[Row]:
    """Training steps a second of compiled models; the eager ones of the same run beside them."""
    with (
        sky.Compute(options=sky.Options(console=False)) as compute,
        Elsewhere(_serve, kind) as here,
    ):
        device = compute.device(kind)
        for name in (name for name in COMPILED if any(part in name for part in only)):
            say(f"  {name}")
            try:
                yield from _compare(name, device, kind, here, steps, rounds)
            except Exception as problem:
                say(f"  {name}: {problem!r}")
                yield Row(name, f"failed: {problem!r}"[:200], failed=True)


def _compare(
    name: str, device: torch.device, kind: str, here: Elsewhere, steps: int, rounds: int
) -> Iterator[Row]:
    ours = Timed(name, device, steps, "sky")
    seconds: dict[str, Callable[[], float]] = {
        "sky": ours,
        "local": functools.partial(here.ask, name, steps, "inductor", "time"),
        "eager": functools.partial(here.ask, name, steps, "", "time"),
    }
    model = COMPILED[name]
    if model.beside_eager:
        seconds["sky eager"] = Timed(name, device, steps, "")
    theirs = here.ask(name, steps, "inductor", "losses")
    apart = max(abs(a - b) for a, b in zip(ours.losses, theirs, strict=True))
    yield Row(f"{name}: losses of {model.warm} steps", f"at most {apart:.2g} apart from local ones")
    samples = interleave(seconds, rounds=rounds)
    rates = {key: sample.per(1, "tasks/s") for key, sample in samples.items()}
    what = f"{name}: steps a second"
    is_gpu = kind.startswith("cuda")
    bar = model.bar if is_gpu else ""
    yield compared(what, rates["sky"], "local torch.compile", rates["local"], bar)
    yield compared(what, rates["sky"], "local eager", rates["eager"])
    if model.beside_eager:
        bar = model.beside_eager if is_gpu else ""
        yield compared(what, rates["sky"], "our own eager steps", rates["sky eager"], bar)
    del seconds, ours
    here.ask("forget")


def starts(kind: str) -> Iterator[Row]:
    """The first step of a compiled model in a new process, with an empty cache and a full one."""
    what = "GPT 6x384, bf16, compiled: first step of a new process"
    say(f"  {what}")
    seconds: dict[str, list[Sample]] = {}
    for backend in ("sky", "inductor"):
        with tempfile.TemporaryDirectory() as cache:
            seconds[backend] = [_start(kind, backend, cache) for _ in range(2)]
    cold, warm = seconds["sky"]
    theirs_cold, theirs_warm = seconds["inductor"]
    yield compared(f"{what}, nothing kept", cold, "local torch.compile", theirs_cold)
    yield compared(f"{what}, kept by the worker", warm, "local torch.compile", theirs_warm)
    yield compared(f"{what}, kept by the worker", warm, "nothing kept", cold)


def _start(kind: str, backend: str, cache: str) -> Sample:
    command = [sys.executable, __file__, "--device", kind, "--start", backend]
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
    told = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return Sample((float(told.stdout.split()[-1]),))


def _begin(kind: str, backend: str) -> float:
    """Seconds until the first step of a model of one length is done; the device is open before."""
    with contextlib.ExitStack() as stack:
        device = torch.device(kind)
        if backend == "sky":
            compute = stack.enter_context(sky.Compute(options=sky.Options(console=False)))
            device = compute.device(kind)
        torch.ones(1, device=device).sum().item()
        start = time.perf_counter()
        next(changing(device, {"backend": backend})).item()
        return time.perf_counter() - start


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", action="append", help="models whose name contains this")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=Path, help="write the rows there as JSON, too")
    parser.add_argument("--starts", action="store_true", help="the first steps of new processes")
    parser.add_argument("--start", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.start:
        print(_begin(given.device, given.start))
        sys.exit()
    rows = []
    made = compiled(given.device, given.steps, given.rounds, only=given.only or [""])
    for row in starts(given.device) if given.starts else made:
        print(" | ".join(row.cells()), flush=True)
        rows.append(row)
        if given.rows:
            save(rows, given.rows)
