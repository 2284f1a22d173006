"""The rendezvous of a pool's workers: a port on the head, where they meet before a framework does.

The head's first worker keeps the port bound until it is used. A worker connects and says which pool
and rank it has. The head answers once all workers have connected, or names those that have not.
Then the port is free for the framework.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterable

from skyward.context import InstanceInfo
from skyward.errors import SkywardError

_reserved: socket.socket | None = None


def reserve() -> int:
    """Bind a port that is free on this machine, and keep it; its number."""
    global _reserved
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    _reserved = socket.socket(family)
    _reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if family == socket.AF_INET6:
        _reserved.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    _reserved.bind(("", 0))
    return int(_reserved.getsockname()[1])


def take() -> socket.socket:
    """The bound socket, to listen on or to close right before another binds the port; once."""
    global _reserved
    taken, _reserved = _reserved, None
    if taken is None:
        raise SkywardError(
            "the port where the workers meet is taken, or this is not the head; a pool has one, "
            "so give it one plugin that needs it, sky.plugins.torch() or sky.plugins.jax()"
        )
    return taken


ARRIVE_SECONDS = 60.0
"""How long the workers wait for each other."""
ANSWER_SECONDS = 5.0
RETRY_SECONDS = 0.05
LINE_MAX = 4096


def everyone(info: InstanceInfo, seconds: float = ARRIVE_SECONDS) -> None:
    """Return when every worker of the pool has connected; `TimeoutError` names the missing ones."""
    if info.is_head:
        _receive(info, take(), seconds)
    else:
        _report(info, seconds)


def places(info: InstanceInfo, ranks: Iterable[int]) -> str:
    """Workers as people call them."""
    each = [f"node {r // info.workers_per_node} worker {r % info.workers_per_node}" for r in ranks]
    return ", ".join(each)


def _receive(info: InstanceInfo, listening: socket.socket, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    missing = set(range(1, info.total_workers))
    with contextlib.ExitStack() as stack:
        here: list[socket.socket] = []
        with listening:
            listening.listen(max(128, info.total_workers))
            while missing and (left := deadline - time.monotonic()) > 0:
                listening.settimeout(left)
                with contextlib.suppress(TimeoutError):
                    caller = stack.enter_context(listening.accept()[0])
                    rank = _rank(info, caller)
                    if rank in missing:
                        missing.remove(rank)
                        here.append(caller)
        problem = late(info, sorted(missing), seconds) if missing else ""
        for caller in here:
            # A worker that has died meanwhile is noticed by the pool, or by the framework.
            with contextlib.suppress(OSError):
                caller.sendall(json.dumps({"problem": problem}).encode() + b"\n")
    if problem:
        raise TimeoutError(problem)


def _rank(info: InstanceInfo, caller: socket.socket) -> int:
    """The rank of the worker that connects; -1 for anything else."""
    caller.settimeout(1.0)
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        said = json.loads(_line(caller))
        if said["pool"] == info.job_id:
            return int(said["rank"])
    return -1


def _report(info: InstanceInfo, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    where = (info.head_addr, info.head_port)
    while True:
        try:
            calling = socket.create_connection(where, timeout=RETRY_SECONDS * 20)
            break
        except OSError as problem:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{late(info, [0], seconds)} ({problem})") from problem
            time.sleep(RETRY_SECONDS)
    with calling:
        said = {"pool": info.job_id, "rank": info.global_worker_index}
        calling.settimeout(max(0.0, deadline - time.monotonic()) + ANSWER_SECONDS)
        calling.sendall(json.dumps(said).encode() + b"\n")
        try:
            answer = json.loads(_line(calling))
        except (OSError, ValueError) as problem:
            raise ConnectionError(
                f"{places(info, [0])} went away while the workers gathered: {problem}"
            ) from problem
    if answer["problem"]:
        raise TimeoutError(answer["problem"])


def _line(connection: socket.socket) -> bytes:
    data = b""
    while not data.endswith(b"\n") and len(data) < LINE_MAX:
        piece = connection.recv(LINE_MAX - len(data))
        if not piece:
            raise ConnectionError("the connection was closed")
        data += piece
    return data


def late(info: InstanceInfo, ranks: list[int], seconds: float) -> str:
    """The message about workers that have not connected."""
    return (
        f"{places(info, ranks)} did not arrive at {info.head_addr}:{info.head_port} within "
        f"{seconds:.0f} s; check that the nodes can reach each other there"
    )
