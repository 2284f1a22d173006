"""Container: nodes in Docker or Podman containers, through the socket that either serves."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from skyward import checks
from skyward.accelerators import Accelerator
from skyward.errors import ConfigurationError, PoolError, PoolStartError, UnavailableError
from skyward.providers import (
    Allocation,
    Capabilities,
    Order,
    Remains,
    Request,
    file_here,
    gathered,
    signature,
)
from skyward.providers.container.machine import ContainerMachine
from skyward.providers.container.service import (
    NODE,
    POOL,
    SIGNATURE,
    answering,
    remove_unused_network,
    said,
)
from skyward.spec import Volume

__all__ = ["Container"]

CACHE = "skyward.cache"
"""The label of volumes that hold the environments of an image; no pool removes them."""
NETWORK_ATTEMPTS = 3
GONE_INTERFACE = "no such network interface"
IMAGE, MOUNTS = "SKYWARD_CONTAINER_IMAGE", "SKYWARD_CONTAINER_MOUNTS"
BOOTSTRAP_SECONDS = 1800
AGENTLESS_SECONDS = 30
"""A container ends itself after so long without an agent."""
_STOP_SECONDS = 5
_CACHE_FOLDER = "/var/cache/skyward"
_PODMAN_SINCE = (5, 4)
"""Older versions accept requests for devices in their Docker API, and ignore them."""
_TOOLKIT = "install the NVIDIA container toolkit there"

_MAIN = f"""\
left={BOOTSTRAP_SECONDS}
while [ "$left" -gt 0 ]; do
    for line in /proc/[0-9]*/cmdline; do
        read -r line 2>/dev/null <"$line"
        case $line in *skyward.worker.agen[t]*) left={AGENTLESS_SECONDS} ;; esac
    done
    left=$((left - 5))
    sleep 5
