"""What it costs to move objects: tensors there and back, again, and models."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
import xxhash
from client_memory import peak_memory
from floors import RawLink, change, touch
from measure import Sample, interleave, p50, timed
from report import Row, absolute, claim, compared, run_suite
from torch import nn

import skyward as sky

QUIET = sky.Options(console=False)
MIB = 2**20
FLOORS = {"new": "into a new buffer", "reused": "into one reused buffer"}


@sky.function
def read_pages(floats: torch.Tensor) -> float:
    """Read one value of every page, so that the pages really have to be there."""
    return float(floats[::1024].sum())


@sky.function
def value_at(floats: torch.Tensor, index: int) -> float:
    return float(floats[index])


@sky.function
def new_result(count: int) -> torch.Tensor:
    """A tensor made beforehand, changed on every page since the last time."""
    import torch

    results = vars(torch).setdefault("_bench_results", {})
    if count not in results:
        results[count] = torch.rand(count)
        results[count][::1024] = 1
    results[count][::1024] += 1
    result: torch.Tensor = results[count]
    return result


@sky.function
def give_back(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> nn.Module:
    """Use everything once, as a training function would, and return the model."""
    assert float(x.view(-1)[::1024].sum()) > 0
    assert int(y[::512].sum()) >= 0
    return model


class MNISTClassifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Linear(784, 256),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(256, 128),
            nn.ReLU(),
            nn.Dropout(0.2),
        )
        self.classifier = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.classifier(self.features(x))
        return output


@dataclass(frozen=True)
class Size:
    """How much to measure."""

    payload: int
    rounds: int
    calls: int
    starts: int
    samples: int


FULL = Size(payload=256 * MIB, rounds=11, calls=100, starts=5, samples=60_000)
QUICK = Size(payload=64 * MIB, rounds=3, calls=20, starts=2, samples=10_000)


def payload(size: int) -> torch.Tensor:
    """Random floats, except that the first of each page is a small whole number.

    Sums of those are exact in any order, so that both ends must agree to the last bit.
    """
    floats = torch.rand(size // 4)
    floats[::1024] = 1
    return floats


def sending(tensor: torch.Tensor, compute: sky.Compute) -> Callable[[], float]:
    """Times a call with the tensor as argument, new on every page."""

    def send() -> float:
        change(tensor)
        start = time.perf_counter()
        seen = read_pages(tensor) >> compute
        taken = time.perf_counter() - start
        assert seen == touch(tensor)
        return taken

    return send


def fetching(count: int, compute: sky.Compute) -> Callable[[], float]:
    """Times a call with such a tensor as its result."""
    last = 0.0

    def fetch() -> float:
        nonlocal last
        start = time.perf_counter()
        result = new_result(count) >> compute
        seen = touch(result)
        taken = time.perf_counter() - start
        assert seen > last
        last = seen
        return taken

    return fetch


def raw_sending(tensor: torch.Tensor, link: RawLink, *, reused: bool) -> Callable[[], float]:
    floats = tensor.numpy()

    def send() -> float:
        change(floats)
        start = time.perf_counter()
        seen, _ = link.exchange([floats], reused=reused)
        taken = time.perf_counter() - start
        assert seen == touch(floats)
        return taken

    return send


def raw_fetching(size: int, link: RawLink, *, reused: bool) -> Callable[[], float]:
    return lambda: timed(lambda: link.exchange([], size, reused=reused))


def transfers(
    size: Size, provider: sky.Local, *, tls: bool, medium: str, floor: str, bar: str
) -> Sequence[Row]:
    """A new tensor to a worker and one back from it, next to plain sockets doing the same."""
    tensor = payload(size.payload)
    with RawLink(tls=tls) as link, sky.Compute(provider, options=QUIET) as compute:
        contenders = {
            "argument": sending(tensor, compute),
            "result": fetching(tensor.numel(), compute),
        }
        for kind in FLOORS:
            reused = kind == "reused"
            contenders[f"argument {kind}"] = raw_sending(tensor, link, reused=reused)
            contenders[f"result {kind}"] = raw_fetching(size.payload, link, reused=reused)
        samples = interleave(contenders, rounds=size.rounds, warmups=2)
    speeds = {name: sample.per(size.payload, "B/s") for name, sample in samples.items()}
    return [
        compared(
            f"{size.payload // MIB} MiB {direction}, {medium}",
            speeds[direction],
            f"{floor}, {into}",
            speeds[f"{direction} {kind}"],
            bar,
        )
        for direction in ("argument", "result")
        for kind, into in FLOORS.items()
    ]


def same_host_transfers(size: Size) -> Sequence[Row]:
    return transfers(
        size,
        sky.Local(),
        tls=False,
        medium="same host",
        floor="Unix socket",
        bar=">= 1.5x",
    )


def tls_transfers(size: Size) -> Sequence[Row]:
    return transfers(
        size,
        sky.Local(transport="tcp"),
        tls=True,
        medium="TCP and TLS",
        floor="ssl socket",
        bar=">= 0.8x",
    )


def first_send(size: Size) -> Sequence[Row]:
    """The first large tensor of a pool: no buffer on either side has been used before."""
    tensor = payload(size.payload)
    with RawLink(tls=False) as link:

        def send_to_a_new_pool() -> float:
            with sky.Compute(options=QUIET) as compute:
                # torch is imported on the worker; the tensor is still small.
                read_pages(torch.ones(4096)) >> compute
                return sending(tensor, compute)()

        samples = interleave(
            {"first": send_to_a_new_pool, "raw": raw_sending(tensor, link, reused=False)},
            rounds=size.starts,
        )
    speeds = {name: sample.per(size.payload, "B/s") for name, sample in samples.items()}
    return [
        compared(
            f"{size.payload // MIB} MiB argument, first of a pool",
            speeds["first"],
            f"Unix socket, {FLOORS['new']}",
            speeds["raw"],
        )
    ]


def unchanged_tensor(size: Size) -> Sequence[Row]:
    """The same tensor again: only its hash is taken, and a change is never missed."""
    tensor = payload(size.payload)
    floats = tensor.numpy()
    label = f"{size.payload // MIB} MiB unchanged, again"
    with sky.Compute(options=QUIET) as compute:
        assert read_pages(tensor) >> compute == touch(tensor)
        before = bytes_sent(compute)
        calls = 0

        def send_again() -> float:
            nonlocal calls
            calls += 1
            return timed(lambda: read_pages(tensor) >> compute)

        samples = interleave(
            {
                "again": send_again,
                "hash": lambda: timed(lambda: xxhash.xxh3_128_digest(floats)),
            },
            rounds=size.rounds,
        )
        per_call = (bytes_sent(compute) - before) / calls

        floats[12345] = 42.0
        seen = value_at(tensor, 12345) >> compute

        handle = sky.put(tensor)
        assert read_pages(handle) >> compute == touch(tensor)
        before = bytes_sent(compute)
        through_handle = [
            p50(lambda: read_pages(handle) >> compute, size.calls) for _ in range(size.rounds)
        ]
        per_handle_call = (bytes_sent(compute) - before) / (size.calls * size.rounds)
    return [
        compared(label, samples["again"], "xxh3_128 of it, one thread", samples["hash"], "<= 1.3x"),
        absolute(f"{label}: sent per call", Sample((per_call,), "B"), "< 16 KiB", 16384),
        claim(
            "a write through a numpy view", "seen" if seen == 42 else "MISSED", "seen", seen == 42
        ),
        absolute("the same through sky.put, p50", Sample(tuple(through_handle)), "< 2 ms", 2e-3),
        absolute("sky.put: sent per call", Sample((per_handle_call,), "B"), "< 16 KiB", 16384),
    ]


def bytes_sent(compute: sky.Compute) -> int:
    return compute.stats().bytes_sent


def memory_of_the_client(size: Size) -> Sequence[Row]:
    """The most a client holds beyond the tensor itself, shared memory included."""
    rows = []
    for transport, medium in (("auto", "same host"), ("tcp", "TCP and TLS")):
        for direction, bar in (("argument", "<= 1.2x"), ("result", "")):
            peak = peak_memory(direction, transport, size.payload)
            rows.append(
                compared(
                    f"client memory for an {direction}, {medium}"
                    if direction == "argument"
                    else f"client memory for a {direction}, {medium}",
                    Sample((float(peak),), "B"),
                    "the payload",
                    Sample((float(size.payload),), "B"),
                    bar,
                )
            )
    return rows


def model_round_trip(size: Size) -> Sequence[Row]:
    """A model and its training data go to a worker, the model comes back."""
    model = MNISTClassifier()
    x = payload(size.samples * 784 * 4).view(size.samples, 784)
    y = torch.randint(0, 10, (size.samples,))
    parameters = [parameter.detach() for parameter in model.parameters()]
    outgoing = [tensor.numpy() for tensor in (x, y, *parameters)]
    returned = sum(parameter.nbytes for parameter in parameters)

    def renew() -> None:
        change(x.view(-1))
        y.add_(1).remainder_(10)
        for parameter in parameters:
            parameter.add_(1e-3)

    with ExitStack() as stack:
        link = stack.enter_context(RawLink(tls=False))
        compute = stack.enter_context(sky.Compute(options=QUIET))

        def through_skyward() -> float:
            renew()
            start = time.perf_counter()
            trained = give_back(model, x, y) >> compute
            taken = time.perf_counter() - start
            assert torch.equal(trained.classifier.weight, model.classifier.weight)
            return taken

        def raw(*, reused: bool) -> float:
            renew()
            return timed(lambda: link.exchange(outgoing, returned, reused=reused))

        samples = interleave(
            {
                "skyward": through_skyward,
                "new": lambda: raw(reused=False),
                "reused": lambda: raw(reused=True),
            },
            rounds=size.rounds,
            warmups=2,
        )
    return [
        compared(
            f"model round trip with {size.samples:,} x 784 floats",
            samples["skyward"],
            f"Unix socket, {into}",
            samples[kind],
            "<= 1.3x",
        )
        for kind, into in FLOORS.items()
    ]


if __name__ == "__main__":
    run_suite(
        "what moving objects costs",
        [
            same_host_transfers,
            tls_transfers,
            first_send,
            unchanged_tensor,
            memory_of_the_client,
            model_round_trip,
        ],
        full=FULL,
        quick=QUICK,
    )
