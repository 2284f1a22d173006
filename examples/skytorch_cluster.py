"""Two nodes at once: train a model on the first, keep a copy of it in step on the second.

`Cluster` starts its computes together and takes them down together. `.to()` and `copy_()` between
their devices move the bytes from node to node: none of them pass through this process.
"""

import asyncio
import copy
import os

import torch
from torch import nn

from skytorch.client import Cluster, Compute

if not torch.cuda.is_available():
    os.environ.setdefault("SKYWARD_DEVICE", "cpu")


async def main() -> None:
    torch.manual_seed(0)
    async with Cluster(
        Compute(name="trainer"),
        Compute(name="judge"),
    ) as (trainer, judge):
        trainer_device = trainer.device("cuda")
        judge_device = judge.device("cuda")

        model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1)).to(trainer_device)
        ref_model = copy.deepcopy(model).to(judge_device)
        print(f"from node to node: {trainer_device} -> {judge_device}")

        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        x = torch.randn(256, 8)
        y = x.square().sum(1, keepdim=True).sqrt()
        data, target = x.to(trainer_device), y.to(trainer_device)
        seen, wanted = x.to(judge_device), y.to(judge_device)

        for step in range(3):
            for _ in range(100):
                optimizer.zero_grad()
                nn.functional.mse_loss(model(data), target).backward()
                optimizer.step()

            # Sync weights from the trainer to the judge
            for p, ref_p in zip(model.parameters(), ref_model.parameters(), strict=True):
                ref_p.data.copy_(p.data)

            with torch.no_grad():
                error = nn.functional.mse_loss(ref_model(seen), wanted)
            print(f"step {step + 1}: the judge's copy is off by {error.item():.4f}")


if __name__ == "__main__":
    asyncio.run(main())
