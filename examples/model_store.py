"""Keep models in a store: every version, what changed in it, and wherever it is needed next.

A small network learns handwritten digits and is saved with what is known of it. Then its last layer
is tuned and saved again, which adds that layer and nothing else. The newest version is loaded by a
function on a worker, and on a worker's torch device: the worker fetches the weights from the store,
this process sends none. A model with a layer that does not fit gets one readable error.

The store is a folder here; `sky.ModelStore("s3://bucket/models")` works the same. Exits with an
error if the loaded model recognises fewer than 92 % of the held-out digits.
"""

import sys
import tempfile

import torch
from torch import nn

import skyward as sky

EXPECTED_ACCURACY = 92.0


class Digits(nn.Module):
    """Pixels in, one of so many classes out."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU())
        self.head = nn.Linear(256, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def load_digits() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Load 1,797 digits of 8 x 8 pixels, and hold out a quarter of them."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    x = torch.from_numpy(images).float() / 16.0
    y = torch.from_numpy(labels).long()
    train, test = train_test_split(range(len(y)), test_size=0.25, stratify=labels, random_state=0)
    return x[train], y[train], x[test], y[test]


def train(
    model: nn.Module, part: nn.Module, x: torch.Tensor, y: torch.Tensor, epochs: int
) -> float:
    """Train one part of a model; returns the last epoch's loss."""
    optimizer = torch.optim.Adam(part.parameters(), lr=2e-3)
    for _ in range(epochs):
        for batch in torch.randperm(len(y)).split(64):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
            loss.backward()
            optimizer.step()
    return loss.item()


@torch.no_grad()
def accuracy(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    """How many digits it recognises, in per cent."""
    return 100.0 * (model.eval()(x).argmax(1) == y).float().mean().item()


@sky.function
def evaluate(store: sky.ModelStore, name: str, x: torch.Tensor, y: torch.Tensor) -> float:
    """Load a model where this runs, and try it there."""
    model = store.load_model(name, into=Digits())
    return accuracy(model, x, y)


def main() -> int:
    torch.manual_seed(0)
    x, y, x_test, y_test = load_digits()

    with tempfile.TemporaryDirectory() as folder:
        store = sky.ModelStore(folder)

        model = Digits()
        loss = train(model, model, x, y, epochs=6)
        score = accuracy(model, x_test, y_test)
        facts = {"accuracy": round(score, 1), "loss": round(loss, 4), "data": "digits 8x8"}
        first = store.save_model(model, "digits", metadata=facts)
        print(f"saved digits {first.version}: {first.size:,} bytes, {first.added:,} of them new")

        train(model, model.head, x, y, epochs=3)
        score = accuracy(model, x_test, y_test)
        tuned = {"accuracy": round(score, 1), "tuned": "the head", "parent": first.version}
        second = store.save_model(model, "digits", metadata=tuned)
        print(f"saved digits {second.version}: {second.size:,} bytes, {second.added:,} of them new")

        print("\nIn the store:")
        for version in store.versions("digits"):
            print(f"  digits {version.version} of {version.class_path}: {dict(version.metadata)}")

        with sky.Compute() as compute:
            there = evaluate(store, "digits", x_test, y_test) >> compute
            print(f"\nLoaded by a function on a worker: {there:.1f}% of held-out digits")

            device = compute.device("cpu")
            with torch.device("meta"):  # takes no memory until the weights are there
                far = Digits()
            before = sky.device_stats(device).bytes_uploaded
            store.load_model("digits", into=far, device=device)
            sent = sky.device_stats(device).bytes_uploaded - before
            print(f"Loaded on {far.head.weight.device} by its worker: {sent} bytes sent from here")
            score = accuracy(far, x_test.to(device), y_test.to(device))
            print(f"The model there recognises {score:.1f}%, as before: {score == there}")

        print("\nInto a model with another layer:")
        try:
            store.load_model("digits", into=Digits(classes=26))
        except sky.errors.ModelMismatchError as problem:
            print(problem)

    if score < EXPECTED_ACCURACY:
        print(f"expected at least {EXPECTED_ACCURACY:.0f}%", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
