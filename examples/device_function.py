"""Develop a training loop line by line on a device, then ship it whole, on the same tensors.

A function on the node makes the model and the data; `sky.remote` leaves them there. Some steps run
one operation at a time, as in a notebook. Then the same loop goes to the node as one function, by
reference: it trains the very tensors that this program holds, and none of them moves.

Exits with an error if the trained model recognises fewer than 88 % of the held-out digits.
"""

import os
import sys
import time

import torch
from torch import nn

import skyward as sky

# Enough to show that it learns, for the tests: they run every example.
EPOCHS = 8 if os.environ.get("SKYWARD_EXAMPLE_QUICK") else 20
BATCH = 100
EXPECTED_ACCURACY = 88.0


def load(seed: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Make the model and read 1,797 handwritten digits, where this runs."""
    from sklearn.datasets import load_digits

    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 10))
    digits = load_digits()
    x = torch.tensor(digits.data, dtype=torch.float32) / 16
    y = torch.tensor(digits.target)
    order = torch.randperm(len(x))
    return model, {"x": x[order], "y": y[order]}


def train(model: nn.Module, x: torch.Tensor, y: torch.Tensor, epochs: int) -> float:
    """Plain PyTorch: it runs wherever the tensors are."""
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(epochs):
        for start in range(0, len(x), BATCH):
            loss = nn.functional.cross_entropy(
                model(x[start : start + BATCH]), y[start : start + BATCH]
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return loss.item()


def accuracy(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    """The share of digits that the model recognises, in percent."""
    model.eval()
    with torch.no_grad():
        share = (model(x).argmax(1) == y).float().mean().item()
    model.train()
    return 100 * share


def main() -> int:
    with sky.Compute() as compute:
        model, data = sky.remote(load)(0) >> compute
        device = next(model.parameters()).device
        x, y = data["x"], data["y"]
        uploaded = sky.device_stats(device).bytes_uploaded
        print(f"Made on the node, and left there: the model and {len(x):,} digits, on {device}")
        known, held_out = (x[:1500], y[:1500]), (x[1500:], y[1500:])
        print(f"Untrained: {accuracy(model, *held_out):.1f}%")

        # Line by line: look at anything, change anything, as on a local device.
        began = time.perf_counter()
        loss = train(model, *known, epochs=1)
        took = time.perf_counter() - began
        print(f"One epoch, operation by operation: loss={loss:.3f} in {1e3 * took:.0f} ms")

        # The same function, shipped whole: one message there, one number back.
        began = time.perf_counter()
        loss = sky.function(train)(model, *known, epochs=EPOCHS) >> compute
        took = time.perf_counter() - began
        print(f"{EPOCHS} epochs, as one call: loss={loss:.3f} in {1e3 * took:.0f} ms")

        stats = sky.device_stats(device)
        moved = stats.bytes_uploaded - uploaded
        print(f"Bytes of tensors sent from here meanwhile: {moved}")
        score = accuracy(model, *held_out)
        print(f"This program's model, still on {device}, recognises {score:.1f}% of new digits")
    if score < EXPECTED_ACCURACY:
        print(f"expected at least {EXPECTED_ACCURACY:.0f}%", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
