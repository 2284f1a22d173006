"""The device process: serves one torch device to one client, until the client leaves.

If the client has kept tensors there, the process stays, and serves the next client.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import NoReturn

import msgspec

from skyward import kernel
from skyward.device.agent_line import AgentLine
from skyward.device.own_torch import OwnTorch
from skyward.device.peers import Peers
from skyward.device.ranks import OwnRank
from skyward.device.visit import NobodyCameError, Visit
from skyward.wire.handshake import Credentials
from skyward.worker import process
from skyward.worker.config import DeviceConfig
from skyward.worker.inspection import Inspection


def main() -> None:
    """Announce the endpoint, and serve one client after the other."""
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=DeviceConfig)
    process.hold_lifeline(config.lifeline, Inspection(config.stacks).answer)
    kernel.raise_descriptors()
    sys.path[:] = config.search_path

    def announce(said: dict[str, object]) -> None:
        os.write(config.status, msgspec.json.encode(said) + b"\n")

    try:
        torch = OwnTorch(
            config.kind, lambda text, transient: announce({"shows": text, "transient": transient})
        )
    except Exception as problem:
        missing = isinstance(problem, ModuleNotFoundError) and problem.name == "torch"
        how = "; the node has no torch: ask for it with Image(pip=['torch'])" if missing else ""
        announce({"problem": f"{problem}{how}"})
        return
    credentials = Credentials(*config.credentials) if config.credentials else None
    peers = Peers(torch.core, credentials)
    if credentials is not None:
        peers.use_links()
    rank = OwnRank(torch.core, torch.kind, credentials, peers, torch.import_whole)
    line = AgentLine(config.line, torch.core, torch.kind)

    def visited_at(where: str) -> Visit:
        visit = Visit(where, config.pool, credentials, peers, config.orphan_timeout, config.ticket)
        line.visited_by(visit)
        return visit

    visit = visited_at(config.where)
    announce({"endpoint": visit.endpoint, "kind": torch.kind, "properties": torch.properties})
    os.close(config.status)
    while True:
        why = _serve(visit, torch, peers, rank, line)
        if not line.holds:
            _end(why)
        visit.close()
        peers.close()
        rank.close()
        torch.forget()
        visit = visited_at(line.next_place())
        line.listens(visit.endpoint)


def _serve(visit: Visit, torch: OwnTorch, peers: Peers, rank: OwnRank, line: AgentLine) -> str:
    """Serve one client until it leaves; returns what went wrong, if anything."""

    def lost(why: str) -> None:
        if not line.holds:
            _end(why)
        visit.leave()

    try:
        ways = visit.begin(lost)
    except NobodyCameError as problem:
        return str(problem)
    message = ctypes.create_string_buffer(4096)
    failed = torch.core.sky_worker_serve(
        (ctypes.c_uint64 * len(ways))(*ways),
        len(ways),
        int(visit.on_one_host),
        torch.kind.encode(),
        peers.make_link,
        peers.end_link,
        rank.join,
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
