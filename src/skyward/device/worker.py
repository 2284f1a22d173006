"""The device process: serves one torch device to one client, until the client leaves.

If the client has kept tensors there, the process stays, and serves the next client.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from typing import NoReturn

import msgspec

from skyward.device import properties
from skyward.device.agent_line import AgentLine
from skyward.device.graphs import running as graphs
from skyward.device.peers import Peers
from skyward.device.visit import NobodyCameError, Visit
from skyward.wire.identity import Credentials
from skyward.worker import lifeline, limits
from skyward.worker.config import DeviceConfig
from skyward.worker.inspection import Inspection


def available() -> dict[str, int]:
    """The kinds of torch device here, and how many of each."""
    import torch

    kinds = {"cpu": 1}
    if torch.cuda.is_available():
        kinds["cuda"] = torch.cuda.device_count()
    if torch.backends.mps.is_available():
        kinds["mps"] = 1
    return kinds


def choose(kind: str) -> str:
    """The real device for "cuda", "cuda:1" or "auto"; an error names the devices of the node."""
    kinds = available()
    if kind == "auto":
        kind = next((k for k in ("cuda", "mps") if k in kinds), "cpu")
    name, _, index = kind.partition(":")
    if name not in kinds or not (index or "0").isdigit() or int(index or 0) >= kinds[name]:
        has = ", ".join(f"{count} x {k}" if count > 1 else k for k, count in kinds.items())
        raise LookupError(
            f"the node has no {kind!r}, it has {has}; ask for one of these, or set "
            "SKYWARD_DEVICE=cpu to try GPU code without one"
        )
    return name if name == "cpu" else f"{name}:{index or 0}"


def main() -> None:
    """Announce the endpoint, and serve one client after the other."""
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=DeviceConfig)
    lifeline.hold(config.lifeline, Inspection(config.stacks).answer)
    limits.raise_descriptors()
    sys.path[:] = config.search_path
    try:
        from skyward.device import build

        gc.disable()  # `import torch` takes 1.68 s so instead of 1.85 s.
        kind = choose(config.kind)
        gc.enable()
        library = ctypes.CDLL(str(build.library("worker")))
        described = properties.read(kind)
    except Exception as problem:
        os.write(config.status, msgspec.json.encode({"problem": str(problem)}) + b"\n")
        return
    credentials = Credentials(*config.credentials) if config.credentials else None
    peers = Peers(library, credentials)
    line = AgentLine(config.line, library, kind)

    def visited_at(where: str) -> Visit:
        visit = Visit(where, config.pool, credentials, peers, config.orphan_timeout)
        line.visited_by(visit)
        return visit

    visit = visited_at(config.where)
    announcement = {"endpoint": visit.endpoint, "kind": kind, "properties": described}
    os.write(config.status, msgspec.json.encode(announcement) + b"\n")
    os.close(config.status)
    programs = graphs.install(kind)
    while True:
        why = _serve(visit, library, kind, peers, line)
        if not line.holds:
            _end(why)
        visit.close()
        peers.close()
        programs.forget()
        visit = visited_at(line.next_place())
        line.listens(visit.endpoint)


def _serve(visit: Visit, library: ctypes.CDLL, kind: str, peers: Peers, line: AgentLine) -> str:
    """Serve one client until it leaves; returns what went wrong, if anything."""

    def lost(why: str) -> None:
        if not line.holds:
            _end(why)
        visit.leave()

    try:
        ops, bulk = visit.begin(lost)
    except NobodyCameError as problem:
        return str(problem)
    message = ctypes.create_string_buffer(4096)
    failed = library.sky_worker_serve(
        ops,
        (ctypes.c_int * len(bulk))(*bulk),
        len(bulk),
        int(visit.on_one_host),
        kind.encode(),
        peers.make_link,
        peers.end_link,
        message,
        ctypes.c_size_t(len(message)),
    )
    return f"device process: {message.value.decode(errors='replace')}" if failed else ""


def _end(why: str) -> NoReturn:
    """End the process at once; the agent reports its last output."""
    if why:
        print(why, file=sys.stderr, flush=True)
    os._exit(bool(why))


if __name__ == "__main__":
    main()
