"""The operations by which a client ships graphs and runs them: both ends know them by name.

To the device's core they are operations like any other: their arguments and results are slots, and
a call costs one record.
"""

from __future__ import annotations

from functools import cache
from typing import Any

NAMESPACE = "skyward"
SCHEMAS = (
    # Gives a graph to the worker, as `text` writes it; returns what the worker made of it.
    "ship(Tensor message) -> Tensor",
    # `token` is what `ship` returned: it names the device, also for a graph without inputs.
    # `generation` counts calls of compiled functions, for CUDA graphs that reuse their memory.
    "run(Tensor token, int graph, Scalar generation, Tensor[] read, Tensor(a!)[] written, "
    "int[] numbers) -> Tensor[]",
    "drop(Tensor token, int graph) -> ()",
    # Only on the client: tells its core what `run` will return for these numbers, so that nobody
    # asks the worker. `results` have no memory; without them, the graph is gone.
    "promise(Tensor[]? results, int graph, int[] numbers) -> ()",
)


@cache
def library() -> Any:
    """PyTorch's library of these operations, which lives as long as the process."""
    import torch

    made: Any = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
    for schema in SCHEMAS:
        made.define(schema)
        # Gradients are AOTAutograd's, which calls these below its own node of the graph.
        name = schema.partition("(")[0]
        made.impl(name, torch.library.fallthrough_kernel, "Autograd")
        made.impl(name, torch.library.fallthrough_kernel, "ADInplaceOrView")
    return made
