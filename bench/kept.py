"""Attaching to a kept model, until its first result, against loading the model from disk.

python bench/kept.py                              # a model of 1 GiB on a CPU worker
python bench/kept.py --device cuda --mib 10240    # a model of 10 GiB on this machine's GPU

The file has just been written, so the kernel has it in memory: a cold disk would only be slower.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from measure import Sample, interleave, say, timed
from report import Row, absolute, claim, compared, figure, save, text_table

import skyward as sky

QUIET = sky.Options(console=False)
WIDTH = 4096
LAYER_MIB = WIDTH * WIDTH * 4 >> 20
"""A layer without bias has 64 MiB of float32."""
SLACK = 64 << 20
"""How much of a device's memory its library may take for itself meanwhile."""


@dataclass(frozen=True)
class Scale:
    rounds: int
    mib: int = 1024
    device: str = "cpu"


FULL = Scale(rounds=7)
QUICK = Scale(rounds=1, mib=LAYER_MIB)


def model_of(mib: int, device: torch.device | str) -> torch.nn.Sequential:
    """Linear layers of so many MiB, without contents."""
    with torch.device("meta"):
        layers = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(mib // LAYER_MIB)]
        model = torch.nn.Sequential(*layers)
    return model.to_empty(device=device)


def filled(mib: int, device: torch.device | str) -> torch.nn.Sequential:
    """The same with contents, made on the device."""
    model = model_of(mib, device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1 / WIDTH)
    return model


def result(model: torch.nn.Module, device: torch.device | str) -> float:
    """The first result: a row of ones stays one through every layer."""
    with torch.no_grad():
        return float(model(torch.ones(1, WIDTH, device=device)).mean().item())


def check(found: float) -> None:
    """Stop if the model is not the one that was kept or saved."""
    if abs(found - 1) > 0.01:
        raise RuntimeError(f"the model's result is {found}, and not 1")


@contextmanager
def pool_with_a_kept_model(scale: Scale) -> Iterator[float]:
    """A kept pool, with the model on its device; yields the seconds that `keep` took."""
    with tempfile.TemporaryDirectory(prefix="sky-") as state:
        os.environ["SKYWARD_STATE"] = state
        with sky.Compute(name="kept-bench", keep=600, options=QUIET) as compute:
            device = compute.device(scale.device)
            model = filled(scale.mib, device)
            check(result(model, device))
            seconds = timed(functools.partial(compute.keep, "model", model))
            del model
        try:
            yield seconds
        finally:
            sky.attach("kept-bench").down(force=True)


def attach(scale: Scale, used: Callable[[], None] = lambda: None) -> None:
    """Attach, take the model, and compute a first result; `used` is called with the model there."""
    with sky.attach("kept-bench") as compute:
        model = compute.kept("model")
        check(result(model, next(model.parameters()).device))
        used()


def load_plainly(scale: Scale, path: Path) -> None:
    """Load the state dict from the file in plain PyTorch, and compute a first result."""
    model = model_of(scale.mib, scale.device)
    model.load_state_dict(torch.load(path, map_location=scale.device, weights_only=True))
    check(result(model, scale.device))


def load_on_a_pool(scale: Scale, path: Path) -> None:
    """The same on the device of a new pool."""
    with sky.Compute(options=QUIET) as compute:
        device = compute.device(scale.device)
        model = model_of(scale.mib, device)
        model.load_state_dict(torch.load(path, mmap=True, weights_only=True))
        check(result(model, device))


def memory_used(kind: str) -> int:
    """The bytes of the GPU that are in use, by whomever; 0 where there is none."""
    if kind == "cpu":
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def memory_rows(scale: Scale, waiting: int, attached: int) -> list[Row]:
    """Whether the GPU had the model once, waiting and in use."""
    if scale.device == "cpu":
        return []
    grown = attached - waiting
    limit = scale.mib // 2 << 20
    return [
        claim(
            f"memory of the GPU while a kept model of {scale.mib} MiB waits, and when it is used",
            f"{figure(waiting, 'B')}, {figure(attached, 'B')}",
            "no second copy",
            grown < limit + SLACK,
        )
    ]


def kept_models(scale: Scale) -> list[Row]:
    """A kept model, against one in a file."""
    with tempfile.TemporaryDirectory(prefix="sky-") as folder:
        path = Path(folder, "model.pt")
        torch.save(filled(scale.mib, "cpu").state_dict(), path)
        with pool_with_a_kept_model(scale) as keeping:
            seen: list[int] = []
            waiting = memory_used(scale.device)
            attach(scale, lambda: seen.append(memory_used(scale.device)))
            samples = interleave(
                {
                    "attach": lambda: timed(lambda: attach(scale)),
                    "plain": lambda: timed(lambda: load_plainly(scale, path)),
                    "pool": lambda: timed(lambda: load_on_a_pool(scale, path)),
                },
                rounds=scale.rounds,
            )
    what = f"attach to a kept model of {scale.mib} MiB ({scale.device}), until its first result"
    return [
        compared(
            what,
            samples["attach"],
            "plain PyTorch: torch.load of its state dict, load_state_dict, a result",
            samples["plain"],
        ),
        compared(what, samples["attach"], "the same on a new Compute's device", samples["pool"]),
        absolute(what, samples["attach"], "<= 1 s", 1.0),
        absolute(f"compute.keep of a model of {scale.mib} MiB", Sample((keeping,)), "<= 1 s", 1.0),
        *memory_rows(scale, waiting, seen[0]),
    ]


def main() -> None:
    """Measure for the device and size that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", help="cpu, or cuda")
    parser.add_argument("--mib", type=int, default=1024, help="the size of the model")
    parser.add_argument("--rounds", type=int, default=FULL.rounds)
    parser.add_argument("--rows", type=Path, help="write the rows there as JSON, too")
    given = parser.parse_args()
    if given.mib < LAYER_MIB:
        sys.exit(f"--mib {given.mib}: give {LAYER_MIB} or more, since a layer has so many")
    say(f"a model of {given.mib} MiB on {given.device}")
    rows = kept_models(Scale(given.rounds, given.mib, given.device))
    if given.rows:
        save(rows, given.rows)
    print(text_table(rows))


if __name__ == "__main__":
    main()
