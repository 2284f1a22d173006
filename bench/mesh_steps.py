"""A small transformer trained by several ranks: the same lines for a mesh and for processes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

WORDS, LENGTH, BATCH = 256, 64, 16
WAYS = ("fully_shard", "tensor parallel", "DDP")


class Block(nn.Module):
    """A block of a transformer, whose heads may be divided between ranks."""

    def __init__(self, width: int, head: int) -> None:
        super().__init__()
        self.head = head
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        heads = [
            part(y).unflatten(-1, (-1, self.head)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        ]
        seen = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Four blocks, which guess the next word."""

    def __init__(self, width: int = 256, head: int = 32, layers: int = 4) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, head) for _ in range(layers))
        self.norm, self.scores = nn.LayerNorm(width), nn.Linear(width, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.words(words) + self.places.weight
        for block in self.blocks:
            x = block(x)
        return self.scores(self.norm(x))


def training(
    way: str, mesh: DeviceMesh, device: torch.device, own: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[], torch.Tensor]:
    """A training step, which returns its loss; `own` gives a rank its part of a batch."""
    torch.manual_seed(0)
    model: Any = Transformer().to(device)
    words = torch.randint(0, WORDS, (BATCH, LENGTH + 1))
    x, y = words[:, :-1].contiguous(), words[:, 1:].contiguous()
    if way == "tensor parallel":
        x, y = x.to(device), y.to(device)
        columns = ("query", "key", "value", "up")
        plan: dict[str, Any] = {name: ColwiseParallel() for name in columns}
        plan |= {name: RowwiseParallel() for name in ("out", "down")}
        for block in model.blocks:
            parallelize_module(block, mesh, plan)
    else:
        x, y = own(x), own(y)
    if way == "fully_shard":
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    if way == "DDP":
        model = DistributedDataParallel(model, process_group=mesh.get_group())
    # PyTorch does not take tensors of both kinds in one call.
    kinds: tuple[list[nn.Parameter], list[nn.Parameter]] = ([], [])
    for parameter in model.parameters():
        kinds[isinstance(parameter, DTensor)].append(parameter)
    optimizer = torch.optim.AdamW(
        [{"params": kind} for kind in kinds if kind], lr=1e-3, foreach=True
    )

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def rank(pipe: Connection, number: int, ranks: int, port: int) -> None:
    """One process of those that have a rank each; asked for a way and how many steps of it."""
    # As a worker's process has: on a busy machine, the kernel divides its processors by sessions.
    os.setsid()
    torch.set_num_threads(1)
    where = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=where, rank=number, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("ranks",))
    steps: dict[str, Callable[[], torch.Tensor]] = {}
    while (question := pipe.recv()) is not None:
        way, count = question
        if way not in steps:
            steps[way] = training(
                way, mesh, torch.device("cpu"), lambda whole: whole.chunk(ranks)[number]
            )
        dist.barrier()
        start = time.perf_counter()
        losses = [steps[way]() for _ in range(count)]
        dist.barrier()
        pipe.send((time.perf_counter() - start, torch.stack(losses).tolist()))
    dist.destroy_process_group()
