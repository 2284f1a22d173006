"""`torch.compile(model, backend="sky")`: the name by which PyTorch finds the compiler."""

from __future__ import annotations

from collections.abc import Sequence
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

    if sky_device_of(graph, inputs) is None:
        return graph
    patches = {**(list_mode_options(mode) if mode else {}), **(options or {})}
    return compile_fx.compile_fx(graph, inputs, config_patches=patches or None)


def sky_device_of(graph: Any, inputs: Sequence[Any]) -> Any:
    """The sky device that a traced graph uses, if any: it may make its tensors itself."""
    nodes = getattr(getattr(graph, "graph", None), "nodes", ())
    # Dynamo writes down one of the two, `make_fx` and `torch.export` the other.
    made = (node.meta.get(key) for node in nodes for key in ("example_value", "val"))
    values = [*inputs, *made]
    devices = (getattr(value, "device", None) for value in values)
    return next((device for device in devices if getattr(device, "type", "") == "sky"), None)
