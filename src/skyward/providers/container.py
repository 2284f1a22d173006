"""Container: nodes in Docker or Podman containers, through the socket that either serves."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import socket
import struct
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skyward import checks
from skyward.errors import ConfigurationError, PoolStartError, UnreachableError
from skyward.providers import Order, Wish, gpus
from skyward.spec import Volume

POOL, NODE = "skyward.pool", "skyward.node"
"""The labels by which a pool's containers are found."""
CACHE = "skyward.cache"
"""The label of volumes with what was built for an image; they outlive every pool."""
IMAGE, MOUNTS = "SKYWARD_CONTAINER_IMAGE", "SKYWARD_CONTAINER_MOUNTS"
BOOTSTRAP_SECONDS = 1800
AGENTLESS_SECONDS = 30
"""A container ends by itself when no agent came up in it for so long, or none is left."""
_CACHE_FOLDER = "/var/cache/skyward"
_TIMEOUT = 120
_ENDING_SECONDS = 5.0
_HEADER = struct.Struct(">BxxxL")
"""Before each piece of a command's output: the stream it belongs to, and its length."""

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

_PYTHON = """\
node=${2#unix:}
node=${node%/*}/python
if [ -x "$node" ]; then exec "$node" -c "$@"; fi
exec "$0" -c "$@"
"""
"""Of a machine on which Python was installed, the node's folder knows where."""

_RELAY = """\
import os, socket, sys, threading
family, _, place = sys.argv[1].partition(":")
if family == "unix":
    end = socket.socket(socket.AF_UNIX)
    end.connect(place)
else:
    host, _, port = place.rpartition(":")
    end = socket.create_connection((host, int(port)))
def out():
    while data := end.recv(1 << 18):
        view = memoryview(data)
        while view:
            view = view[os.write(1, view):]
    os.close(1)
sender = threading.Thread(target=out)
sender.start()
while data := os.read(0, 1 << 18):
    end.sendall(data)
end.shutdown(socket.SHUT_WR)
sender.join()
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
    """The address of the Docker or Podman service; found by itself when left out."""
    name: str = field(default="container", init=False, repr=False)

    def __post_init__(self) -> None:
        for what in ("image", "python", "host"):
            value = getattr(self, what)
            if value is not None:
                checks.text(self, what, value)
        mounts = self.mounts if isinstance(self.mounts, Sequence) else None
        if mounts is None or not all(isinstance(each, Volume) for each in mounts):
            raise checks.refused(self, {"mounts": self.mounts}, "give a list of sky.Volume(...)")
        checks.store(self, mounts=tuple(mounts))

    def check(self, wish: Wish) -> None:
        """Little is known before the service is asked."""
        if wish.accelerator is not None:
            gpus.check(wish.accelerator)

    def describe(self) -> Mapping[str, Any]:
        """Where its containers are; that is all it takes to find and remove them."""
        return {"host": self.host or os.environ.get("DOCKER_HOST")}

    def price(self, wish: Wish) -> float | None:
        """Whoever runs the service has paid for its machine."""
        return None

    async def create(self, order: Order) -> ContainerMachine:
        """Run a container with the pool's labels, in the pool's own network."""
        making = asyncio.create_task(asyncio.to_thread(self._create, order))
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            # A thread cannot be cancelled: what it makes is taken back.
            with contextlib.suppress(Exception):
                await (await making).destroy()
            raise

    async def find(self, pool: str) -> Sequence[ContainerMachine]:
        """Containers with the pool's label; a network that none of them uses any more goes."""
        return await asyncio.to_thread(self._find, pool)

    def _create(self, order: Order) -> ContainerMachine:
        service = self._service()
        with service.connected() as docker:
            try:
                return ContainerMachine(service, self._run(docker, order), self.python)
            except Exception as problem:
                with contextlib.suppress(Exception):
                    docker.containers.get(_name(order.pool, order.node)).remove(force=True, v=True)
                _remove_unused_network(docker, order.pool)
                if isinstance(problem, (PoolStartError, ConfigurationError)):
                    raise
                said, accelerator = _said(problem), order.wish.accelerator
                why = accelerator and gpus.refusal(accelerator, order.node, said)
                raise PoolStartError(
                    why or f"node {order.node}: the container did not start: {said}"
                ) from problem

    def _run(self, docker: Any, order: Order) -> Any:
        wish = order.wish
        image = self.image or os.environ.get(IMAGE) or _official_python(wish)
        found = _have_image(docker, image)
        network = _network(docker, order.pool)
        options: dict[str, Any] = {}
        if wish.vcpus:
            options["nano_cpus"] = int(wish.vcpus * 1e9)
        if wish.memory_gb:
            options["mem_limit"] = int(wish.memory_gb * 2**30)
        if wish.accelerator is not None and os.environ.get("SKYWARD_DEVICE") != "cpu":
            options["device_requests"] = [gpus.request(docker, wish.accelerator, order.node)]
        mounts = [_mount(each) for each in (*_usual_mounts(), *self.mounts, *wish.volumes)]
        if self.python is None:
            # Else each pool would begin with nothing, and each of its nodes.
            mounts.append(_cache(docker, found))
            options["environment"] = {"SKYWARD_CACHE": _CACHE_FOLDER}
        # PyTorch's data loaders share memory there, and Docker's 64 MB are soon used up.
        options["shm_size"] = int((wish.memory_gb or 4) * 2**29)
        return docker.containers.run(
            image,
            ["sh", "-c", _MAIN],
            name=_name(order.pool, order.node),
            hostname=f"node-{order.node}",
            labels={POOL: order.pool, NODE: str(order.node)},
            network=network,
            mounts=mounts,
            init=True,
            auto_remove=True,
            detach=True,
            **options,
        )

    def _find(self, pool: str) -> list[ContainerMachine]:
        service = self._service()
        with service.connected() as docker:
            found = docker.containers.list(all=True, filters={"label": f"{POOL}={pool}"})
            if not found:
                _remove_unused_network(docker, pool)
            return [ContainerMachine(service, container, self.python) for container in found]

    def _service(self) -> _Service:
        tried = []
        for address in _addresses(self.host):
            service = _Service(address)
            try:
                _check_socket(address)
                with service.connected() as docker:
                    docker.ping()
            except ConfigurationError:
                raise
            except Exception as problem:
                tried.append(f"{address} ({_said(problem)})")
                continue
            return service
        raise ConfigurationError(
            f"Container(): no Docker or Podman answers at {'; '.join(tried)}; start one "
            "(`systemctl start docker`, or `podman system service --time=0`), or set DOCKER_HOST"
        )


