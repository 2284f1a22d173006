"""The device process: serves one torch device to one client, until the client leaves."""

from __future__ import annotations

import ctypes
import gc
import os
import queue
import sys
import threading
from typing import NoReturn

import msgspec

from skyward.device import properties
from skyward.device.graphs import running as graphs
from skyward.device.peers import Peers
from skyward.device.pump import BACKLOGS, ON_ONE_HOST, Pump
from skyward.wire.channel import Channel
from skyward.wire.identity import Credentials
from skyward.wire.listener import Listener
from skyward.wire.messages import Hello
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
    """Announce the endpoint, wait for both connections, serve."""
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
    arrived: dict[str, queue.SimpleQueue[Channel]] = {
        role: queue.SimpleQueue() for role in BACKLOGS
    }
    free, lock = set(BACKLOGS), threading.Lock()
    credentials = Credentials(*config.credentials) if config.credentials else None
    peers = Peers(library, credentials)

    def accept(channel: Channel, hello: Hello) -> None:
        if peers.is_peer(hello):
            peers.accept(channel, hello)
            return
        # One client, ever: a link of another session is closed.
        with lock:
            is_first = hello.role in free
            free.discard(hello.role)
        if is_first:
            arrived[hello.role].put(channel)
        else:
            channel.close()

    # It stays open: a client that lost its connection comes again, and other devices' processes do.
    listener = Listener(config.where, config.pool, credentials, accept)
    announcement = {"endpoint": listener.endpoint, "kind": kind, "properties": described}
    os.write(config.status, msgspec.json.encode(announcement) + b"\n")
    os.close(config.status)
    on_one_host = credentials is None
    try:
        patience = None if on_one_host else config.orphan_timeout
        roles = ON_ONE_HOST if on_one_host else tuple(BACKLOGS)
        channels = {role: arrived[role].get(timeout=patience) for role in roles}
    except queue.Empty:
        _end(f"the client did not connect within {config.orphan_timeout:g} s")
    if on_one_host:
        ends = [channel.detach()[0] for channel in channels.values()]
    else:
        pumps = [
            Pump(channel, BACKLOGS[role], _end, patience=config.orphan_timeout)
            for role, channel in channels.items()
        ]
        ends = [pump.near for pump in pumps]
    ops, *bulk = (end.fileno() for end in ends)
    sockets = (ctypes.c_int * len(bulk))(*bulk)
    graphs.install(kind)
    message = ctypes.create_string_buffer(4096)
    failed = library.sky_worker_serve(
        ops,
        sockets,
        len(bulk),
        int(on_one_host),
        kind.encode(),
        peers.make_link,
        peers.end_link,
        message,
        ctypes.c_size_t(len(message)),
    )
    _end(f"device process: {message.value.decode(errors='replace')}" if failed else "")


def _end(why: str) -> NoReturn:
    """End the process at once; the agent reports its last output."""
    if why:
        print(why, file=sys.stderr, flush=True)
    os._exit(bool(why))


if __name__ == "__main__":
    main()
