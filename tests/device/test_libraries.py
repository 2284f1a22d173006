"""Libraries that look for a device find an open sky device, or say in one line why they cannot."""

from __future__ import annotations

import importlib
import itertools
import os
import subprocess
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward.device import operators
from skyward.device.core import core
from skyward.device.libraries import Choice, Patches, wrap, wrap_property
from skyward.device.libraries import torch as patches_of_torch
from skyward.errors import DeviceError

from ..conftest import Sharing, only_in_all, other_case

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
    monkeypatch.setattr("skyward.device.libraries.USERS", {"peft_user"})
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


@only_in_all
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


@only_in_all
def test_arguments_of_a_trainer_choose_the_device_and_allow_bf16(
    device: torch.device, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")

    ours = transformers.TrainingArguments(str(tmp_path), bf16=True, report_to=[])
    assert (ours.device, ours.n_gpu) == (device, 1)
    told = transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    assert told.device.type == "cpu"


# What cannot be.


@other_case
@pytest.mark.usefixtures("fresh")
def test_what_cannot_run_on_the_device_says_why(device: torch.device) -> None:
    accelerate = pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers")
    from transformers.quantizers.auto import get_hf_quantizer

    with pytest.raises(ValueError, match=rf"'fp8' computes .* and {device} is not one; use 'bf16'"):
        accelerate.Accelerator(mixed_precision="fp8")
    with pytest.raises(ValueError, match=f"the model is on {device}; use the model as it is"):
        torch.nn.DataParallel(torch.nn.Linear(2, 2).to(device))
    with pytest.raises(ValueError, match=f"a process for each copy .* of {device}; use mesh.repl"):
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


FOREIGN = """
import sys

import torch

library = torch.library.Library("foreign", "DEF")
library.define("scaled(Tensor x, float by) -> Tensor")
library.define("above(Tensor x, float least) -> Tensor")
library.define("increase_(Tensor(a!) x, int by) -> ()")
library.define("halves(Tensor x) -> (Tensor, Tensor[])")
library.define("counted(Tensor x) -> (Tensor, int)")
library.define("first(Tensor(a) x) -> Tensor(a)")
library.define("on(Tensor x, Device device) -> Tensor")
library.define("numbers(Tensor x, int?[] by) -> Tensor")
is_client = "skyward.device.worker" not in " ".join(sys.orig_argv)
library.define("newer(Tensor x) -> Tensor" if is_client else "newer(Tensor x, int a=1) -> Tensor")


@torch.library.impl(library, "scaled", "CPU")
def scaled(x, by):
    return torch.from_numpy(x.numpy() * by)


@torch.library.register_fake("foreign::scaled", lib=library)
def _(x, by):
    return torch.empty_like(x)


def setup_context(ctx, inputs, output):
    ctx.by = inputs[1]


def backward(ctx, gradient):
    return torch.ops.foreign.scaled(gradient, ctx.by), None


torch.library.register_autograd(
    "foreign::scaled", backward, setup_context=setup_context, lib=library
)


@torch.library.impl(library, "above", "CPU")
def above(x, least):
    return x[x > least]


@torch.library.register_fake("foreign::above", lib=library)
def _(x, least):
    return x.new_empty(torch.library.get_ctx().new_dynamic_size())


@torch.library.impl(library, "increase_", "CPU")
def increase_(x, by):
    x += by


@torch.library.impl(library, "halves", "CPU")
def halves(x):
    return x.sum(), [half.clone() for half in x.chunk(2)]


@torch.library.impl(library, "counted", "CPU")
def counted(x):
    return x.clone(), int(x.sum())


@torch.library.register_fake("foreign::counted", lib=library)
def _(x):
    return torch.empty_like(x), 0


@torch.library.impl(library, "first", "CPU")
def first(x):
    return x[:1]


@torch.library.impl(library, "on", "CPU")
def on(x, device):
    assert x.device == device
    return x + 1


@torch.library.custom_op("foreign::reversed", mutates_args=(), device_types="cpu")
def reversed(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(x.numpy()[::-1].copy())
"""

COMPILED = """
#include <ATen/ATen.h>
#include <torch/library.h>

at::Tensor doubled(const at::Tensor& x) { return x * 2; }

std::tuple<at::Tensor, int64_t> positive(const at::Tensor& x) {
  auto kept = x.index({x > 0});
  return {kept, kept.numel()};
}

TORCH_LIBRARY(of_cpp, m) {
  m.def("doubled(Tensor x) -> Tensor");
  m.def("positive(Tensor x) -> (Tensor, int)");
}
TORCH_LIBRARY_IMPL(of_cpp, CPU, m) {
  m.impl("doubled", &doubled);
  m.impl("positive", &positive);
}
"""

APART = """
import torch

torch.library.define("apart::twice", "(Tensor x) -> Tensor")


@torch.library.impl("apart::twice", "cpu")
def twice(x):
    return 2 * x
"""


@pytest.fixture(scope="module")
def with_library(
    tmp_path_factory: pytest.TempPathFactory, sharing: Sharing
) -> Iterator[torch.device]:
    """A device of a node that has a library which registers operators, as the client has."""
    folder = tmp_path_factory.mktemp("library")
    (folder / "foreign_operators.py").write_text(FOREIGN)
    (folder / "apart").mkdir()
    (folder / "apart" / "__init__.py").touch()
    (folder / "apart" / "operators.py").write_text(APART)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        library = importlib.import_module("foreign_operators").library
        importlib.import_module("apart.operators")
        with sharing(sky.Compute(options=sky.Options(console=False))) as compute:
            yield compute.device("cpu")
        library._destroy()


def test_an_operator_of_another_library_runs_on_the_node(with_library: torch.device) -> None:
    x = torch.arange(4.0).to(with_library).requires_grad_()
    y = torch.ops.foreign.scaled(x, 2.5)
    y.sum().backward()
    assert (y.device, y.tolist()) == (with_library, [0.0, 2.5, 5.0, 7.5])
    assert x.grad.tolist() == [2.5] * 4
    total, (first, second) = torch.ops.foreign.halves(x.detach())
    assert (total.item(), first.tolist(), second.tolist()) == (6.0, [0.0, 1.0], [2.0, 3.0])
    assert torch.ops.foreign.reversed(x.detach()).tolist() == [3.0, 2.0, 1.0, 0.0]


def test_what_an_operator_returns_is_asked_every_time_unless_its_library_says_it(
    with_library: torch.device,
) -> None:
    foreign, x = torch.ops.foreign, torch.zeros(3, device=with_library)

    def asked(call: Callable[[], Any]) -> int:
        call()
        before = sky.device_stats(with_library).asked
        for _ in range(4):
            call()
        return sky.device_stats(with_library).asked - before

    assert asked(lambda: foreign.scaled(x, 2.0)) == 0
    factors = itertools.count(2.5)
    assert asked(lambda: foreign.scaled(x, next(factors))) == 0
    assert asked(lambda: foreign.increase_(x, 1)) == 0
    assert asked(lambda: foreign.above(x, 4.5)) == 4
    assert foreign.above(x, 4.5).tolist() == [5.0, 5.0, 5.0]
    x[1] = 0.0
    assert foreign.above(x, 4.5).tolist() == [5.0, 5.0]
    assert foreign.above(x, 9.5).tolist() == []


def test_a_package_of_the_operators_name_does_not_hide_the_module_that_registers_it(
    with_library: torch.device,
) -> None:
    assert torch.ops.apart.twice(torch.ones(2, device=with_library)).tolist() == [2.0, 2.0]


def test_a_number_that_an_operator_returns_is_that_of_the_call(with_library: torch.device) -> None:
    made = [torch.full((4,), float(k)).to(with_library) for k in range(3)]
    assert [torch.ops.foreign.counted(x)[1] for x in made] == [0, 4, 8]


def test_an_operator_that_has_a_device_for_an_argument_runs_on_the_node(
    with_library: torch.device,
) -> None:
    x = torch.zeros(2, device=with_library)
    for device in (with_library, "cpu"):
        assert torch.ops.foreign.on(x, torch.device(device)).tolist() == [1.0, 1.0]


def test_an_operator_of_another_version_on_the_node_is_an_error_of_that_call(
    with_library: torch.device,
) -> None:
    x = torch.zeros(2, device=with_library)
    with pytest.raises(NotImplementedError) as refused:
        torch.ops.foreign.newer(x)
    assert str(refused.value) == (
        "foreign::newer is (Tensor, int) -> (Tensor) on the node and (Tensor) -> (Tensor) in the "
        "client; install the version of its library that the client has"
    )
    with pytest.raises(NotImplementedError, match="numbers has an argument that cannot travel"):
        torch.ops.foreign.numbers(x, [1])
    assert x.tolist() == [0.0, 0.0]


def test_a_view_by_another_library_is_refused(with_library: torch.device) -> None:
    with pytest.raises(NotImplementedError, match=r"foreign::first returns a view.* clone the"):
        torch.ops.foreign.first(torch.zeros(2, device=with_library))


def test_the_package_that_has_a_compiled_library_in_it_is_found() -> None:
    assert list(operators._package_around(__file__)) == [__package__]


@only_in_all
def test_an_operator_that_is_registered_in_cpp_runs_on_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sharing: Sharing
) -> None:
    """Compiles it, and starts a pool whose node finds it: half a minute."""
    from torch.utils import cpp_extension

    package = tmp_path / "compiled_operators"
    package.mkdir()
    (package / "operators.cpp").write_text(COMPILED)
    options = [
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        *(f"-I{folder}" for folder in cpp_extension.include_paths()),
        f"-L{Path(torch.__file__).with_name('lib')}",
        *("-std=c++20", "-shared", "-fPIC", "-ltorch_cpu", "-lc10"),
    ]
    compiler = os.environ.get("CXX", "c++")
    command = [compiler, "operators.cpp", "-o", "operators.so", *options]
    subprocess.run(command, check=True, cwd=package)
    (package / "__init__.py").write_text(
        "import pathlib, torch\n"
        'torch.ops.load_library(pathlib.Path(__file__).with_name("operators.so"))\n'
    )
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("compiled_operators")
    with sharing(sky.Compute(options=sky.Options(console=False))) as compute:
        x = torch.arange(4.0).to(compute.device("cpu"))
        assert torch.ops.of_cpp.doubled(x).tolist() == [0.0, 2.0, 4.0, 6.0]
        kept, count = torch.ops.of_cpp.positive(x)
        assert (kept.tolist(), count) == ([1.0, 2.0, 3.0], 3)