@dataclass(frozen=True, slots=True)
class _Service:
    """Docker or Podman at an address; connected to for as long as something is asked."""

    address: str

    @contextlib.contextmanager
    def connected(self) -> Iterator[Any]:
        try:
            import docker
        except ImportError:
            raise ConfigurationError(
                "Container(): the docker package is missing; install skyward[container]"
            ) from None
        client = docker.DockerClient(base_url=self.address, timeout=_TIMEOUT)
        try:
            yield client
        finally:
            client.close()


class ContainerMachine:
    """One container."""

    def __init__(self, service: _Service, container: Any, python: str | None) -> None:
        self._service = service
        self.id = str(container.name)
        self.python = python
        self.node = int(container.labels.get(NODE, 0))
        self._pool = str(container.labels.get(POOL, ""))
        self._copying: list[threading.Thread] = []
        """One for each connection; they end with it, at the latest with the container."""
        container.reload()
        networks = container.attrs["NetworkSettings"]["Networks"].values()
        self.address = next((each["IPAddress"] for each in networks if each["IPAddress"]), "")

    @property
    def direct(self) -> str | None:
        """On the same kernel, a container's address can be reached from the host."""
        local = self._service.address.startswith("unix:")
        return self.address if local and sys.platform == "linux" and self.address else None

    async def run(
        self,
        command: Sequence[str],
        *,
        input: bytes = b"",
        output: Callable[[bytes], None] | None = None,
    ) -> int:
        """A process in the container."""
        mark = f"/tmp/.skyward-{uuid.uuid4().hex}"
        script = f'echo "$$" >{mark}; trap "rm -f {mark}" EXIT; "$@"'
        work = asyncio.create_task(
            asyncio.to_thread(self._run, ["sh", "-c", script, "sh", *command], input, output)
        )
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            await asyncio.to_thread(self._end, mark)
            with contextlib.suppress(Exception):
                await work
            raise

    def _run(
        self, command: Sequence[str], input: bytes, output: Callable[[bytes], None] | None
    ) -> int:
        with self._executing(command) as (stream, exit_status):
            feeder = threading.Thread(target=_feed, args=(stream, input), daemon=True)
            feeder.start()
            for data in _output(stream):
                if output is not None:
                    output(data)
            feeder.join()
            return exit_status()

    def _end(self, mark: str) -> None:
        """Kill a command and its children; their shell left its process id behind."""
        kill = (
            f'pid=$(cat {mark}) || exit 0; pids=$pid; next=$pid; while [ -n "$next" ]; do '
            "found=; for one in $next; do for stat in /proc/[0-9]*/stat; do "
            'read -r line <"$stat" 2>/dev/null || continue; rest=${line##*) }; set -- $rest; '
            '[ "$2" = "$one" ] && found="$found ${line%% *}"; done; done; '
            f'pids="$pids $found"; next=$found; done; kill -9 $pids; rm -f {mark}'
        )
        with contextlib.suppress(Exception):
            self._run(["sh", "-c", kill], b"", None)

    async def dial(self, endpoint: str) -> socket.socket:
        """Through a process in the container that copies its streams to the socket."""
        return await asyncio.to_thread(self._dial, endpoint)

    def _dial(self, endpoint: str) -> socket.socket:
        command = ["sh", "-c", _PYTHON, self.python or "python3", _RELAY, endpoint]
        executing = self._executing(command)
        stream, _ = executing.__enter__()
        near, far = socket.socketpair()

        def upward() -> None:
            with contextlib.suppress(OSError):
                while data := far.recv(1 << 18):
                    stream.sendall(data)
                stream.shutdown(socket.SHUT_WR)

        def downward() -> None:
            try:
                with contextlib.suppress(OSError):
                    for data in _output(stream, errors=False):
                        far.sendall(data)
                    far.shutdown(socket.SHUT_WR)
                sender.join()
            finally:
                far.close()
                executing.__exit__(None, None, None)

        sender = threading.Thread(target=upward, name="skyward-dial", daemon=True)
        sender.start()
        receiver = threading.Thread(target=downward, name="skyward-dial", daemon=True)
        receiver.start()
        self._copying = [each for each in self._copying if each.is_alive()] + [receiver]
        return near

    @contextlib.contextmanager
    def _executing(
        self, command: Sequence[str]
    ) -> Iterator[tuple[socket.socket, Callable[[], int]]]:
        with self._service.connected() as docker:
            try:
                process = docker.api.exec_create(self.id, list(command), stdin=True)["Id"]
                raw = docker.api.exec_start(process, socket=True)
            except Exception as problem:
                raise PoolStartError(
                    f"node {self.node}: `{shlex.join(command)[:80]}` could not be run in container "
                    f"{self.id}: {_said(problem)}"
                ) from problem
            # The package hands out a wrapper that leaves its socket open.
            stream = getattr(raw, "_sock", raw)
            try:
                yield stream, lambda: int(docker.api.exec_inspect(process)["ExitCode"])
            finally:
                raw.close()
                stream.close()

    async def alive(self) -> bool:
        """Whether the container runs, or is only paused."""
        return await asyncio.to_thread(self._alive)

    def _alive(self) -> bool:
        from docker.errors import NotFound

        try:
            _check_socket(self._service.address)
            with self._service.connected() as docker:
                return docker.containers.get(self.id).status in ("running", "paused")
        except NotFound:
            return False
        except Exception as problem:
            raise UnreachableError(
                f"container {self.id}: {self._service.address} does not say what became of it: "
                f"{_said(problem)}"
            ) from problem

    async def destroy(self) -> None:
        """Remove the container, and with the last one the pool's network."""
        await asyncio.to_thread(self._destroy)

    def _destroy(self) -> None:
        from docker.errors import APIError, NotFound

        with self._service.connected() as docker:
            try:
                container = docker.containers.get(self.id)
                try:
                    container.remove(force=True, v=True)
                except APIError as problem:
                    # It is on its way out by itself: wait until it has gone.
                    if problem.status_code != 409:
                        raise
                    container.wait(condition="removed", timeout=_TIMEOUT)
            except NotFound:
                pass
            _remove_unused_network(docker, self._pool)
        for thread in self._copying:
            thread.join(_ENDING_SECONDS)


