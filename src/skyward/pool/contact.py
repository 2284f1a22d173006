"""Contact: how a node is reached over a network, and what happens while it is not.

Every connection to such a node is a link, which makes itself anew. Here is noticed that a node has
fallen silent, so that its links do; its lanes get no new tasks meanwhile; and it is decided when
there is no more to hope for.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable

from skyward.console import Console
from skyward.errors import SkywardError
from skyward.pool.dispatch import Dispatcher
from skyward.pool.lane import Lane
from skyward.pool.loop import Loop
from skyward.pool.node import DOUBT_SECONDS, PING_SECONDS, Node
from skyward.wire.channel import Channel
from skyward.wire.dial import PAUSES, Dialer, refused, refused_too_long
from skyward.wire.identity import Credentials, Dial, connect
from skyward.wire.messages import Hello, Welcome

SILENCE_SECONDS = 4.0
"""An agent that has not answered for so long is called on a new connection."""


def reach(
    endpoint: str,
    hello: Hello,
    credentials: Credentials | None,
    name: str,
    dial: Dial,
    *,
    gone: str = "",
    persist: Callable[[], bool] = lambda: False,
) -> tuple[Channel, Welcome]:
    """A channel to an agent or an executor, which over a network outlives its connections.

    It is tried again for as long as `persist` says so, unless nobody listens there.
    """
    if credentials is None:
        return connect(endpoint, hello, None, name)
    dialer = Dialer(endpoint, hello, credentials, name, dial, gone=gone)
    refused_since: float | None = None
    pause, longest = PAUSES
    while True:
        try:
            return dialer.open()
        except (OSError, EOFError, SkywardError) as problem:
            refused_since = refused(problem, refused_since)
            impostor = isinstance(problem.__cause__, ssl.SSLCertVerificationError)
            if impostor or refused_too_long(refused_since) or not persist():
                raise
        time.sleep(pause)
        pause = min(2 * pause, longest)


class Contacts:
    """Watches over the links of a pool's nodes; all on the loop's thread."""

    def __init__(
        self, loop: Loop, dispatcher: Dispatcher, console: Console, patience: float
    ) -> None:
        self._loop, self._dispatcher, self._console = loop, dispatcher, console
        self._patience = patience

    def watch_node(self, node: Node, control: Channel) -> None:
        """An agent is connected."""
        control.on_change(
            lambda connected: self._loop.soon(lambda: self._changed(node, control, connected))
        )

    def _changed(self, node: Node, control: Channel, connected: bool) -> None:
        if node.control is not control or node.state in ("lost", "stopped"):
            return
        if connected and node.cut_off:
            node.cut_off = False
            node.hear()
            self._console.phase(node.index, node.state)
        elif not connected and not node.cut_off:
            node.cut_off = True
            self._console.note(f"node {node.index}: connection lost, reconnecting")
            self._console.phase(node.index, "reconnecting")

    def watch_lane(self, lane: Lane, bury: Callable[[str], None]) -> None:
        """An executor is connected; `bury` it if its process turns out to have ended."""

        def changed(connected: bool) -> None:
            if connected:
                self._dispatcher.resume(lane)
            else:
                self._dispatcher.pause(lane)
                if lane.end_reason:
                    bury(lane.end_reason)

        lane.channel.on_change(lambda connected: self._loop.soon(lambda: changed(connected)))

    def why_lost(self, node: Node) -> str:
        """Why a node must be taken for lost, or nothing; looked at regularly."""
        control = node.control
        if control is None or not control.resumes:
            return "it has stopped answering" if node.silent_too_long else ""
        silence = time.monotonic() - node.heard
        dead = (node.cut_off or silence > DOUBT_SECONDS) and node.machine.looks_dead()
        # The agent has heard the last of us a little before we have heard the last of it.
        if silence > self._patience or (dead and silence > self._patience - 2 * PING_SECONDS):
            return (
                f"there was no contact for {self._patience:g} s (orphan_timeout), "
                "after which a node ends itself"
            )
        if dead:
            return "its agent is gone"
        if control.connected and node.unanswered > SILENCE_SECONDS:
            # What does not answer here hardly gets anything through elsewhere.
            for channel in (control, *(lane.channel for lane in node.lanes.values())):
                channel.doubt()
        return ""
