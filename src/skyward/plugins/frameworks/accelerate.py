"""Accelerate: `Accelerator()` finds its settings and the process group where it looks for them."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal, get_args

from skyward.context import InstanceInfo
from skyward.errors import ConfigurationError
from skyward.plugins.plugin import Plugin, check_installed, installing

Precision = Literal["no", "fp16", "bf16", "fp8"]
PRECISIONS: tuple[str, ...] = get_args(Precision)


def accelerate(
    mixed_precision: Precision | None = None,
    gradient_accumulation_steps: int = 1,
    cpu: bool | None = None,
    *,
    config: Mapping[str, Any] | None = None,
) -> Plugin:
    """Install Accelerate and give every `Accelerator()` its settings.

    An argument that is None or 1 is left to the function. `cpu=None` means the CPU on nodes that
    have no accelerator. With `sky.plugins.torch()`, training is distributed over all workers.

    `config` has the settings that `accelerate config` writes, and is how FSDP and DeepSpeed are
    chosen: `{"fsdp": {...}}` or `{"deepspeed": {...}}`; these need `sky.plugins.torch()` as well.
    What it says of machines and processes is passed over, since the pool decides that.

    >>> plugins = [sky.plugins.torch(), sky.plugins.accelerate(mixed_precision="bf16")]
    """
    if mixed_precision not in (None, *PRECISIONS):
        raise ConfigurationError(
            f"sky.plugins.accelerate(mixed_precision={mixed_precision!r}): choose "
            f"{', '.join(map(repr, PRECISIONS))}, or None to leave it to the function"
        )
    steps = gradient_accumulation_steps
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ConfigurationError(
            f"sky.plugins.accelerate(gradient_accumulation_steps={steps!r}): give a whole number, "
            "1 or more"
        )
    if cpu not in (None, True, False):
        raise ConfigurationError(
            f"sky.plugins.accelerate(cpu={cpu!r}): give True, False, or None for whichever fits "
            "the hardware"
        )
    settings, group = ({}, {}) if config is None else variables(config)
    chosen = settings.get("ACCELERATE_MIXED_PRECISION")
    if chosen not in (None, *PRECISIONS):
        raise ConfigurationError(
            f"sky.plugins.accelerate(config={{'mixed_precision': {chosen!r}}}): choose "
            f"{', '.join(map(repr, PRECISIONS))}"
        )
    if mixed_precision is not None:
        settings["ACCELERATE_MIXED_PRECISION"] = mixed_precision
    if steps > 1:
        # Accelerate heeds this more than what the function says.
        settings["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = str(steps)
    if cpu is not None:
        settings["ACCELERATE_USE_CPU"] = str(cpu).lower()
    packages = ["accelerate"]
    if "ACCELERATE_USE_DEEPSPEED" in group:
        packages.append("deepspeed")
    return replace(
        Plugin.create("accelerate")
        .with_transform(installing(packages))
        .with_around_process(functools.partial(_set_up, settings, group)),
        needs=("torch",) if group else (),
    )


@contextlib.contextmanager
def _set_up(settings: dict[str, str], group: dict[str, str], info: InstanceInfo) -> Iterator[None]:
    check_installed("accelerate")
    os.environ.update(settings)
    # One worker alone has no group to share a model with.
    if group and info.total_workers > 1:
        if info.accelerators:
            if "ACCELERATE_USE_DEEPSPEED" in group:
                check_installed("deepspeed")
            # Before any task: the first `PartialState` of a process reads them, and never again.
            os.environ.update(group)
        elif info.is_head:
            # The settings stay away: `Accelerator()` refuses some of them on processors.
            print(
                "skyward: Accelerate has FSDP and DeepSpeed on accelerators alone; on these nodes "
                "every worker holds the whole model (DistributedDataParallel)",
                file=sys.stderr,
            )
    compute_where_the_node_can(info)
    yield


def compute_where_the_node_can(info: InstanceInfo) -> None:
    """Say that there is no accelerator: Accelerate ignores a process group of CPUs otherwise."""
    if not info.accelerators:
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")


TOPOLOGY = frozenset(
    {
        "compute_environment",
        "machine_rank",
        "main_process_ip",
        "main_process_port",
        "main_training_function",
        "num_machines",
        "num_processes",
        "rdzv_backend",
        "same_network",
        "use_cpu",
    }
)
"""What the pool decides; a file of `accelerate config` has them, and they are passed over."""

_KINDS = ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP", "DEEPSPEED")

_STEPS = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"

_PLAIN = {
    "debug": "ACCELERATE_DEBUG_MODE",
    "downcast_bf16": "ACCELERATE_DOWNCAST_BF16",
    "enable_cpu_affinity": "ACCELERATE_CPU_AFFINITY",
    "gradient_accumulation_steps": _STEPS,
    "mixed_precision": "ACCELERATE_MIXED_PRECISION",
    "num_cpu_threads_per_process": "OMP_NUM_THREADS",
}

_FSDP = {
    "version": "FSDP_VERSION",
    "activation_checkpointing": "FSDP_ACTIVATION_CHECKPOINTING",
    "auto_wrap_policy": "FSDP_AUTO_WRAP_POLICY",
    "backward_prefetch": "FSDP_BACKWARD_PREFETCH",
    "cpu_ram_efficient_loading": "FSDP_CPU_RAM_EFFICIENT_LOADING",
    "forward_prefetch": "FSDP_FORWARD_PREFETCH",
    "ignored_modules": "FSDP_IGNORED_MODULES",
    "min_num_params": "FSDP_MIN_NUM_PARAMS",
    "offload_params": "FSDP_OFFLOAD_PARAMS",
    "reshard_after_forward": "FSDP_RESHARD_AFTER_FORWARD",
    "sharding_strategy": "FSDP_SHARDING_STRATEGY",
    "state_dict_type": "FSDP_STATE_DICT_TYPE",
    "sync_module_states": "FSDP_SYNC_MODULE_STATES",
    "transformer_layer_cls_to_wrap": "FSDP_TRANSFORMER_CLS_TO_WRAP",
    "use_orig_params": "FSDP_USE_ORIG_PARAMS",
}

_DEEPSPEED = {
    "config_file": "ACCELERATE_DEEPSPEED_CONFIG_FILE",
    "gradient_accumulation_steps": _STEPS,
    "gradient_clipping": "ACCELERATE_GRADIENT_CLIPPING",
    "moe_layer_cls_names": "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES",
    "offload_optimizer_device": "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
    "offload_optimizer_nvme_path": "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH",
    "offload_param_device": "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE",
    "offload_param_nvme_path": "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH",
    "zero3_init_flag": "ACCELERATE_DEEPSPEED_ZERO3_INIT",
    "zero3_save_16bit_model": "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL",
    "zero_stage": "ACCELERATE_DEEPSPEED_ZERO_STAGE",
}

_SECTIONS = {
    "fsdp": ("FSDP", _FSDP, "ACCELERATE_USE_FSDP"),
    "deepspeed": ("DEEPSPEED", _DEEPSPEED, "ACCELERATE_USE_DEEPSPEED"),
}


def variables(config: object) -> tuple[dict[str, str], dict[str, str]]:
    """The variables for every worker, and those for a group of several with accelerators alone.

    `config` is what `accelerate config` writes, as a dict. Its sections may be called `fsdp` and
    `deepspeed`, and their keys may come without the prefix.

    >>> variables({"mixed_precision": "bf16", "fsdp": {"sharding_strategy": "FULL_SHARD"}})[1]
    {'ACCELERATE_USE_FSDP': 'true', 'FSDP_SHARDING_STRATEGY': 'FULL_SHARD'}
    """
    if not isinstance(config, Mapping):
        raise ConfigurationError(
            f"sky.plugins.accelerate(config={config!r}): give a dict, such as "
            "{'mixed_precision': 'bf16', 'fsdp': {'sharding_strategy': 'FULL_SHARD'}}"
        )
    plain: dict[str, Any] = {}
    group: dict[str, str] = {}
    kind = str(config.get("distributed_type", "")).upper()
    if kind and kind not in _KINDS:
        raise _refused("distributed_type", config["distributed_type"], _KINDS)
    for key, value in config.items():
        section = str(key).removesuffix("_config")
        if section in _SECTIONS:
            if group:
                raise ConfigurationError(
                    "sky.plugins.accelerate(config={...}): it has both 'fsdp' and 'deepspeed'; "
                    "keep one"
                )
            group = _section(str(key), section, value, kind)
        elif key not in TOPOLOGY and key != "distributed_type":
            if key not in _PLAIN:
                raise _unknown(str(key), [*_PLAIN, *_SECTIONS])
            plain[_PLAIN[key]] = value
    if kind in ("FSDP", "DEEPSPEED") and not group:
        group = {f"ACCELERATE_USE_{kind}": "true"}
    if _STEPS in group:
        # DeepSpeed's section has it, too, but it means the same without a group.
        plain[_STEPS] = group.pop(_STEPS)
    return {name: _text(value) for name, value in plain.items()}, group


def _section(key: str, section: str, given: object, kind: str) -> dict[str, str]:
    name, known, switch = _SECTIONS[section]
    if not isinstance(given, Mapping):
        raise ConfigurationError(
            f"sky.plugins.accelerate(config={{{key!r}: {given!r}}}): give a dict of its settings"
        )
    if kind and kind != name:
        raise ConfigurationError(
            f"sky.plugins.accelerate(config={{'distributed_type': {kind!r}, {key!r}: ...}}): the "
            f"section is for {name!r}; drop one of the two"
        )
    found = {switch: "true"}
    for setting, value in given.items():
        bare = str(setting).removeprefix(f"{section}_")
        if bare not in known:
            raise _unknown(f"{key}.{setting}", list(known))
        found[known[bare]] = _text(value)
    return found


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _unknown(key: str, known: list[str]) -> ConfigurationError:
    return ConfigurationError(
        f"sky.plugins.accelerate(config={{{key!r}: ...}}): no such setting; there are "
        f"{', '.join(sorted(known))}"
    )


def _refused(key: str, value: object, known: tuple[str, ...]) -> ConfigurationError:
    return ConfigurationError(
        f"sky.plugins.accelerate(config={{{key!r}: {value!r}}}): choose {', '.join(known)}"
    )
