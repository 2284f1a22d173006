"""Training steps with DistributedDataParallel, timed by the process that makes them.

Imported by the workers of a pool, and run by `torchrun` as a script that prints the seconds.
"""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def seconds_for(steps: int) -> float:
    """Seconds for so many steps of a small MLP, the slowest rank's; after a few to warm up."""
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(
            nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 10)
        )
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = torch.randn(64, 784), torch.randint(0, 10, (64,))

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    for _ in range(10):
        step()
    dist.barrier()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    taken = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return taken.item()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    seconds = seconds_for(int(sys.argv[1]))
    if dist.get_rank() == 0:
        print(seconds)
    dist.destroy_process_group()