def _addresses(host: str | None) -> list[str]:
    """Where a service may answer, best first."""
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


def _check_socket(address: str) -> None:
    """Raise where nobody listens: the docker package would leave a socket open."""
    if address.startswith("unix://"):
        with socket.socket(socket.AF_UNIX) as probe:
            probe.connect(address.removeprefix("unix://"))


def _usual_mounts() -> list[Volume]:
    """Those that the environment asks for in every container, read-only."""
    pairs = [each.partition(":") for each in os.environ.get(MOUNTS, "").split(",") if each]
    return [Volume(source, target or source, read_only=True) for source, _, target in pairs]


def _official_python(wish: Wish) -> str:
    mine = f"{sys.version_info.major}.{sys.version_info.minor}"
    return f"python:{mine if wish.image.python == 'auto' else wish.image.python}-slim"


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
                f"the image {image!r} is not here and cannot be pulled: {_said(problem)}; name "
                f"another with Container(image=...) or {IMAGE}"
            ) from problem


def _network(docker: Any, pool: str) -> str:
    import docker.errors as errors

    name = f"sky-{pool}"
    if not docker.networks.list(names=[name]):
        try:
            docker.networks.create(name, labels={POOL: pool}, check_duplicate=True)
        except errors.APIError as problem:
            # Another node of the pool was quicker.
            if problem.status_code != 409 and "already" not in str(problem):
                raise
    return name


