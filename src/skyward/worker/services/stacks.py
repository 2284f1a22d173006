"""Stacks: where every thread of a node's executors and device processes is."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor

from skyward.wire.asking import answer
from skyward.wire.channel import Channel
from skyward.worker.process import ChildProcess
from skyward.worker.services import ServedNode
from skyward.worker.stacks import StackSource, described

AT_ONCE = 32
"""How many processes are asked at the same time: each may take two seconds."""


def serve(node: ServedNode, channel: Channel) -> None:
    """Answer every question with the stacks as they are now."""
    answer(channel, {"stacks": lambda _: _stacks(node)})


def _stacks(node: ServedNode) -> list[dict[str, object]]:
    asked = [
        functools.partial(_look, "executor", each.worker, each.slot, each.process, each.stacks)
        for each in node.executors
        if each.announced and not each.process.ended
    ]
    asked += [
        functools.partial(_look, each.kind, -1, 0, each.process, each.stacks)
        for each in node.devices
        if each.announced
    ]
    if not asked:
        return []
    with ThreadPoolExecutor(min(AT_ONCE, len(asked)), "skyward-stacks") as threads:
        return list(threads.map(lambda look: look(), asked))


def _look(
    kind: str, worker: int, slot: int, process: ChildProcess, stacks: StackSource
) -> dict[str, object]:
    place = {"kind": kind, "worker": worker, "slot": slot, "pid": process.pid}
    return place | described(stacks.look(process))
