"""Accelerate: `Accelerator()` finds its settings and the process group where it looks for them."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from typing import Literal, get_args

from skyward.context import InstanceInfo
from skyward.errors import ConfigurationError
from skyward.plugins.packages import check_installed, extended
from skyward.plugins.plugin import Cluster, Plugin
from skyward.spec import Image

Precision = Literal["no", "fp16", "bf16", "fp8"]
PRECISIONS: tuple[str, ...] = get_args(Precision)


def accelerate(
    mixed_precision: Precision | None = None,
    gradient_accumulation_steps: int = 1,
    cpu: bool | None = None,
) -> Plugin:
    """Install Accelerate and give every `Accelerator()` its settings.

    An argument that is None or 1 is left to the function. `cpu=None` means the CPU on nodes that
    have no accelerator. With `sky.plugins.torch()`, training is distributed over all workers.

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
    settings: dict[str, str] = {}
    if mixed_precision is not None:
        settings["ACCELERATE_MIXED_PRECISION"] = mixed_precision
    if steps > 1:
        # Accelerate heeds this more than what the function says.
        settings["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = str(steps)
    if cpu is not None:
        settings["ACCELERATE_USE_CPU"] = str(cpu).lower()
    return (
        Plugin.create("accelerate")
        .with_transform(_install)
        .with_around_process(functools.partial(_set_up, settings))
    )


def _install(image: Image, cluster: Cluster) -> Image:
    return extended(image, ["accelerate"])


@contextlib.contextmanager
def _set_up(settings: dict[str, str], info: InstanceInfo) -> Iterator[None]:
    check_installed("accelerate")
    os.environ.update(settings)
    compute_where_the_node_can(info)
    yield


def compute_where_the_node_can(info: InstanceInfo) -> None:
    """Say that there is no accelerator: Accelerate ignores a process group of CPUs otherwise."""
    if not info.accelerators:
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")
