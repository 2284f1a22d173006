"""NVIDIA MIG: every worker process of a node has a slice of a GPU of its own."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import subprocess
from collections.abc import Iterator

from skyward.context import InstanceInfo
from skyward.errors import ConfigurationError
from skyward.plugins.plugin import Cluster, Plugin
from skyward.spec import Image

DEVICES = "SKYWARD_MIG_DEVICES"
"""The slices of the node, one for each worker process, for the processes to read."""
PROGRAM = "nvidia-smi"
COMMAND_SECONDS = 60.0

_PROFILE = re.compile(r"\d+g\.\d+gb(?:\+[a-z.]+)?")
_GPU = re.compile(r"^GPU (\d+):", re.MULTILINE)
_SLICE = re.compile(r"^\s+MIG (\S+)\s+Device\s+\d+:\s+\(UUID:\s+(MIG-[^)\s]+)\)", re.MULTILINE)
_CREATED = re.compile(r"created GPU instance ID\s+(\d+)")


def mig(profile: str) -> Plugin:
    """Divide the GPUs of every node with NVIDIA MIG: a slice for each worker process.

    Slices of the profile that a node has already are used; the others are made when the node
    starts, and removed when it ends. `Worker(per_node=2)` says how many there are.

    >>> plugins = [sky.plugins.mig("3g.40gb")]
    >>> sky.Compute(provider, worker=sky.Worker(per_node=2), plugins=plugins)
    """
    if not isinstance(profile, str) or not _PROFILE.fullmatch(profile):
        raise ConfigurationError(
            f"sky.plugins.mig({profile!r}): give a profile that `nvidia-smi mig -lgip` lists, such "
            "as '3g.40gb'"
        )
    return (
        Plugin.create("mig")
        .with_transform(_check_workers)
        .with_around_app(functools.partial(_divided, profile))
        .with_around_process(_on_a_slice)
    )


def _check_workers(image: Image, cluster: Cluster) -> Image:
    worker = cluster.spec.worker
    if worker.executor == "process" and worker.concurrency > 1:
        raise ConfigurationError(
            f"Worker(concurrency={worker.concurrency}): with sky.plugins.mig each worker process "
            f"has a slice of its own; write Worker(per_node={worker.concurrency})"
        )
    return image


@contextlib.contextmanager
def _divided(profile: str, info: InstanceInfo) -> Iterator[None]:
    if shutil.which(PROGRAM) is None:
        raise FileNotFoundError(
            f"{info.hostname or 'the node'} has no {PROGRAM}, which comes with NVIDIA's driver; "
            "use nodes with NVIDIA GPUs, or leave sky.plugins.mig() out"
        )
    want = info.workers_per_node
    with contextlib.ExitStack() as cleanup:
        slices = _slices(profile)
        said = "there is no GPU"
        for gpu in _GPU.findall(_run("-L")):
            if len(slices) < want:
                said = _fill(gpu, profile, want - len(slices), cleanup) or said
                slices = _slices(profile)
        if len(slices) < want:
            raise RuntimeError(
                f"this node has {len(slices)} of {want} slices {profile}, and makes no more: "
                f"{said}; use a smaller profile (`nvidia-smi mig -lgip`), fewer workers "
                "(Worker(per_node=...)), or have root divide the GPU"
            )
        os.environ[DEVICES] = ",".join(slices[:want])
        yield


@contextlib.contextmanager
def _on_a_slice(info: InstanceInfo) -> Iterator[None]:
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ[DEVICES].split(",")[info.worker]
    yield


def _slices(profile: str) -> list[str]:
    return [uuid for kind, uuid in _SLICE.findall(_run("-L")) if kind == profile]


def _fill(gpu: str, profile: str, count: int, cleanup: contextlib.ExitStack) -> str:
    """Make up to `count` slices on a GPU; returns why there are fewer, or "".

    `cleanup` leaves the GPU as it was, also after a start that fails halfway.
    """
    mode = _attempt("-i", gpu, "--query-gpu=mig.mode.current", "--format=csv,noheader")
    if "Disabled" in mode.stdout:
        done = _attempt("-i", gpu, "-mig", "1")
        if done.returncode:
            return _said(done)
        cleanup.callback(_attempt, "-i", gpu, "-mig", "0")
    for _ in range(count):
        done = _attempt("mig", "-i", gpu, "-cgi", profile, "-C")
        if done.returncode:
            return _said(done)
        made = _CREATED.search(done.stdout)
        if made is None:
            return f"{PROGRAM} does not say what it made: {_said(done)}"
        for flag in ("-dgi", "-dci"):
            cleanup.callback(_attempt, "mig", flag, "-i", gpu, "-gi", made[1])
    return ""


def _run(*arguments: str) -> str:
    done = _attempt(*arguments)
    if done.returncode:
        raise RuntimeError(
            f"`{PROGRAM} {' '.join(arguments)}` failed on the node: {_said(done)}; check its driver"
        )
    return done.stdout


def _attempt(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [PROGRAM, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=COMMAND_SECONDS,
    )


def _said(done: subprocess.CompletedProcess[str]) -> str:
    return " ".join((done.stderr or done.stdout).split())[-300:] or f"status {done.returncode}"
