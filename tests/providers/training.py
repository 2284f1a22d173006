"""Trainings that run on every provider's machines: over all nodes at once, and on a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import skyward as sky


@sky.function
def synchronised() -> tuple[str, tuple[str, ...], list[float]]:
    """Train on data of its own, with gradients averaged over all nodes.

    Returns the node's host name, the addresses of all nodes, and the weights, which are the same
    on all nodes if the nodes have reached each other.
    """
    import socket

    import torch
    import torch.distributed as dist

    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.full((8, 4), dist.get_rank() + 1.0)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    weights = [value for each in model.parameters() for value in each.flatten().tolist()]
    peers = tuple(peer.address for peer in sky.instance_info().peers)
    return socket.gethostname(), peers, weights


def device_losses(
    device: Any, steps: int = 5, after: Callable[[int], None] = lambda step: None
) -> list[float]:
    """The losses of a training that the client steps through; `after` is called at each step."""
    import torch

    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 3))
    model.to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    x, y = torch.randn(64, 16).to(device), (torch.arange(64) % 3).to(device)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        after(step)
    return losses
