"""The processes of a mesh: how they reach each other, over a network too, and who may be one."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

import skyward as sky
from skyward.device import ranks
from skyward.device.core import core
from skyward.errors import DeviceError
from skyward.nodes.devices import PoolDevices
from skyward.wire.messages import DeviceDown, DeviceUp, Hello

from ..conftest import PATIENCE, only_in_all, other_case, wait_until, worker_processes

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

TICKET = "5e11ab1e"


@pytest.mark.parametrize(
    ("asked", "ticket", "role"),
    [
        (f"peer-rank-{TICKET}-device-ops", TICKET, "device-ops"),
        (f"peer-rank-{TICKET}-device-bulk-2", TICKET, "device-bulk-2"),
        ("peer-rank-0ther-device-ops", TICKET, ""),
        ("peer-rank--device-ops", "", ""),
        ("peer-rank-device-ops", "", ""),
        (f"peer-rank-{TICKET}-device-ops", "", ""),
        ("peer-12-0", TICKET, ""),
        ("device-ops", TICKET, ""),
    ],
)
def test_who_has_the_clients_ticket_takes_its_place(asked: str, ticket: str, role: str) -> None:
    assert ranks.role_of(Hello("pool", asked), ticket) == role


def test_ranks_that_are_reached_over_a_network_do_the_same(sharing) -> None:
    options = sky.Options(console=False)
    with sharing(sky.Compute(sky.Local(transport="tcp"), nodes=2, options=options)) as compute:
        mesh = compute.mesh(dp=2)
        x = torch.ones(3, device=mesh.device) + mesh.get_local_rank()
        assert [each.tolist() for each in mesh.each(x)] == [[1.0] * 3, [2.0] * 3]
        dist.all_reduce(x, group=mesh.get_group())
        assert x.tolist() == [3.0] * 3
        # Beside the records, and in several stripes.
        large = torch.arange(3_000_000)
        assert torch.equal(large.to(mesh.device).on(1), large)
        with pytest.raises(DeviceError, match=r"rank 1 \(node 1\): .*different values"):
            mesh.get_local_rank().item()


@pytest.fixture(scope="module")
def pair(sharing) -> Iterator[sky.Compute]:
    """A pool of two nodes, whose ranks and agents are killed."""
    with sharing(sky.Compute(nodes=2, options=sky.Options(console=False))) as compute:
        yield compute


def _mesh_of(compute: sky.Compute, size: int = 2) -> tuple[Any, list[psutil.Process]]:
    """A mesh of ranks, and their processes, in the order of their nodes."""
    before = {each.pid for each in _device_processes()}
    mesh: Any = compute.mesh(dp=size)
    started = [each for each in _device_processes() if each.pid not in before]
    # Those of a node are below its agent.
    agents = [node.host.agent_pid for node in compute._open_fleet.nodes]
    started.sort(key=lambda each: [agent in _above(each) for agent in agents], reverse=True)
    return mesh, started


def _device_processes() -> list[psutil.Process]:
    found = []
    for each in worker_processes():
        with contextlib.suppress(psutil.Error):
            if "skyward.device.worker" in each.cmdline():
                found.append(each)
    return found


def _above(process: psutil.Process) -> list[int]:
    return [each.pid for each in process.parents()]


@contextlib.contextmanager
def _reading(x: torch.Tensor) -> Iterator[Future[tuple[str, float]]]:
    """A thread that waits for a tensor: what the error says that it gets, and when it got it."""

    def told() -> tuple[str, float]:
        with pytest.raises(DeviceError) as caught:
            x.cpu()
        return str(caught.value), time.monotonic()

    before = sky.device_stats(x.device).waits
    with ThreadPoolExecutor(1) as threads:
        reading = threads.submit(told)
        wait_until(lambda: sky.device_stats(x.device).waits > before)
        yield reading


@pytest.fixture
def late_agents(monkeypatch) -> None:
    """The client hears of the end of a process later than the connections to it end."""
    heard = PoolDevices.heard

    def later(self: PoolDevices, message: DeviceUp | DeviceDown) -> None:
        is_late = isinstance(message, DeviceDown) and message.number not in self._waiting
        threading.Timer(0.5 if is_late else 0, heard, (self, message)).start()

    monkeypatch.setattr(PoolDevices, "heard", later)


@pytest.mark.parametrize(
    ("rank", "where"),
    [
        (0, "reading"),
        (1, "in a collective"),
        pytest.param(1, "reading", marks=other_case),
        pytest.param(0, "in a collective", marks=other_case),
    ],
)
def test_whoever_waits_for_a_rank_is_told_how_it_ended(
    pair: sky.Compute, late_agents, eventually, rank: int, where: str
) -> None:
    mesh, started = _mesh_of(pair)
    x = torch.ones(3, device=mesh.device)
    dist.all_reduce(x, group=mesh.get_group())
    x.cpu()
    started[rank].suspend()
    if where == "in a collective":
        dist.all_reduce(x, group=mesh.get_group())
    with _reading(x) as told:
        killed = time.monotonic()
        started[rank].kill()
        text, at = told.result(PATIENCE)
    assert re.search(rf"rank {rank} \(node {rank}\) is lost: .*SIGKILL", text), text
    assert at - killed < 60
    eventually(lambda: not any(each.is_running() for each in started))


def test_whoever_waits_for_a_rank_is_told_of_its_nodes_end(pair: sky.Compute, eventually) -> None:
    mesh, started = _mesh_of(pair)
    x = torch.ones(3, device=mesh.device)
    x.cpu()
    started[1].suspend()
    with _reading(x) as told:
        killed = time.monotonic()
        os.kill(pair._open_fleet.nodes[1].host.agent_pid, signal.SIGKILL)
        text, at = told.result(PATIENCE)
    assert re.search(r"rank 1 \(node 1\) is lost: .*its agent is gone", text), text
    assert at - killed < 60
    eventually(lambda: not any(each.is_running() for each in started))
    # Which waits for the node.
    again = pair.mesh(dp=2)
    assert torch.ones(3, device=again.device).tolist() == [1.0] * 3


@contextlib.contextmanager
def _joining(compute: sky.Compute, monkeypatch) -> Iterator[tuple[Future[str], psutil.Process]]:
    """A thread that makes a mesh, whose second rank stands still: what the error says."""
    started: queue.SimpleQueue[list[DeviceUp]] = queue.SimpleQueue()
    start = PoolDevices._start_processes

    def noted(self: PoolDevices, *args: Any, **options: Any) -> list[DeviceUp]:
        ups = start(self, *args, **options)
        started.put(ups)
        return ups

    def told() -> str:
        with pytest.raises(DeviceError) as caught:
            compute.mesh(dp=2)
        return str(caught.value)

    monkeypatch.setattr(PoolDevices, "_start_processes", noted)
    with ThreadPoolExecutor(1) as threads:
        making = threads.submit(told)
        second = started.get(timeout=PATIENCE)[1].pid
        # It imports torch as soon as it has heard of the mesh, and then it meets the others.
        maps = Path(f"/proc/{second}/maps")
        wait_until(lambda: "libtorch_python" in maps.read_text())
        process = psutil.Process(second)
        process.suspend()
        yield making, process


def test_a_rank_that_is_lost_while_the_ranks_meet_is_an_error(
    pair: sky.Compute, monkeypatch
) -> None:
    with _joining(pair, monkeypatch) as (making, second):
        second.kill()
        killed = time.monotonic()
        said = making.result(PATIENCE)
    assert re.search(r"rank 1 \(node 1\) is lost: .*SIGKILL", said), said
    assert time.monotonic() - killed < 60
    monkeypatch.undo()
    again = pair.mesh(dp=2)
    assert torch.ones(3, device=again.device).tolist() == [1.0] * 3


def test_a_pool_is_closed_while_ranks_meet(sharing, monkeypatch, eventually) -> None:
    with sharing(sky.Compute(nodes=2, options=sky.Options(console=False))) as compute:
        with _joining(compute, monkeypatch) as (making, second):
            began = time.monotonic()
            compute._open_fleet.devices.close("its pool was closed")
            assert "is gone: its pool was closed" in making.result(PATIENCE)
        assert time.monotonic() - began < 60
        eventually(lambda: not second.is_running())


def _sum_without(mesh: Any, rank: int) -> torch.Tensor:
    """A sum of all ranks to which one does not come: it computes its part for half an hour."""
    place, x = mesh.get_rank(), torch.ones(4000, device=mesh.device) / 2
    for few in (True, False):
        # The first time, the client waits for all ranks to say what the results look like.
        steps = torch.where((place != rank) | few, 2, 10**8)
        part = torch.special.laguerre_polynomial_l(x, steps)
        dist.all_reduce(part, group=mesh.get_group())
    return part


@only_in_all
def test_a_rank_that_does_not_come_to_a_collective_is_named_with_its_stacks(
    sharing, eventually
) -> None:
    options = sky.Options(console=False, collective_timeout=30)
    with sharing(sky.Compute(nodes=2, options=options)) as compute:
        mesh, started = _mesh_of(compute)
        x = _sum_without(mesh, 1)
        began = time.monotonic()
        said = (
            r"sky:0 misses ranks: rank 0 \(node 0\): (.|\n)*"
            r"rank 1 \(node 1\): it did not come to where the others are\n"
            rf"rank 1 \(node 1\): node 1 device cpu \(pid {started[1].pid}\):\n"
            r"(.|\n)*, in _serve\n"
        )
        with pytest.raises(DeviceError, match=said):
            x.cpu()
        assert time.monotonic() - began < 60
        # It is lost to the others, and so is the mesh, whose processes end.
        eventually(lambda: not any(each.is_running() for each in started))
        with pytest.raises(
            DeviceError, match=r"is gone: rank 1 \(node 1\) is lost: it did not come"
        ):
            x.cpu()


@only_in_all
def test_ranks_below_ranks_take_part_and_are_named(sharing, eventually) -> None:
    """Seven processes import torch, and the others wait for one of them: a minute."""
    options = sky.Options(console=False, collective_timeout=40)
    with sharing(sky.Compute(worker=sky.Worker(per_node=7), options=options)) as compute:
        mesh, started = _mesh_of(compute, 7)
        place = mesh.get_rank()
        assert mesh.each(place) == list(range(7))
        large = torch.arange(3_000_000)
        x = large.to(mesh.device) + place
        assert torch.equal(x.on(6), large + 6)
        dist.all_reduce(x, group=mesh.get_group())
        assert torch.equal(x.cpu(), 7 * large + 21)
        with pytest.raises(IndexError, match=r"rank 6 \(node 0\): index out of range"):
            torch.arange(4, device=mesh.device).index_select(0, 9 * (place == 6).view(1)).cpu()
        y = _sum_without(mesh, 5)
        with pytest.raises(DeviceError) as caught:
            y.cpu()
        absent = re.findall(r"(rank \d \(node 0\)): it did not come", str(caught.value))
        assert absent == ["rank 5 (node 0)"], str(caught.value)
        eventually(lambda: not any(each.is_running() for each in started))


def test_a_rank_that_is_lost_is_named_and_the_mesh_can_be_made_again(sharing, eventually) -> None:
    with sharing(sky.Compute(nodes=2, options=sky.Options(console=False))) as compute:
        before = {each.pid for each in psutil.Process().children(recursive=True)}
        mesh = compute.mesh(dp=2)
        x = torch.ones(3, device=mesh.device)
        dist.all_reduce(x, group=mesh.get_group())
        started = [
            each
            for each in psutil.Process().children(recursive=True)
            if each.pid not in before and "skyward.device.worker" in each.cmdline()
        ]
        assert len(started) == 2
        started[1].kill()
        eventually(lambda: mesh.device.index not in core().open_devices)
        with pytest.raises(DeviceError, match=r"rank \d \(node \d\) is lost: .*SIGKILL"):
            x.cpu()
        eventually(lambda: not any(each.is_running() for each in started))
        again = compute.mesh(dp=2)
        y = torch.ones(3, device=again.device)
        dist.all_reduce(y, group=again.get_group())
        assert y.tolist() == [2.0] * 3
