"""The examples of the guides on PyTorch and on distributed training, on two local nodes.

Those that are about other frameworks have theirs in the tests of those; what needs wheels that are
not here, torchvision's for one, is looked at up to the image that would be built.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import skyward as sky

from ..conftest import only_in_all

pytest.importorskip("torch", reason="torch is not installed")


def nodes(lines: list[sky.Output], text: str, stream: str = "stdout") -> list[int]:
    return sorted(line.node for line in lines if text in line and line.stream == stream)


# PyTorch.


@sky.function
@sky.stdout(only="head")
def train() -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    rank = dist.get_rank()
    world_size = dist.get_world_size()

    torch.manual_seed(rank)
    model = DDP(nn.Linear(784, 10))

    torch.manual_seed(0)
    x = torch.randn(1000, 784)
    y = torch.randint(0, 10, (1000,))
    dataset = TensorDataset(x, y)

    sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank)
    loader = DataLoader(dataset, batch_size=64, sampler=sampler)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loss_fn = nn.CrossEntropyLoss()

    for epoch in range(3):
        sampler.set_epoch(epoch)
        for batch_x, batch_y in loader:
            loss = loss_fn(model(batch_x), batch_y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"Epoch {epoch}: loss={loss.item():.4f}")

    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return {
        "final_loss": loss.item(),
        "rank": rank,
        "seen": sorted(sampler),
        "weights": weights.numpy(),
    }


@only_in_all
def test_distributed_training(compute: sky.Compute, printed: list[sky.Output]) -> None:
    results = train() @ compute

    assert [r["rank"] for r in results] == [0, 1]
    assert sorted(results[0]["seen"] + results[1]["seen"]) == list(range(1000))
    np.testing.assert_array_equal(results[0]["weights"], results[1]["weights"])
    assert nodes(printed, "Epoch") == [0, 0, 0]


@only_in_all
def test_the_process_group_is_there_before_the_function_runs(compute: sky.Compute) -> None:
    @sky.function
    def train() -> bool:
        import torch.distributed as dist

        return dist.is_initialized()

    assert train() @ compute == [True, True]


def test_with_torchvision_and_torchaudio(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYWARD_DEVICE", "cpu")
    compute = sky.Compute(
        accelerator=sky.accelerators.A100(),
        nodes=2,
        plugins=[sky.plugins.torch(vision="latest", audio="latest")],
    )
    image = compute._spec.request.image

    assert image.pip == ("torch", "torchvision", "torchaudio")
    assert [index.packages for index in image.pip_indexes] == [image.pip]
    assert image.pip_indexes[0].url.endswith("/cu128")


def test_pinned_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYWARD_DEVICE", "cpu")
    pinned = sky.plugins.torch(version="2.3.0", vision="0.18.0", cuda="cu124")
    compute = sky.Compute(accelerator=sky.accelerators.A100(), nodes=2, plugins=[pinned])
    image = compute._spec.request.image

    assert image.pip == ("torch==2.3.0", "torchvision==0.18.0")
    assert image.pip_indexes[0].url.endswith("/cu124")


def test_without_an_accelerator_the_wheels_are_for_the_cpu(compute: sky.Compute) -> None:
    image = compute._spec.request.image

    assert image.pip_indexes[0].url.endswith("/cpu")


def test_with_hugging_face() -> None:
    plugins = [sky.plugins.torch(), sky.plugins.huggingface(token="hf_xxx")]
    image = sky.Compute(nodes=2, plugins=plugins)._spec.request.image

    assert {"torch", "transformers", "datasets", "tokenizers"} <= set(image.pip)
    assert image.pip_indexes[0].packages == ("torch",)


# Distributed training.


def test_data_is_partitioned_and_stays_aligned(compute: sky.Compute) -> None:
    @sky.function
    def train(x_full: np.ndarray, y_full: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        x, y = sky.shard(x_full, y_full, shuffle=True, seed=42)
        # x[i] still corresponds to y[i]
        return x, y

    x_full = np.arange(11)
    (x0, y0), (x1, y1) = train(x_full, x_full**2) @ compute

    assert sorted([*x0, *x1]) == list(range(11))
    np.testing.assert_array_equal(x0**2, y0)
    np.testing.assert_array_equal(x1**2, y1)


def test_torch_datasets_are_partitioned_too(compute: sky.Compute) -> None:
    @sky.function
    def mine() -> tuple[list[int], list[int], str]:
        import torch
        from torch.utils.data import DataLoader, TensorDataset

        whole = torch.arange(6)
        part = sky.shard(TensorDataset(whole))
        loaded = [int(x) for (batch,) in DataLoader(part, batch_size=2) for x in batch]
        return sky.shard(whole).tolist(), loaded, type(part).__name__

    assert mine() @ compute == [([0, 2, 4], [0, 2, 4], "Subset"), ([1, 3, 5], [1, 3, 5], "Subset")]


def test_a_function_knows_its_place(compute: sky.Compute, printed: list[sky.Output]) -> None:
    @sky.function
    def distributed_task(data: list[int]) -> dict[str, Any]:
        info = sky.instance_info()
        print(f"Node {info.node} of {info.total_nodes}")
        return {
            "coordinates": info.is_head,
            "head": (info.head_addr, info.head_port),
            "accelerators": info.accelerators,
            "peers": [(peer.node, peer.address) for peer in info.peers],
            "sum": sum(data),
        }

    first, second = distributed_task([1, 2, 3]) @ compute

    assert (first["coordinates"], second["coordinates"]) == (True, False)
    assert first["head"] == second["head"]
    assert first["head"][1] > 0
    assert first["peers"] == [(0, "127.0.0.1"), (1, "127.0.0.1")]
    assert first["sum"] == second["sum"] == 6
    assert nodes(printed, "Node 0 of 2") == [0]
    assert nodes(printed, "Node 1 of 2") == [1]


# Output control.


def speak() -> None:
    import os
    import sys

    print("to stdout")
    print("to stderr", file=sys.stderr)
    os.write(1, b"from C, to stdout\n")


def test_only_the_head_prints(compute: sky.Compute, printed: list[sky.Output]) -> None:
    sky.function(sky.stdout(only="head")(speak))() @ compute

    assert nodes(printed, "to stdout") == [0, 0]
    assert nodes(printed, "to stderr", "stderr") == [0, 1]


def test_a_predicate_chooses_who_prints(compute: sky.Compute, printed: list[sky.Output]) -> None:
    sky.function(sky.stdout(only=lambda info: info.node >= 1)(speak))() @ compute

    assert nodes(printed, "to stdout") == [1, 1]


def test_stderr_is_controlled_apart(compute: sky.Compute, printed: list[sky.Output]) -> None:
    sky.function(sky.stderr(only="head")(speak))() @ compute

    assert nodes(printed, "to stderr", "stderr") == [0]
    assert nodes(printed, "to stdout") == [0, 0, 1, 1]


def test_a_silent_function_prints_nothing(compute: sky.Compute, printed: list[sky.Output]) -> None:
    sky.function(sky.silent(speak))() @ compute

    assert printed == []


def test_the_call_after_a_silent_one_prints(
    compute: sky.Compute, printed: list[sky.Output]
) -> None:
    sky.function(sky.silent(speak))() @ compute
    sky.function(speak)() @ compute

    assert nodes(printed, "to stdout") == [0, 0, 1, 1]
