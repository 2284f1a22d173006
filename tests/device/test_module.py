"""`torch.sky` and `torch.accelerator` have what programs and libraries ask of a device's module."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward.device import properties

from ..conftest import only_in_all
from .test_defects import device_processes

torch = pytest.importorskip("torch")

WITHOUT_SKYWARD = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "skyward":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Hidden())
import torch

print(torch.load(sys.argv[1], map_location="cpu")["weight"].tolist())
try:
    torch.load(sys.argv[1])
except RuntimeError as problem:
    print(problem)
"""


def test_a_device_is_named_and_described_by_its_node(device: torch.device) -> None:
    found = torch.sky.get_device_properties(device)
    assert vars(found) == properties.read("cpu")
    assert found.total_memory == torch.sky.mem_get_info(device)[1]
    assert found.multi_processor_count == os.cpu_count()
    assert torch.sky.get_device_name(device) == found.name != ""
    assert torch.sky.get_device_capability(device) == (found.major, found.minor) == (0, 0)
    assert torch.sky.is_bf16_supported()
    assert f"sky:{device.index}, {found.name}" in torch.sky.memory_summary(device)


@only_in_all
def test_the_process_of_a_cpu_imports_torch_when_an_operator_of_pythons_is_named() -> None:
    """Only the libraries are loaded at first: that makes a device ready 1.5 s earlier."""
    library = torch.library.Library("swift", "DEF")
    library.define("unknown(Tensor x) -> Tensor")
    with sky.Compute(options=sky.Options(console=False)) as compute:
        device = compute.device("cpu")
        assert torch.arange(4, device=device).sum().item() == 6
        (process,) = device_processes(compute)
        python = "libtorch_python"
        assert not any(python in each.path for each in process.memory_maps())
        with pytest.raises(NotImplementedError, match="swift::unknown"):
            torch.ops.swift.unknown(torch.ones(2, device=device))
        assert any(python in each.path for each in process.memory_maps())


def test_the_properties_of_a_closed_device_say_that_it_is_closed() -> None:
    with sky.Compute(options=sky.Options(console=False)) as compute:
        device = compute.device("cpu")
        assert torch.sky.get_device_properties(device).type == "cpu"
    with pytest.raises(sky.errors.DeviceError, match="is gone: its pool was closed"):
        torch.sky.get_device_properties(device)


def test_a_gpu_is_described_by_all_that_torch_knows_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Found:
        name, major, minor, total_memory = "NVIDIA H200", 9, 0, 150 << 30
        multi_processor_count, is_integrated, uuid = 132, 0, object()

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda kind: Found())
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", lambda kind: warnings.catch_warnings())
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    found = properties.DeviceProperties(**properties.read("cuda:1"))
    assert (found.type, found.name, found.major, found.is_integrated) == (
        "cuda",
        "NVIDIA H200",
        9,
        0,
    )
    assert found.uuid == str(Found.uuid)
    assert (found.cuda_version, found.is_bf16_supported) == ("13.0", True)


def test_a_cpu_is_described_by_its_instructions(device: torch.device) -> None:
    told = torch.sky.get_device_properties(device).instructions
    assert told == torch.backends.cpu.get_cpu_capability()


def test_the_processor_is_named_by_the_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor : 0\nmodel name\t: AMD EPYC 9354\n")
    monkeypatch.setattr(properties, "CPUINFO", cpuinfo)
    assert properties.read("cpu")["name"] == "AMD EPYC 9354"


def test_the_device_of_a_tensor_is_current_for_a_block(
    device: torch.device, other_device: torch.device
) -> None:
    with torch.sky.device(device):
        with torch.sky.device_of(torch.ones(1, device=other_device)):
            assert torch.sky.current_device() == other_device.index
        with torch.sky.device_of(torch.ones(1)):
            assert torch.sky.current_device() == device.index
    assert not torch.sky.can_device_access_peer(device, other_device)


def test_generators_of_all_devices_are_kept_together(
    device: torch.device, other_device: torch.device
) -> None:
    def drawn() -> list[list[float]]:
        return [torch.rand(2, device=d).tolist() for d in (device, other_device)]

    before = torch.sky.get_rng_state_all()
    first = drawn()
    torch.sky.seed_all()
    assert drawn() != first
    torch.sky.random.set_rng_state_all(before)
    assert drawn() == first


def _in(context: Any) -> int:
    with context:
        return torch.accelerator.current_device_index()


