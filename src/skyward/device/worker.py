"""The device process: one torch device, served to one client until it leaves."""

from __future__ import annotations

import ctypes
import os
import queue
import sys
from typing import NoReturn

import msgspec

from skyward.device.pump import BACKLOGS, Link
from skyward.device.route import Door
from skyward.wire.channel import Channel
from skyward.wire.identity import Credentials
from skyward.wire.listener import Listener
from skyward.wire.messages import Hello
from skyward.worker import lifeline, limits
from skyward.worker.config import DeviceConfig


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
    """The real device for "cuda", "cuda:1" or "auto"; raises naming what there is."""
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
    lifeline.hold(config.lifeline)
    limits.raise_descriptors()
    sys.path[:] = config.search_path
    try:
        from skyward.device import build

        kind = choose(config.kind)
        library = ctypes.CDLL(str(build.library("worker")))
    except Exception as problem:
        os.write(config.status, msgspec.json.encode({"problem": str(problem)}) + b"\n")
        return
    arrived: dict[str, queue.SimpleQueue[Channel]] = {
        role: queue.SimpleQueue() for role in BACKLOGS
    }
    doors = {role: Door(config.orphan_timeout) for role in BACKLOGS}

    def accept(channel: Channel, hello: Hello) -> None:
        if hello.role not in BACKLOGS:
            channel.close()
        elif channel.shares_memory:
            arrived[hello.role].put(channel)
        else:
            doors[hello.role].knock(channel)

    credentials = Credentials(*config.credentials) if config.credentials else None
    listener = Listener(config.where, config.pool, credentials, accept)
    announcement = {"endpoint": listener.endpoint, "kind": kind}
    os.write(config.status, msgspec.json.encode(announcement) + b"\n")
    os.close(config.status)
    on_one_host = credentials is None
    if on_one_host:
        channels = [arrived[role].get() for role in BACKLOGS]
        ends = [channel.detach()[0] for channel in channels]
        listener.close()
    else:
        # The listener stays: a client whose connection was cut comes back to it.
        ends = [Link(doors[role], limit, _end).near for role, limit in BACKLOGS.items()]
    ops, bulk = (end.fileno() for end in ends)
    message = ctypes.create_string_buffer(4096)
    failed = library.sky_worker_serve(
        ops, bulk, int(on_one_host), kind.encode(), message, ctypes.c_size_t(len(message))
    )
    _end(f"device process: {message.value.decode(errors='replace')}" if failed else "")


def _end(why: str) -> NoReturn:
    """End at once, whatever runs; the agent passes on what is written last."""
    if why:
        print(why, file=sys.stderr, flush=True)
    os._exit(bool(why))


if __name__ == "__main__":
    main()
