"""Contact: how the client connects to agents and executors, and notices that a node is silent.

Over a network, a connection is a link, which reconnects by itself. `Contacts` makes the links of a
silent node reconnect, sends no new tasks to executors that are cut off, and decides when a node is
lost.
"""

from __future__ import annotations

import math
import ssl
from collections.abc import Callable

from skyward.calls.dispatch import Dispatcher
from skyward.calls.lane import Lane
from skyward.calls.loop import Loop
from skyward.console import Console
from skyward.nodes.node import LOST_SECONDS, PING_SECONDS, QUIET_SECONDS, Node
from skyward.staff import Staff
from skyward.wire.channel import Channel
from skyward.wire.connecting import GREETING_SECONDS, Dial, connect
from skyward.wire.dial import PAUSES, Dialer, refused, refused_too_long
from skyward.wire.identity import Credentials
from skyward.wire.messages import Hello, Welcome

SILENCE_SECONDS = 4.0
"""How long an agent may leave a heartbeat unanswered before the client reconnects."""


connecting = Staff("skyward-connect", most=64)
"""The threads that make connections: each takes a few round trips."""


class Approach:
    """The attempts to make the first connection to a process of a node."""

    def __init__(
        self,
        endpoint: str,
        hello: Hello,
        credentials: Credentials | None,
        name: str,
        dial: Dial,
        *,
        gone: str = "",
        patience: float = math.inf,
        near_seconds: float = GREETING_SECONDS,
    ) -> None:
        """For `gone` and `patience`, see `Dialer`; a greeting here may take `near_seconds`."""
        self._dialer: Dialer | None = None
        if credentials is not None:
            self._dialer = Dialer(
                endpoint, hello, credentials, name, dial, gone=gone, patience=patience
            )
        self._endpoint, self._hello, self._name = endpoint, hello, name
        self._near_seconds = near_seconds
        self._refused_since: float | None = None
        self._pause, self._longest = PAUSES

    @property
    def is_within_host(self) -> bool:
        """Whether no network is in between, and no firewall."""
        return self._dialer is None

    def attempt(self) -> tuple[Channel, Welcome]:
        """Connect; over a network, the channel outlives its connections."""
        if self._dialer is None:
            return connect(self._endpoint, self._hello, None, self._name, self._near_seconds)
        return self._dialer.open()

    def pause_after(self, problem: BaseException) -> float | None:
        """How long to wait before the next attempt; None if that is hopeless."""
        self._refused_since = refused(problem, self._refused_since)
        impostor = isinstance(problem.__cause__, ssl.SSLCertVerificationError)
        if self._dialer is None or impostor or refused_too_long(self._refused_since):
            return None
        pause, self._pause = self._pause, min(2 * self._pause, self._longest)
        return pause


class Contacts:
    """Watches the links of a pool's nodes, on the loop's thread."""

    def __init__(
        self, loop: Loop, dispatcher: Dispatcher, console: Console, patience: float
    ) -> None:
        self._loop, self._dispatcher, self._console = loop, dispatcher, console
        self._patience = patience

    def watch_node(self, node: Node, control: Channel) -> None:
        """Notice when the connection to an agent is lost, and when it is made again."""
        control.on_change(
            lambda connected: self._loop.call_soon(lambda: self._changed(node, control, connected))
        )

    def _changed(self, node: Node, control: Channel, connected: bool) -> None:
        if node.control is not control or node.state == "stopped" or control.expects_end:
            return
        if connected:
            node.reconnect()
            self._console.phase(node.index, node.state)
        else:
            node.disconnect()
            self._console.note(f"node {node.index}: connection lost, reconnecting")
            self._console.phase(node.index, "reconnecting")

    def watch_lane(self, lane: Lane, lost: Callable[[str], None]) -> None:
        """Pause an executor that is cut off; `lost` is called if its process has ended."""

        def changed(connected: bool) -> None:
            if connected:
                self._dispatcher.resume(lane)
            else:
                self._dispatcher.pause(lane)
                if lane.end_reason:
                    lost(lane.end_reason)

        lane.channel.on_change(lambda connected: self._loop.call_soon(lambda: changed(connected)))

    def why_lost(self, node: Node) -> str:
        """Why a node counts as lost; empty if it does not. Called at every beat."""
        control = node.control
        if control is None:
            return ""
        silence = node.heartbeats.silence
        quiet = node.heartbeats.unanswered > QUIET_SECONDS
        cut_off = control.resumes and not control.connected
        dead = (quiet or cut_off) and node.host.looks_dead()
        if not control.resumes:
            return "it has stopped answering" if dead or silence > LOST_SECONDS else ""
        # The agent's last message from the client is a little older than the client's last message
        # from the agent.
        if silence > self._patience or (dead and silence > self._patience - 2 * PING_SECONDS):
            return (
                f"there was no contact for {self._patience:g} s (orphan_timeout), "
                "after which a node ends itself"
            )
        if dead:
            return "its agent is gone"
        if control.connected and node.heartbeats.unanswered > SILENCE_SECONDS:
            # If the agent's connection is dead, those of the executors probably are, too.
            for channel in (control, *(lane.channel for lane in node.lanes.values())):
                channel.reconnect()
        return ""
