"""Train a transformer that is sharded over two nodes, from one program.

`compute.mesh()` is PyTorch's DeviceMesh over the workers of the pool, and this program holds all of
it: `fully_shard` leaves each worker its part of every weight, each worker computes on its part of
every batch, and the loop below reads like one for a single device. What a worker has can be looked
at from here. The whole weights come back at the end, into a plain model.

Exits with an error if the trained model recognises fewer than 88 % of the held-out digits.
"""

import os
import sys
import tempfile
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import skyward as sky

# Enough to show that it learns, for the tests: they run every example.
EPOCHS = 5 if os.environ.get("SKYWARD_EXAMPLE_QUICK") else 8
BATCH = 96
WIDTH, HEADS, LAYERS = 64, 4, 2
EXPECTED_ACCURACY = 88.0


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).movedim(2, 0)
        heads = (each.transpose(1, 2) for each in (q, k, v))
        attended = nn.functional.scaled_dot_product_attention(*heads)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class Transformer(nn.Module):
    """Reads a digit of 8 by 8 pixels as a sequence of its eight rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, WIDTH)
        self.places = nn.Parameter(torch.randn(8, WIDTH) / 10)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x) + self.places
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


def main() -> int:
    digits = load_digits()
    x, y = torch.tensor(digits.images, dtype=torch.float32) / 16, torch.tensor(digits.target)
    held_out = torch.arange(len(y)) % 5 == 0
    torch.manual_seed(0)
    known = TensorDataset(x[~held_out], y[~held_out])
    # Every batch has the same number of digits for each rank.
    loader = DataLoader(known, batch_size=BATCH, shuffle=True, drop_last=True)

    with sky.Compute(nodes=2) as compute:
        mesh = compute.mesh(dp=2)
        model = Transformer()
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        weight = model.layers[0].qkv.weight
        whole, part = tuple(weight.shape), tuple(weight.to_local().shape)
        print(f"A weight of {whole} is {part} on each rank of {mesh.device}")

        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for epoch in range(EPOCHS):
            total = torch.zeros((), device=mesh.device)
            # Of each batch, a rank gets its own half.
            for images, labels in map(mesh.split, loader):
                loss = nn.functional.cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                total += loss.detach()
            losses = [each.item() / len(loader) for each in mesh.each(total)]
            print(f"epoch {epoch + 1:2d}/{EPOCHS}: loss={sum(losses) / len(losses):.4f}")

        # Every rank has other rows of a weight, and so of its gradient.
        norms = ", ".join(f"{weight.grad.on(rank).norm():.4f}" for rank in range(mesh.size()))
        print(f"The gradient's norm, rank by rank: {norms}")
        print("The last loss:", loss.detach())
        weights = {name: part.full_tensor().cpu() for name, part in model.state_dict().items()}

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "digits.pt"
        torch.save(weights, file)
        plain = Transformer()
        plain.load_state_dict(torch.load(file))
    with torch.no_grad():
        found = plain(x[held_out]).argmax(1) == y[held_out]
    accuracy = 100 * found.float().mean().item()
    print(f"Saved, and loaded here: {accuracy:.1f}% of the held-out digits")
    if accuracy < EXPECTED_ACCURACY:
        print(f"expected at least {EXPECTED_ACCURACY:.0f}%", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
