"""What pods of a Kubernetes cluster cost: starting pools, calls and bytes, requests to its API.

Run by `kubernetes.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import floors
import numpy as np
from api_server import ApiServer
from cluster import NAMESPACE, Cluster, cluster
from floors import Link, change, connect_tls, make_certificate, touch
from measure import Sample, interleave, p50, timed
from report import Row, absent, absolute, compared, run_suite
from testbed import NoTestbedError

import skyward as sky
from skyward.providers import Order
from skyward.providers.kubernetes.jobs import is_running
from skyward.testing import plain_request

QUIET = sky.Options(console=False)
MIB = 2**20
KUBECTL = "`kubectl port-forward`"
ASKED, ANSWERED = 104, 67
"""Bytes of a no-op call and of its answer, as TLS makes them."""
OURS = "a plain socket through our own port forwarding"
OFFICIAL = "a plain socket through the official client's"
OFFICIAL_PAYLOAD = 16 * MIB
"""It copies the rest of its buffer for every piece: with more bytes it takes for ever, and keeps
the whole process from running meanwhile."""
TLS = "a plain TLS socket to the pod"


@dataclass(frozen=True)
class Size:
    """How much to measure."""

    payload: int
    rounds: int
    calls: int
    starts: int
    pools: int


FULL = Size(payload=256 * MIB, rounds=9, calls=200, starts=5, pools=5)
QUICK = Size(payload=32 * MIB, rounds=2, calls=20, starts=1, pools=1)


# The start.


def pools_start(size: Size) -> Sequence[Row]:
    """Two pods whose Python is ready: from the moment at which both run, and from `with` on."""
    what = "pool of 2 pods, image there: until ready"
    try:
        with cluster() as found, Running(found) as running:
            provider = found.provider()
            start(provider, running)
            seconds = [start(provider, running) for _ in range(size.starts)]
    except NoTestbedError as problem:
        return [absent(what, "", str(problem))]
    after, whole = (Sample(values) for values in zip(*seconds, strict=True))
    return [
        absolute(f"{what}, after both run", after, "< 3 s", 3),
        absolute(f"{what}, in all", whole),
    ]


@sky.function
def pod_name() -> str:
    return socket.gethostname()


def start(provider: sky.Kubernetes, running: Running) -> tuple[float, float]:
    """Seconds until a pool is ready: since its second pod ran, and in all."""
    compute = sky.Compute(provider, nodes=2, options=QUIET)
    began = time.perf_counter()
    with compute:
        ready = time.perf_counter()
        names = pod_name() @ compute
    return ready - max(running.since(name) for name in names), ready - began


class Running:
    """When pods began to run, as the API server told whoever watched: to some milliseconds.

    The time in a pod's own status has whole seconds.
    """

    def __init__(self, found: Cluster) -> None:
        self._access = found.access()
        self._since: dict[str, float] = {}
        self._closed = False
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def since(self, pod: str) -> float:
        return self._since[pod]

    def _watch(self) -> None:
        while not self._closed:
            with contextlib.suppress(sky.errors.PoolError):
                version = self._access.get("pods")["metadata"]["resourceVersion"]
                for _, pod in self._access.watch("pods", version):
                    if is_running(pod):
                        self._since.setdefault(pod["metadata"]["name"], time.perf_counter())

    def __enter__(self) -> Running:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        self._access.stop_watching()
        self._access.close()
        self._thread.join()


# Calls and bytes.


def calls_and_bytes(size: Size) -> Sequence[Row]:
    """A pool through the API server and one straight to its pod, in turns with the plain."""
    what = f"{size.payload // MIB} MiB"
    try:
        with ExitStack() as stack:
            found = stack.enter_context(cluster())
            through = opened(stack, found.provider(direct=False))
            straight = opened(stack, found.provider(direct=True))
            links = {
                "kubectl": stack.enter_context(through_kubectl(found, through)),
                "ours": stack.enter_context(through_ours(found, through)),
                "official": stack.enter_context(through_official(found, through)),
                "tls": stack.enter_context(straight_tls(straight)),
            }
            calls = interleave(
                {
                    "call": lambda: p50(lambda: nothing() >> through, size.calls),
                    "straight": lambda: p50(lambda: nothing() >> straight, size.calls),
                    **{name: trips(link, size.calls) for name, link in links.items()},
                },
                rounds=size.rounds,
            )
            official = links.pop("official")
            floats = np.random.default_rng(0).random(size.payload // 4, np.float32)
            floats[::1024] = 1
            up = interleave(
                {
                    "call": sending(floats, through),
                    "straight": sending(floats, straight),
                    "official": plainly(floats[: OFFICIAL_PAYLOAD // 4], official),
                    **{name: plainly(floats, link) for name, link in links.items()},
                },
                rounds=size.rounds,
            )
            down = interleave(
                {
                    "call": fetching(size.payload, through),
                    "straight": fetching(size.payload, straight),
                    "official": plainly_back(OFFICIAL_PAYLOAD, official),
                    **{name: plainly_back(size.payload, link) for name, link in links.items()},
                },
                rounds=size.rounds,
            )
    except NoTestbedError as problem:
        unknown = ("no-op call to a pod", f"{what} to a pod", f"{what} from a pod")
        return [absent(each, KUBECTL, str(problem)) for each in unknown]
    rows = [
        compared("no-op call to a pod, port forwarding", calls["call"], against, calls[name], bar)
        for name, against, bar in (
            ("kubectl", f"a message there and back, {KUBECTL}", "<= 1.5x"),
            ("ours", OURS, "<= 1.5x"),
            ("official", OFFICIAL, ""),
        )
    ]
    rows.append(compared("no-op call to a pod, direct", calls["straight"], TLS, calls["tls"]))
    for direction, seconds in ((f"{what} to a pod", up), (f"{what} from a pod", down)):
        rate = {
            name: sample.per(OFFICIAL_PAYLOAD if name == "official" else size.payload, "B/s")
            for name, sample in seconds.items()
        }
        forwarded = f"{direction}, port forwarding"
        rows += [
            compared(forwarded, rate["call"], KUBECTL, rate["kubectl"], ">= 0.7x"),
            compared(forwarded, rate["call"], OURS, rate["ours"]),
            compared(forwarded, rate["call"], f"{OFFICIAL}, 16 MiB", rate["official"]),
            compared(f"{direction}, direct", rate["straight"], TLS, rate["tls"], ">= 0.8x"),
        ]
    return rows


def forwarded_calls(rounds: int, calls: int) -> Sequence[Row]:
    """A call through the API server, in turns with the same bytes through kubectl."""
    what, against = "no-op call over a forwarded port", f"the same bytes, echoed, {KUBECTL}"
    try:
        with ExitStack() as stack:
            found = stack.enter_context(cluster())
            compute = opened(stack, found.provider(direct=False))
            here = stack.enter_context(sky.Compute(options=QUIET))
            pod, port = serve_echo() >> compute
            near = stack.enter_context(found.forwarding(pod, port))
            end = stack.enter_context(socket.create_connection(("127.0.0.1", near)))
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

            def echo() -> None:
                end.sendall(bytes(ASKED))
                assert len(end.recv(ASKED)) == ANSWERED

            taken = interleave(
                {
                    "call": lambda: p50(lambda: nothing() >> compute, calls),
                    "both": lambda: p50(lambda: (echo(), nothing() >> here), calls),
                    "echo": lambda: p50(echo, calls),
                },
                rounds=rounds,
            )
    except NoTestbedError as problem:
        return [absent(what, against, str(problem))]
    return [
        compared(what, taken["call"], against, taken["echo"], "<= 1.5x"),
        compared(what, taken["call"], f"{against}, then a call here", taken["both"]),
    ]


@sky.function
def serve_echo() -> tuple[str, int]:
    """Start a program in the pod that answers each message on one connection: its pod and port."""
    text = f"""
