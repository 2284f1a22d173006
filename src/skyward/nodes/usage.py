"""How busy nodes are, as their agents measure it."""

from __future__ import annotations

import itertools
import queue
from collections.abc import Callable
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


class UsageDesk:
    """Asks agents for measurements; any thread may ask."""

    def __init__(self, tell: Callable[[int, Message], bool]) -> None:
        """`tell` sends to the agent of a node; False if the node has none now."""
        self._tell = tell
        self._numbers = itertools.count(1)
        self._waiting: dict[int, queue.SimpleQueue[Usage]] = {}

    def get(self, node: int) -> NodeUsage | None:
        """How busy a node is; None if its agent does not answer."""
        number = next(self._numbers)
        answers: queue.SimpleQueue[Usage] = queue.SimpleQueue()
        self._waiting[number] = answers
        try:
            if not self._tell(node, Measure(number)):
                return None
            told = answers.get(timeout=ANSWER_SECONDS)
        except queue.Empty:
            return None
        finally:
            del self._waiting[number]
        gpus = tuple(GpuUsage(*each) for each in told.gpus)
        return NodeUsage(told.cpu_percent, told.memory_used, told.memory_total, gpus)

    def heard(self, message: Usage) -> None:
        """Take an agent's measurement."""
        waiting = self._waiting.get(message.number)
        if waiting is not None:
            waiting.put(message)
