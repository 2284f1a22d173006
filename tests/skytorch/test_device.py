"""A compute's device, under whatever name it is asked for."""

from __future__ import annotations

import pytest
import torch

import skyward as sky
from skytorch.client import Compute


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


def test_asking_for_what_no_device_is_called_names_what_there_is(
    node: Compute, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SKYWARD_DEVICE")

    with pytest.raises(sky.ConfigurationError, match="has no 'tpu', it has cpu"):
        node.device("tpu")
