"""Libraries that look for a device find an open sky device, or say in one line why they cannot."""

from __future__ import annotations

import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from skyward.device.core import DeviceError, core
from skyward.device.libraries import torch as patches_of_torch
from skyward.device.libraries.choice import Choice
from skyward.device.libraries.patches import Patches, wrap, wrap_property

torch = pytest.importorskip("torch")

GONE = """
import accelerate, torch
from accelerate import Accelerator, PartialState
from accelerate.utils import get_max_memory

import skyward as sky

def seen():
    return str(Accelerator().device), str(PartialState().device), sorted(map(str, get_max_memory()))

before = seen()
with sky.Compute(options=sky.Options(console=False)) as compute:
    compute.device("cpu")
    within = seen()
print(before, within, seen(), sep="\\n")
"""


@pytest.fixture(autouse=True)
def current(device: torch.device) -> Iterator[None]:
    """Of the session's devices, the first is the current one, as for a user with a single pool."""
    with torch.sky.device(device):
        yield


@pytest.fixture
def choice() -> Choice:
    return Choice(core())


@pytest.fixture
def local_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this machine had a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(core(), "chosen", None)


@pytest.fixture
def fresh() -> Iterator[None]:
    """accelerate keeps its choice for the process; other tests must not see it."""
    state = pytest.importorskip("accelerate.state")
    state.AcceleratorState._reset_state(reset_partial_state=True)
    yield
    state.AcceleratorState._reset_state(reset_partial_state=True)


# The choice.


def test_an_open_device_is_used_where_there_is_no_gpu(choice: Choice, device: torch.device) -> None:
    assert choice.device() == device


