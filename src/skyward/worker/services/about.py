"""About: the facts of a node: its agent, its executors, its folder."""

from __future__ import annotations

import os
import time

from skyward.wire.asking import answer
from skyward.wire.channel import Channel
from skyward.worker.services import ServedNode


def serve(node: ServedNode, channel: Channel) -> None:
    """Answer every question with the facts as they are now."""
    answer(channel, {"facts": lambda _: _facts(node)})


def _facts(node: ServedNode) -> dict[str, object]:
    return {
        "pool": node.config.pool,
        "node": node.config.node,
        "pid": os.getpid(),
        "folder": node.config.folder,
        "time": time.time(),
        "executors": [
            {"worker": each.worker, "slot": each.slot, "pid": each.process.pid}
            for each in node.executors
        ],
    }
