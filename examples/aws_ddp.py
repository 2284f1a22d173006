"""Train a small model on four instances of AWS with DistributedDataParallel.

    python examples/aws_ddp.py

The account and the region are those of the `aws` command; docs/aws.md says what the account must
allow, and how to try this without one. AWS sells A100s by eight, and four such machines cost more
than $100 an hour: `sky offers A100` shows the price, and so does the first line, before anything is
bought. With sky.accelerators.L4() they cost about $3. SKYWARD_DEVICE=cpu tries the code on machines
without GPUs.
"""

import skyward as sky


@sky.function
@sky.stdout(only="head")
def train() -> dict:
    import torch
    import torch.distributed as dist
    import torch.nn as nn
    from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    rank = dist.get_rank()
    world_size = dist.get_world_size()

    model = nn.Linear(784, 10).cuda()
    model = DDP(model)

    x = torch.randn(1000, 784)
    y = torch.randint(0, 10, (1000,))
    dataset = TensorDataset(x, y)
    sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank)
    loader = DataLoader(dataset, batch_size=64, sampler=sampler)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loss_fn = nn.CrossEntropyLoss()

    for epoch in range(10):
        sampler.set_epoch(epoch)
        for batch_x, batch_y in loader:
            batch_x, batch_y = batch_x.cuda(), batch_y.cuda()
            loss = loss_fn(model(batch_x), batch_y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"Epoch {epoch}: loss={loss.item():.4f}")

    return {"final_loss": loss.item(), "rank": rank}


if __name__ == "__main__":
    with sky.Compute(
        provider=sky.AWS(),
        accelerator=sky.accelerators.A100(),
        nodes=4,
        plugins=[sky.plugins.torch()],
    ) as compute:
        results = train() @ compute

    for r in results:
        print(f"Rank {r['rank']}: loss={r['final_loss']:.4f}")