@pytest.mark.usefixtures("local_gpu")
def test_beside_a_gpu_the_default_device_decides(
    choice: Choice, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert choice.device() is None
    with torch.device(device):
        assert choice.device() == device
    with torch.device("sky"):
        assert choice.device() == device
    monkeypatch.setattr(torch, "get_default_device", lambda: torch.device("cuda"))
    torch.sky.set_device(device)
    assert choice.device() is None


@pytest.mark.usefixtures("local_gpu")
def test_beside_a_gpu_the_current_accelerator_decides(
    choice: Choice, device: torch.device, other_device: torch.device
) -> None:
    torch.accelerator.set_device_index(other_device.index)
    assert choice.device() == other_device
    torch.accelerator.set_device_index(device)
    assert choice.device() == device


@pytest.mark.usefixtures("local_gpu")
def test_what_pytorch_does_by_itself_is_no_choice(choice: Choice) -> None:
    data = torch.utils.data.TensorDataset(torch.arange(4.0))
    assert len(list(torch.utils.data.DataLoader(data, batch_size=2, pin_memory=True))) == 2
    assert choice.device() is None


def test_a_forked_child_uses_no_device_of_its_parent(
    choice: Choice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(core()), "in_bad_fork", property(lambda self: True))
    assert choice.device() is None


# How modules are patched.


def _double(original: Any) -> Any:
    return lambda *args: 2 * original(*args)


def _patch(module: types.ModuleType) -> None:
    wrap(module, "three", _double)
    wrap(module.Kind, "four", _double)
    wrap_property(module.Kind, "five", _double)
    wrap(module, "missing", _double)


SOURCE = """
import functools

@functools.lru_cache
def three():
    return 3

class Kind:
    @classmethod
    def four(cls):
        return 4

    @functools.cached_property
    def five(self):
        return 5
"""


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_module_is_patched_whenever_it_is_imported(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"imported_{when}"
    (tmp_path / f"{name}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("skyward.device.libraries.patches.USERS", {"peft_user"})
    user = types.ModuleType("peft_user")
    monkeypatch.setitem(sys.modules, "peft_user", user)
    if when == "before":
        user.renamed = __import__(name).three
    patches = Patches({name: _patch})
    with pytest.warns(  # noqa: PT031
        UserWarning, match=f"{name} has no missing in this version: it may not find"
    ):
        patches.install()
        module = __import__(name)
    sys.meta_path.remove(patches)
    assert module.three() == 6
    assert module.Kind.four() == 8
    assert module.Kind().five == 10
    assert module.three.cache_info().hits == 0
    assert getattr(user, "renamed", module.three) is module.three
    assert "exec_module" not in vars(module.__spec__.loader)


def test_a_library_of_an_unknown_version_is_left_alone_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "very_new.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    patches = Patches({"very_new": lambda module: wrap(module.Gone, "name", _double)})
    patches.install()
    with pytest.warns(UserWarning, match="very_new has no Gone in this version"):
        import very_new  # type: ignore[import-not-found]  # noqa: F401
    sys.meta_path.remove(patches)


# accelerate.


@pytest.mark.usefixtures("fresh")
def test_accelerate_uses_the_device_and_its_memory(device: torch.device) -> None:
    from accelerate import Accelerator, PartialState
    from accelerate.utils import get_max_memory, infer_auto_device_map

    assert Accelerator().device == PartialState().device == device
    assert get_max_memory()[device.index] > 1 << 20
    assert get_max_memory({"cpu": "1KB", device.index: "1MB"}) == {device.index: 10**6, "cpu": 1000}
    with pytest.raises(ValueError, match=rf"names 63; .* so name {device.index} for {device}"):
        get_max_memory({63: "1GB"})
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    assert infer_auto_device_map(model) == {"": device.index}


@pytest.mark.usefixtures("fresh")
def test_accelerate_is_told_when_a_device_is_opened_after_it_chose(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate import Accelerator, PartialState

    with monkeypatch.context() as patch:
        patch.setattr(Choice, "device", lambda self: None)
        assert PartialState().device.type == "cpu"
        assert Accelerator().device.type == "cpu"
    assert Accelerator().device == device


@pytest.mark.usefixtures("fresh")
def test_accelerate_does_as_it_is_told(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    from accelerate import Accelerator, PartialState

    assert Accelerator(cpu=True).device.type == "cpu"
    PartialState._reset_state()
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "meta")
    assert PartialState().device.type == "meta"


@pytest.mark.usefixtures("fresh", "local_gpu")
def test_beside_a_gpu_accelerate_uses_that_gpu(device: torch.device) -> None:
    from accelerate import PartialState

    assert PartialState().default_device.type == "cuda"
    torch.sky.set_device(device)
    assert PartialState().default_device == device


@pytest.mark.slow
def test_without_a_device_accelerate_is_as_before() -> None:
    """Slow: another process imports accelerate and opens a pool."""
    command = [sys.executable, "-W", "ignore", "-c", GONE]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    before, within, after = done.stdout.splitlines()
    assert before == after == "('cpu', 'cpu', ['cpu'])"
    assert within == "('sky:0', 'sky:0', ['0', 'cpu'])"


# safetensors.


def test_safetensors_loads_to_the_device(device: torch.device, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    from safetensors.torch import load_file, load_model, save_file, save_model

    x = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)}
    save_file({name: value.to(device) for name, value in x.items()}, tmp_path / "x")
    for where in (str(device), device, device.index):
        loaded = load_file(tmp_path / "x", device=where)
        assert {value.device for value in loaded.values()} == {device}
        assert all(torch.equal(loaded[name].cpu(), value) for name, value in x.items())
    with safetensors.safe_open(tmp_path / "x", "pt", device=str(device)) as file:
        assert isinstance(file, safetensors.safe_open)
        assert list(file.keys()) == ["a", "b"]
        part = file.get_slice("a")
        assert part.get_shape() == [2, 3]
        assert part[:, 1:].device == device
        assert part[:, 1:].tolist() == [[1.0, 2.0], [4.0, 5.0]]
    model = torch.nn.Linear(2, 2).to(device)
    save_model(model, str(tmp_path / "model"))
    again = torch.nn.Linear(2, 2, device=device)
    load_model(again, str(tmp_path / "model"), device=str(device))
    assert torch.equal(again.weight, model.weight)
    with pytest.raises(safetensors.SafetensorError, match="device fog is invalid"):
        load_file(tmp_path / "x", device="fog")


# transformers.


def test_arguments_of_a_trainer_choose_the_device_and_allow_bf16(
    device: torch.device, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")

    ours = transformers.TrainingArguments(str(tmp_path), bf16=True, report_to=[])
    assert (ours.device, ours.n_gpu) == (device, 1)
    told = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    assert told.device.type == "cpu"


# What cannot be.


@pytest.mark.usefixtures("fresh")
def test_what_cannot_run_on_the_device_says_why(device: torch.device) -> None:
    accelerate = pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers")
    from transformers.quantizers.auto import get_hf_quantizer

    with pytest.raises(ValueError, match=rf"'fp8' computes .* and {device} is not one; use 'bf16'"):
        accelerate.Accelerator(mixed_precision="fp8")
    with pytest.raises(ValueError, match=f"the model is on {device}; use the model as it is"):
        torch.nn.DataParallel(torch.nn.Linear(2, 2).to(device))
    with pytest.raises(ValueError, match=f"a process for each copy .* of {device}; run the train"):
        torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2).to(device))
    config, fp8 = transformers.GPT2Config(), transformers.FineGrainedFP8Config()
    for place in ("auto", {"": device}):
        with pytest.raises(ValueError, match=rf"fp8 computes .* and {device} is not one; load"):
            get_hf_quantizer(config, fp8, place, True, {})
    assert get_hf_quantizer(config, None, "auto", True, {})[0] is None


def test_backward_on_a_local_gpu_says_that_it_cannot_and_what_can(choice: Choice) -> None:
    """With a stand-in for the engine of a machine with a GPU, which asserts so."""

    def engine(outputs: Any, *args: Any) -> Any:
        raise RuntimeError(
            "opt_ready_stream && opt_parent_stream INTERNAL ASSERT FAILED at "
            '"/pytorch/torch/csrc/autograd/engine.cpp":1084, please report a bug to PyTorch.'
        )

    graph = types.ModuleType("graph")
    graph._engine_run_backward = engine
    patches_of_torch.PATCHES["torch.autograd.graph"](graph, choice=choice)
    loss = types.SimpleNamespace(device=torch.device("cuda", 1))
    with pytest.raises(DeviceError) as caught:
        graph._engine_run_backward((loss,))
    assert str(caught.value) == (
        "backward on cuda:1: PyTorch's engine knows one accelerator in a process, and since "
        "compute.device() was called that is sky; use the same GPU through a pool: "
        "compute = sky.Compute(provider=sky.Local()) and compute.device('cuda:1')"
    )
    assert "opt_ready_stream" in str(caught.value.__cause__)


def test_other_errors_of_backward_stay_what_they_are(device: torch.device) -> None:
    assert torch.autograd._engine_run_backward is torch.autograd.graph._engine_run_backward
    assert torch.autograd._engine_run_backward.__wrapped__.__name__ == "_engine_run_backward"
    loss = torch.ones(2, device=device, requires_grad=True).sum()
    loss.backward()
    x = torch.ones(2, device=device, requires_grad=True)
    y = (x * x).sum()
    y.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.backward()
