"""Train one model on two nodes of a Ray cluster at once with DistributedDataParallel.

    python examples/ray_pool.py http://head:8265    # through the dashboard: no Ray is needed here
    python examples/ray_pool.py                     # inside the cluster, or as RAY_ADDRESS says

docs/ray.md says what the network must allow. The nodes get PyTorch, in the version that runs here,
and this skyward, and keep both for the next time. SKYWARD_TORCH_INDEX names another index for
PyTorch. If the machines have an environment with everything, SKYWARD_RAY_PYTHON names its
interpreter, and nothing is installed.

The task is to learn the parity of eight bits, which no linear model can. Each node gets half of
the samples, and gradients are averaged between the nodes. Then this process steps through a
training itself, on a device of the second node. Exits with an error if either has not learnt it.
"""

import os
import sys

import torch
from torch import nn

import skyward as sky

TORCH_VERSION = torch.__version__.split("+")[0]
TORCH_INDEX = os.environ.get("SKYWARD_TORCH_INDEX")
STEPS = 300


def parity() -> tuple[torch.Tensor, torch.Tensor]:
    """Every number of eight bits, in a random order, and whether its bits are odd in number."""
    order = torch.randperm(256, generator=torch.Generator().manual_seed(0))
    bits = (order[:, None] >> torch.arange(8)) & 1
    return bits.float() * 2 - 1, (bits.sum(1) % 2).float()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 128), nn.Tanh(), nn.Linear(128, 1), nn.Flatten(0))


def fitted(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    """Train on all samples at once; the share that is right in the end."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(STEPS):
        optimizer.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(model(x), y).backward()
        optimizer.step()
    with torch.no_grad():
        return ((model(x) > 0).float() == y).float().mean().item()


@sky.function
def train(x: torch.Tensor, y: torch.Tensor) -> tuple[str, int, float]:
    """Train on this node's half: its address, how many samples it had, and the share right."""
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    info = sky.instance_info()
    x, y = sky.shard(x, y)
    right = fitted(DistributedDataParallel(network()), x, y)
    return info.peers[info.node].address, len(x), right


def main() -> int:
    provider = sky.Ray(
        sys.argv[1] if len(sys.argv) > 1 else None,
        python=os.environ.get("SKYWARD_RAY_PYTHON") or None,
    )
    indexes = [sky.PipIndex(url=TORCH_INDEX, packages=["torch"])] if TORCH_INDEX else []
    x, y = parity()
    with sky.Compute(
        provider,
        nodes=2,
        image=sky.Image(pip=[f"torch=={TORCH_VERSION}"], pip_indexes=indexes),
        plugins=[sky.plugins.torch()],
    ) as compute:
        shares = []
        for rank, (address, seen, right) in enumerate(train(x, y) @ compute):
            print(f"rank {rank} on {address}: {seen} samples, {right:.0%} right")
            shares.append(right)
        device = compute.device("cpu", node=1)
        right = fitted(network().to(device), x.to(device), y.to(device))
        print(f"stepped from here, on {device} of node 1: {right:.0%} right")
    return 0 if min(*shares, right) > 0.95 else 1


if __name__ == "__main__":
    sys.exit(main())