done
"""


@dataclass(frozen=True)
class Container:
    """Nodes in containers on this machine, or wherever `DOCKER_HOST` points.

    `image` is the container image; without it, `SKYWARD_CONTAINER_IMAGE` or an official Python.
    `python` names an interpreter in it that has skyward and all that is needed, so that nothing is
    installed. `mounts` are folders of the host that every node sees, besides the pool's volumes.

    >>> with sky.Compute(sky.Container("python:3.11-slim"), nodes=2, memory_gb=2) as compute: ...
    """

    image: str | None = None
    mounts: Sequence[Volume] = ()
    python: str | None = None
    host: str | None = None
    """The address of the Docker or Podman service; if left out, the usual ones are tried."""
    name: str = field(default="container", init=False, repr=False)
    capabilities = Capabilities(answers=True, collects=True, stops=True, moves=True)

    def __post_init__(self) -> None:
        for what in ("image", "python", "host"):
            value = getattr(self, what)
            if value is not None:
                checks.text(self, what, value)
        given = self.mounts if isinstance(self.mounts, Sequence) else [None]
        # As `describe` writes them down, they are mappings.
        mounts = [Volume(**each) if isinstance(each, Mapping) else each for each in given]
        if not all(isinstance(each, Volume) for each in mounts):
            raise checks.refused(self, {"mounts": self.mounts}, "give a list of sky.Volume(...)")
        checks.store(self, mounts=tuple(mounts))

    def check(self, request: Request) -> None:
        """Refuse accelerators that no container can have; the rest only the service knows."""
        if request.accelerator is not None:
            _check_gpus(request.accelerator)

    def describe(self) -> Mapping[str, Any]:
        """The arguments, with the address and the image that variables name."""
        return {
            "image": self.image or os.environ.get(IMAGE) or None,
            "mounts": [asdict(each) for each in self.mounts],
            "python": self.python,
            "host": self._named or None,
        }

    @classmethod
    def arguments_here(cls, arguments: Mapping[str, Any], home: str) -> Mapping[str, Any]:
        """The service's address, unless it is a socket that is not here."""
        kind, _, path = (arguments.get("host") or "").partition("://")
        if kind != "unix":
            return arguments
        there = file_here(path, home)
        return {**arguments, "host": there and f"unix://{there}"}

    async def ping(self) -> str:
        """The service that answers."""
        service = await asyncio.to_thread(answering, self.host)
        return f"Docker or Podman at {service.address}"

    def price(self, request: Request) -> float | None:
        """None: the price of the service's machine is unknown."""
        return None

    def allocate(self, pool: str) -> Allocation[ContainerMachine]:
        """The pool's machines, made one by one."""
        return Allocation(self, pool)

    async def create(self, order: Order) -> ContainerMachine:
        """Run a container with the pool's labels, in the pool's own network."""
        making = asyncio.create_task(asyncio.to_thread(self._create, order))
        try:
            return (await asyncio.shield(making)).machine
        except asyncio.CancelledError:
            # A thread cannot be cancelled: undo what it does.
            with contextlib.suppress(Exception):
                await self._undo(await making)
            raise

    async def _undo(self, got: _Got) -> None:
        """Remove a container that was made, and stop one that was started again."""
        if got.how == "made":
            await got.machine.destroy()
        elif got.how == "started":
            await asyncio.to_thread(self._stop_one, got.machine.id)

    async def find(self, pool: str) -> Sequence[ContainerMachine]:
        """The containers with the pool's label; without any, the pool's network is removed."""
        return await asyncio.to_thread(self._find, pool)

    async def remains(self) -> Sequence[Remains]:
        """The containers and networks of all pools that the service has."""
        return await asyncio.to_thread(self._remains)

    def _remains(self) -> list[Remains]:
        try:
            service = answering(self.host)
        except ConfigurationError as problem:
            # Who names a service may have containers there, and must hear that nobody has looked.
            if self._named:
                raise UnavailableError(str(problem)) from problem
            raise
        with service.connected() as docker:
            return gathered(_left(docker))

    @property
    def _named(self) -> str:
        """The address of the service that was named; empty if the usual ones are tried."""
        return self.host or os.environ.get("DOCKER_HOST") or ""

    @property
    def where(self) -> str:
        """Where `remains` looks, for people."""
        return f"container at {self._named}" if self._named else self.name

    async def check_stop(self, pool: str) -> None:
        """Every container can be stopped."""

    async def spare(self, pool: str, spared: bool) -> None:
        """A container of a kept pool keeps its files in any case."""

    async def stop(self, pool: str) -> float | None:
        """Stop the pool's containers; their files stay, and `create` starts them again."""
        await asyncio.to_thread(self._stop, pool)
        return None

    def _stop(self, pool: str) -> None:
        with answering(self.host).connected() as docker:
            for container in docker.containers.list(filters={"label": f"{POOL}={pool}"}):
                _stop(container)

    def _stop_one(self, name: str) -> None:
        with answering(self.host).connected() as docker:
            _stop(docker.containers.get(name))

    def _create(self, order: Order) -> _Got:
        service = answering(self.host)
        with service.connected() as docker:
            if order.request.keep and (former := _former(docker, order)) is not None:
                there, how = former
                return _Got(ContainerMachine(service, there, self.python), how)
            try:
                machine = ContainerMachine(service, self._run(docker, order), self.python)
                return _Got(machine, "made")
            except Exception as problem:
                with contextlib.suppress(Exception):
                    docker.containers.get(_name(order.pool, order.node)).remove(force=True, v=True)
                remove_unused_network(docker, order.pool)
                if isinstance(problem, (PoolStartError, ConfigurationError)):
                    raise
                words, accelerator = said(problem), order.request.accelerator
                why = accelerator and _gpu_refusal(accelerator, order.node, words)
                raise PoolStartError(
                    why or f"node {order.node}: the container did not start: {words}"
                ) from problem

    def _run(self, docker: Any, order: Order) -> Any:
        request = order.request
        image = self.image or os.environ.get(IMAGE) or request.python_image
        found = _have_image(docker, image)
        network = _network(docker, order)
        options: dict[str, Any] = {}
        if request.vcpus:
            options["nano_cpus"] = int(request.vcpus * 1e9)
        if request.memory_gb:
            options["mem_limit"] = int(request.memory_gb * 2**30)
        if request.accelerator is not None and os.environ.get("SKYWARD_DEVICE") != "cpu":
            options["device_requests"] = [_gpus(docker, request.accelerator, order.node)]
        mounts = [_mount(each) for each in (*_usual_mounts(), *self.mounts, *request.volumes)]
        if self.python is None:
            # Without this volume every node of every pool would build its environment again.
            mounts.append(_cache(docker, found))
            options["environment"] = {"SKYWARD_CACHE": _CACHE_FOLDER}
        # PyTorch's data loaders share memory there, and Docker's 64 MB are soon used up.
        options["shm_size"] = int((request.memory_gb or 4) * 2**29)
        return docker.containers.run(
            image,
            ["sh", "-c", _MAIN],
            name=_name(order.pool, order.node),
            hostname=f"node-{order.node}",
            labels={**signature(SIGNATURE, order.pool, order.name), NODE: str(order.node)},
            network=network,
            mounts=mounts,
            init=True,
            # One that can be stopped must not be gone then.
            auto_remove=not request.keep,
            detach=True,
            **options,
        )

    def _find(self, pool: str) -> list[ContainerMachine]:
        service = answering(self.host)
        with service.connected() as docker:
            found = docker.containers.list(all=True, filters={"label": f"{POOL}={pool}"})
            if not found:
                remove_unused_network(docker, pool)
            return [ContainerMachine(service, container, self.python) for container in found]


