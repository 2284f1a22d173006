"""NVIDIA MPS: the worker processes of a node share its GPUs at the same time."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from skyward.context import InstanceInfo
from skyward.errors import ConfigurationError
from skyward.plugins.plugin import Plugin

CONTROL = "nvidia-cuda-mps-control"
START_SECONDS = 20.0
STOP_SECONDS = 10.0
LOOK_SECONDS = 0.05


def mps(
    active_thread_percentage: int | None = None, pinned_memory_limit: str | None = None
) -> Plugin:
    """Run NVIDIA's Multi-Process Service on every node while the pool is open.

    `active_thread_percentage` is the most of a GPU that one process may compute on, 1 to 100.
    `pinned_memory_limit` is the most memory of each GPU for one process, such as "0=4G,1=4G", or
    "4G" for GPU 0.

    >>> shared = sky.Worker(per_node=4)
    >>> sky.Compute(provider, worker=shared, plugins=[sky.plugins.mps()])
    """
    settings: dict[str, str] = {}
    share = active_thread_percentage
    if share is not None:
        if isinstance(share, bool) or not isinstance(share, int) or not 1 <= share <= 100:
            raise ConfigurationError(
                f"sky.plugins.mps(active_thread_percentage={share!r}): give a whole number from 1 "
                "to 100"
            )
        settings["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(share)
    limit = pinned_memory_limit
    if limit is not None:
        if not isinstance(limit, str) or not limit or limit.split() != [limit]:
            raise ConfigurationError(
                f"sky.plugins.mps(pinned_memory_limit={limit!r}): give a size for each GPU, such "
                "as '0=4G,1=4G'"
            )
        settings["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = limit if "=" in limit else f"0={limit}"
    return Plugin.create("mps").with_around_app(functools.partial(_serve, settings))


@contextlib.contextmanager
def _serve(settings: Mapping[str, str], info: InstanceInfo) -> Iterator[None]:
    program = shutil.which(CONTROL)
    if program is None:
        raise FileNotFoundError(
            f"{info.hostname or 'the node'} has no {CONTROL}, which comes with NVIDIA's driver; "
            "use nodes with NVIDIA GPUs, or leave sky.plugins.mps() out"
        )
    with contextlib.ExitStack() as cleanup:
        # A folder of its own: another daemon on this machine serves others. The name is short,
        # since a socket in it has a path of at most 107 bytes.
        folder = Path(tempfile.mkdtemp(prefix="sky-mps-", dir="/tmp"))
        cleanup.callback(shutil.rmtree, folder, ignore_errors=True)
        pipes, logs = folder / "pipe", folder / "log"
        pipes.mkdir()
        logs.mkdir()
        os.environ["CUDA_MPS_PIPE_DIRECTORY"] = str(pipes)
        os.environ["CUDA_MPS_LOG_DIRECTORY"] = str(logs)
        os.environ.update(settings)
        # In the foreground, as a child: a daemon would outlive an agent that is killed.
        daemon = subprocess.Popen(
            [program, "-f"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        cleanup.callback(_stop, program, daemon)
        _wait_until_it_answers(program, daemon)
        yield


def _wait_until_it_answers(program: str, daemon: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not _tell(program, "get_server_list"):
        if daemon.poll() is not None:
            said = daemon.stderr.read().strip() if daemon.stderr else ""
            raise RuntimeError(
                f"{CONTROL} ended at once with status {daemon.returncode}"
                + (f": {said[-500:]}" if said else "")
                + "; run it on the node by hand to see why (a GPU in use by another MPS daemon, "
                "or one without MPS)"
            )
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"{CONTROL} did not answer within {START_SECONDS:g} s; run `nvidia-smi` on the "
                "node to see whether its driver works"
            )
        time.sleep(LOOK_SECONDS)


def _tell(program: str, command: str) -> bool:
    try:
        told = subprocess.run(
            [program], input=f"{command}\n", capture_output=True, text=True, timeout=STOP_SECONDS
        )
    except subprocess.TimeoutExpired:
        return False
    return told.returncode == 0


def _stop(program: str, daemon: subprocess.Popen[str]) -> None:
    if daemon.poll() is None:
        _tell(program, "quit")
    try:
        daemon.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()
    if daemon.stderr is not None:
        daemon.stderr.close()
