"""The device process: one torch device, served to one client until it leaves."""

from __future__ import annotations

import ctypes
import os
import sys
import threading

import msgspec

from skyward.device.pump import plain_socket
from skyward.wire.channel import Channel
from skyward.wire.identity import Credentials, Listener
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
    channels: dict[str, Channel] = {}
    complete = threading.Event()

    def accept(channel: Channel, hello: Hello) -> None:
        channels[hello.role] = channel
        if len(channels) == 2:
            complete.set()

    credentials = Credentials(*config.credentials) if config.credentials else None
    listener = Listener(config.where, config.pool, credentials, accept)
    announcement = {"endpoint": listener.endpoint, "kind": kind}
    os.write(config.status, msgspec.json.encode(announcement) + b"\n")
    os.close(config.status)
    complete.wait()
    listener.close()
    both = [channels[role] for role in ("device-ops", "device-bulk")]
    ends = [plain_socket(channel) for channel in both]
    ops, bulk = (end.fileno() for end in ends)
    shares_memory = all(channel.shares_memory for channel in both)
    message = ctypes.create_string_buffer(4096)
    failed = library.sky_worker_serve(
        ops, bulk, int(shares_memory), kind.encode(), message, ctypes.c_size_t(len(message))
    )
    if failed:
        print(f"device process: {message.value.decode(errors='replace')}", file=sys.stderr)
        sys.stderr.flush()
    os._exit(failed)


if __name__ == "__main__":
    main()