_How = Literal["made", "started", "found"]
"""Whether a node's container is new, was started again, or ran already."""


@dataclass(frozen=True, slots=True)
class _Got:
    """The container of a node, and how the node came to have it."""

    machine: ContainerMachine
    how: _How


def _left(docker: Any) -> Iterator[Remains]:
    """What there is of any pool, whoever made it."""
    marked = {"label": POOL}
    # Sparse: the description of a container that ends meanwhile would be an error.
    for each in docker.containers.list(all=True, sparse=True, filters=marked):
        name = str((each.attrs.get("Names") or [each.id])[0]).removeprefix("/")
        yield Remains.labelled(each.attrs.get("Labels") or {}, SIGNATURE, f"container {name}")
    for each in docker.networks.list(filters=marked):
        yield Remains.labelled(each.attrs.get("Labels") or {}, SIGNATURE, f"network {each.name}")


def _stop(container: Any) -> None:
    try:
        container.stop(timeout=_STOP_SECONDS)
    except Exception as problem:
        raise PoolError(
            f"the container {container.name} could not be stopped: {said(problem)}"
        ) from problem


def _former(docker: Any, order: Order) -> tuple[Any, _How] | None:
    """The container that a node of a kept pool has already, started if it is stopped."""
    import docker.errors as errors

    try:
        there = docker.containers.get(_name(order.pool, order.node))
    except errors.NotFound:
        return None
    if there.labels.get(POOL) != order.pool:
        return None
    if there.status == "running":
        return there, "found"
    order.tell("starting the container again")
    try:
        there.start()
    except errors.APIError as problem:
        raise PoolStartError(
            f"node {order.node}: the container {there.name} could not be started again: "
            f"{said(problem)}; `sky down` removes it"
        ) from problem
    return there, "started"


def _usual_mounts() -> list[Volume]:
    """The mounts that an environment variable asks for in every container, read-only."""
    pairs = [each.partition(":") for each in os.environ.get(MOUNTS, "").split(",") if each]
    return [Volume(source, target or source, read_only=True) for source, _, target in pairs]


def _have_image(docker: Any, image: str) -> Any:
    import docker.errors as errors

    try:
        return docker.images.get(image)
    except errors.ImageNotFound:
        try:
            docker.images.pull(image)
            return docker.images.get(image)
        except errors.APIError as problem:
            raise PoolStartError(
                f"the image {image!r} is not here and cannot be pulled: {said(problem)}; name "
                f"another with Container(image=...) or {IMAGE}"
            ) from problem


