"""Arrival: workers connect to the head before a framework does, so that missing ones are named.

A worker connects and says which pool and rank it has. The head answers once all workers have
connected, or names those that have not. Then the port is free for the framework.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterable

from skyward.context import InstanceInfo
from skyward.plugins import rendezvous

ARRIVE_SECONDS = 60.0
"""How long the workers wait for each other."""
ANSWER_SECONDS = 5.0
RETRY_SECONDS = 0.05
LINE_MAX = 4096


def everyone(info: InstanceInfo, seconds: float = ARRIVE_SECONDS) -> None:
    """Return when every worker of the pool has connected; `TimeoutError` names the missing ones."""
    if info.is_head:
        _receive(info, rendezvous.take(), seconds)
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