def _remove_unused_network(docker: Any, pool: str) -> None:
    with contextlib.suppress(Exception):
        for network in docker.networks.list(filters={"label": f"{POOL}={pool}"}):
            network.remove()


def _mount(volume: Volume) -> Any:
    from docker.types import Mount

    return Mount(volume.target, volume.source, type="bind", read_only=volume.read_only)


def _cache(docker: Any, image: Any) -> Any:
    """A volume for what is built in containers of an image; its Python is that of no other."""
    from docker.types import Mount

    name = f"skyward-cache-{str(image.id).removeprefix('sha256:')[:12]}"
    docker.volumes.create(name, labels={CACHE: (image.tags or [name])[0]})
    return Mount(_CACHE_FOLDER, name, type="volume")


def _name(pool: str, node: int) -> str:
    return f"sky-{pool}-{node}"


def _feed(stream: socket.socket, data: bytes) -> None:
    with contextlib.suppress(OSError):
        stream.sendall(data)
        stream.shutdown(socket.SHUT_WR)


def _output(stream: socket.socket, *, errors: bool = True) -> Iterator[bytes]:
    """What a command writes, piece by piece."""
    buffer = b""
    left, wanted = 0, False
    while data := _received(stream):
        buffer += data
        while buffer:
            if not left:
                if len(buffer) < _HEADER.size:
                    break
                kind, left = _HEADER.unpack_from(buffer)
                wanted = errors or kind == 1
                buffer = buffer[_HEADER.size :]
                continue
            piece, buffer = buffer[:left], buffer[left:]
            left -= len(piece)
            if wanted:
                yield piece


def _received(stream: socket.socket) -> bytes:
    try:
        return stream.recv(1 << 18)
    except ConnectionResetError:
        # So ends a command that did not read all of its input.
        return b""


def _said(problem: Exception) -> str:
    return str(getattr(problem, "explanation", None) or problem)[:500]
