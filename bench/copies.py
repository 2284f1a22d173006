"""Copies between the devices of several nodes: from node to node, against the way through here.

python bench/copies.py                  # CPU workers
python bench/copies.py --device cuda    # GPU workers: two processes that share this machine's GPU
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from floors import RawLink
from measure import Sample, interleave, timed
from report import Row, absolute, compared, run_suite
from throttle import apart, throttled
from training import QUIET

import skyward as sky
from skyward.device.peers import CARRIERS

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


def pool(transport: Literal["unix", "tcp"], nodes: int) -> sky.Compute:
    """Nodes on this machine, which the client reaches through shared memory or with TLS."""
    local = sky.Local(transport=transport)
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


def on_one_host(size: Size) -> Sequence[Row]:
    """Two nodes on one machine, and a client there, or one that is reached over a network."""
    rows = []
    for transport, client, bar in (("unix", "here", ""), ("tcp", "over TCP and TLS", ">= 5x")):
        with pool(transport, 2) as compute:
            samples, parameters = between_two(compute, size)
        copied = f"{size.payload // MIB} MiB from node to node, shared memory"
        if transport == "unix":
            rate = samples["copy"].per(size.payload, "B/s")
            rows.append(absolute(copied, rate, ">= 8 GB/s", 8e9))
        rows.append(followed(samples, parameters, f"shared memory, client {client}", bar))
    return rows


def over_tcp(size: Size) -> Sequence[Row]:
    """Two nodes that reach each other as over a network."""
    with apart(), pool("tcp", 2) as compute, plain_tls(size.payload) as floor:
        samples, parameters = between_two(compute, size, {"floor": floor})
    what = f"{size.payload // MIB} MiB from node to node, TCP and TLS"
    ours, theirs = (samples[name].per(size.payload, "B/s") for name in ("copy", "floor"))
    return [
        absolute(what, ours, ">= 3 GB/s", 3e9),
        compared(what, ours, f"{CARRIERS} plain TLS sockets, a process each", theirs),
        followed(samples, parameters, "TCP and TLS, client so, too", ""),
    ]


@contextmanager
def plain_tls(payload: int) -> Iterator[Callable[[], float]]:
    """Measures the same bytes over as many connections as a copy uses, sent the plain way."""
    with ExitStack() as stack:
        links = [stack.enter_context(RawLink(tls=True)) for _ in range(CARRIERS)]
        threads = stack.enter_context(ThreadPoolExecutor(CARRIERS))
        share = torch.randn(payload // CARRIERS // 4).numpy()
        yield lambda: timed(
            lambda: list(threads.map(lambda link: link.exchange([share], reused=True), links))
        )


def between_two(
    compute: sky.Compute, size: Size, others: Mapping[str, Callable[[], float]] | None = None
) -> tuple[Mapping[str, Sample], int]:
    """Seconds to copy a tensor, and to have weights follow, directly and through the client.

    What `others` measure comes in the same rounds.
    """
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
            **(others or {}),
        },
        rounds=size.rounds,
    )
    return samples, sum(p.numel() for p, _ in pairs)


def followed(samples: Mapping[str, Sample], parameters: int, where: str, bar: str) -> Row:
    """How fast weights follow from worker to worker, against the way through the client."""
    ours, theirs = (samples[name].per(4 * parameters, "B/s") for name in ("follow", "through"))
    what = f"weights of {parameters // 1_000_000} M parameters to another worker, {where}"
    return compared(what, ours, "through the client, .cpu()", theirs, bar)


def to_four_nodes(size: Size) -> Sequence[Row]:
    """The same tensor to four nodes, each of which sends at a limited rate."""
    with throttled(size.rate), pool("tcp", 5) as compute:
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
        [on_one_host, over_tcp, to_four_nodes],
        full=FULL,
        quick=QUICK,
    )
