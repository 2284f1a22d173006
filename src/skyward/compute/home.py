"""The home of a sky device: the node, and the worker on it, that hold the device."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from skyward.calls.task import Task
from skyward.compute import Compute, entered_computes
from skyward.functions import Pending

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

NOTICE_SECONDS = 5.0
"""How long a call for a device waits for a worker before a warning tells the user."""

_log = logging.getLogger("skyward")


@dataclass(frozen=True, slots=True)
class Home:
    """Where a sky device is: a node, and a worker if only that worker can reach the device."""

    compute: Compute
    node: int
    worker: int | None

    def __str__(self) -> str:
        return f"node {self.node} of {self.compute.name}"

    def run(self, pending: Pending[T]) -> T:
        """Run a call on the node and wait; the call takes its turn among the node's calls."""
        calls = self.compute._open_fleet.dispatcher
        alone = None if self.worker is None else (self.node, self.worker)
        task = calls.prepare(pending, keep=False, on=self.node, worker=alone)
        notice = threading.Timer(NOTICE_SECONDS, self._tell_waiting, (task,))
        notice.daemon = True
        notice.start()
        try:
            result: T = calls.run(task)
            return result
        finally:
            notice.cancel()

    def _tell_waiting(self, task: Task) -> None:
        if not task.assigned and not task.done:
            running = [
                name
                for view in self.compute.nodes
                if view.node == self.node
                for name in view.running
            ]
            _log.warning(
                "%s waits for a free worker on %s, which runs %s; give the node more with "
                "sky.Worker(concurrency=...)",
                task.name,
                self,
                ", ".join(running) or "nothing",
            )


def home_of(device: torch.device) -> Home | None:
    """Where a sky device is; None if the device belongs to no open pool of this process."""
    for compute in list(entered_computes):
        fleet = compute._fleet
        if fleet is not None and not fleet.closed:
            holder = fleet.devices.holder(device.index)
            if holder is not None:
                return Home(compute, *holder)
    return None
