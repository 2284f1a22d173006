"""A device over TLS, as between two machines, beside plain C++ programs over the same library.

python bench/links.py                  # CPU workers
python bench/links.py --device cuda    # GPU workers
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import parity
import psutil
import torch
from elsewhere import Elsewhere
from loading import loading
from measure import Sample, interleave, say, timed
from report import Row, absolute, compared, run_suite
from ssh import ssh_calls
from throttle import apart
from training import QUIET, mlp, stepper

import skyward as sky
from skyward.device.meeting import BACKLOGS
from skyward.device.peers import CARRIERS
from skyward.wire.handshake import CONNECTIONS, Authority
from skyward.wire.native import STRIPING_PROCESSORS

MIB = 2**20
KIND = sys.argv[sys.argv.index("--device") + 1] if "--device" in sys.argv else "cpu"
STREAMS = sum("bulk" in role for role in BACKLOGS)
"""Over how many links the bytes of a tensor go."""
SOURCE = Path(__file__).parent / "tls_floor.cpp"


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    rounds: int
    pings: int
    payload: int
    steps: int


FULL = Size(rounds=15, pings=2000, payload=256 * MIB, steps=100)
QUICK = Size(rounds=3, pings=500, payload=64 * MIB, steps=50)


def _openssl() -> str:
    """The library that Python's `ssl` has loaded, if it is one of its own; else the system's."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    return next((line.split()[-1] for line in lines if "/libssl" in line), "libssl.so.3")


