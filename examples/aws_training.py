"""Distributed training on four instances of AWS: topology, shards, and output of one node.

    python examples/aws_training.py

Real handwritten digits travel to the instances once. Every node trains on its own shard, gradients
are averaged between the nodes, and only the head prints. As in examples/aws_ddp.py, the account is
that of the `aws` command, the price (more than $100 an hour for four times eight A100s) is shown
first, and SKYWARD_DEVICE=cpu tries the code on machines without GPUs. Exits with an error if the
model recognises fewer than 90 % of the digits that it was not trained on, or the nodes' copies
differ.
"""

import sys

import numpy as np
from sklearn.datasets import load_digits

import skyward as sky


@sky.function
def distributed_task(data):
    import torch.distributed as dist

    info = sky.instance_info()
    print(f"Node {info.node} of {info.total_nodes}")
    assert dist.is_initialized()

    if info.is_head:
        print(f"the head listens at {info.head_addr}; its peers: {len(info.peers)}")

    return sum(sky.shard(data))


@sky.function
@sky.stdout(only="head")
def train(x_full, y_full):
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817

    x, y = sky.shard(x_full, y_full, shuffle=True, seed=42)
    # x[i] still corresponds to y[i]
    x, y = torch.from_numpy(x).cuda(), torch.from_numpy(y).cuda()
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)
    ).cuda()
    trained = DDP(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(60):
        loss = torch.nn.functional.cross_entropy(trained(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if epoch % 10 == 9:
            print(f"Epoch {epoch}: loss={loss.item():.4f}")  # only head node prints
    return dist.get_rank(), len(x), model.cpu()


def main() -> int:
    digits = load_digits()
    x = (digits.data / 16.0).astype(np.float32)
    y = digits.target.astype(np.int64)
    held_out = np.arange(len(y)) % 5 == 0

    with sky.Compute(
        provider=sky.AWS(),
        nodes=4,
        accelerator=sky.accelerators.A100(),
        plugins=[sky.plugins.torch()],
    ) as compute:
        sums = distributed_task(list(range(1000))) @ compute
        results = train(x[~held_out], y[~held_out]) @ compute  # runs on all 4 nodes

    print(f"the shards sum up to {sum(sums)}")
    import torch

    for rank, seen, _ in results:
        print(f"rank {rank} trained on {seen} digits")
    weights = [torch.cat([p.flatten() for p in model.parameters()]) for _, _, model in results]
    if any(not torch.equal(weights[0], each) for each in weights):
        print("the copies of the model differ", file=sys.stderr)
        return 1
    with torch.no_grad():
        guessed = results[0][2](torch.from_numpy(x[held_out])).argmax(1).numpy()
    accuracy = 100.0 * float((guessed == y[held_out]).mean())
    print(f"Held-out accuracy: {accuracy:.1f}%, the same weights on all four nodes")
    return 0 if accuracy >= 90.0 and sum(sums) == sum(range(1000)) else 1


if __name__ == "__main__":
    sys.exit(main())
