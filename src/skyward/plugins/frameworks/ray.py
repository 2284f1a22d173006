"""Ray on the nodes of a pool: a head on the first one, which the others join."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skyward.context import InstanceInfo
from skyward.errors import ConfigurationError
from skyward.plugins import rendezvous
from skyward.plugins.plugin import Plugin, check_installed, installing, requirement

START_SECONDS = 120.0
"""How long Ray may take to start on a node, or its head to listen."""
LOOK_SECONDS = 0.1
_KEEPER = "skyward.plugins.frameworks.ray_keeper"


@dataclass(frozen=True)
class _Settings:
    token: str
    """What lets a process into the cluster; Ray before 2.52 does not know of it."""
    arguments: tuple[str, ...]


def ray(
    version: str = "latest",
    extras: Sequence[str] = ("default",),
    num_cpus: float | None = None,
    num_gpus: float | None = None,
    resources: Mapping[str, float] | None = None,
    object_store_memory: int | None = None,
) -> Plugin:
    """Start a Ray cluster on the pool's nodes, whose processes end with the pool.

    `ray.init()`, or the first task, finds the cluster by `RAY_ADDRESS`. `extras` are those of the
    package, such as "train" and "tune". `num_cpus`, `num_gpus`, `resources` and
    `object_store_memory` are what each node offers; left out, Ray looks at the machine.

    >>> with sky.Compute(nodes=2, plugins=[sky.plugins.ray(extras=["train"])]) as compute:
    ...     result = train_with_ray() >> compute
    """
    if isinstance(extras, str) or not all(isinstance(each, str) for each in extras):
        raise ConfigurationError(
            f"sky.plugins.ray(extras={extras!r}): give a list, such as ['train', 'tune']"
        )
    for name, value in (("num_cpus", num_cpus), ("num_gpus", num_gpus)):
        if value is not None and not (isinstance(value, (int, float)) and value >= 0):
            raise ConfigurationError(f"sky.plugins.ray({name}={value!r}): give a number, such as 2")
    given = {
        "num-cpus": num_cpus,
        "num-gpus": num_gpus,
        "object-store-memory": object_store_memory,
        "resources": None if resources is None else json.dumps(dict(resources)),
    }
    arguments = tuple(f"--{name}={value}" for name, value in given.items() if value is not None)
    package = f"ray[{','.join(extras)}]" if extras else "ray"
    settings = _Settings(secrets.token_hex(32), arguments)
    return (
        Plugin.create("ray")
        .with_transform(installing([requirement("ray", package, version)]))
        .with_around_process(functools.partial(_in_one_cluster, settings))
        .with_distributed()
    )


def variables(info: InstanceInfo, token: str) -> dict[str, str]:
    """What a process needs to find the cluster and to be let in."""
    host = f"[{info.head_addr}]" if ":" in info.head_addr else info.head_addr
    return {
        "RAY_ADDRESS": f"{host}:{info.head_port}",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": token,
        "RAY_USAGE_STATS_ENABLED": "0",
    }


@contextlib.contextmanager
def _in_one_cluster(settings: _Settings, info: InstanceInfo) -> Iterator[None]:
    check_installed("ray")
    os.environ.update(variables(info, settings.token))
    if info.total_workers > 1:
        rendezvous.everyone(info)
    keeper = None
    try:
        if info.worker == 0:
            keeper = _start(settings, info)
        _wait_for_head(info)
        yield
    finally:
        if (loaded := sys.modules.get("ray")) is not None:
            loaded.shutdown()
        if keeper is not None:
            keeper.stdin.close()
            keeper.wait()


def _start(settings: _Settings, info: InstanceInfo) -> Any:
    """Start Ray's processes on this node, through a process that ends them when this one ends."""
    address = next((p.address for p in info.peers if p.node == info.node), info.head_addr)
    where = (
        ["--head", f"--port={info.head_port}", "--include-dashboard=false"]
        if info.is_head
        else [f"--address={os.environ['RAY_ADDRESS']}"]
    )
    arguments = ["--disable-usage-stats", f"--node-ip-address={address}", *where]
    if not info.is_head:
        _wait_for_head(info)
    keeper = subprocess.Popen(
        [sys.executable, "-m", _KEEPER, _folder(info), *arguments, *settings.arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        text=True,
    )
    assert keeper.stdout is not None
    said = []
    for line in keeper.stdout:
        if line.strip() == "started":
            return keeper
        said.append(line)
    keeper.wait()
    raise RuntimeError(f"Ray did not start on node {info.node}:\n{''.join(said)[-2000:]}")


def _folder(info: InstanceInfo) -> str:
    """Where Ray keeps sockets and logs: nodes take the path from the head, so all have the same.

    Short, because the path of a Unix socket may have 107 characters.
    """
    return f"/tmp/skyray-{info.job_id}-{info.head_port}"


def _wait_for_head(info: InstanceInfo) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            socket.create_connection((info.head_addr, info.head_port), 5.0).close()
            return
        except OSError as problem:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"Ray's head does not listen at {os.environ['RAY_ADDRESS']} after "
                    f"{START_SECONDS:.0f} s: {problem}; see that nodes may connect to each other"
                ) from problem
        time.sleep(LOOK_SECONDS)
