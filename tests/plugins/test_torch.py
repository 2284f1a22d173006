"""The torch plugin: the environment of `torchrun`, one group a pool, and what becomes of it."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward.plugins.plugin import Cluster, ClusterSpec
from skyward.spec import Nodes

from ..conftest import only_in_all
from ..waiting import wait_for

torch = pytest.importorskip("torch")

QUIET = sky.Options(console=False, fail_grace=0.5)
VARIABLES = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "WORLD_SIZE",
    "RANK",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "NODE_RANK",
)


@sky.function
def summed() -> tuple[int, int, float]:
    import torch
    import torch.distributed as dist

    total = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), total.item()


@sky.function
def environment() -> dict[str, str]:
    return {name: os.environ[name] for name in VARIABLES}


def test_the_group_is_there_before_the_first_task(compute: sky.Compute) -> None:
    assert summed() @ compute == [(0, 2, 3.0), (1, 2, 3.0)]


def test_the_environment_is_that_of_torchrun(compute: sky.Compute) -> None:
    first, second = environment() @ compute
    assert first["MASTER_PORT"] == second["MASTER_PORT"] != "0"
    assert {**first, "MASTER_PORT": ""} == {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "",
        "WORLD_SIZE": "2",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "NODE_RANK": "0",
    }
    assert (second["RANK"], second["LOCAL_RANK"], second["NODE_RANK"]) == ("1", "0", "1")


def test_a_second_broadcast_uses_the_same_group(compute: sky.Compute) -> None:
    @sky.function
    def group() -> tuple[int, int]:
        import torch.distributed as dist

        return os.getpid(), id(dist.group.WORLD)

    assert group() @ compute == group() @ compute


def test_a_single_call_runs_beside_the_group(compute: sky.Compute) -> None:
    assert environment() >> compute
    assert summed() @ compute == [(0, 2, 3.0), (1, 2, 3.0)]


def test_ddp_gradients_equal_one_process_with_the_joint_batch(compute: sky.Compute) -> None:
    @sky.function
    def gradients() -> list[torch.Tensor]:
        import torch
        from torch.nn.parallel import DistributedDataParallel

        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(20, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4)
        )
        x, y = torch.randn(64, 20), torch.randint(0, 4, (64,))
        wrapped = DistributedDataParallel(model)
        mine_x, mine_y = sky.shard(x, y)
        torch.nn.functional.cross_entropy(wrapped(mine_x), mine_y).backward()
        return [p.grad for p in model.parameters()]

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    x, y = torch.randn(64, 20), torch.randint(0, 4, (64,))
    torch.nn.functional.cross_entropy(model(x), y).backward()
    for grads in gradients() @ compute:
        for ours, alone in zip(grads, model.parameters(), strict=True):
            assert torch.allclose(ours, alone.grad, atol=1e-6, rtol=0)


def test_the_group_has_the_order_of_a_meshs_ranks(compute: sky.Compute) -> None:
    @sky.function
    def ranks(own: torch.Tensor) -> tuple[int, int, float]:
        import torch.distributed as dist

        rank = int(own)
        dist.all_reduce(own)
        return rank, dist.get_rank(), own.item()

    mesh: Any = compute.mesh("cpu", dp=2)
    own = mesh.get_rank()
    assert ranks(own) @ compute == [(0, 0, 1.0), (1, 1, 1.0)]
    assert own.item() == 1


def test_the_distributed_sampler_works_unchanged(compute: sky.Compute) -> None:
    @sky.function
    def seen() -> list[int]:
        import torch
        from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

        data = TensorDataset(torch.arange(10))
        sampler = DistributedSampler(data, shuffle=True)
        sampler.set_epoch(1)
        return [
            int(i) for (batch,) in DataLoader(data, batch_size=2, sampler=sampler) for i in batch
        ]

    first, second = seen() @ compute
    assert sorted(first + second) == list(range(10))


@only_in_all
def test_a_second_pool_in_this_process_has_its_own_group(compute: sky.Compute) -> None:
    with sky.Compute(nodes=2, plugins=[sky.plugins.torch()], options=QUIET) as other:
        ports = {e["MASTER_PORT"] for e in (environment() @ other) + (environment() @ compute)}
        assert len(ports) == 2
        assert summed() @ other == summed() @ compute


@only_in_all
def test_killing_a_rank_fails_the_others_and_the_next_broadcast_has_a_new_group(
    compute: sky.Compute,
) -> None:
    @sky.function
    def step_until_killed() -> None:
        import torch
        import torch.distributed as dist

        for step in range(100_000):
            if dist.get_rank() == 1 and step == 20:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.all_reduce(torch.ones(10))

    before = environment() @ compute
    with pytest.raises(sky.BroadcastError) as raised:
        step_until_killed() @ compute
    assert [outcome.ok for outcome in raised.value.outcomes] == [False, False]
    assert "SIGKILL" in str(raised.value.exceptions[0])
    assert "rank 1 (node 1) failed first: WorkerDiedError: " in str(raised.value)
    assert summed() @ compute == [(0, 2, 3.0), (1, 2, 3.0)]
    assert (environment() @ compute)[0]["MASTER_PORT"] != before[0]["MASTER_PORT"]


@only_in_all
def test_a_rank_that_notices_nothing_is_ended(
    compute: sky.Compute, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @sky.function
    def one_dies_one_sleeps() -> None:
        import torch.distributed as dist

        if dist.get_rank() == 1:
            wait_for(tmp_path / "begun")
            os._exit(9)
        (tmp_path / "begun").touch()
        while True:
            time.sleep(0.1)

    monkeypatch.setattr("skyward.compute.broadcasts.LOOK_SECONDS", 60.0)
    with pytest.raises(sky.BroadcastError, match="2 of 2 workers") as raised:
        one_dies_one_sleeps() @ compute
    died, ended = raised.value.exceptions
    assert "exit status 9" in str(died)
    assert "was cancelled on node 0, because rank 1 (node 1) failed: Worker" in str(ended)
    assert "; it was here" in str(ended)
    assert summed() @ compute == [(0, 2, 3.0), (1, 2, 3.0)]


def test_a_rank_that_raises_ends_the_others_and_is_named_first(
    compute: sky.Compute, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @sky.function
    def train() -> None:
        import torch
        import torch.distributed as dist

        if dist.get_rank() == 1:
            wait_for(tmp_path / "begun")
            time.sleep(0.5)  # Its next line takes the other rank into the collective.
            raise ValueError("boom")
        (tmp_path / "begun").touch()
        dist.all_reduce(torch.ones(1))

    monkeypatch.setattr("skyward.compute.broadcasts.LOOK_SECONDS", 60.0)
    with pytest.raises(sky.BroadcastError) as raised:
        train() @ compute
    place = r"at test_torch\.py:\d+ in train: dist\.all_reduce\(torch\.ones\(1\)\)"
    assert re.search(
        r"rank 1 \(node 1\) failed first: ValueError: boom\n"
        r"  cancelled: rank 0 waited in the collective all_reduce, " + place,
        str(raised.value),
    ), str(raised.value)
    first, cancelled = raised.value.exceptions
    assert isinstance(first, ValueError)
    assert 'raise ValueError("boom")' in first.__notes__[0]
    assert isinstance(cancelled, sky.errors.TaskCancelledError)
    assert cancelled.collective == "all_reduce"
    assert [type(outcome.error) for outcome in raised.value.outcomes] == [
        type(cancelled),
        type(first),
    ]
    assert summed() @ compute == [(0, 2, 3.0), (1, 2, 3.0)]


@only_in_all
def test_an_interrupted_broadcast_leaves_no_collective_for_the_next(
    compute: sky.Compute, tmp_path: Path
) -> None:
    """A rank that still waits in a collective must not meet the collective of the next call."""

    @sky.function
    def one_waits() -> None:
        import torch
        import torch.distributed as dist

        if dist.get_rank() == 0:
            (tmp_path / "waits").touch()
            dist.all_reduce(torch.zeros(1))

    def interrupt() -> None:
        wait_for(tmp_path / "waits")
        signal.raise_signal(signal.SIGINT)

    striking = threading.Thread(target=interrupt)
    striking.start()
    with pytest.raises(KeyboardInterrupt):
        one_waits() @ compute
    striking.join()
    assert summed() @ compute == [(0, 2, 3.0), (1, 2, 3.0)]


def test_a_group_whose_ranks_raise_alike_stays(compute: sky.Compute) -> None:
    @sky.function
    def pid(fails: bool) -> int:
        import torch.distributed as dist

        dist.barrier()  # Else a rank may fail, and its grace be over, before the other begins.
        if fails:
            raise ValueError("everywhere")
        return os.getpid()

    before = pid(False) @ compute
    with pytest.raises(sky.BroadcastError, match="2 of 2"):
        pid(True) @ compute
    assert pid(False) @ compute == before


@only_in_all
def test_retries_run_all_ranks_again_in_a_new_group(compute: sky.Compute, tmp_path: Path) -> None:
    @sky.function(retries=1)
    def dies_once() -> float:
        import torch
        import torch.distributed as dist

        rank = dist.get_rank()
        with (tmp_path / str(rank)).open("a") as log:
            log.write("x")
        if rank == 1 and (tmp_path / "1").stat().st_size == 1:
            os._exit(3)
        total = torch.ones(1)
        dist.all_reduce(total)
        return total.item()

    assert dies_once() @ compute == [2.0, 2.0]
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["xx", "xx"]


@only_in_all
def test_several_workers_a_node_and_a_new_size() -> None:
    with sky.Compute(
        nodes=2, worker=sky.Worker(per_node=2), plugins=[sky.plugins.torch()], options=QUIET
    ) as compute:
        places = [
            (e["RANK"], e["LOCAL_RANK"], e["LOCAL_WORLD_SIZE"], e["NODE_RANK"], e["WORLD_SIZE"])
            for e in environment() @ compute
        ]
        assert places == [
            ("0", "0", "2", "0", "4"),
            ("1", "1", "2", "0", "4"),
            ("2", "0", "2", "1", "4"),
            ("3", "1", "2", "1", "4"),
        ]
        compute.resize(1)
        assert summed() @ compute == [(0, 2, 3.0), (1, 2, 3.0)]


@only_in_all
def test_a_resize_lets_a_broadcast_finish(compute: sky.Compute, tmp_path: Path) -> None:
    """Slow: the broadcast goes on for longer than one that has lost a peer may."""

    @sky.function
    def long() -> float:
        import torch
        import torch.distributed as dist

        (tmp_path / str(dist.get_rank())).touch()
        ends = time.monotonic() + 9
        while time.monotonic() < ends:
            time.sleep(0.1)
        total = torch.ones(1)
        dist.all_reduce(total)
        return total.item()

    results: list[list[float]] = []
    running = threading.Thread(target=lambda: results.append(long() @ compute))
    running.start()
    while len(list(tmp_path.iterdir())) < 2:
        time.sleep(0.01)
    compute.resize(3)
    running.join()
    assert results == [[2.0, 2.0]]
    assert [world for _, world, _ in summed() @ compute] == [3, 3, 3]


@only_in_all
def test_one_worker_needs_no_group() -> None:
    @sky.function
    def initialized() -> bool:
        import torch.distributed as dist

        return dist.is_initialized()

    with sky.Compute(plugins=[sky.plugins.torch()], options=QUIET) as compute:
        assert initialized() >> compute is False


@only_in_all
def test_a_node_that_never_arrives_is_named(nothing_left: None) -> None:
    def absent(info: sky.InstanceInfo) -> Iterator[None]:
        from skyward.plugins import rendezvous

        rendezvous.ARRIVE_SECONDS = 2.0
        if info.node == 1:
            time.sleep(10)
        yield

    plugins = [sky.Plugin.create("absent").with_around_process(absent), sky.plugins.torch()]
    with (
        pytest.raises(
            sky.errors.PluginError, match=r"node 1 worker 0 did not arrive at .* within 2 s"
        ),
        sky.Compute(nodes=2, plugins=plugins, options=QUIET),
    ):
        pass


# The image.


def cluster_with(accelerator: Any) -> Cluster:
    return Cluster("c", ClusterSpec(Nodes(2), accelerator, sky.Worker(), sky.Options()))


@pytest.mark.parametrize(
    ("accelerator", "wheels"), [(None, "cpu"), (sky.accelerators.A100(), "cu126")]
)
def test_packages_and_index_are_appended(accelerator: Any, wheels: str) -> None:
    plugin = sky.plugins.torch(cuda="cu126", version="2.3.0", vision="latest", audio=">=2.3")
    own = sky.PipIndex("https://example.org/simple", packages=["mine"])
    image = sky.Image(pip=["numpy"], pip_indexes=[own])
    assert plugin.transform is not None
    changed = plugin.transform(image, cluster_with(accelerator))
    assert changed.pip == ("numpy", "torch==2.3.0", "torchvision", "torchaudio>=2.3")
    assert changed.pip_indexes[0] == own
    index = changed.pip_indexes[1]
    assert index.url.endswith(f"/whl/{wheels}")
    assert index.packages == ("torch", "torchvision", "torchaudio")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"backend": "mpi"}, "choose 'nccl', 'gloo'"),
        ({"cuda": "12.8"}, "such as 'cu128'"),
        ({"version": "newest"}, "version='newest'.*'latest'"),
        ({"vision": ""}, "vision=''"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(sky.errors.ConfigurationError, match=words):
        sky.plugins.torch(**arguments)


@sky.function
def moved_to_cuda() -> list[str]:
    import torch

    model = torch.nn.Linear(2, 2).cuda().to("cuda:0")
    tensor = torch.zeros(2).cuda(non_blocking=True).to(torch.device("cuda"), torch.float64)
    return [model.weight.device.type, tensor.device.type, str(tensor.dtype)]


@only_in_all
def test_gpu_code_can_be_tried_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.setenv("SKYWARD_DEVICE", "cpu")
    wanted = sky.accelerators.A100()
    with sky.Compute(accelerator=wanted, plugins=[sky.plugins.torch()], options=QUIET) as compute:
        assert moved_to_cuda() >> compute == ["cpu", "cpu", "torch.float64"]
