"""Accelerate on a pool: `Accelerator()` has its settings and sees the process group."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pytest

import skyward as sky
from skyward.context import InstanceInfo
from skyward.errors import ConfigurationError
from skyward.plugins.frameworks.accelerate import compute_where_the_node_can, variables
from skyward.plugins.plugin import entered

from ..conftest import only_in_all

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


@only_in_all
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


FSDP = {
    "mixed_precision": "bf16",
    "num_processes": 8,
    "fsdp": {"sharding_strategy": "SHARD_GRAD_OP", "use_orig_params": True},
}


class TestConfig:
    """FSDP and DeepSpeed need accelerators, so here the settings arrive and no model is divided."""

    @only_in_all
    def test_the_settings_of_fsdp_reach_accelerate(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from accelerate.utils import FullyShardedDataParallelPlugin

        everyone, group = variables(FSDP)
        for name, value in {**everyone, **group}.items():
            monkeypatch.setenv(name, value)

        made = FullyShardedDataParallelPlugin()

        assert os.environ["ACCELERATE_USE_FSDP"] == "true"
        assert os.environ["ACCELERATE_MIXED_PRECISION"] == "bf16"
        assert made.sharding_strategy.name == "SHARD_GRAD_OP"
        assert made.use_orig_params is True

    def test_the_settings_of_deepspeed_reach_accelerate(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from accelerate.utils import DeepSpeedPlugin

        _, group = variables(
            {
                "distributed_type": "DEEPSPEED",
                "deepspeed_config": {
                    "zero_stage": 3,
                    "offload_param_device": "cpu",
                    "zero3_save_16bit_model": True,
                    "gradient_clipping": 0.5,
                },
            }
        )
        for name, value in group.items():
            monkeypatch.setenv(name, value)

        made = DeepSpeedPlugin()

        assert os.environ["ACCELERATE_USE_DEEPSPEED"] == "true"
        assert (made.zero_stage, made.offload_param_device) == (3, "cpu")
        assert made.zero3_save_16bit_model is True
        assert made.gradient_clipping == 0.5

    def test_a_file_of_accelerate_config_and_the_short_form_mean_the_same(self) -> None:
        file = {
            "compute_environment": "LOCAL_MACHINE",
            "distributed_type": "FSDP",
            "fsdp_config": {"fsdp_sharding_strategy": "FULL_SHARD", "fsdp_offload_params": False},
            "machine_rank": 0,
        }
        short = {"fsdp": {"sharding_strategy": "FULL_SHARD", "offload_params": False}}

        assert variables(file) == variables(short)

    @only_in_all
    def test_on_processors_every_worker_holds_the_model_whatever_the_section_says(
        self, sharing: Sharing, capsys: pytest.CaptureFixture[str]
    ) -> None:
        config = {**FSDP, "fsdp": {"sync_module_states": True, "cpu_ram_efficient_loading": True}}
        plugins = [sky.plugins.torch(), sky.plugins.accelerate(config=config)]
        with sharing(sky.Compute(nodes=2, plugins=plugins, options=QUIET)) as compute:
            seen = train() @ compute

        assert [(each["kind"], each["precision"]) for each in seen] == [("MULTI_CPU", "bf16")] * 2
        assert "every worker holds the whole model" in capsys.readouterr().err

    def test_workers_with_accelerators_get_the_settings_of_the_group(self) -> None:
        around = sky.plugins.accelerate(config=FSDP).around_process
        assert around is not None
        with (
            mock.patch.dict(os.environ),
            entered(around, InstanceInfo(total_nodes=2, accelerators=1)),
        ):
            assert os.environ["FSDP_SHARDING_STRATEGY"] == "SHARD_GRAD_OP"
            assert os.environ["ACCELERATE_USE_FSDP"] == "true"

    def test_accumulation_of_gradients_counts_without_deepspeed_too(self) -> None:
        everyone, _ = variables({"deepspeed": {"gradient_accumulation_steps": 4}})
        assert everyone == {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}

    def test_deepspeed_that_is_not_installed_is_named(self) -> None:
        pytest.importorskip("accelerate")
        plugin = sky.plugins.accelerate(config={"deepspeed": {"zero_stage": 2}})
        assert plugin.around_process is not None

        with (
            pytest.raises(ModuleNotFoundError, match=r"deepspeed is not installed.*pip=\["),
            entered(plugin.around_process, InstanceInfo(total_nodes=2, accelerators=1)),
        ):
            raise AssertionError("entered")

    def test_a_group_needs_the_torch_plugin(self) -> None:
        fsdp = sky.plugins.accelerate(config=FSDP)

        with pytest.raises(ConfigurationError, match=r"needs 'torch' before it; write plugins=\["):
            sky.Compute(plugins=[fsdp])
        with pytest.raises(ConfigurationError, match="needs 'torch' before it"):
            sky.Compute(plugins=[fsdp, sky.plugins.torch()])

    @pytest.mark.parametrize(
        ("config", "message"),
        [
            ("fsdp.yaml", r"give a dict, such as"),
            ({"fdsp": {}}, r"'fdsp': \.\.\.\}\): no such setting; there are .*fsdp"),
            ({"fsdp": {"shard": 1}}, r"'fsdp\.shard'.*sharding_strategy"),
            ({"fsdp": "FULL_SHARD"}, r"give a dict of its settings"),
            ({"fsdp": {}, "deepspeed": {}}, r"both 'fsdp' and 'deepspeed'; keep one"),
            ({"distributed_type": "TPU"}, r"choose NO, MULTI_CPU"),
            ({"distributed_type": "FSDP", "deepspeed": {}}, r"drop one of the two"),
            ({"mixed_precision": "fp4"}, r"choose 'no', 'fp16'"),
        ],
    )
    def test_settings_that_are_none_are_refused(self, config: Any, message: str) -> None:
        with pytest.raises(ConfigurationError, match=message):
            sky.plugins.accelerate(config=config)
