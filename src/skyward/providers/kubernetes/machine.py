"""A pod as a machine: commands run in it, and connections to what listens there."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Sequence
from typing import Protocol

from skyward.errors import UnreachableError
from skyward.providers import LOOPBACK, Machine
from skyward.providers.kubernetes import pending, streams
from skyward.providers.kubernetes.access import Access, ApiError, Object
from skyward.providers.kubernetes.manifests import MARKS
from skyward.providers.piped import Piped, relay_command
from skyward.wire.connecting import host_and_port

ENDED_SECONDS = 3.0
"""How long after a failed command the client waits to hear that its pod has ended."""


class PodKeeper(Protocol):
    """What a pod's machine needs of the pool's other pods."""

    job: str

    @property
    def access(self) -> Access:
        """The connection to the API server."""

    async def look(self, name: str) -> Object | None:
        """A pod as it is known; None if it is gone."""

    async def after_start(self, node: int) -> None:
        """Note that a node has an agent."""

    async def end(self, node: int) -> None:
        """Remove a node's pod; with the last node, everything that is not to be kept."""


class PodMachine(Piped, Machine):
    """The pod of one node."""

    forwards_to = LOOPBACK
    # The pod lives while one of its marks has the number of a process that runs.
    before, after = f'echo "$shell" >{MARKS}$shell', f"rm -f {MARKS}$shell"
    ends_input = False

    def __init__(
        self,
        keeper: PodKeeper,
        node: int,
        pod: Object | None,
        python: str | None,
        *,
        direct: bool = True,
    ) -> None:
        self._access, self._keeper = keeper.access, keeper
        self.id = f"{keeper.access.place.namespace}/{keeper.job}-{node}"
        self.node, self.python = node, python
        self._pod = pod["metadata"]["name"] if pod else ""
        self._uid = pod["metadata"]["uid"] if pod else ""
        self.address = str((pod or {}).get("status", {}).get("podIP", ""))
        self.direct = self.address if direct and self.address else None
        self.ended = pod is None or not is_usable(pod)
        """Whether its pod did not run when it was found."""
        self._refusal = ""
        self._destroyed = False

    # Commands.

    async def pipe(self, command: Sequence[str]) -> socket.socket:
        """Run a program in the pod's container, through the API server."""
        return await asyncio.to_thread(
            streams.execute, self._access, self._name(), command, self._note_refusal
        )

    def _note_refusal(self, words: str) -> None:
        self._refusal = words and f"pod {self._pod}: {words}"

    async def why_lost(self) -> str:
        """How the pod has ended, if it has, or why it starts no program."""
        how = await asyncio.to_thread(self._how_it_ended)
        return how or self._refusal or f"the connection to pod {self._pod} was lost"

    def _how_it_ended(self) -> str:
        """How the pod has ended; empty if it has not, or nobody knows."""
        deadline = time.monotonic() + ENDED_SECONDS
        with contextlib.suppress(ApiError, UnreachableError):
            # The kubelet tells the API server a moment after the fact.
            while is_usable(pod := self._access.get("pods", self._pod)):
                if time.monotonic() > deadline:
                    return ""
                time.sleep(0.2)
            return pending.ended(pod, self._access.logs(self._pod))
        return ""

    def _name(self) -> str:
        if not self._pod:
            raise UnreachableError(f"node {self.node} has no pod yet")
        return self._pod

    # Connections.

    async def dial(self, endpoint: str) -> socket.socket:
        """Connect through a process in the pod that copies its streams to the socket."""
        command, text = relay_command(self.python, endpoint, "framed")
        return await asyncio.to_thread(streams.relay, self._access, self._name(), command, text)

    async def forward(self, endpoint: str) -> socket.socket:
        """Connect to a port of the pod's loopback through the API server."""
        _, port = host_and_port(endpoint)
        return await asyncio.to_thread(streams.forward, self._access, self._name(), port)

    # Its end.

    async def alive(self) -> bool:
        """Whether the pod exists and has not ended."""
        if self._destroyed or not self._pod:
            return False
        found = await self._keeper.look(self._pod)
        return found is not None and found["metadata"]["uid"] == self._uid and is_usable(found)

    async def after_start(self) -> None:
        """Have the Job go after its end again, with all that it owns."""
        await self._keeper.after_start(self.node)

    async def destroy(self) -> None:
        """Remove the pod, and with the pool's last one the Job and all that it owns."""
        if self._destroyed:
            return
        await self._keeper.end(self.node)
        self._destroyed = True


def is_usable(pod: Object) -> bool:
    """Whether the pod runs, or will."""
    gone = pod["metadata"].get("deletionTimestamp") is not None
    return not gone and (pod.get("status") or {}).get("phase") in (None, "Pending", "Running")
