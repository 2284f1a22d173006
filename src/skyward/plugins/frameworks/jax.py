"""JAX: the right wheels, and every worker's devices in one mesh before the first task."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
from collections.abc import Callable, Iterator

from skyward.context import InstanceInfo
from skyward.errors import ConfigurationError
from skyward.plugins import rendezvous
from skyward.plugins.plugin import Cluster, Plugin, extended, imported
from skyward.spec import Image

LEAVE_SECONDS = 30
"""How long a worker that leaves waits for the others to leave, before JAX aborts it with a trace.

More than it is given before it is ended without one.
"""

_joined = False
_once_joined: list[Callable[[], None]] = []


def jax(cuda: str = "cuda12") -> Plugin:
    """Install JAX and call `jax.distributed.initialize()` once per worker process.

    `cuda` names the extra for accelerators that have CUDA; elsewhere plain `jax` is installed.
    With a single worker nothing is initialised.

    >>> with sky.Compute(nodes=2, plugins=[sky.plugins.jax()]) as compute:
    ...     results = train() @ compute
    """
    if not isinstance(cuda, str) or not cuda.startswith("cuda"):
        raise ConfigurationError(
            f"sky.plugins.jax(cuda={cuda!r}): give the extra of the package, such as 'cuda12'"
        )
    return (
        Plugin.create("jax")
        .with_transform(functools.partial(_install, cuda))
        .with_around_process(_one_mesh)
        .with_distributed()
    )


def _install(cuda: str, image: Image, cluster: Cluster) -> Image:
    accelerator = cluster.spec.accelerator
    has_cuda = accelerator is not None and accelerator.cuda
    return extended(image, [f"jax[{cuda}]" if has_cuda else "jax"])


def variables(info: InstanceInfo) -> dict[str, str]:
    """What describes this worker's place to JAX."""
    host = f"[{info.head_addr}]" if ":" in info.head_addr else info.head_addr
    return {
        "JAX_COORDINATOR_ADDRESS": f"{host}:{info.head_port}",
        "JAX_NUM_PROCESSES": str(info.total_workers),
        "JAX_PROCESS_ID": str(info.global_worker_index),
        "JAX_LOCAL_DEVICE_COUNT": str(len(_own_devices(info)) or 1),
    }


def _own_devices(info: InstanceInfo) -> list[int]:
    """The accelerators of this worker, among those it sees; empty where it computes on CPUs."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        seen = [each for each in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if each.strip()]
        return list(range(len(seen)))
    share = info.accelerators // info.workers_per_node
    return list(range(info.worker * share, (info.worker + 1) * share))


@contextlib.contextmanager
def _one_mesh(info: InstanceInfo) -> Iterator[None]:
    global _joined
    jax = imported("jax")
    if info.total_workers < 2:
        yield
        return
    os.environ.update(variables(info))
    rendezvous.everyone(info)
    jax.distributed.initialize(
        os.environ["JAX_COORDINATOR_ADDRESS"],
        num_processes=info.total_workers,
        process_id=info.global_worker_index,
        local_device_ids=_own_devices(info) or None,
        cluster_detection_method="deactivate",
        initialization_timeout=int(rendezvous.ARRIVE_SECONDS),
        shutdown_timeout_seconds=LEAVE_SECONDS,
    )
    _joined = True
    # JAX has installed a handler of its own, which notes a preemption and does not end the process.
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
    for action in _once_joined:
        action()
    yield
    # Not when a later plugin has failed: the other workers never leave, and this would wait.
    jax.distributed.shutdown()


def once_joined(action: Callable[[], None]) -> None:
    """Call an action once the devices of all workers are one mesh.

    A plugin that builds on this one may be given before it or after it.
    """
    if _joined:
        action()
    else:
        _once_joined.append(action)