class Floor:
    """Two plain programs that talk to each other."""

    def __init__(self, folder: Path, streams: int) -> None:
        program = folder / "tls_floor"
        if not program.exists():
            flags = ("-std=c++20", "-O2", str(SOURCE), "-o", str(program), "-ldl", "-pthread")
            subprocess.run([os.environ.get("CXX", "g++"), *flags], check=True)
        authority = Authority("floor")
        library = _openssl()
        ends = {"serve": authority.issue("node"), "ask": authority.issue("client")}
        words = {}
        for role, credentials in ends.items():
            parts = ("authority", "certificate", "key")
            paths = [folder / f"{role}-{part}.pem" for part in parts]
            for part, path in zip(parts, paths, strict=True):
                path.write_text(getattr(credentials, part))
            words[role] = [str(program), role, library, *map(str, paths)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._server = subprocess.Popen(words["serve"], text=True, **pipes)  # type: ignore[call-overload]
        port = self._server.stdout.readline().strip()
        self._client = subprocess.Popen(
            [*words["ask"], port, str(streams)],
            text=True,
            **pipes,  # type: ignore[call-overload]
        )

    def ask(self, what: str, amount: int) -> tuple[float, float]:
        """Seconds, and the asking program's processor seconds."""
        self._client.stdin.write(f"{what} {amount}\n")
        self._client.stdin.flush()
        taken, used = self._client.stdout.readline().split()
        return float(taken), float(used)

    def close(self) -> None:
        """End both programs."""
        for process in (self._client, self._server):
            process.stdin.close()
            process.wait()


@contextmanager
def plain(streams: int) -> Iterator[Floor]:
    """The floor for so many streams."""
    with tempfile.TemporaryDirectory(prefix="sky-floor-") as folder:
        floor = Floor(Path(folder), streams)
        try:
            yield floor
        finally:
            floor.close()


@contextmanager
def device_over_tls(nodes: int = 1) -> Iterator[list[torch.device]]:
    """Devices that the client reaches with TLS."""
    with (
        warnings.catch_warnings(),
        sky.Compute(sky.Local(transport="tcp"), nodes=nodes, options=QUIET) as compute,
    ):
        warnings.simplefilter("ignore")  # of a loop that waits for every value
        yield list(compute.devices(KIND))


def latency(size: Size) -> Sequence[Row]:
    """How long a value takes to come back."""
    with device_over_tls() as (device,), plain(1) as floor:
        first = torch.ones((), device=device)

        def value() -> float:
            return sorted(timed(first.item) for _ in range(size.pings))[size.pings // 2]

        samples = interleave(
            {"ours": value, "floor": lambda: floor.ask("ping", size.pings)[0]}, rounds=size.rounds
        )
    against = "a ping-pong of two C++ programs over TLS"
    return [compared("`.item()` over TLS", samples["ours"], against, samples["floor"], "<= 2x")]


def bulk(size: Size) -> Sequence[Row]:
    """Bytes to a device and back, and the client's processor time for them."""
    client = psutil.Process()
    used: dict[str, list[float]] = {"up": [], "send": []}

    def processor() -> float:
        times = client.cpu_times()
        return times.user + times.system

    with device_over_tls() as (device,), plain(STREAMS) as floor:
        host = torch.randn(size.payload // 4)
        there = host.to(device)

        def up() -> float:
            before = processor()
            taken = timed(lambda: (there.copy_(host), torch.sky.synchronize(device)))
            used["up"].append(processor() - before)
            return taken

        def send() -> float:
            taken, spent = floor.ask("send", size.payload)
            used["send"].append(spent)
            return taken

        samples = interleave(
            {
                "up": up,
                "down": lambda: timed(there.cpu),
                "send": send,
                "receive": lambda: floor.ask("receive", size.payload)[0],
            },
            rounds=size.rounds,
        )
    rates = {name: sample.per(size.payload, "B/s") for name, sample in samples.items()}
    against = f"{STREAMS} plain C++ streams over TLS"
    what = f"{size.payload // MIB} MiB"
    cpu = {name: Sample(tuple(values[1:])) for name, values in used.items()}
    return [
        compared(f"{what} to a device over TLS", rates["up"], against, rates["send"], ">= 0.9x"),
        compared(
            f"{what} from a device over TLS", rates["down"], against, rates["receive"], ">= 0.9x"
        ),
        compared(
            f"the client's processor time for {what} to a device",
            cpu["up"],
            against,
            cpu["send"],
            "<= 1.2x",
        ),
    ]


def between_nodes(size: Size) -> Sequence[Row]:
    """Bytes from one node's device to another's."""
    with apart(), device_over_tls(2) as (here, there), plain(CARRIERS) as floor:
        source = torch.randn(size.payload // 4, device=here)
        target = torch.zeros_like(source, device=there)

        def copy() -> float:
            return timed(lambda: (target.copy_(source), torch.sky.synchronize(there)))

        samples = interleave(
            {"copy": copy, "floor": lambda: floor.ask("send", size.payload)[0]}, rounds=size.rounds
        )
    ours, theirs = (samples[name].per(size.payload, "B/s") for name in ("copy", "floor"))
    what = f"{size.payload // MIB} MiB from node to node over TLS"
    against = f"{CARRIERS} plain C++ streams over TLS"
    return [compared(what, ours, against, theirs, ">= 0.9x"), absolute(what, ours)]


READ = {"pinned batches of 3 MiB": True, "BERT-base with dropout, bf16": False}
"""The loops that are timed on a GPU, and whether they read the loss of every step."""


def loops(size: Size) -> Sequence[Row]:
    """Training loops over TLS, over shared memory and on the local GPU."""
    if KIND != "cuda":
        return []
    rows = []
    with (
        device_over_tls() as (far,),
        sky.Compute(options=QUIET) as compute,
        Elsewhere(parity.serve) as here,
    ):
        near = compute.device(KIND)
        for name, item in READ.items():
            say(f"  {name}")
            seconds: dict[str, Callable[[], float]] = {
                "tls": parity.Timed(name, far, size.steps, item=item),
                "shared": parity.Timed(name, near, size.steps, item=item),
                "local": functools.partial(here.ask, "time", name, size.steps, item),
            }
            rows += _rates(name, interleave(seconds, rounds=size.rounds), item=item)
            here.ask("forget", name)
        far_step, near_step = (
            stepper(mlp, device, 10 * size.steps, item=False) for device in (far, near)
        )
        samples = interleave({"tls": far_step, "shared": near_step}, rounds=size.rounds)
        rows += _rates("MLP", samples, item=False)
    return rows


def _rates(name: str, samples: dict[str, Sample], *, item: bool) -> list[Row]:
    rates = {where: sample.per(1, "tasks/s") for where, sample in samples.items()}
    what = f"{name}: steps a second over TLS" + (", loss.item() every step" if item else "")
    rows = []
    if "local" in rates:
        rows.append(compared(what, rates["tls"], "local GPU", rates["local"], ">= 1.0x"))
    bar = "" if item else ">= 0.9x"
    rows.append(compared(what, rates["tls"], "over shared memory", rates["shared"], bar))
    return rows


def batches(size: Size) -> Sequence[Row]:
    """A training loop that sends a new batch of 3 MB with every step."""
    batch = torch.randn(3 * MIB // 4)

    def loop(device: torch.device) -> float:
        weight = torch.ones((), device=device)

        def steps() -> None:
            for _ in range(50):
                sent = batch.to(device, non_blocking=True)
                weight.add_(sent.sum() * 1e-9)
            weight.item()

        steps()
        return timed(steps) / 50

    with (
        device_over_tls() as (far,),
        sky.Compute(options=QUIET) as compute,
    ):
        near = compute.device(KIND)
        samples = interleave(
            {"tls": lambda: loop(far), "shared": lambda: loop(near)}, rounds=size.rounds
        )
    return [
        compared(
            "a step with a new batch of 3 MB, over TLS",
            samples["tls"],
            "over shared memory",
            samples["shared"],
        )
    ]


@sky.function
def _nothing(*values: object) -> None:
    """Take some arguments."""


def calls(size: Size) -> Sequence[Row]:
    """Calls over TLS: one of nothing, and one with a large argument."""
    processors = os.cpu_count() or 1
    streams = CONNECTIONS - 1 if processors > STRIPING_PROCESSORS else 1
    argument = torch.randn(size.payload // 4)
    with (
        sky.Compute(sky.Local(transport="tcp"), options=QUIET) as far,
        sky.Compute(options=QUIET) as near,
        plain(1) as one,
        plain(streams) as floor,
    ):

        def no_op(compute: sky.Compute) -> float:
            calls = sorted(timed(lambda: _nothing() >> compute) for _ in range(size.pings))
            return calls[size.pings // 2]

        def large() -> float:
            argument[0] += 1  # what a worker has got is not sent again
            return timed(lambda: _nothing(argument) >> far)

        small = interleave(
            {
                "tls": lambda: no_op(far),
                "unix": lambda: no_op(near),
                "ping": lambda: one.ask("ping", size.pings)[0],
            },
            rounds=size.rounds,
        )
        samples = interleave(
            {"ours": large, "floor": lambda: floor.ask("send", size.payload)[0]},
            rounds=size.rounds,
        )
    pairs = zip(small["unix"].values, small["ping"].values, strict=True)
    allowed = Sample(tuple(call + 1.5 * ping for call, ping in pairs))
    ours, theirs = (samples[name].per(size.payload, "B/s") for name in ("ours", "floor"))
    what = f"{size.payload // MIB} MiB as an argument over TLS"
    against = f"{streams} plain C++ stream{'s' * (streams > 1)} over TLS"
    return [
        compared(
            "a no-op call over TLS",
            small["tls"],
            "over a Unix socket, and 1.5 ping-pongs",
            allowed,
            "<= 1x",
        ),
        compared(what, ours, against, theirs, ">= 0.9x"),
    ]


def forwarded(size: Size) -> Sequence[Row]:
    """A call to a pod, through the API server."""
    from pods import forwarded_calls

    return forwarded_calls(size.rounds, size.pings // 10)


def calls_over_ssh(size: Size) -> Sequence[Row]:
    """A no-op call beside a byte through `ssh`."""
    return ssh_calls(size.rounds, size.pings)


if __name__ == "__main__":
    if "--device" in sys.argv:
        at = sys.argv.index("--device")
        del sys.argv[at : at + 2]
    measurements = [
        latency,
        calls,
        bulk,
        between_nodes,
        batches,
        loops,
        loading,
        forwarded,
        calls_over_ssh,
    ]
    run_suite("links", measurements, full=FULL, quick=QUICK)
