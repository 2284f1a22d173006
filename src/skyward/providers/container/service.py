"""The container service: Docker or Podman, at a socket or an address."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyward.errors import ConfigurationError

POOL, NODE = "skyward.pool", "skyward.node"
"""The labels by which a pool's containers are found."""
SIGNATURE = "skyward."
"""How the labels begin with the pool, its name and its client: `sky gc` knows it by them."""
TIMEOUT = 120


@dataclass(frozen=True, slots=True)
class Service:
    """Docker or Podman at an address; the client connects for each request."""

    address: str
    version: str | None = None
    """The version of its API. If not given, every client asks, which costs Podman some 60 ms."""

    @contextlib.contextmanager
    def connected(self) -> Iterator[Any]:
        """A client of the docker package for this service."""
        try:
            import docker
        except ImportError:
            raise ConfigurationError(
                "Container(): the docker package is missing; install skyward-torch[container]"
            ) from None
        client = docker.DockerClient(base_url=self.address, version=self.version, timeout=TIMEOUT)
        try:
            yield client
        finally:
            client.close()


def answering(host: str | None) -> Service:
    """The service at that address, or the first that answers at one of the usual addresses."""
    tried = []
    for address in _addresses(host):
        try:
            check_socket(address)
            with Service(address).connected() as docker:
                docker.ping()
                version = docker.api.api_version
        except ConfigurationError:
            raise
        except Exception as problem:
            tried.append(f"{address} ({said(problem)})")
            continue
        return Service(address, version)
    raise ConfigurationError(
        f"Container(): no Docker or Podman answers at {'; '.join(tried)}; start one "
        "(`systemctl start docker`, or `podman system service --time=0`), or set DOCKER_HOST"
    )


def _addresses(host: str | None) -> list[str]:
    """The addresses to try, best first."""
    if host or os.environ.get("DOCKER_HOST"):
        return [host or os.environ["DOCKER_HOST"]]
    runtime = os.environ.get("XDG_RUNTIME_DIR", f"/run/user/{os.getuid()}")
    sockets = [
        Path("/var/run/docker.sock"),
        Path.home() / ".docker" / "run" / "docker.sock",
        Path(runtime, "podman", "podman.sock"),
        Path("/run/podman/podman.sock"),
    ]
    found = [each for each in sockets if each.exists()]
    return [f"unix://{each}" for each in found or sockets]


def check_socket(address: str) -> None:
    """Raise where nobody listens: the docker package would leave a socket open."""
    if address.startswith("unix://"):
        with socket.socket(socket.AF_UNIX) as probe:
            probe.connect(address.removeprefix("unix://"))


def remove_unused_network(docker: Any, pool: str) -> None:
    """Remove a pool's network, unless a container is still in it."""
    with contextlib.suppress(Exception):
        for network in docker.networks.list(filters={"label": f"{POOL}={pool}"}):
            network.remove()


def said(problem: Exception) -> str:
    """What the service said of a failure, in short."""
    return str(getattr(problem, "explanation", None) or problem)[:500]