@only_in_all
def test_a_compiled_graph_has_operators_of_another_library(with_library: torch.device) -> None:
    torch.compiler.reset()

    @torch.compile
    def compiled(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.foreign.scaled(x + 1, 3.0) - 1

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compiled(torch.arange(3.0).to(with_library)).tolist() == [2.0, 5.0, 8.0]


@pytest.mark.parametrize(
    ("installed", "advice"),
    [
        (True, 'install it there, for example with sky.Image(pip=["Of-another-name"])'),
        (False, "send it along with sky.Image(includes=[...])"),
    ],
)
def test_a_library_that_the_node_does_not_have_is_named(
    device: torch.device,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    installed: bool,
    advice: str,
) -> None:
    """The node of `device` has the folders that were on the path when its pool began."""
    (tmp_path / "only_here.py").write_text(
        'import torch\nlibrary = torch.library.Library("elsewhere", "DEF")\n'
        'library.define("op(Tensor x) -> Tensor")\n'
    )
    if installed:
        folder = tmp_path / "of_another_name-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: Of-another-name\n")
        (folder / "top_level.txt").write_text("only_here\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "only_here", raising=False)
    library = importlib.import_module("only_here").library
    with pytest.raises(NotImplementedError) as refused:
        torch.ops.elsewhere.op(torch.ones(2, device=device))
    assert str(refused.value) == (
        "elsewhere::op is not known to the worker: the node has no 'only_here', which registers "
        f"it; {advice}"
    )
    assert torch.ones(2, device=device).sum().item() == 2.0
    library._destroy()


def test_an_operator_that_is_defined_again_is_looked_at_again(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a notebook's cell that is run again: with fewer arguments, and from elsewhere."""
    monkeypatch.syspath_prepend(tmp_path)
    x = torch.ones(2, device=device)
    for module, schema, arguments in (
        ("defines_first", "op(Tensor x, Tensor y, int z) -> Tensor", (x, x, 1)),
        ("defines_second", "op(Tensor x) -> Tensor", (x,)),
    ):
        (tmp_path / f"{module}.py").write_text(
            'import torch\nlibrary = torch.library.Library("defined_again", "DEF")\n'
            f'library.define("{schema}")\n'
        )
        library = importlib.import_module(module).library
        with pytest.raises(NotImplementedError, match=f"the node has no '{module}'"):
            torch.ops.defined_again.op(*arguments)
        library._destroy()


def test_an_operator_that_the_program_itself_registers_says_where_to_put_it(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def op(x: torch.Tensor) -> torch.Tensor:
        return x

    monkeypatch.setattr(op, "__module__", "__main__")
    monkeypatch.setitem(op.__annotations__, "x", torch.Tensor)
    monkeypatch.setitem(op.__annotations__, "return", torch.Tensor)
    torch.library.custom_op("of_program::op", op, mutates_args=(), device_types="cpu")
    with pytest.raises(NotImplementedError, match=r"program itself registers it.*of its own"):
        torch.ops.of_program.op(torch.ones(2, device=device))
