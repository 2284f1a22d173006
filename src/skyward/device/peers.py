"""Peers: the links of a device's process to the processes of other devices.

On one host a link is one Unix socket, over which the cores agree on shared memory. Over a network
it is several links with TLS, most of them for long copies.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from skyward.device import build
from skyward.device.meeting import Meeting
from skyward.errors import SkywardError
from skyward.wire import native
from skyward.wire.channel import Channel
from skyward.wire.handshake import PEER, Credentials, Dialer, connect
from skyward.wire.messages import Hello
from skyward.wire.native import Terms

CARRIERS = 4
"""Over how many connections with TLS the bytes of long copies go: a thread encrypts each."""
CONNECTIONS = 1 + CARRIERS
WINDOW = 16 << 20
PATIENCE_SECONDS = 20.0
"""How long a link without a connection waits for one before the copies over it fail."""

TERMS = Terms(WINDOW, PATIENCE_SECONDS, "the other device's process")

MakeLink = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(ctypes.c_char), ctypes.c_size_t
)
EndLink = ctypes.CFUNCTYPE(None, ctypes.c_uint64)


class Unreachable(SkywardError):
    """The process of another device cannot be reached."""


class Peers:
    """Makes links, and owns their connections."""

    def __init__(self, library: ctypes.CDLL, credentials: Credentials | None) -> None:
        self._library, self._credentials = library, credentials
        self._arriving: dict[int, dict[int, Channel]] = {}
        self._held: dict[int, list[Channel]] = {}
        self._lock = threading.Lock()
        # The core calls these; they must live as long as it may.
        self.make_link = MakeLink(self._make)
        self.end_link = EndLink(self._end)

    def use_links(self) -> None:
        """Be ready for connections over a network."""
        native.load(build.library(build.LINK))
        self._library.sky_worker_use_links(native.core().table)

    @staticmethod
    def is_peer(hello: Hello) -> bool:
        """Whether a connection comes from the process of another device."""
        return hello.role.startswith(f"{PEER}-")

    # The other side has dialed.

    def accept(self, channel: Channel, hello: Hello) -> None:
        """Take a connection of a link; when all have come, the core has the link."""
        try:
            _, number, stripe = hello.role.split("-")
            link, index = int(number), int(stripe)
        except ValueError:
            channel.close()
            return
        if index not in range(CONNECTIONS) or link in self._held:
            channel.close()
            return
        with self._lock:
            channels = self._arriving.setdefault(link, {})
            # The other side tries each of our addresses: one may have worked for some connections.
            before = channels.pop(index, None)
            channels[index] = channel
            is_whole = channel.shares_memory or len(channels) == CONNECTIONS
            if is_whole:
                del self._arriving[link]
        if before is not None:
            before.close()
        if is_whole:
            in_order = [channels[each] for each in sorted(channels)]
            with contextlib.suppress(SkywardError):
                self._take(link, in_order, None, "")

    # This side dials.

    def _make(self, description: bytes, message: Any, size: int) -> int:
        """Make a link; called by the core, on the thread that runs the operations."""
        try:
            self.dial(msgspec.json.decode(description, type=Meeting))
        except Exception as problem:
            words = (str(problem) or type(problem).__name__).encode()[: size - 1] + b"\0"
            ctypes.memmove(message, words, len(words))
            return 1
        return 0

    def dial(self, meeting: Meeting) -> None:
        """Make the link of a meeting, over the first endpoint that works."""
        problems = []
        for endpoint in meeting.endpoints:
            channels: list[Channel] = []
            try:
                self._connect(endpoint, meeting, channels)
                self._take(meeting.link, channels, meeting.own, meeting.other)
                return
            except (OSError, EOFError, SkywardError) as problem:
                problems.append(f"{endpoint.partition(':')[0]}: {problem}")
                for channel in channels:
                    channel.close()
        raise Unreachable(
            f"{meeting.own} does not reach {meeting.other} "
            f"({'; '.join(problems) or 'it listens for its client alone'})"
        )

    def _connect(self, endpoint: str, meeting: Meeting, channels: list[Channel]) -> None:
        hellos = [
            Hello(meeting.pool, f"{PEER}-{meeting.link}-{index}", pid=os.getpid())
            for index in range(CONNECTIONS)
        ]
        if endpoint.startswith("unix:"):
            if not os.path.exists(endpoint.removeprefix("unix:")):
                raise Unreachable("it is on another host")
            channels.append(connect(endpoint, hellos[0], None, meeting.name)[0])
            return
        if meeting.is_of_own_pool:
            given = self._credentials
        else:
            given = Credentials(*meeting.credentials) if meeting.credentials else None
        if given is None:
            raise Unreachable(
                f"there are no credentials for pool {meeting.pool} here: its key is with the "
                "client that started it"
            )
        self.use_links()
        for hello in hellos:
            dialer = Dialer(
                endpoint,
                hello,
                given,
                meeting.name,
                gone="its process has ended",
                patience=PATIENCE_SECONDS,
                terms=TERMS,
            )
            channels.append(dialer.open()[0])

    # Both sides.

    def _take(self, link: int, channels: Sequence[Channel], own: str | None, other: str) -> None:
        """Hand a link's connections to the core."""
        shares_memory = channels[0].shares_memory
        if shares_memory:
            ways = [channels[0].detach()[0].fileno()]
        else:
            ways = [channel.native_link.address for channel in channels]
        with self._lock:
            self._held[link] = list(channels)
        message = ctypes.create_string_buffer(2048)
        failed = self._library.sky_worker_link(
            ctypes.c_uint64(link),
            (ctypes.c_uint64 * len(ways))(*ways),
            len(ways),
            int(shares_memory),
            None if own is None else own.encode(),
            other.encode(),
            message,
            ctypes.c_size_t(len(message)),
        )
        if failed:
            self._close(link)
            raise Unreachable(message.value.decode(errors="replace"))
        if not shares_memory:
            for channel in channels:
                channel.native_link.on_end(self._lost(link))

    def _lost(self, link: int) -> Callable[[str], None]:
        def lost(why: str) -> None:
            self._library.sky_worker_lose_link(ctypes.c_uint64(link), why.encode())
            # Not here: the links' thread has others to look after.
            threading.Thread(
                target=self._close, args=(link,), name="skyward-peer-lost", daemon=True
            ).start()

        return lost

    def _end(self, link: int) -> None:
        """The client says that the other device is gone; called by the core."""
        threading.Thread(
            target=self._close, args=(link,), name="skyward-peer-gone", daemon=True
        ).start()

    def close(self) -> None:
        """Close the connections of all links: the client has left, and the core has ended them."""
        with self._lock:
            links, arriving = list(self._held), list(self._arriving.values())
            self._arriving = {}
        for link in links:
            self._close(link)
        for channels in arriving:
            for channel in channels.values():
                channel.close()

    def _close(self, link: int) -> None:
        with self._lock:
            held = self._held.pop(link, [])
        for each in held:
            each.close()
        self._library.sky_worker_free_link(ctypes.c_uint64(link))
