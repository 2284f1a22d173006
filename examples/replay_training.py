"""Have a training step run as one message: recorded when it is first called, and then replayed.

Trains the same model twice on a device that is somewhere else: operation by operation, and with
`sky.replay`. The step has all that a step has: forward, backward, clipping, Adam, an average of the
weights and a scheduler. Both trainings end with the same weights, bit for bit.
"""

import sys
import time

import torch
from torch import nn

import skyward as sky

STEPS = 300


class Average:
    """An average of a model's weights, which follows them slowly."""

    def __init__(self, model: nn.Module) -> None:
        self.weights = [weight.detach().clone() for weight in model.parameters()]

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for mine, weight in zip(self.weights, model.parameters(), strict=True):
            mine.lerp_(weight, 0.01)


class Training:
    def __init__(self, device: torch.device) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 10)
        ).to(device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=3e-3)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, STEPS)
        self.average = Average(self.model)

    def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.average.update(self.model)
        self.scheduler.step()
        return loss.detach()


def main() -> int:
    with sky.Compute() as compute:
        device = compute.device("auto")
        torch.manual_seed(1)
        inputs = [torch.randn(128, 64).to(device) for _ in range(STEPS)]
        batches = [(x, (x[:, :10] + x[:, 10:20]).argmax(-1)) for x in inputs]

        weights = []
        for name in ("operation by operation", "replayed"):
            training = Training(device)
            replayed = sky.replay(training.step)
            step = training.step if name == "operation by operation" else replayed
            began = time.perf_counter()
            losses = [step(*batch) for batch in batches]
            first, last = losses[0].item(), torch.stack(losses[-20:]).mean().item()
            milliseconds = 1e3 * (time.perf_counter() - began) / STEPS
            print(f"{name}: loss {first:.3f} -> {last:.3f}, {milliseconds:.2f} ms a step")
            print(f"  {replayed.replayed} of {STEPS} steps were one message each")
            state = [*training.model.parameters(), *training.average.weights]
            weights.append([weight.detach().cpu() for weight in state])
        same = all(torch.equal(mine, its) for mine, its in zip(*weights, strict=True))
        print(f"The same weights, bit for bit: {same}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
