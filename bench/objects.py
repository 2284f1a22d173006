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
MEDIA: dict[str, Callable[[], sky.Local]] = {
    "same host": sky.Local,
    "TCP and TLS": lambda: sky.Local(transport="tcp"),
}
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

    prepare_result.local(count)
    result: torch.Tensor = vars(torch)["_bench_results"][count]
    result[::1024] += 1
    return result


@sky.function
def prepare_result(count: int) -> None:
    """Make the tensor of `new_result`, and return nothing of it."""
    import torch

    results = vars(torch).setdefault("_bench_results", {})
    if count not in results:
        results[count] = torch.rand(count)
        results[count][::1024] = 1


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


def same_host_transfers(size: Size) -> Sequence[Row]:
    return transfers(size, "same host", "Unix socket", ">= 1.5x")


def tls_transfers(size: Size) -> Sequence[Row]:
    return transfers(size, "TCP and TLS", "ssl socket", ">= 0.8x")


def transfers(size: Size, medium: str, floor: str, bar: str) -> Sequence[Row]:
    """A new tensor to a worker and one back from it, next to plain sockets doing the same."""
    tensor = payload(size.payload)
    with ExitStack() as stack:
        link = stack.enter_context(RawLink(tls=floor == "ssl socket"))
        compute = stack.enter_context(sky.Compute(MEDIA[medium](), options=QUIET))
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


def first_transfers(size: Size) -> Sequence[Row]:
    """The first large tensors of a pool: no buffer on either side has been used before."""
    tensor = payload(size.payload)
    with RawLink(tls=False) as link:

        def to_a_new_pool() -> float:
            with sky.Compute(options=QUIET) as compute:
                # torch is imported on the worker; the tensor is still small.
                read_pages(torch.ones(4096)) >> compute
                return sending(tensor, compute)()

        def from_a_new_pool() -> float:
            with sky.Compute(options=QUIET) as compute:
                # The worker makes the tensor; it is changed before it is returned.
                prepare_result(tensor.numel()) >> compute
                return fetching(tensor.numel(), compute)()

        contenders = {"argument": to_a_new_pool, "result": from_a_new_pool}
        for kind in FLOORS:
            reused = kind == "reused"
            contenders[f"argument {kind}"] = raw_sending(tensor, link, reused=reused)
            contenders[f"result {kind}"] = raw_fetching(size.payload, link, reused=reused)
        samples = interleave(contenders, rounds=size.starts)
    speeds = {name: sample.per(size.payload, "B/s") for name, sample in samples.items()}
    return [
        compared(
            f"{size.payload // MIB} MiB {direction}, first of a pool",
            speeds[direction],
            f"Unix socket, {into}",
            speeds[f"{direction} {kind}"],
        )
        for direction in ("argument", "result")
        for kind, into in FLOORS.items()
    ]


def unchanged_tensor(size: Size) -> Sequence[Row]:
    """The same tensor again: only its hash is taken, and a change is never missed."""
    return [row for medium in MEDIA for row in sent_again(size, medium)]


def sent_again(size: Size, medium: str) -> Sequence[Row]:
    tensor = payload(size.payload)
    floats = tensor.numpy()
    label = f"{size.payload // MIB} MiB unchanged, again, {medium}"
    with sky.Compute(MEDIA[medium](), options=QUIET) as compute:
        assert read_pages(tensor) >> compute == touch(tensor)
        before = compute.stats().bytes_sent
        calls = 0

        def send_again() -> float:
            nonlocal calls
            calls += 1
            return timed(lambda: value_at(tensor, 0) >> compute)

        samples = interleave(
            {
                "again": send_again,
                "hash": lambda: timed(lambda: xxhash.xxh3_128_digest(floats)),
            },
            rounds=size.rounds,
        )
        per_call = (compute.stats().bytes_sent - before) / calls

        floats[12345] = 42.0
        seen = value_at(tensor, 12345) >> compute

        handle = sky.put(tensor)
        assert read_pages(handle) >> compute == touch(tensor)
        before = compute.stats().bytes_sent
        through_handle = [
            p50(lambda: value_at(handle, 0) >> compute, size.calls) for _ in range(size.rounds)
        ]
        per_handle_call = (compute.stats().bytes_sent - before) / (size.calls * size.rounds)
    return [
        compared(label, samples["again"], "xxh3_128 of it, one thread", samples["hash"], "<= 1.3x"),
        on_the_wire(f"on the wire for it, {medium}", per_call),
        claim(
            f"a write through a numpy view, {medium}",
            "seen" if seen == 42 else "MISSED",
            "seen",
            seen == 42,
        ),
        absolute(
            f"the same through sky.put, p50, {medium}",
            Sample(tuple(through_handle)),
            "< 2 ms",
            2e-3,
        ),
        on_the_wire(f"on the wire for a sky.put, {medium}", per_handle_call),
    ]


def on_the_wire(what: str, per_call: float) -> Row:
    """Bytes of a call that carries nothing: its request, and no more."""
    return absolute(what, Sample((per_call,), "B"), "< 1 KiB", 1024)


def memory_of_the_client(size: Size) -> Sequence[Row]:
    """The most a client holds beyond the tensor itself, shared memory included."""
    rows = []
    for medium, transport in (("same host", "auto"), ("TCP and TLS", "tcp")):
        for what, direction, times, bar in (
            ("one argument", "argument", 1, "<= 1.2x"),
            ("5 new arguments in turn", "argument", 5, "<= 1.2x"),
            ("5 results in turn", "result", 5, ""),
        ):
            peak = peak_memory(direction, transport, size.payload, times)
            rows.append(
                compared(
                    f"client memory: {what}, {medium}",
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
            first_transfers,
            unchanged_tensor,
            memory_of_the_client,
            model_round_trip,
        ],
        full=FULL,
        quick=QUICK,
    )
