"""What the sky device costs against the same PyTorch run here: operations, training steps, bytes.

python bench/device.py                  # a CPU worker against local CPU eager
python bench/device.py --device cuda    # a GPU worker against the same GPU used locally
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import mmap
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import opening
import psutil
import thin_link
import torch
from compiled import compiled
from elsewhere import Elsewhere
from measure import Sample, interleave, p50, say, timed
from parity import parity, small
from report import Row, absolute, compared, run_suite
from slow_link import ROUND_TRIP, NoLinkError, slow_link, steps_over
from training import QUIET, mlp, stepper, transformer

import skyward as sky
from skyward.device import toolchain

MIB = 2**20
KIND = sys.argv[sys.argv.index("--device") + 1] if "--device" in sys.argv else "cpu"


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    rounds: int
    steps: int
    operations: int
    payload: int
    streak: int
    """Steps in a row over a slow link: long enough that the one wait at the end hardly counts."""


FULL = Size(rounds=9, steps=50, operations=3000, payload=256 * MIB, streak=600)
QUICK = Size(rounds=3, steps=10, operations=500, payload=32 * MIB, streak=300)


def local() -> torch.device:
    """The device a user would otherwise use here."""
    return torch.device("cuda", 0) if KIND.startswith("cuda") else torch.device("cpu")


MODELS = {"MLP": mlp, "4-block transformer": transformer}


class Local(Elsewhere):
    """The device that a user would otherwise use here."""

    def __init__(self) -> None:
        super().__init__(_serve_local, KIND)

    def contender(self, *question: Any) -> Callable[[], float]:
        """A contender that measures itself over there."""
        return functools.partial(self.ask, *question)


def _serve_local(pipe: Connection, kind: str) -> None:
    global KIND
    KIND = kind
    known: dict[Any, Callable[[], float]] = {}
    while (question := pipe.recv()) is not None:
        if question not in known:
            known[question] = _local_contender(*question)
        pipe.send(known[question]())


def _local_contender(what: str, *details: Any) -> Callable[[], float]:
    if what == "steps":
        name, steps, item, of_thread = details
        clock = time.thread_time if of_thread else time.perf_counter
        return stepper(MODELS[name], local(), steps, item=item, clock=clock)
    if what == "adding":
        return adding(local(), *details)
    if what == "direct":
        return direct(*details)
    (payload,) = details
    up, down = copying(local(), payload)
    return up if what == "up" else down


def adding(device: torch.device, operations: int) -> Callable[[], float]:
    """Seconds to issue one small operation."""
    x = torch.ones(4, 4, device=device)

    def run() -> float:
        start = time.perf_counter()
        y = x
        for _ in range(operations):
            y = y + 1
        return (time.perf_counter() - start) / operations

    return run


def copying(device: torch.device, payload: int) -> tuple[Callable[[], float], Callable[[], float]]:
    """Seconds for a copy to the device, and for one back."""
    host = torch.randn(payload // 4)
    landing = torch.empty_like(host)
    there = torch.empty_like(host, device=device)

    def up() -> None:
        there.copy_(host)
        there[:1].item()

    return lambda: timed(up), lambda: timed(lambda: landing.copy_(there))


def copying_to_new(device: torch.device, payload: int, *, used: bool) -> Callable[[], float]:
    """Seconds for a copy that makes a new tensor, in memory that was used before or never."""
    host = torch.randn(payload // 4)

    def up() -> float:
        if not used:
            torch.sky.empty_cache()
        start = time.perf_counter()
        there = host.to(device)
        there[:1].item()
        return time.perf_counter() - start

    return up


def copying_here(payload: int, *, used: bool) -> Callable[[], float]:
    """Seconds for one thread's copy to shared memory that was used before or never."""
    host = torch.randn(payload // 4)
    kept = mmap.mmap(-1, payload)

    def copy() -> float:
        start = time.perf_counter()
        into = kept if used else mmap.mmap(-1, payload)
        ctypes.memmove(ctypes.addressof(ctypes.c_char.from_buffer(into)), host.data_ptr(), payload)
        return time.perf_counter() - start

    copy()
    return copy


def training(size: Size) -> Sequence[Row]:
    """Training steps, with and without reading the loss every time."""
    rows = []
    with sky.Compute(options=QUIET) as compute, Local() as here:
        remote = compute.device(KIND)
        for name, make in MODELS.items():
            for item in (False, True):
                samples = interleave(
                    {
                        "sky": stepper(make, remote, size.steps, item=item),
                        "local": here.contender("steps", name, size.steps, item, False),
                    },
                    rounds=size.rounds,
                )
                bar = "" if KIND == "cpu" else (">= 0.95x" if item else ">= 1.5x")
                ours, theirs = (samples[k].per(1, "tasks/s") for k in ("sky", "local"))
                reading = "loss.item() every step" if item else "no .item()"
                what = f"{name} training steps a second, {reading}"
                rows.append(compared(what, ours, f"local {KIND} eager", theirs, bar))
    return rows


def client_cost(size: Size) -> Sequence[Row]:
    """What the user's own thread spends."""
    if KIND != "cpu":
        return []
    with sky.Compute(options=QUIET) as compute, Local() as here:
        remote = compute.device(KIND)
        adds = interleave(
            {
                "sky": adding(remote, size.operations),
                "local": here.contender("adding", size.operations),
            },
            rounds=4 * size.rounds,
        )
        steps = interleave(
            {
                "sky": stepper(mlp, remote, size.steps, item=False, clock=time.thread_time),
                "local": here.contender("steps", "MLP", size.steps, False, True),
            },
            rounds=size.rounds,
        )
        before = sky.device_stats(remote)
        adding(remote, size.operations)()
        after = sky.device_stats(remote)
        per_op = (after.bytes_sent - before.bytes_sent) / (after.operations - before.operations)
        scalar = torch.ones(1, device=remote)
        waits = tuple(p50(scalar.item, 300) for _ in range(size.rounds))
    return [
        compared("issuing x + 1", adds["sky"], "local CPU eager", adds["local"], "<= 0.9x"),
        compared(
            "client thread's CPU time per MLP step",
            steps["sky"],
            "local CPU eager",
            steps["local"],
            "<= 1.0x",
        ),
        absolute("bytes per operation on the wire", Sample((per_op,), "B"), "<= 48 B", 48),
        absolute(".item(), p50", Sample(waits), "<= 40 us", 40e-6),
    ]


OPERATIONS = ("add", "mm", "layer_norm")
WIDTH = 64
BURSTS = 10
"""A difference of some hundred nanoseconds drowns in whatever else interrupts either side.

A burst is of all the operations: the wait at its end, which is no operation's, is 50 us of the
worker's time, and would add 170 ns to each of 300.
"""


def issuing(device: torch.device, name: str) -> Callable[[], object]:
    """One operation whose result nobody keeps."""
    x, weight = (torch.ones(*shape, device=device) for shape in ((WIDTH, WIDTH), (WIDTH,)))
    return {
        "add": lambda: x + 1,
        "mm": lambda: x @ x,
        "layer_norm": lambda: torch.nn.functional.layer_norm(x, (WIDTH,), weight, weight),
    }[name]


def served(compute: sky.Compute, name: str, operations: int) -> Callable[[], float]:
    """CPU seconds the worker's serving thread spends per operation, in the best burst of some."""
    device = compute.device(KIND)
    issue = issuing(device, name)
    worker = next(
        process
        for process in psutil.Process().children(recursive=True)
        if "skyward.device.worker" in process.cmdline()
    )
    schedule = Path(f"/proc/{worker.pid}/task/{worker.pid}/schedstat")

    def spent() -> float:
        torch.sky.synchronize(device)
        return int(schedule.read_text().split()[0]) * 1e-9

    def burst() -> float:
        before = spent()
        for _ in range(operations):
            issue()
        return (spent() - before) / operations

    return lambda: min(burst() for _ in range(BURSTS))


@functools.cache
def floor_library() -> ctypes.CDLL:
    """floor.cpp, compiled as the device's own cores are."""
    home = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory(prefix="sky-floor-") as folder:
        made = Path(folder, "floor.so")
        toolchain.run(
            os.environ.get("CXX", "g++"),
            *toolchain.flags_of("worker"),
            f"-I{home / 'include'}",
            "-shared",
            str(Path(__file__).with_name("floor.cpp")),
            f"-L{home / 'lib'}",
            "-ltorch_cpu",
            "-lc10",
            f"-Wl,-rpath,{home / 'lib'}",
            "-o",
            str(made),
        )
        library = ctypes.CDLL(str(made))
    library.floor_seconds.restype = ctypes.c_double
    return library


def direct(name: str, operations: int) -> Callable[[], float]:
    """CPU seconds of the same operation called from C++, in the best burst of some."""
    torch.set_num_threads(1)
    measure, operation = floor_library().floor_seconds, OPERATIONS.index(name)
    return lambda: min(measure(operation, operations, WIDTH) for _ in range(BURSTS))


def worker_cost(size: Size) -> Sequence[Row]:
    """What the worker's thread spends on an operation beyond the operation itself."""
    if KIND != "cpu":
        return []
    image = sky.Image(env={"OMP_NUM_THREADS": "1"})
    with sky.Compute(image=image, options=QUIET) as compute, Local() as here:
        contenders: dict[str, Callable[[], float]] = {}
        for name in OPERATIONS:
            contenders[name] = served(compute, name, size.operations)
            contenders[f"direct {name}"] = here.contender("direct", name, size.operations)
        samples = interleave(contenders, rounds=4 * size.rounds)
    beyond = {
        name: [
            a - b
            for a, b in zip(samples[name].values, samples[f"direct {name}"].values, strict=True)
        ]
        for name in OPERATIONS
    }
    mixed = Sample(tuple(map(statistics.mean, zip(*beyond.values(), strict=True))))
    what = "worker thread's CPU time per operation, beyond a direct call in C++"
    return [
        absolute(f"{what}: {', '.join(OPERATIONS)}", mixed, "<= 400 ns", 400e-9),
        *(absolute(f"{what}: {name}", Sample(tuple(values))) for name, values in beyond.items()),
    ]


def slow_network(size: Size) -> Sequence[Row]:
    """Training over a link with a delay, against the same connections without."""
    if KIND != "cpu":
        return []
    try:
        with slow_link() as ends:
            samples = steps_over(ends, size.streak, size.rounds)
    except NoLinkError as reason:
        say(f"  slow network: left out, {reason}")
        return []
    far, near = (samples[f"{place}, free"].per(1, "tasks/s") for place in ("far", "near"))
    waits = [samples[name].values for name in ("far, read", "near, read", "round trip")]
    beyond = Sample(
        tuple((there - here) / trip for there, here, trip in zip(*waits, strict=True)),
        " round trips",
    )
    over = f"over a round trip of {ROUND_TRIP * 1e3:.0f} ms"
    free = f"MLP training steps a second {over}, no .item()"
    read = f"MLP step with loss.item() {over}, beyond one without the delay"
    return [
        compared(free, far, "TLS on loopback", near, ">= 0.9x"),
        absolute(read, beyond, "<= 1.25 round trips", 1.25),
    ]


LONG_LINKS = {0.030: ">= 0.95x", 0.100: ">= 0.9x"}
"""Round trips, and how much of the loopback's rate a GPT keeps that reads its loss now and then."""


def thin_links(size: Size) -> Sequence[Row]:
    """A GPT over long links: rate, bytes a step, first step, and how often it asks."""
    if KIND != "cpu":
        return []
    asks = Sample((thin_link.questions(),), " questions")
    lengths = f"GPT with {thin_link.LENGTHS} lengths: questions to the worker"
    rows = [absolute(lengths, asks, "<= 50", 50)]
    rounds = max(3, size.rounds // 3)
    try:
        for round_trip, bar in LONG_LINKS.items():
            with slow_link(round_trip) as ends:
                found = thin_link.over(ends, rounds, first=False)
            what = f"GPT over a round trip of {round_trip * 1e3:.0f} ms"
            far, near = (found[place].per(1, "tasks/s") for place in ("far", "near"))
            read = f"{what}, loss read every {thin_link.READ_EVERY} steps: steps a second"
            sizes = Sample(found["bytes"].values, "B")
            rows += [
                compared(read, far, "TLS on loopback", near, bar),
                absolute(f"{what}: bytes a step, with TLS", sizes, "<= 150 B", 150),
            ]
        with slow_link(round_trip) as ends:
            found = thin_link.over(ends, rounds, first=True)
        rows += [
            absolute(f"{what}: first step, nothing remembered", found["cold"], "<= 3 s", 3),
            absolute(f"{what}: first step of a later session", found["warm"], "<= 1 s", 1),
        ]
    except NoLinkError as reason:
        say(f"  thin links: left out, {reason}")
    return rows


def ordinary_models(size: Size) -> Sequence[Row]:
    """The same losses and speed as on the local GPU, for models that people train."""
    return [] if KIND == "cpu" else [*small(size.rounds), *parity(size.steps, size.rounds)]


def compiled_models(size: Size) -> Sequence[Row]:
    """`torch.compile` here and there; two processors compile a large model for minutes."""
    only = ("MLP",) if KIND == "cpu" else ("",)
    return list(compiled(KIND, size.steps, size.rounds, only=only))


def bytes_each_way(size: Size) -> Sequence[Row]:
    """Large copies to and from the device."""
    with sky.Compute(options=QUIET) as compute, Local() as here:
        remote = compute.device(KIND)
        up, down = copying(remote, size.payload)
        samples = interleave(
            {
                "up": up,
                "new": copying_to_new(remote, size.payload, used=True),
                "new pages": copying_to_new(remote, size.payload, used=False),
                "memcpy": copying_here(size.payload, used=True),
                "memcpy to new pages": copying_here(size.payload, used=False),
                "down": down,
                "local up": here.contender("up", size.payload),
                "local down": here.contender("down", size.payload),
            },
            rounds=size.rounds,
        )
    rates = {name: sample.per(size.payload, "B/s") for name, sample in samples.items()}
    megabytes = f"{size.payload // MIB} MiB"
    down_bar, down_limit = ("3 GB/s", 3e9) if KIND == "cpu" else ("1 GB/s", 1e9)
    new = f"{megabytes} host to device, into a new tensor"
    return [
        absolute(f"{megabytes} host to device", rates["up"], ">= 3 GB/s", 3e9),
        absolute(new, rates["new"], ">= 5 GB/s", 5e9),
        compared(new, rates["new"], "memcpy into memory used before", rates["memcpy"]),
        compared(
            f"{new} and new pages",
            rates["new pages"],
            "memcpy into new pages",
            rates["memcpy to new pages"],
            ">= 1.2x" if KIND == "cpu" else "",
        ),
        absolute(f"{megabytes} device to host", rates["down"], f">= {down_bar}", down_limit),
        absolute(f"{megabytes} host to device, local {KIND}", rates["local up"]),
        absolute(f"{megabytes} device to host, local {KIND}", rates["local down"]),
    ]


@sky.function
def given(*tensors: torch.Tensor) -> None:
    """Get tensors, and do nothing with them."""


def made(count: int) -> torch.Tensor:
    """A tensor of so many bytes."""
    return torch.ones(count, dtype=torch.uint8)


def functions_over_tensors(size: Size) -> Sequence[Row]:
    """Calls whose tensors stay on the device: arguments by reference, and results."""
    total = 4 * size.payload
    with sky.Compute(options=QUIET) as compute:
        device = compute.device(KIND)
        parts = {
            count: [torch.ones(total // count, dtype=torch.uint8).to(device) for _ in range(count)]
            for count in (1, 16)
        }

        def calling(count: int) -> Callable[[], float]:
            given(*parts[count]) >> compute  # torch is imported there with the first tensor
            return lambda: timed(lambda: given(*parts[count]) >> compute)

        def first() -> float:
            fresh = torch.ones(total, dtype=torch.uint8).to(device)
            torch.accelerator.synchronize(device)
            start = time.perf_counter()
            given(fresh) >> compute
            seconds = time.perf_counter() - start
            del fresh
            torch.accelerator.synchronize(device)
            return seconds

        def staying() -> float:
            start = time.perf_counter()
            result = sky.remote(made, device=device)(total) >> compute
            seconds = time.perf_counter() - start
            del result
            # A gigabyte takes a while to free: the next call is not to wait for it.
            torch.accelerator.synchronize(device)
            return seconds

        staying()
        samples = interleave(
            {"one": calling(1), "many": calling(16), "first": first, "stays": staying},
            rounds=3 * size.rounds,
        )
    amount = f"{total // MIB} MiB of device tensors"
    return [
        absolute(f"a function over {amount}, one tensor", samples["one"], "< 2 ms", 2e-3),
        absolute(f"a function over {amount}, 16 tensors", samples["many"], "< 2 ms", 2e-3),
        absolute(f"its first call over {amount} that were uploaded", samples["first"]),
        absolute(f"a result of {total // MIB} MiB that stays", samples["stays"].per(total, "B/s")),
    ]


def opened_devices(size: Size) -> Sequence[Row]:
    """Opening a device."""
    scale = opening.QUICK if size is QUICK else opening.FULL
    return opening.opening(dataclasses.replace(scale, device=KIND))


if __name__ == "__main__":
    if "--device" in sys.argv:
        at = sys.argv.index("--device")
        del sys.argv[at : at + 2]
    run_suite(
        "what the torch device costs",
        [
            opened_devices,
            client_cost,
            worker_cost,
            training,
            compiled_models,
            slow_network,
            thin_links,
            bytes_each_way,
            functions_over_tensors,
            ordinary_models,
        ],
        full=FULL,
        quick=QUICK,
    )
