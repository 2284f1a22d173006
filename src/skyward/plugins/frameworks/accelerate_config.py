"""The settings of `accelerate config` as the variables that Accelerate reads in a worker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyward.errors import ConfigurationError

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