ASKED: dict[str, Callable[[torch.device], object]] = {
    "current_accelerator": lambda d: torch.accelerator.current_accelerator() == torch.device("sky"),
    "current_device_idx": lambda d: torch.accelerator.current_device_idx() == d.index,
    "current_device_index": lambda d: torch.accelerator.current_device_index() == d.index,
    "current_stream": lambda d: torch.accelerator.current_stream(d).device == d,
    "device_count": lambda d: torch.accelerator.device_count() > d.index,
    "device_index": lambda d: _in(torch.accelerator.device_index(d.index)) == d.index,
    "empty_cache": lambda d: torch.accelerator.empty_cache() is None,
    "empty_host_cache": lambda d: torch.accelerator.empty_host_cache() is None,
    "get_device_capability": lambda d: (
        {torch.bfloat16, torch.float32}
        < torch.accelerator.get_device_capability(d)["supported_dtypes"]
    ),
    "get_memory_info": lambda d: torch.accelerator.get_memory_info(d)[1] > 0,
    "is_available": lambda d: torch.accelerator.is_available(),
    "max_memory_allocated": lambda d: torch.accelerator.max_memory_allocated(d) >= 4,
    "max_memory_reserved": lambda d: torch.accelerator.max_memory_reserved(d) >= 4,
    "memory_allocated": lambda d: torch.accelerator.memory_allocated(d) >= 4,
    "memory_reserved": lambda d: torch.accelerator.memory_reserved(d) >= 4,
    "memory_stats": lambda d: (
        torch.accelerator.memory_stats(d)["allocated_bytes.all.current"]
        == torch.accelerator.memory_allocated(d)
    ),
    "reset_accumulated_memory_stats": lambda d: (
        torch.accelerator.reset_accumulated_memory_stats(d) is None
    ),
    "reset_peak_memory_stats": lambda d: torch.accelerator.reset_peak_memory_stats(d) is None,
    "set_device_idx": lambda d: torch.accelerator.set_device_idx(d) is None,
    "set_device_index": lambda d: torch.accelerator.set_device_index(d) is None,
    "set_stream": lambda d: torch.accelerator.set_stream(torch.sky.default_stream(d)) is None,
    "synchronize": lambda d: torch.accelerator.synchronize(d) is None,
}
NOT_ON_SKY = {"Graph": "not supported on device type: sky"}


@pytest.mark.filterwarnings("ignore:Use `:FutureWarning")
@pytest.mark.parametrize("name", torch.accelerator.__all__)
def test_every_function_of_torch_accelerator_knows_the_device(
    device: torch.device, name: str
) -> None:
    with torch.sky.device(device):
        kept = torch.ones(1, device=device)
        if name in NOT_ON_SKY:
            with pytest.raises(RuntimeError, match=NOT_ON_SKY[name]):
                getattr(torch.accelerator, name)()
        else:
            assert ASKED[name](device)
        assert kept.item() == 1.0


@pytest.mark.skipif(
    not hasattr(torch.accelerator, "empty_host_cache"), reason="this torch has no empty_host_cache"
)
def test_pinned_memory_is_given_back_and_taken_again(device: torch.device) -> None:
    kept = torch.ones(3).pin_memory()
    del (dropped := [torch.ones(5000).pin_memory()])[:]
    torch.accelerator.empty_host_cache()
    assert kept.is_pinned()
    assert kept.tolist() == [1.0] * 3
    assert torch.zeros(5000).pin_memory().to(device).sum().item() == 0.0
    assert dropped == []


@pytest.mark.parametrize("name", ["Float", "Double", "Half", "BFloat16", "Long", "Bool", "Byte"])
def test_a_tensor_is_of_the_type_that_it_names(device: torch.device, name: str) -> None:
    kind, here = getattr(torch.sky, f"{name}Tensor"), getattr(torch, f"{name}Tensor")
    x = torch.ones(2, dtype=here.dtype, device=device)
    assert x.type() == f"torch.sky.{name}Tensor"
    assert repr(kind) == f"<class '{x.type()}'>"
    assert isinstance(x, kind)
    assert not isinstance(x.cpu(), kind)
    assert not isinstance(x.to(torch.int16), kind)
    with torch.sky.device(device):
        for wanted in (kind, x.type()):
            assert torch.ones(2).type(wanted).dtype == here.dtype
            assert torch.ones(2).type(wanted).device == device
        assert isinstance(kind([1, 0]), kind)
        assert kind(2, 3).shape == (2, 3)


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
def test_a_storage_is_of_a_type(device: torch.device) -> None:
    x = torch.ones(2, device=device)
    assert x.storage_type() is torch.sky.FloatStorage
    assert x.storage().type() == "torch.sky.FloatStorage"
    assert isinstance(x.storage(), torch.sky.FloatStorage)
    assert not isinstance(x.cpu().storage(), torch.sky.FloatStorage)


@only_in_all
@pytest.mark.slow
def test_a_saved_model_opens_where_skyward_is_not_installed(
    device: torch.device, tmp_path: Path
) -> None:
    """Slow: another interpreter imports torch."""
    model, file = torch.nn.Linear(1, 1).to(device), tmp_path / "model.pt"
    torch.save(model.state_dict(), file)

    command = [sys.executable, "-c", WITHOUT_SKYWARD, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    here, problem = done.stdout.splitlines()

    assert here == str(model.weight.tolist())
    advice = 'where no such device is open, give torch.load map_location="cpu"'
    assert problem.endswith(f"(tagged with {device}; {advice})")
