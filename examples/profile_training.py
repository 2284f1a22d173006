"""See where the time of a training loop goes, and what reading the loss at every step costs.

Trains the same model twice on a device that is somewhere else: with `.item()` at every step, and
with one at the end. Each loop is profiled: five lines say where its time went, and a file has the
whole trace for https://ui.perfetto.dev, which shows it in the browser and uploads nothing.
"""

import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

import skyward as sky

STEPS = 12


def main(folder: Path) -> int:
    with sky.Compute() as compute:
        device = compute.device("auto")
        model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        x, y = torch.randn(512, 64).to(device), torch.randint(10, (512,)).to(device)

        def train(*, read_every_loss: bool) -> None:
            for _ in range(STEPS):
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if read_every_loss:
                    loss.item()
            print(f"loss {loss.item():.3f}")

        train(read_every_loss=True)  # the first steps are not like the others

        for name, read_every_loss in (("every-step", True), ("at-the-end", False)):
            with sky.profile(device) as profile:
                train(read_every_loss=read_every_loss)
            print(f"\n.item() {name.replace('-', ' ')}:\n{profile}")
            for operation in profile.operations()[:3]:
                print(f"{operation.count:>8} x  {operation.name}: {1e3 * operation.seconds:.2f} ms")
            profile.export(folder / f"trace-{name}.json")
            print(f"the trace is in {folder / f'trace-{name}.json'}")
    return 0


if __name__ == "__main__":
    given = sys.argv[1:]
    sys.exit(main(Path(given[0] if given else tempfile.mkdtemp(prefix="profile-"))))
