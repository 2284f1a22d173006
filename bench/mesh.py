"""A mesh's training beside a process per rank, and what more ranks cost its client.

The ranks' sums are Gloo's on both sides, over the same groups and sizes, and each rank computes on
one thread: of all three ways to train, the losses of every rank are compared to the last bit.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from elsewhere import Elsewhere
from measure import Sample, interleave
from mesh_steps import WAYS, rank, training
from report import Row, absolute, claim, compared, run_suite
from torch.distributed.tensor import DTensor, Shard

import skyward as sky

QUIET = sky.Options(console=False)
STEPS_COMPARED = 20
RANKS = (1, 4, 8)
MANY = 1000


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    rounds: int
    steps: int
    operations: int


FULL = Size(rounds=5, steps=8, operations=1000)
QUICK = Size(rounds=2, steps=3, operations=200)


class Processes:
    """A process for each rank, which train at a word."""

    def __init__(self, ranks: int, stack: contextlib.ExitStack) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self._all = [
            stack.enter_context(Elsewhere(rank, number, ranks, port)) for number in range(ranks)
        ]

    def train(self, way: str, steps: int) -> tuple[float, list[list[float]]]:
        """Seconds for the steps, the slowest rank's, and the losses of each rank."""
        for process in self._all:
            process._near.send((way, steps))
        answers = [process._near.recv() for process in self._all]
        return max(seconds for seconds, _ in answers), [losses for _, losses in answers]


class Together:
    """The same on a mesh."""

    def __init__(self, mesh: Any) -> None:
        self._mesh = mesh
        self._steps: dict[str, Callable[[], torch.Tensor]] = {}

    def train(self, way: str, steps: int) -> tuple[float, list[list[float]]]:
        if way not in self._steps:
            self._steps[way] = training(way, self._mesh, self._mesh.device, self._mesh.split)
        torch.accelerator.synchronize(self._mesh.device)
        start = time.perf_counter()
        losses = [self._steps[way]() for _ in range(steps)]
        torch.accelerator.synchronize(self._mesh.device)
        seconds = time.perf_counter() - start
        return seconds, [each.tolist() for each in self._mesh.each(torch.stack(losses))]


@contextlib.contextmanager
def pool(ranks: int, **options: Any) -> Iterator[sky.Compute]:
    """Workers that compute on one thread, as the processes do."""
    os.environ["OMP_NUM_THREADS"] = "1"
    worker = sky.Worker(per_node=ranks)
    with sky.Compute(*options.values(), worker=worker, options=QUIET) as compute:
        yield compute


def steps(size: Size) -> Sequence[Row]:
    """The losses, and steps a second, of each way to train with four ranks."""
    rows = []
    with contextlib.ExitStack() as stack:
        compute = stack.enter_context(pool(4))
        ours = Together(compute.mesh("cpu", ranks=4))
        theirs = Processes(4, stack)
        for way in WAYS:
            same = ours.train(way, STEPS_COMPARED)[1] == theirs.train(way, STEPS_COMPARED)[1]
            said = "the same bits on each rank" if same else "not the same bits"
            what = f"{way}, 4 ranks: losses of {STEPS_COMPARED} steps"
            rows.append(claim(what, said, "bit-equal", same))
        for way in WAYS:
            taken = interleave(
                {
                    "mesh": lambda way=way: ours.train(way, size.steps)[0],
                    "processes": lambda way=way: theirs.train(way, size.steps)[0],
                },
                rounds=size.rounds,
            )
            rates = {name: each.per(size.steps, "tasks/s") for name, each in taken.items()}
            what = f"{way}, 4 ranks: steps a second"
            against = "a process per rank"
            rows.append(compared(what, rates["mesh"], against, rates["processes"], ">= 0.95x"))
    return rows


