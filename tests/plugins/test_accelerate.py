"""Accelerate on a pool: `Accelerator()` has its settings and sees the process group."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest

import skyward as sky
from skyward.context import InstanceInfo
from skyward.errors import ConfigurationError
from skyward.plugins.frameworks.accelerate import compute_where_the_node_can

pytest.importorskip("accelerate", reason="accelerate is not installed")

QUIET = sky.Options(console=False)
Sharing = Callable[[sky.Compute], AbstractContextManager[sky.Compute]]


@pytest.fixture(scope="module")
def pool(sharing: Sharing) -> Iterator[sky.Compute]:
    """Two nodes with settings for Accelerate."""
    settings = sky.plugins.accelerate(mixed_precision="bf16", gradient_accumulation_steps=2)
    plugins = [sky.plugins.torch(), settings]
    with sharing(sky.Compute(nodes=2, plugins=plugins, options=QUIET)) as compute:
        yield compute


@sky.function
def train() -> dict[str, Any]:
    import accelerate
    import torch

    accelerator = accelerate.Accelerator()
    torch.manual_seed(accelerator.process_index)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, torch.utils.data.DataLoader(data, batch_size=8)
    )
    steps = 0
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        steps += accelerator.sync_gradients
    return {
        "rank": (accelerator.process_index, accelerator.num_processes),
        "kind": accelerator.distributed_type.name,
        "precision": accelerator.mixed_precision,
        "batches": len(loader),
        "steps": steps,
        "weights": [p.detach().tolist() for p in model.parameters()],
    }


def test_an_accelerator_is_distributed_and_has_its_settings(pool: sky.Compute) -> None:
    first, second = train() @ pool

    assert (first["rank"], second["rank"]) == ((0, 2), (1, 2))
    assert first["kind"] == "MULTI_CPU"
    assert first["precision"] == "bf16"
    assert (first["batches"], first["steps"]) == (4, 2)
    assert first["weights"] == second["weights"]


@pytest.mark.parametrize(
    ("plugin", "expected"),
    [
        (sky.plugins.accelerate(), {"ACCELERATE_USE_CPU": "true"}),
        (
            sky.plugins.accelerate(
                mixed_precision="fp16", gradient_accumulation_steps=4, cpu=False
            ),
            {
                "ACCELERATE_MIXED_PRECISION": "fp16",
                "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",
                "ACCELERATE_USE_CPU": "false",
            },
        ),
    ],
)
def test_only_what_is_given_is_set(plugin: sky.Plugin, expected: dict[str, str]) -> None:
    @sky.function
    def settings() -> dict[str, str]:
        return {name: value for name, value in os.environ.items() if name.startswith("ACCELERATE_")}

    with sky.Compute(plugins=[plugin], options=QUIET) as compute:
        assert settings() >> compute == expected


def test_a_node_with_accelerators_uses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)

    compute_where_the_node_can(InstanceInfo(accelerators=1))

    assert "ACCELERATE_USE_CPU" not in os.environ


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mixed_precision": "int8"}, r"mixed_precision='int8'\): choose 'no', 'fp16'"),
        ({"gradient_accumulation_steps": 0}, r"gradient_accumulation_steps=0\): give a whole"),
        ({"cpu": "yes"}, r"cpu='yes'\): give True, False"),
    ],
)
def test_settings_are_checked(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        sky.plugins.accelerate(**arguments)


def test_the_image_gets_accelerate() -> None:
    assert sky.Compute(plugins=[sky.plugins.accelerate()])._spec.request.image.pip == (
        "accelerate",
    )
