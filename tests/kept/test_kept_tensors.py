"""Tensors that are kept stay in the memory of their device's process, for the next client."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward.events import EventStream
from skyward.nodes import records
from skyward.nodes.devices import PoolDevices
from skyward.nodes.occupancy import occupancy

from ..conftest import ALL, PATIENCE, Eventually, other_case
from .conftest import QUIET, Script, said

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module", params=["unix", "tcp"] if ALL else ["unix"])
def bench(request: pytest.FixtureRequest, home: Path) -> Iterator[str]:
    """A pool whose device process stays from test to test: it takes seconds to start."""
    name = f"kept-{request.param}"
    local = sky.Local(transport=request.param)
    with sky.Compute(local, name=name, keep=True, options=QUIET) as compute:
        compute.keep("anchor", torch.zeros(1, device=compute.device("cpu")))
    yield name
    sky.attach(name).down(force=True)


def process_of(compute: sky.Compute, tensor: torch.Tensor) -> int:
    return compute._open_fleet.devices.process_of(tensor.device.index)


def where(tensor: torch.Tensor) -> bytes:
    """How others open the tensor's memory: it names the process and the memory in it."""
    from skyward.device.core import core

    return core().export(tensor.device.index, [tensor.untyped_storage().data_ptr()])[0]


def test_the_next_client_has_the_very_memory(bench: str) -> None:
    with sky.attach(bench) as compute:
        tensor = torch.arange(1 << 19, device=compute.device("cpu"))
        compute.keep("numbers", tensor)
        memory, process = where(tensor), process_of(compute, tensor)
        tensor[0] = 7  # a kept tensor is the tensor itself
    with sky.attach(bench) as compute:
        again = compute.kept("numbers")
        assert process_of(compute, again) == process
        assert where(again) == memory
        assert again[:3].tolist() == [7, 1, 2]
        compute.forget("numbers")
        assert again.sum().item() > 0  # as long as it is used


def test_what_belongs_together_stays_together(bench: str) -> None:
    with sky.attach(bench) as compute:
        device = compute.device("cpu")
        layer = torch.nn.Linear(3, 3).to(device)
        layer.register_buffer("count", torch.zeros(2, device=device))
        layer.frozen = torch.nn.Parameter(torch.ones(2, device=device), requires_grad=False)
        layer.tied = layer.weight
        value = {
            "layer": layer,
            "row": layer.weight.detach()[1],
            "host": torch.ones(2),
            "empty": torch.empty(0, 3, device=device),
            "device": device,
            "cpu": torch.device("cpu"),
        }
        compute.keep("together", value)
    with sky.attach(bench) as compute:
        again = compute.kept("together")
        layer = again["layer"]
        assert layer.tied is layer.weight
        assert isinstance(layer.weight, torch.nn.Parameter)
        assert layer.weight.requires_grad
        assert not layer.frozen.requires_grad
        with torch.no_grad():
            layer.weight.fill_(5)
        assert again["row"].tolist() == [5, 5, 5]
        assert again["host"].device.type == "cpu"
        assert again["empty"].shape == (0, 3)
        assert (again["device"], again["cpu"]) == (layer.weight.device, torch.device("cpu"))
        layer(torch.ones(1, 3, device=again["device"])).sum().backward()
        assert layer.weight.grad is not None
        compute.forget("together")


def test_leaving_waits_for_the_last_operations_and_raises_what_failed(bench: str) -> None:
    with (
        pytest.raises(IndexError, match="index 9 is out of bounds") as raised,
        sky.attach(bench) as compute,
    ):
        tensor = torch.arange(4, device=compute.device("cpu"))
        compute.keep("last", tensor)
        for place in (0, 9):  # the first of a kind is waited for
            tensor[torch.tensor([place]).to(tensor.device)] = 0
    assert "noticed when the client left the pool" in raised.value.__notes__[-1]
    with pytest.raises(KeyError) as own, sky.attach(bench) as compute:
        tensor = compute.kept("last")
        assert tensor.tolist() == [0, 1, 2, 3]
        for place in (0, 9):
            tensor[torch.tensor([place]).to(tensor.device)] = 0
        raise KeyError("of the block's own")
    assert "Closing failed as well: IndexError: index 9" in own.value.__notes__[-1]
    with sky.attach(bench) as compute:
        compute.forget("last")


def test_leaving_waits_for_every_device_also_if_one_has_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nothing: Any = None
    desk = PoolDevices("pool", nothing, nothing, None, None, EventStream("desk"), nothing)
    released, ended = threading.Event(), []

    def synchronize(index: int) -> None:
        if index == 0:
            raise IndexError("index 9")
        released.wait()
        ended.append(index)

    monkeypatch.setattr(torch.accelerator, "synchronize", synchronize)
    for index in (0, 1):
        desk._open[index] = (0, {"cpu"}, types.SimpleNamespace(index=index))
        desk.keep(index)
    threading.Timer(0.2, released.set).start()
    with pytest.raises(IndexError, match="index 9"):
        desk.finish(pytest.fail)
    assert ended == [1]


def test_two_names_of_one_tensor_are_one_tensor(bench: str) -> None:
    with sky.attach(bench) as compute:
        tensor = torch.zeros(4, device=compute.device("cpu"))
        compute.keep("a", [tensor])
        compute.keep("b", {"view": tensor[1:]})
        tensor += 1
        assert compute.kept("a")[0].tolist() == [1, 1, 1, 1]
        compute.forget("a")
    with sky.attach(bench) as compute:
        compute.keep("c", compute.kept("b"))
        compute.kept("b")["view"].mul_(3)
        assert compute.kept("c")["view"].tolist() == [3, 3, 3]
        for name in ("b", "c"):
            compute.forget(name)