def client(size: Size) -> Sequence[Row]:
    """The client's processor time for a step, with more and more ranks."""
    rows = []
    with pool(max(RANKS)) as compute:
        meshes = {ranks: Together(compute.mesh("cpu", ranks=ranks)) for ranks in RANKS}
        for way in WAYS:
            for each in meshes.values():
                each.train(way, 5)
            spent = interleave(
                {
                    str(ranks): partial(_processor_time, each, way, size.steps)
                    for ranks, each in meshes.items()
                },
                rounds=size.rounds,
            )
            for ranks in RANKS[1:]:
                what = f"{way}: the client's processor time for a step with {ranks} ranks"
                bar = "<= 1.2x" if ranks == max(RANKS) else ""
                rows.append(compared(what, spent[str(ranks)], "1 rank", spent["1"], bar))
        rows += _issuing(size, {ranks: each._mesh for ranks, each in meshes.items()})
    return rows


def _processor_time(together: Together, way: str, steps: int) -> float:
    start = time.process_time()
    together.train(way, steps)
    return (time.process_time() - start) / steps


def _issuing(size: Size, meshes: dict[int, Any]) -> list[Row]:
    """What the user's thread spends on an operation.

    The client sends an operation to the first rank whatever there is behind it, and each rank
    passes it on to four. So for the client a mesh of a thousand needs one worker: its collectives
    would fail, and all else is as it would be.
    """
    meshes = {**meshes, MANY: _pretended(meshes[1])}
    rows = []
    for what, make in (
        ("x + 1", lambda mesh: torch.ones(4, device=mesh.device)),
        ("x + 1 of a DTensor", _sharded),
    ):
        taken = interleave(
            {str(n): partial(_issue, make(mesh), size.operations) for n, mesh in meshes.items()},
            rounds=size.rounds,
        )
        for ranks in list(meshes)[1:]:
            bar = "<= 2x" if ranks == MANY else ""
            name = f"issuing {what}, {ranks} ranks" + " (one is real)" * (ranks == MANY)
            rows.append(compared(name, taken[str(ranks)], "1 rank", taken["1"], bar))
    return rows


def _pretended(mesh: Any) -> Any:
    """A mesh of many ranks whose only process is that of a mesh of one."""
    from skyward.device import mesh as ours

    core = ours.core()
    make_groups, core.make_groups = core.make_groups, lambda *_: None
    try:
        pretended: Any = ours.Mesh(mesh.device.index, {"ranks": MANY}, "pretended")
    finally:
        core.make_groups = make_groups
    # A collective would say it.
    pretended.get_group()._place = torch.zeros((), dtype=torch.int64, device=mesh.device)
    return pretended


def _sharded(mesh: Any) -> torch.Tensor:
    local = torch.ones(4, device=mesh.device)
    shape = torch.Size([4 * mesh.size()])
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=shape, stride=(1,))


def _issue(x: torch.Tensor, operations: int) -> float:
    torch.accelerator.synchronize(x.device)
    start = time.perf_counter()
    for _ in range(operations):
        x + 1
    seconds = (time.perf_counter() - start) / operations
    torch.accelerator.synchronize(x.device)
    return seconds


def sent(size: Size) -> Sequence[Row]:
    """Bytes of operations that a step takes of a link, after the first steps."""
    rows = []
    with pool(4, provider=sky.Local(transport="tcp")) as compute:
        mesh = compute.mesh("cpu", ranks=4)
        for way in WAYS:
            step = training(way, mesh, mesh.device, mesh.split)
            for how, again in (("", step), (", replayed", sky.replay(step))):
                for _ in range(20):
                    again()
                torch.accelerator.synchronize(mesh.device)
                before = sky.device_stats(mesh.device)
                for _ in range(size.steps):
                    again()
                torch.accelerator.synchronize(mesh.device)
                after = sky.device_stats(mesh.device)
                coded = (after.bytes_coded - before.bytes_coded) / size.steps / 4
                plain = (after.bytes_sent - before.bytes_sent) / size.steps / 4
                what = f"{way}{how}, 4 ranks: bytes over TLS for a step and rank"
                rows.append(absolute(what, Sample((coded,), "B"), "<= 100 B", 100))
                rows.append(absolute(f"{what}, before coding", Sample((plain,), "B")))
    return rows


if __name__ == "__main__":
    run_suite("a mesh", [steps, client, sent], full=FULL, quick=QUICK)
