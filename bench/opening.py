"""A device of a pool that is there, until its first result, against a new Python with PyTorch.

python bench/opening.py                  # on a CPU worker
python bench/opening.py --device cuda    # on this machine's GPU
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from measure import interleave, say, timed
from report import Row, compared, save, text_table

import skyward as sky

QUIET = sky.Options(console=False)


@dataclass(frozen=True)
class Scale:
    rounds: int
    device: str = "cpu"


FULL = Scale(rounds=9)
QUICK = Scale(rounds=1)


def locally(device: str) -> float:
    """The seconds until a new Python has a first result."""
    program = f"import torch; torch.ones(3, device={device!r}).sum().item()"
    return timed(lambda: subprocess.run([sys.executable, "-c", program], check=True))


def opened(device: str) -> float:
    """The seconds until a new device has a first result; its pool is ready before."""
    with sky.Compute(options=QUIET) as compute:
        return timed(lambda: torch.ones(3, device=compute.device(device)).sum().item())


def opening(scale: Scale) -> list[Row]:
    """Rows for one kind of device."""
    samples = interleave(
        {"ours": lambda: opened(scale.device), "local": lambda: locally(scale.device)},
        rounds=scale.rounds,
    )
    return [
        compared(
            f"a device is opened ({scale.device}), until its first result",
            samples["ours"],
            "plain PyTorch: a new Python until its first result there",
            samples["local"],
            "<= 1x",
        )
    ]


def main() -> None:
    """Measure for the device that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", help="cpu, or cuda")
    parser.add_argument("--rounds", type=int, default=FULL.rounds)
    parser.add_argument("--rows", type=Path, help="write the rows there as JSON, too")
    given = parser.parse_args()
    say(f"opening {given.device}")
    rows = opening(Scale(given.rounds, given.device))
    if given.rows:
        save(rows, given.rows)
    print(text_table(rows))


if __name__ == "__main__":
    main()
