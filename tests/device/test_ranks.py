"""The processes of a mesh: how they reach each other, over a network too, and who may be one."""

from __future__ import annotations

import os

import psutil
import pytest

import skyward as sky
from skyward.device import ranks
from skyward.device.core import core
from skyward.errors import DeviceError
from skyward.wire.messages import Hello

from ..conftest import only_in_all

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


@only_in_all
def test_a_rank_that_does_not_come_to_a_collective_is_named(sharing, monkeypatch) -> None:
    monkeypatch.setattr("skyward.nodes.devices.COLLECTIVE_SECONDS", 40.0)
    with sharing(sky.Compute(nodes=2, options=sky.Options(console=False))) as compute:
        mesh = compute.mesh(dp=2)
        x = torch.ones(3, device=mesh.device)
        dist.all_reduce(x, group=mesh.get_group())
        agent = compute.run(sky.function(os.getppid)(), on=1)
        second = next(
            each
            for each in psutil.Process(agent).children(recursive=True)
            if "skyward.device.worker" in each.cmdline()
        )
        second.suspend()
        try:
            dist.all_reduce(x, group=mesh.get_group())
            said = r"rank 0 \(node 0\): (.|\n)*rank 1 \(node 1\): .*did not come to where"
            with pytest.raises(DeviceError, match=said):
                x.on(0)
        finally:
            second.resume()


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