def test_a_second_client_gets_a_copy(bench: str, script: Script) -> None:
    with sky.attach(bench) as compute:
        tensor = torch.full((1 << 18,), 2.0, device=compute.device("cpu"))
        compute.keep("both", {"large": tensor, "small": tensor[:2].clone()})
        other = script(
            f"""
            import torch
            with sky.attach({bench!r}) as compute:
                found = compute.kept("both")
                found["large"].zero_()
                print(found["small"].tolist(), found["large"].sum().item())
            """
        )
        assert said(other) == "[2.0, 2.0] 0.0"
        assert tensor.sum().item() == 2 << 18
        compute.forget("both")


@other_case
def test_values_in_two_processes_are_both_the_very_tensors(bench: str, script: Script) -> None:
    with sky.attach(bench) as compute:
        first = torch.zeros(2, device=compute.device("cpu"))
        compute.keep("first", first)
        other = script(
            f"""
            import torch
            with sky.attach({bench!r}) as compute:
                compute.keep("second", torch.zeros(2, device=compute.device("cpu")))
            """
        )
        assert said(other) == ""
    with sky.attach(bench) as compute:
        first, second = compute.kept("first"), compute.kept("second")
        second.add_(1)
        assert process_of(compute, first) != process_of(compute, second)
        assert compute.kept("second").device == second.device
        assert compute.device("cpu") == first.device
        first.add_(second.to(first.device))
    with sky.attach(bench) as compute:
        assert compute.kept("second").tolist() == [1, 1]
        assert compute.kept("first").tolist() == [1, 1]
        for name in ("first", "second"):
            compute.forget(name)


def test_a_client_that_is_killed_leaves_what_it_has_kept(bench: str, script: Script) -> None:
    killed = script(
        f"""
        import torch
        compute = sky.attach({bench!r}).__enter__()
        tensor = torch.ones(1 << 18, device=compute.device("cpu"))
        compute.keep("survivor", tensor)
        tensor += 1
        torch.sky.synchronize(tensor.device)
        print(compute._open_fleet.devices.process_of(tensor.device.index), flush=True)
        os.kill(os.getpid(), 9)
        """
    )
    process = int(said_by_killed(killed))
    with sky.attach(bench) as compute:
        again = compute.kept("survivor")
        assert again.sum().item() == 2 << 18
        assert os.path.exists(f"/proc/{process}")
        compute.forget("survivor")


def said_by_killed(process: subprocess.Popen[str]) -> str:
    out, problems = process.communicate(timeout=PATIENCE)
    assert process.returncode == -signal.SIGKILL, problems
    return out


def test_values_are_listed_with_their_place_and_size(bench: str) -> None:
    with sky.attach(bench) as compute:
        compute.keep("there", torch.ones(1 << 18, device=compute.device("cpu")))
        compute.keep("plain", 1)
        found = {each.name: each for each in compute.kept_values()}
        there, plain = found["there"], found["plain"]
        assert (there.node, there.device) == (0, "cpu")
        assert there.bytes >= 1 << 20
        assert (plain.node, plain.device) == (0, "")
        found = occupancy(records.read(bench))
        assert [each["name"] for each in found.values] == ["anchor", "plain", "there"]
        assert re.search(r"1 client, keeps 3 values \(1\.\d+ M", found.state)
        for name in ("there", "plain"):
            compute.forget(name)


def test_a_value_is_replaced_by_another(bench: str) -> None:
    with sky.attach(bench) as compute:
        device = compute.device("cpu")
        compute.keep("again", torch.zeros(2, device=device))
        compute.keep("again", torch.ones(2, device=device))
    with sky.attach(bench) as compute:
        assert compute.kept("again").tolist() == [1, 1]
        compute.forget("again")


def test_a_slice_of_a_storage_is_kept_in_the_nodes_memory(bench: str) -> None:
    with sky.attach(bench) as compute:
        whole = torch.arange(8.0, device=compute.device("cpu"))
        part = whole.untyped_storage()[8:24]
        tensor = torch.empty(0, device=whole.device).set_(part)
        compute.keep("part", tensor)
        tensor.zero_()
        assert compute.kept("part").tolist() == [2, 3, 4, 5]
        compute.forget("part")


def test_a_value_is_lost_with_its_process(bench: str) -> None:
    with sky.attach(bench) as compute:
        tensor = torch.ones(2, device=compute.device("cpu"))
        compute.keep("doomed", tensor)
        process = process_of(compute, tensor)
    os.kill(process, signal.SIGKILL)
    with sky.attach(bench) as compute:
        with pytest.raises(sky.errors.StateLostError, match=r"doomed.*cpu on node 0.*SIGKILL"):
            compute.kept("doomed")
        (lost,) = (each for each in compute.kept_values() if each.name == "doomed")
        assert "SIGKILL" in lost.lost
        for name in ("doomed", "anchor"):
            compute.keep(name, torch.zeros(2, device=compute.device("cpu")))
        assert compute.kept("doomed").tolist() == [0, 0]
        compute.forget("doomed")


def test_the_process_ends_with_its_last_value(bench: str, eventually: Eventually) -> None:
    with sky.attach(bench) as compute:
        tensor = compute.kept("anchor")
        compute.keep("other", tensor)
        process = process_of(compute, tensor)
    with sky.attach(bench) as compute:
        compute.forget("other")
        assert os.path.exists(f"/proc/{process}")
        compute.forget("anchor")
        eventually(lambda: not os.path.exists(f"/proc/{process}"))
        compute.keep("anchor", torch.zeros(1, device=compute.device("cpu")))
