"""A compute's device, under whatever name it is asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import skyward as sky
from skytorch.client import Compute

from ..conftest import other_case


@other_case
def test_a_training_step_runs_on_its_device(node: Compute) -> None:
    torch.manual_seed(0)
    local = torch.nn.Linear(4, 2)
    remote = torch.nn.Linear(4, 2)
    remote.load_state_dict(local.state_dict())
    remote.to(node.device("cuda"))
    x = torch.randn(8, 4)
    for model, data in ((local, x), (remote, x.to(node.device("cuda")))):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model(data).square().mean().backward()
        optimizer.step()

    assert remote.weight.device.type == "sky"
    torch.testing.assert_close(remote.weight.cpu(), local.weight)


def test_the_device_is_the_same_whatever_name_it_is_asked_by(
    node: Compute, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SKYWARD_DEVICE")
    best = "cuda" if torch.cuda.is_available() else "cpu"

    assert node.device(best) == node.device("auto") == node.device()


def test_a_device_has_a_type_and_an_index(node: Compute, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SKYWARD_DEVICE")

    assert node.device("cpu", 0) == node.device("cpu:0") == node.device(type="cpu", index=0)


@other_case
def test_a_device_that_the_node_lacks_is_named_with_its_index(
    node: Compute, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SKYWARD_DEVICE")

    with pytest.raises(sky.errors.ConfigurationError, match="has no 'cuda:97'"):
        node.device("cuda", 97)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("tpu",), r"device\('tpu'\): there is no such device; ask for 'auto', 'cpu', 'cuda'"),
        (("cuda:x",), r"device\('cuda:x'\): there is no such device"),
        (("cuda:",), r"device\('cuda:'\): there is no such device"),
        (("cuda:-1",), r"device\('cuda:-1'\): there is no such device"),
        (("cpu:0", 1), r"the index is there twice; write device\('cpu', 1\)"),
        (("a:b:c",), r"device\('a:b:c'\): there is no such device"),
        (("cuda:0:1",), r"device\('cuda:0:1'\): there is no such device"),
        (("",), r"device\(''\): there is no such device"),
        ((3,), r"device\(3\): there is no such device"),
        (
            ("cuda:1", 1),
            r"the index is there twice; write device\('cuda', 1\)",
        ),
        (("cuda", -1), r"device\('cuda', -1\): an index is a whole number, 0 or more"),
        (("cuda", "1"), r"device\('cuda', '1'\): an index is a whole number"),
        (("cpu", 1), r"device\('cpu', 1\): only 'cuda' devices are numbered"),
        (("auto", 0), r"device\('auto', 0\): only 'cuda' devices are numbered"),
    ],
)
def test_an_impossible_device_is_refused_without_asking_a_node(
    arguments: tuple[Any, ...], message: str
) -> None:
    # This compute has no node that could be asked.
    with pytest.raises(sky.errors.ConfigurationError, match=message) as refused:
        Compute(name="new").device(*arguments)
    assert isinstance(refused.value, RuntimeError), "as from torch.device"
