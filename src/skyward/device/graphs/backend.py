"""`torch.compile(model, backend="sky")`: the name by which PyTorch finds the compiler."""

from __future__ import annotations

from typing import Any


def sky(
    graph: Any,
    inputs: Any,
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Any:
    """Have the worker compile a traced function of sky tensors.

    `mode` and `options` are those of Inductor, which does it there. A function without sky tensors
    runs as it is.

    >>> compiled = torch.compile(model, backend="sky", mode="reduce-overhead")
    """
    from torch._inductor import compile_fx, list_mode_options

    from skyward.device.core import core
    from skyward.device.libraries.torch import sky_device_of

    core()
    if sky_device_of(graph, inputs) is None:
        return graph
    patches = {**(list_mode_options(mode) if mode else {}), **(options or {})}
    return compile_fx.compile_fx(graph, inputs, config_patches=patches or None)
