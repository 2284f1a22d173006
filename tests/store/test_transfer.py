"""The ways people move a model between machines, each with a store between them."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import skyward as sky

from ..conftest import only_in_all

MODELS = """
import torch
import torch.nn as nn


class SimpleModel(nn.Module):
    def __init__(self):
        super(SimpleModel, self).__init__()
        self.linear = nn.Linear(10, 2)

    def forward(self, x):
        return self.linear(x)


class CustomModule(nn.Module):
    def __init__(self):
        super(CustomModule, self).__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x):
        return self.linear(x)


class ComplexModel(nn.Module):
    def __init__(self):
        super(ComplexModel, self).__init__()
        self.custom = CustomModule()
        self.linear = nn.Linear(5, 2)

    def forward(self, x):
        x = self.custom(x)
        return self.linear(x)
"""
"""The file that sender and receiver both have."""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """That file, imported."""
    (tmp_path / "models.py").write_text(MODELS)
    spec = importlib.util.spec_from_file_location("models", tmp_path / "models.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "models", module)
    spec.loader.exec_module(module)
    return module


def received(folder: Path, script: str, where: Path) -> str:
    """What a process on the receiving end prints."""
    text = f"import skyward as sky\nfile_server = sky.ModelStore({str(folder)!r})\n{script}"
    done = subprocess.run(
        [sys.executable, "-c", text], cwd=where, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_file_of_torch_save_goes_through_the_store(
    models, store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model, x = models.SimpleModel(), torch.randn(3, 10)
    torch.save(model.state_dict(), "model.pth")

    store.import_file("model.pth", "model.pth")
    store.export_file("model.pth", "received_model.pth")

    loaded_model = models.SimpleModel()
    loaded_model.load_state_dict(torch.load("received_model.pth"))
    loaded_model.eval()
    assert torch.equal(loaded_model(x), model(x))


@only_in_all
def test_a_model_of_custom_modules_is_loaded_by_another_process(
    models, store, folder: Path, tmp_path: Path
) -> None:
    model = models.ComplexModel()
    store.save_model(model.state_dict(), "complex")
    right = model(torch.arange(5.0)).tolist()

    script = (
        "from models import *\n"
        "loaded_model = ComplexModel()\n"
        "loaded_model.load_state_dict(file_server.load_model('complex'))\n"
        "loaded_model.eval()\n"
        "print(loaded_model(torch.arange(5.0)).tolist())\n"
    )
    assert received(folder, script, tmp_path) == f"{right}\n"


def test_a_model_that_is_defined_otherwise_is_told_how(models, store) -> None:
    class ComplexModel(nn.Module):
        """As it was before its custom module was renamed."""

        def __init__(self) -> None:
            super().__init__()
            self.costum = models.CustomModule()
            self.linear = nn.Linear(5, 2)

    store.save_model(models.ComplexModel(), "complex")

    with pytest.raises(sky.errors.ModelMismatchError) as caught:
        store.load_model("complex", into=ComplexModel())

    told = str(caught.value)
    assert "costum.linear.weight  [5, 5] float32; nearest: custom.linear.weight" in told
    assert "unexpected, not in the model" in told


def test_a_large_model_is_kept_by_a_file_server(models, store, folder: Path) -> None:
    file_server, model = store, models.SimpleModel()
    file_server.save_model(model.state_dict(), "large_model.pth")

    loaded_model = models.SimpleModel()
    loaded_model.load_state_dict(sky.ModelStore(folder).load_model("large_model.pth"))
    loaded_model.eval()

    assert torch.equal(loaded_model.linear.weight, model.linear.weight)
    (version,) = file_server.versions("large_model.pth")
    assert version.torch == torch.__version__
