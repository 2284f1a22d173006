"""The torch devices of a pool, as calls and the user ask for them, and the way to each."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from skyward.console import Console
from skyward.device.meeting import Whereabouts
from skyward.device.recovery import recoveries
from skyward.errors import ConfigurationError
from skyward.events import EventStream
from skyward.nodes.devices import START_SECONDS, DeviceDesk
from skyward.nodes.node import Roster
from skyward.nodes.spec import PoolSpec
from skyward.wire.channel import Channel
from skyward.wire.identity import PEER, Authority, Credentials, node_name
from skyward.wire.messages import Message

if TYPE_CHECKING:
    import torch

POLL_SECONDS = 0.05


class PoolDevices:
    """Finds and opens the devices of a pool's nodes."""

    def __init__(
        self,
        pool_id: str,
        spec: PoolSpec,
        roster: Roster,
        authority: Authority | None,
        credentials: Credentials | None,
        events: EventStream,
        console: Console,
    ) -> None:
        self._id, self._spec, self._roster = pool_id, spec, roster
        self._authority, self._credentials = authority, credentials
        self.desk = DeviceDesk(
            self._tell_node, self._connect, self._locate, events, console.own_line
        )
        """The open devices."""

    def get(self, node: int, kind: str) -> int:
        """The index of the sky device of that kind on that node.

        If the device was lost and has a checkpoint, it comes back with the checkpoint's tensors,
        and its node is awaited.
        """
        for last in (False, True):
            if self.desk.awaits(node):
                self._await_node(node)
            try:
                index = self.desk.get(node, kind)
                break
            except ConfigurationError:
                # The node may have been lost a moment ago, with its device.
                if last or not self.desk.awaits(node):
                    raise
        try:
            recoveries.fill(index)
        except BaseException as problem:
            # Its tensors have memory and no contents: nobody may read them.
            self.desk.drop(node, index, f"its checkpoint cannot be read: {problem}")
            raise
        return index

    def resident(self, node: int, kind: str, pid: int) -> int:
        """The index of the device that is that process; of the node's, if another client has it."""
        found = self.desk.resident(node, kind, pid)
        return self.get(node, kind) if found is None else found

    def _await_node(self, index: int) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and not self._roster.closed:
            node = self._roster.get(index)
            if node is None or node.serves or node.state == "failed":
                return
            time.sleep(POLL_SECONDS)

    def holder(self, index: int) -> tuple[int, int | None] | None:
        """The node of a sky device of this pool, and the worker if only one sees the GPU."""
        found = self.desk.find(index)
        if found is None:
            return None
        node, kinds = found
        gpus = [int(kind[5:]) for kind in kinds if kind.startswith("cuda:")]
        alone = self._spec.worker.per_node == "accelerator" and gpus
        return node, gpus[0] if alone else None

    def home(self, index: int) -> tuple[int, str] | None:
        """The node and the kind of a sky device of this pool; None if it has no such device."""
        found = self.desk.find(index)
        if found is None:
            return None
        node, kinds = found
        # It may have been asked for as "auto", but is known by its own kind, too.
        return node, next((kind for kind in sorted(kinds) if kind != "auto"), "auto")

    def for_result(self, wanted: str | torch.device, node: int, worker: int) -> torch.device:
        """The device that the results of a worker stay on; opens the device if it is not open."""
        import torch

        if not isinstance(wanted, str):
            return wanted
        kind = os.environ.get("SKYWARD_DEVICE") or wanted
        if self._spec.worker.per_node == "accelerator" and kind in ("cuda", "auto") and worker:
            # Every worker has a GPU of its own; the first one's is what "auto" finds.
            kind = f"cuda:{worker}"
        # To fill a lost device runs functions on the node, and the result waits in a worker of it.
        return torch.device("sky", self.desk.get(node, kind, back=False))

    def _tell_node(self, index: int, message: Message) -> None:
        node = self._roster.get(index)
        if node is None or not node.serves:
            there = [each.index for each in self._roster.nodes if each.serves]
            if not self._roster.nodes:
                raise ConfigurationError(
                    f"device(node={index}): the pool has no nodes now, because it shrinks to none "
                    "when it is idle; call compute.resize(1) first, or give nodes=(1, n)"
                )
            raise ConfigurationError(
                f"device(node={index}): that node is not ready; ready are {there}"
                if node is not None
                else f"device(node={index}): the pool's nodes are {there}"
            )
        node.tell(message)

    def _connect(self, index: int, endpoint: str, role: str) -> Channel:
        node = self._roster.get(index)
        if node is None:
            raise ConfigurationError(
                f"device(node={index}): that node has left the pool; see `compute.nodes`"
            )
        channel, _ = node.host.approach(
            role,
            node.host.routes.choose(endpoint),
            self._credentials,
            gone="its process has ended",
            patience=self._spec.options.orphan_timeout,
        ).attempt()
        return channel

    def _locate(self, index: int, endpoints: str) -> Whereabouts:
        node = self._roster.get(index)
        found = node.host.routes.for_peers(endpoints) if node is not None else ()
        return Whereabouts(self._id, node_name(self._id, index), found, self._issue)

    def _issue(self) -> Credentials | None:
        """Credentials for a process of another pool of this client's."""
        return self._authority.issue(PEER) if self._authority else None