def _network(docker: Any, order: Order) -> str:
    import docker.errors as errors

    name = f"sky-{order.pool}"
    for attempt in range(NETWORK_ATTEMPTS):
        if docker.networks.list(names=[name]):
            break
        try:
            labels = signature(SIGNATURE, order.pool, order.name)
            docker.networks.create(name, labels=labels, check_duplicate=True)
        except errors.APIError as problem:
            # Podman looks at all interfaces one by one, and fails if one has gone meanwhile.
            if GONE_INTERFACE in str(problem) and attempt + 1 < NETWORK_ATTEMPTS:
                continue
            # Another node of the pool made the network at the same moment.
            if problem.status_code != 409 and "already" not in str(problem):
                raise
        break
    return name


def _mount(volume: Volume) -> Any:
    from docker.types import Mount

    return Mount(volume.target, volume.source, type="bind", read_only=volume.read_only)


def _cache(docker: Any, image: Any) -> Any:
    """A volume for the environments of one container image, which depend on its Python."""
    from docker.types import Mount

    name = f"skyward-cache-{str(image.id).removeprefix('sha256:')[:12]}"
    docker.volumes.create(name, labels={CACHE: (image.tags or [name])[0]})
    return Mount(_CACHE_FOLDER, name, type="volume")


def _name(pool: str, node: int) -> str:
    return f"sky-{pool}-{node}"


# GPUs: how Docker and Podman are asked for them, and why they may refuse.


def _check_gpus(accelerator: Accelerator) -> None:
    """Refuse accelerators that no container service hands out."""
    if not accelerator.is_nvidia:
        raise ConfigurationError(
            f"Container(): accelerator={accelerator}: containers are given NVIDIA GPUs only; name "
            "one of these, or use sky.SSH(...) for a machine that has it"
        )


def _gpus(docker: Any, accelerator: Accelerator, node: int) -> Any:
    """Ask for the GPUs of one node; each node gets others, as all share the service's machine.

    Other pools are not known: their nodes get GPUs of the same numbers.
    """
    from docker.types import DeviceRequest

    first = node * accelerator.count
    numbers = [str(number) for number in range(first, first + accelerator.count)]
    podman = _podman_version(docker)
    if podman is None:
        return DeviceRequest(device_ids=numbers, capabilities=[["gpu"]])
    if podman < _PODMAN_SINCE:
        raise ConfigurationError(
            f"Container(): accelerator={accelerator}: Podman {'.'.join(map(str, podman))} gives no "
            "GPUs to those who use its Docker API; take Podman 5.4 or newer, or Docker"
        )
    return DeviceRequest(driver="cdi", device_ids=[f"nvidia.com/gpu={each}" for each in numbers])


def _gpu_refusal(accelerator: Accelerator, node: int, said: str) -> str | None:
    """The message for a container that was refused its GPUs; None for any other refusal."""
    if not re.search(r"device driver|nvidia|\bCDI\b", said, re.IGNORECASE):
        return None
    first = node * accelerator.count
    wanted = f"GPU {first}"
    if accelerator.count > 1:
        wanted = f"GPUs {first} to {first + accelerator.count - 1}"
    if re.search(r"could not select device driver|executable file not found", said):
        advice = f"{_TOOLKIT}, with `nvidia-ctk runtime configure --runtime=docker`"
    elif re.search(r"\bCDI\b", said):
        advice = (
            f"{_TOOLKIT}, with `nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml`; "
            "`nvidia-ctk cdi list` shows what there is"
        )
    else:
        advice = "`nvidia-smi -L` there shows what there is"
    return (
        f"accelerator={accelerator}: node {node} needs {wanted} of the machine that runs the "
        f"containers, which it did not get: {said}; {advice}; or use fewer nodes, another "
        "provider, or no accelerator="
    )


def _podman_version(docker: Any) -> tuple[int, ...] | None:
    for component in docker.version().get("Components") or ():
        if component.get("Name") == "Podman Engine":
            return tuple(map(int, re.findall(r"\d+", component.get("Version", ""))[:3]))
    return None
