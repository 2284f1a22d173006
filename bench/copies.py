"""Copies between the devices of several nodes: from node to node, against the way through here.

python bench/copies.py                  # CPU workers
python bench/copies.py --device cuda    # GPU workers: two processes that share this machine's GPU
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from measure import Sample, interleave, timed
from report import Row, absolute, compared, run_suite
from throttle import throttled
from training import QUIET

import skyward as sky

MIB = 2**20
KIND = sys.argv[sys.argv.index("--device") + 1] if "--device" in sys.argv else "cpu"


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    rounds: int
    payload: int
    layers: int
    """Of the model whose weights follow; 12 make 100 million parameters."""
    relayed: int
    rate: float
    """At which a node sends, where copies are relayed."""


FULL = Size(rounds=9, payload=256 * MIB, layers=12, relayed=64 * MIB, rate=32e6)
QUICK = Size(rounds=3, payload=64 * MIB, layers=2, relayed=16 * MIB, rate=16e6)


def pool(transport: str, nodes: int) -> sky.Compute:
    """Nodes on this machine, reached through shared memory or as over a network."""
    local = sky.Local(transport="tcp" if transport == "TCP and TLS" else "unix")
    return sky.Compute(
        local, nodes=nodes, image=sky.Image(env={"OMP_NUM_THREADS": "1"}), options=QUIET
    )


def weights(layers: int, device: torch.device) -> list[torch.Tensor]:
    """Those of a GPT-2: 7.1 million parameters a layer, and 15 million for its vocabulary."""
    shapes = [(768,), (768,), (2304, 768), (2304,), (768, 768), (768,)]
    shapes += [(768,), (768,), (3072, 768), (3072,), (768, 3072), (768,)]
    return [torch.randn(shape, device=device) for shape in [(20_000, 768), *shapes * layers]]


def until_there(work: Callable[[], object], *devices: torch.device) -> float:
    """Seconds until the devices have what was copied to them."""

    def run() -> None:
        work()
        for device in devices:
            torch.sky.synchronize(device)

    return timed(run)


def over_shared_memory(size: Size) -> Sequence[Row]:
    """Between two nodes on this machine."""
    return between_two("shared memory", size, ">= 8 GB/s", 8e9)


def over_tcp(size: Size) -> Sequence[Row]:
    """The same as over a network."""
    return between_two("TCP and TLS", size, ">= 3 GB/s", 3e9)


def between_two(transport: str, size: Size, bar: str, limit: float) -> Sequence[Row]:
    """One large tensor, and the weights of a model."""
    with pool(transport, 2) as compute:
        here, there = compute.devices(KIND)
        source = torch.randn(size.payload // 4, device=here)
        target = torch.zeros_like(source, device=there)
        pairs = list(zip(weights(size.layers, here), weights(size.layers, there), strict=True))

        def follow() -> None:
            for p, q in pairs:
                q.copy_(p)

        def follow_through_here() -> None:
            for p, q in pairs:
                q.copy_(p.cpu())

        samples = interleave(
            {
                "copy": lambda: until_there(lambda: target.copy_(source), there),
                "follow": lambda: until_there(follow, there),
                "through": lambda: until_there(follow_through_here, there),
            },
            rounds=size.rounds,
        )
        parameters = sum(p.numel() for p, _ in pairs)
    return [
        absolute(
            f"{size.payload // MIB} MiB from node to node, {transport}",
            samples["copy"].per(size.payload, "B/s"),
            bar,
            limit,
        ),
        compared(
            f"weights of {parameters // 1_000_000} M parameters to another worker, {transport}",
            samples["follow"].per(4 * parameters, "B/s"),
            "through the client, .cpu()",
            samples["through"].per(4 * parameters, "B/s"),
            ">= 5x",
        ),
    ]


def to_four_nodes(size: Size) -> Sequence[Row]:
    """The same tensor to four nodes, each of which sends at a limited rate."""
    with throttled(size.rate), pool("TCP and TLS", 5) as compute:
        here, *others = compute.devices("cpu")
        source = torch.randn(size.relayed // 4, device=here)
        targets = [torch.zeros_like(source, device=device) for device in others]
        for device in others:  # makes the links: to each, and along the chain
            torch.ones(MIB, device=here).to(device)

        def run(count: int) -> float:
            source.add_(1)
            torch.sky.synchronize(here)
            chosen = targets[:count]
            return until_there(lambda: [t.copy_(source) for t in chosen], *others[:count])

        samples = interleave(
            {"four": lambda: run(4), "one": lambda: run(1)}, rounds=min(size.rounds, 5)
        )
    ratio = Sample(
        tuple(a / b for a, b in zip(samples["four"].values, samples["one"].values, strict=True)),
        "x",
    )
    what = f"{size.relayed // MIB} MiB to 4 nodes, {size.rate / 1e6:.0f} MB/s each, against to one"
    return [absolute(what, ratio, "<= 1.3x", 1.3)]


if __name__ == "__main__":
    if "--device" in sys.argv:
        at = sys.argv.index("--device")
        del sys.argv[at : at + 2]
    run_suite(
        "copies between devices",
        [over_shared_memory, over_tcp, to_four_nodes],
        full=FULL,
        quick=QUICK,
    )