import socket
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
end, _ = listener.accept()
end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
while data := end.recv({ASKED}):
    end.sendall(data[:{ANSWERED}])
"""
    process = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE)
    assert process.stdout is not None
    return socket.gethostname(), int(process.stdout.readline())


def opened(stack: ExitStack, provider: sky.Kubernetes) -> sky.Compute:
    return stack.enter_context(sky.Compute(provider, options=QUIET))


@sky.function
def nothing() -> None:
    return None


@sky.function
def read_pages(floats: Any) -> float:
    """Read one value of every page, so that the pages really have to be there."""
    return float(floats[::1024].sum())


@sky.function
def new_result(count: int) -> Any:
    """An array made beforehand, changed on every page since the last time."""
    import numpy as np

    results = vars(np).setdefault("_bench_results", {})
    if count not in results:
        results[count] = np.ones(count, np.float32)
    results[count][::1024] += 1
    return results[count]


@sky.function
def serve_floor(kind: str, files: Mapping[str, bytes], host: str) -> tuple[str, str, int]:
    """Start floors.py in the pod, for one connection: the pod's name, its address and the port."""
    folder = Path(tempfile.mkdtemp())
    for name, content in files.items():
        (folder / name).write_bytes(content)
    process = subprocess.Popen(
        [sys.executable, folder / "floors.py", kind, folder, host], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    port = int(process.stdout.readline())
    return socket.gethostname(), sky.instance_info().peers[0].address, port


def floor_in(compute: sky.Compute, kind: str, folder: Path, host: str) -> tuple[str, str, int]:
    files = {each.name: each.read_bytes() for each in (Path(floors.__file__), *folder.iterdir())}
    return serve_floor(kind, files, host) >> compute


@contextlib.contextmanager
def through_kubectl(found: Cluster, compute: sky.Compute) -> Iterator[Link]:
    with tempfile.TemporaryDirectory() as empty:
        pod, _, port = floor_in(compute, "tcp", Path(empty), "127.0.0.1")
    with found.forwarding(pod, port) as near:
        end = socket.create_connection(("127.0.0.1", near))
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with Link(end) as link:
            yield link


@contextlib.contextmanager
def through_ours(found: Cluster, compute: sky.Compute) -> Iterator[Link]:
    with tempfile.TemporaryDirectory() as empty:
        pod, _, port = floor_in(compute, "tcp", Path(empty), "127.0.0.1")
    access = found.access()
    with contextlib.closing(access), Link(access.forward(pod, port)) as link:
        yield link


@contextlib.contextmanager
def through_official(found: Cluster, compute: sky.Compute) -> Iterator[Link]:
    from kubernetes import client, config, stream

    with tempfile.TemporaryDirectory() as empty:
        pod, _, port = floor_in(compute, "tcp", Path(empty), "127.0.0.1")
    api = client.CoreV1Api(config.new_client_from_config(found.kubeconfig))
    forwarded = stream.portforward(
        api.connect_get_namespaced_pod_portforward, pod, NAMESPACE, ports=str(port)
    )
    end = forwarded.socket(port)
    end.setblocking(True)
    with Link(end) as link:
        yield link


@contextlib.contextmanager
def straight_tls(compute: sky.Compute) -> Iterator[Link]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_certificate(folder)
        _, address, port = floor_in(compute, "tls", folder, "0.0.0.0")
        with Link(connect_tls(address, port, folder)) as link:
            yield link


def trips(link: Link, calls: int) -> Callable[[], float]:
    return lambda: p50(link.round_trip, calls)


def sending(floats: Any, compute: sky.Compute) -> Callable[[], float]:
    """Times a call with the array as argument, new on every page."""

    def send() -> float:
        change(floats)
        start = time.perf_counter()
        seen = read_pages(floats) >> compute
        taken = time.perf_counter() - start
        assert seen == touch(floats)
        return taken

    return send


def fetching(payload: int, compute: sky.Compute) -> Callable[[], float]:
    """Times a call with such an array as its result."""
    return lambda: timed(lambda: touch(new_result(payload // 4) >> compute))


def plainly(floats: Any, link: Link) -> Callable[[], float]:
    def send() -> float:
        change(floats)
        return timed(lambda: link.exchange([floats], reused=False))

    return send


def plainly_back(payload: int, link: Link) -> Callable[[], float]:
    return lambda: timed(lambda: link.exchange([], payload, reused=False))


# Requests.


def api_requests(size: Size) -> Sequence[Row]:
    """Pools of pretended pods: what the provider asks of the API, from first pod to last."""
    few, many = 8, 64
    costs = {nodes: [pretended(nodes) for _ in range(size.pools)] for nodes in (1, few, many)}
    requests = {
        nodes: Sample(tuple(each / nodes for each, _ in cost), " requests a pod")
        for nodes, cost in costs.items()
    }
    seconds = {
        nodes: Sample(tuple(each / nodes for _, each in cost)) for nodes, cost in costs.items()
    }
    made, asked = "to make and remove a pool of {}", "requests to the API"
    return [
        compared(
            f"{asked} {made.format(many)}",
            requests[many],
            made.format(few),
            requests[few],
            "<= 1x",
        ),
        compared(
            f"{asked} {made.format(few)}", requests[few], made.format(1), requests[1], "<= 1x"
        ),
        compared(
            f"processor time {made.format(many)}, a pod",
            seconds[many],
            made.format(few),
            seconds[few],
        ),
    ]


def pretended(nodes: int) -> tuple[int, float]:
    """How many requests a pool of pretended pods takes, and the processor time of both ends."""
    with ApiServer() as server:
        provider = sky.Kubernetes(kubeconfig=server.kubeconfig, image="pretended")
        began = time.process_time()
        asyncio.run(made_and_removed(provider, nodes))
        seconds = time.process_time() - began
        assert not server.cluster.objects["jobs"]
        assert not server.cluster.objects["pods"]
        return server.requests.total(), seconds


async def made_and_removed(provider: sky.Kubernetes, nodes: int) -> None:
    orders = [Order("pretended", node, plain_request()) for node in range(nodes)]
    machines = await asyncio.gather(*(provider.create(order) for order in orders))
    assert all([await each.alive() for each in machines])
    await asyncio.gather(*(each.destroy() for each in machines))


def main() -> None:
    """Take all measurements."""
    run_suite("kubernetes", [pools_start, calls_and_bytes, api_requests], full=FULL, quick=QUICK)
