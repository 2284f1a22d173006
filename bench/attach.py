"""Attaching to a kept pool, against starting a pool anew, each with a first call."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass

from measure import interleave, timed
from report import Row, absolute, compared, run_suite

import kept
import skyward as sky

QUIET = sky.Options(console=False)


@dataclass(frozen=True)
class Scale:
    rounds: int


FULL = Scale(rounds=15)
QUICK = Scale(rounds=2)


@sky.function
def nothing() -> None:
    """Do nothing."""


def start() -> None:
    """Start a pool, make a call, and end the pool."""
    with sky.Compute(nodes=2, options=QUIET) as compute:
        nothing() @ compute


def attach() -> None:
    """Attach, make a call, and leave."""
    with sky.attach("bench") as compute:
        nothing() @ compute


def attaching(scale: Scale) -> list[Row]:
    """To attach, against starting a pool."""
    with tempfile.TemporaryDirectory(prefix="sky-") as state:
        os.environ["SKYWARD_STATE"] = state
        with sky.Compute(nodes=2, name="bench", keep=True, options=QUIET):
            pass
        try:
            samples = interleave(
                {"attach": lambda: timed(attach), "start": lambda: timed(start)},
                rounds=scale.rounds,
            )
        finally:
            sky.attach("bench").down(force=True)
    return [
        compared(
            "sky.attach to 2 nodes, a broadcast, and leave",
            samples["attach"],
            "the same with a new Compute",
            samples["start"],
            "<= 0.5x",
        ),
        absolute("sky.attach, a broadcast, and leave", samples["attach"], "<= 1 s", 1.0),
    ]


def kept_models(scale: Scale) -> list[Row]:
    """A model that was kept, against one in a file."""
    return kept.kept_models(kept.QUICK if scale is QUICK else kept.FULL)


if __name__ == "__main__":
    measurements = [attaching, kept_models]
    run_suite("what attaching to a kept pool costs", measurements, full=FULL, quick=QUICK)
