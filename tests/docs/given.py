"""What the snippets of a page take for granted, such as a model and its data."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import skyward as sky

Names = Callable[[], dict[str, Any]]


@contextlib.contextmanager
def given(page: str) -> Iterator[Names]:
    """Makes the names that a page may use without making them, anew for each snippet.

    `sky` is there for all; a pool is the same for all snippets of the page.
    """
    with contextlib.ExitStack() as stack:
        more = _GIVEN[page](stack) if page in _GIVEN else dict
        yield lambda: {"sky": sky, **more()}


def _pool(stack: contextlib.ExitStack, nodes: int = 1) -> sky.Compute:
    return stack.enter_context(sky.Compute(nodes=nodes, options=sky.Options(console=False)))


def _device(stack: contextlib.ExitStack) -> Names:
    """A model that learns something small, on a pool of two nodes."""
    import torch
    from torch import nn

    class Net(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Linear(4, 4), nn.Linear(4, 1))

    compute = _pool(stack, nodes=2)
    sky.ModelStore("stored").save_model(Net(), "net")

    def names() -> dict[str, Any]:
        model = Net()
        device = compute.device("cpu")
        batches = [(torch.randn(8, 4), torch.randn(8, 1)) for _ in range(2)]
        return {
            "torch": torch,
            "copy": copy,
            "Net": Net,
            "model": model,
            "optimizer": torch.optim.SGD(model.parameters(), lr=0.01),
            "criterion": nn.MSELoss(),
            "batches": batches,
            "x": batches[0][0].to(device),
            "compute": compute,
            "device": device,
            "store": sky.ModelStore("stored"),
            "train": lambda *_: None,
            "train_step": lambda *_: None,
        }

    return names


def _mesh(stack: contextlib.ExitStack) -> Names:
    """A mesh of four ranks, and a batch on it."""
    import torch
    from torch import nn

    workers = sky.Worker(per_node=4)
    compute = stack.enter_context(sky.Compute(worker=workers, options=sky.Options(console=False)))
    mesh = compute.mesh(dp=2, tp=2)

    def names() -> dict[str, Any]:
        x, y = mesh.split([torch.randn(16, 8), torch.randn(16, 1)])
        return {
            "torch": torch,
            "nn": nn,
            "compute": compute,
            "mesh": mesh,
            "make_model": lambda: nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 1)),
            "x": x,
            "y": y,
            "loss": x.sum(),
        }

    return names


def _store(stack: contextlib.ExitStack) -> Names:
    from torch import nn

    compute = _pool(stack)
    return lambda: {"model": nn.Linear(3, 2), "compute": compute}


def _pool_alone(stack: contextlib.ExitStack) -> Names:
    compute = _pool(stack)
    return lambda: {"compute": compute}


_GIVEN: dict[str, Callable[[contextlib.ExitStack], Names]] = {
    "docs/device.md": _device,
    "docs/mesh.md": _mesh,
    "docs/store.md": _store,
    "docs/debugging.md": _pool_alone,
}
