"""How busy nodes are, as their agents measure it."""

from __future__ import annotations

import itertools
import queue
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from skyward.wire.messages import Measure, Message, Usage

ANSWER_SECONDS = 3.0
"""How long the client waits for a measurement."""


@dataclass(frozen=True, slots=True)
class GpuUsage:
    """How busy one GPU is; `percent` is None if its driver does not say."""

    name: str
    percent: float | None
    memory_used: int
    memory_total: int


@dataclass(frozen=True, slots=True)
class NodeUsage:
    """How busy a node is; in a container, all of it is the container's share."""

    cpu_percent: float
    """Of all processors that the node may use, since the measurement before."""
    memory_used: int
    memory_total: int
    gpus: tuple[GpuUsage, ...]
    network_received: int = 0
    """Bytes that the node has received since it was started, but for those from itself."""
    network_sent: int = 0


class UsageDesk:
    """Asks agents for measurements; any thread may ask."""

    def __init__(self, tell: Callable[[int, Message], bool]) -> None:
        """`tell` sends to the agent of a node; False if the node has none now."""
        self._tell = tell
        self._numbers = itertools.count(1)
        self._waiting: dict[int, queue.SimpleQueue[Usage]] = {}

    def get(self, node: int) -> NodeUsage | None:
        """How busy a node is; None if its agent does not answer."""
        return self.get_all([node]).get(node)

    def get_all(
        self, nodes: Iterable[int], seconds: float = ANSWER_SECONDS
    ) -> dict[int, NodeUsage]:
        """How busy these nodes are; those that do not answer in so many seconds are left out."""
        answers: queue.SimpleQueue[Usage] = queue.SimpleQueue()
        asked: dict[int, int] = {}
        found: dict[int, NodeUsage] = {}
        deadline = time.monotonic() + seconds
        try:
            for node in nodes:
                number = next(self._numbers)
                self._waiting[number] = answers
                asked[number] = node
                if not self._tell(node, Measure(number)):
                    del asked[number], self._waiting[number]
            while len(found) < len(asked):
                told = answers.get(timeout=max(0.0, deadline - time.monotonic()))
                found[asked[told.number]] = _usage(told)
        except queue.Empty:
            pass
        finally:
            for number in asked:
                self._waiting.pop(number, None)
        return found

    def heard(self, message: Usage) -> None:
        """Take an agent's measurement."""
        waiting = self._waiting.get(message.number)
        if waiting is not None:
            waiting.put(message)


def _usage(told: Usage) -> NodeUsage:
    gpus = tuple(GpuUsage(*each) for each in told.gpus)
    return NodeUsage(
        told.cpu_percent,
        told.memory_used,
        told.memory_total,
        gpus,
        told.network_received,
        told.network_sent,
    )
