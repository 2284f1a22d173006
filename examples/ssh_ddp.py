"""Train one model on two SSH hosts at once with DistributedDataParallel.

    python examples/ssh_ddp.py me@gpu1 me@gpu2:2222

Hosts are named as for `ssh`, aliases of ~/.ssh/config included, or in SKY_SSH_HOSTS, separated by
commas; SKY_SSH_USER, SKY_SSH_PORT, SKY_SSH_KEY and SKY_SSH_KNOWN_HOSTS say how to log in where
ssh's own settings do not. The hosts need no more than a shell: the first time, they get Python,
PyTorch in the version that runs here, and this skyward. SKYWARD_TORCH_INDEX names another index
with torch, or a folder of the hosts with its wheel, such as file:///wheels.

The digits are loaded here, and each host gets its half of them. Gradients are averaged over the
network between the hosts. Exits with an error if the trained model recognises fewer than 90 % of
the held-out digits, or the two copies differ.
"""

import os
import sys

import torch
from torch import nn

import skyward as sky

EPOCHS = 10
EXPECTED_ACCURACY = 90.0
TORCH_VERSION = torch.__version__.split("+")[0]
TORCH_INDEX = os.environ.get("SKYWARD_TORCH_INDEX", "https://download.pytorch.org/whl/cpu")


def hosts() -> sky.SSH:
    """The hosts that were named on the command line, or in the environment."""
    named = sys.argv[1:] or os.environ.get("SKY_SSH_HOSTS", "").split(",")
    if len(named) < 2:
        sys.exit("name two hosts: python examples/ssh_ddp.py me@gpu1 me@gpu2")
    port = os.environ.get("SKY_SSH_PORT")
    return sky.SSH(
        named[:2],
        user=os.environ.get("SKY_SSH_USER"),
        port=int(port) if port else None,
        key=os.environ.get("SKY_SSH_KEY"),
        known_hosts=os.environ.get("SKY_SSH_KNOWN_HOSTS"),
    )


def load_digits() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Load 1,797 digits of 8 by 8 pixels and hold out every fourth of them."""
    from sklearn.datasets import load_digits as load

    digits = load()
    x = torch.from_numpy(digits.data).float() / 16.0
    y = torch.from_numpy(digits.target).long()
    held_out = torch.arange(len(y)) % 4 == 0
    return x[~held_out], y[~held_out], x[held_out], y[held_out]


@sky.function
@sky.stdout(only="head")
def train(x: torch.Tensor, y: torch.Tensor) -> tuple[str, int, nn.Module]:
    """Train on this node's half; the place, how many digits it saw, and the model."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)  # So small a model is fastest on one.
    x, y = sky.shard(x, y)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    trained = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    # As many steps on every node: a node more would wait for gradients that never come.
    steps = len(x) // 32
    for epoch in range(EPOCHS):
        total = torch.zeros(())
        order = torch.randperm(len(x))
        for batch in order[: steps * 32].split(32):
            loss = nn.functional.cross_entropy(trained(x[batch]), y[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach() / steps
        # What each node measured on its half, averaged.
        dist.all_reduce(total)
        mean = total.item() / dist.get_world_size()
        print(f"epoch {epoch + 1:2d}/{EPOCHS}: loss={mean:.4f}")
    return sky.instance_info().peers[dist.get_rank()].address, len(x), model


def main() -> int:
    x_train, y_train, x_test, y_test = load_digits()
    image = sky.Image(
        pip=[f"torch=={TORCH_VERSION}"],
        pip_indexes=[sky.PipIndex(url=TORCH_INDEX, packages=["torch"])],
    )
    with sky.Compute(hosts(), nodes=2, image=image, plugins=[sky.plugins.torch()]) as compute:
        results = train(x_train, y_train) @ compute
    for rank, (address, seen, _) in enumerate(results):
        print(f"rank {rank} on {address}: {seen} digits an epoch")
    first, second = (model.state_dict() for _, _, model in results)
    if not all(torch.equal(first[name], second[name]) for name in first):
        print("the copies of the model differ", file=sys.stderr)
        return 1
    with torch.no_grad():
        right = results[0][2](x_test).argmax(1) == y_test
    accuracy = 100.0 * right.float().mean().item()
    print(f"Held-out accuracy: {accuracy:.1f}%, the same weights on both hosts")
    return 0 if accuracy >= EXPECTED_ACCURACY else 1


if __name__ == "__main__":
    sys.exit(main())
