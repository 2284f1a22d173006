"""Fit a line to data spread over the nodes, each working on its own part.

Every node receives the same arguments and takes its share with `sky.shard`. Several arguments stay
aligned, `x[i]` with `y[i]`, also when shuffled: the permutation is the same on every node. The
parts are disjoint and together they are everything, so their sums add up to the sums of the whole.
"""

import random
from typing import NamedTuple

import skyward as sky


class Sums(NamedTuple):
    """What least squares needs to know about a set of points."""

    n: int
    x: float
    y: float
    xx: float
    xy: float


@sky.function
def partial_sums(xs: list[float], ys: list[float]) -> Sums:
    x, y = sky.shard(xs, ys, shuffle=True, seed=42)
    print(f"{len(x)} of {len(xs)} points")
    return Sums(
        n=len(x),
        x=sum(x),
        y=sum(y),
        xx=sum(a * a for a in x),
        xy=sum(a * b for a, b in zip(x, y, strict=True)),
    )


def fit(parts: list[Sums]) -> tuple[float, float]:
    """Slope and intercept from the sums of all parts."""
    n, x, y, xx, xy = (sum(column) for column in zip(*parts, strict=True))
    slope = (n * xy - x * y) / (n * xx - x * x)
    return slope, (y - slope * x) / n


def main() -> None:
    rng = random.Random(0)
    xs = [rng.uniform(-1, 1) for _ in range(10_000)]
    ys = [3 * x + 0.5 + rng.gauss(0, 0.1) for x in xs]

    with sky.Compute(nodes=3) as compute:
        parts = partial_sums(xs, ys) @ compute

    slope, intercept = fit(parts)
    print(f"points per node: {[part.n for part in parts]}")
    print(f"fitted y = {slope:.2f} x + {intercept:.2f} (drawn from y = 3 x + 0.5)")


if __name__ == "__main__":
    main()
