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
from skyward.plugins.frameworks.accelerate_config import variables
from skyward.plugins.packages import check_installed, extended
from skyward.plugins.plugin import Cluster, Plugin
from skyward.spec import Image

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
        .with_transform(functools.partial(_install, packages))
        .with_around_process(functools.partial(_set_up, settings, group)),
        needs=("torch",) if group else (),
    )


def _install(packages: list[str], image: Image, cluster: Cluster) -> Image:
    return extended(image, packages)


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
