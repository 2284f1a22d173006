"""PyTorch: the right wheels, and a process group that is there before the first task."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any, Literal

from skyward import kernel
from skyward.context import InstanceInfo
from skyward.errors import ConfigurationError
from skyward.plugins import rendezvous
from skyward.plugins.plugin import Cluster, Plugin, extended, requirement
from skyward.spec import Image, PipIndex

WHEELS = "https://download.pytorch.org/whl"
LOOK_SECONDS = 0.05
_PRETENDED = "SKYWARD_DEVICE"
"""With `cpu`, code that asks for CUDA runs on a machine that has none."""

Backend = Literal["nccl", "gloo"]


def torch(
    backend: Backend | None = None,
    cuda: str = "cu128",
    version: str = "latest",
    vision: str | None = None,
    audio: str | None = None,
) -> Plugin:
    """Install PyTorch and initialise `torch.distributed` once per worker process.

    `backend=None` means nccl where there is CUDA and gloo elsewhere. `cuda` names the wheels for
    accelerators that have it; without one the CPU wheels are used. With a single worker nothing
    is initialised. With `SKYWARD_DEVICE=cpu`, on machines without CUDA, `.cuda()` and
    `.to("cuda")` mean the processor.

    >>> with sky.Compute(nodes=2, plugins=[sky.plugins.torch()]) as compute:
    ...     results = train() @ compute
    """
    if backend not in (None, "nccl", "gloo"):
        raise ConfigurationError(
            f"sky.plugins.torch(backend={backend!r}): choose 'nccl', 'gloo', or None for whichever "
            "fits the hardware"
        )
    if not isinstance(cuda, str) or not cuda.startswith("cu"):
        raise ConfigurationError(
            f"sky.plugins.torch(cuda={cuda!r}): give the suffix of the wheels, such as 'cu128'"
        )
    packages = {"torch": requirement("torch", "torch", version)}
    for name, word in (("vision", vision), ("audio", audio)):
        if word is not None:
            package = f"torch{name}"
            packages[package] = requirement("torch", package, word, argument=name)
    return (
        Plugin.create("torch")
        .with_transform(functools.partial(_install, packages, cuda))
        .with_around_process(functools.partial(_process_group, backend))
        .with_distributed()
    )


def _install(packages: dict[str, str], cuda: str, image: Image, cluster: Cluster) -> Image:
    accelerator = cluster.spec.accelerator
    wheels = cuda if accelerator is not None and accelerator.cuda else "cpu"
    if cuda_is_pretended():
        image = replace(image, env={**image.env, _PRETENDED: "cpu"})
    index = PipIndex(f"{WHEELS}/{wheels}", tuple(packages))
    return extended(image, list(packages.values()), index)


def variables(info: InstanceInfo) -> dict[str, str]:
    """What `torchrun` would set for this worker."""
    return {
        "MASTER_ADDR": info.head_addr,
        "MASTER_PORT": str(info.head_port),
        "WORLD_SIZE": str(info.total_workers),
        "RANK": str(info.global_worker_index),
        "LOCAL_RANK": str(info.worker),
        "LOCAL_WORLD_SIZE": str(info.workers_per_node),
        "NODE_RANK": str(info.node_rank),
        "GROUP_RANK": str(info.node_rank),
    }


@contextlib.contextmanager
def _process_group(backend: Backend | None, info: InstanceInfo) -> Iterator[None]:
    if cuda_is_pretended():
        pretend_cuda()
    if info.total_workers < 2:
        yield
        return
    os.environ.update(variables(info))
    _share_processors(info)
    import torch
    import torch.distributed as dist

    if torch.cuda.is_available():
        torch.cuda.set_device(info.worker % torch.cuda.device_count())
    chosen = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    store = _meet(info)
    dist.init_process_group(
        chosen, store=store, rank=info.global_worker_index, world_size=info.total_workers
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def _share_processors(info: InstanceInfo) -> None:
    """Divide the processors among the workers that share them, as `torchrun` divides threads."""
    mine = next((peer.address for peer in info.peers if peer.node == info.node), "")
    here = sum(peer.address == mine for peer in info.peers) * info.workers_per_node
    if here > 1:
        processors = kernel.processors()
        threads = max(1, processors // here)
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))


def _meet(info: InstanceInfo) -> Any:
    """A store that every worker has reached; an error names the workers that have not."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    seconds = timedelta(seconds=rendezvous.ARRIVE_SECONDS)
    if info.is_head:
        listening = rendezvous.take()
        listening.listen(max(128, info.total_workers))
        store = TCPStore(
            info.head_addr,
            info.head_port,
            is_master=True,
            wait_for_workers=False,
            timeout=seconds,
            master_listen_fd=listening.detach(),
        )
    else:
        store = TCPStore(info.head_addr, info.head_port, is_master=False, timeout=seconds)
    keys = [f"skyward/{rank}" for rank in range(info.total_workers)]
    store.set(keys[info.global_worker_index], "here")
    deadline = time.monotonic() + rendezvous.ARRIVE_SECONDS
    while not store.check(keys):
        if time.monotonic() > deadline:
            late = [rank for rank, key in enumerate(keys) if not store.check([key])]
            raise TimeoutError(rendezvous.late(info, late, rendezvous.ARRIVE_SECONDS))
        time.sleep(LOOK_SECONDS)
    return store


def cuda_is_pretended() -> bool:
    """Whether the user asked to try GPU code without a GPU."""
    return os.environ.get(_PRETENDED) == "cpu"


def pretend_cuda() -> None:
    """Make `.cuda()` and `.to("cuda")` of tensors and modules mean the processor, in this process.

    Does nothing where there is CUDA.
    """
    import torch

    if torch.cuda.is_available():
        return
    kinds: tuple[Any, ...] = (torch.Tensor, torch.nn.Module)
    for kind in kinds:
        if getattr(kind.cuda, "pretended", False):
            return
        kind.cuda = _on_processor(kind.cuda)
        kind.to = _moved(kind.to)


def _on_processor(original: Any) -> Any:
    @functools.wraps(original)
    def cuda(self: Any, *_: object, **__: object) -> Any:
        return self.to("cpu")

    cuda.pretended = True  # type: ignore[attr-defined]
    return cuda


def _moved(original: Any) -> Any:
    @functools.wraps(original)
    def to(self: Any, *given: Any, **named: Any) -> Any:
        return original(
            self,
            *(_meant(each) for each in given),
            **{name: _meant(each) for name, each in named.items()},
        )

    return to


def _meant(value: Any) -> Any:
    import torch

    if isinstance(value, str) and value.partition(":")[0] == "cuda":
        return "cpu"
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    return value
