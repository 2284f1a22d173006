"""The relay: large buffers go from executor to executor, so that the client sends them only once.

The client tells an executor to fetch a buffer from a peer. The peer passes on the bytes that it
has, while the other bytes are still on their way to the peer. So a broadcast goes down a chain of
executors in small parts, and all links of the chain carry bytes at the same time. An executor that
cannot get a buffer from a peer reports the buffer as missing, and the client sends it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from skyward.errors import BlobStoreFullError, ProtocolError, SkywardError
from skyward.objects import memory
from skyward.wire import messages
from skyward.wire.channel import Channel
from skyward.wire.handshake import PEER, Credentials, connect_once
from skyward.wire.messages import Fetch, Hello, Part, Want
from skyward.worker.arrivals import Arrival, Arrivals

BEAT_SECONDS = 1.0
"""How often a peer that waits for bytes itself sends an empty part."""
SILENT_SECONDS = 10.0
"""After so long without a message from a peer, the executor connects to it again."""
UNKNOWN_SECONDS = 30.0
"""How long a peer waits for a buffer that it does not know when another executor asks for it."""
AGAIN_SECONDS = 0.2


class Unavailable(Exception):
    """A peer does not have the buffer that it was asked for."""


@dataclass(slots=True)
class RunningFetch:
    """Buffers that are being fetched."""

    fetch: Fetch
    arrivals: list[Arrival]
    heard: float = field(default_factory=time.monotonic)
    """When the peer last sent something."""


class Relay:
    """Fetches buffers from peers, and passes them on to others."""

    def __init__(
        self,
        pool: str,
        credentials: Credentials | None,
        arrivals: Arrivals,
        settled: Callable[[], None],
    ) -> None:
        """`settled` is called when buffers have arrived, or will not arrive."""
        self._pool, self._credentials = pool, credentials
        self._arrivals = arrivals
        self._settled = settled

    def fetch(self, fetch: Fetch) -> None:
        """Begin to fetch buffers from a peer; if there is no room, they stay missing."""
        wanted = self._arrivals.unknown(fetch.blobs)
        if not wanted:
            return
        try:
            arrivals = self._arrivals.expect(wanted, fetch.number)
        except BlobStoreFullError:
            return
        threading.Thread(
            target=self._run,
            args=(RunningFetch(fetch, arrivals),),
            name="skyward-fetch",
            daemon=True,
        ).start()

    def _run(self, running: RunningFetch) -> None:
        arrivals, complete = running.arrivals, False
        try:
            self._pull(running)
            names = memory.digests([arrival.view for arrival in arrivals])
            complete = names == [arrival.digest for arrival in arrivals]
        except (OSError, EOFError, SkywardError, Unavailable):
            # The executor reports the buffers as missing, and the client sends them.
            pass
        finally:
            self._arrivals.settle(arrivals, complete=complete)
            self._settled()

    def _pull(self, running: RunningFetch) -> None:
        """Fill all buffers, over several connections if one breaks."""
        while True:
            try:
                self._pull_once(running)
                return
            except (SkywardError, ConnectionRefusedError):
                # The peer breaks the protocol, or its process is gone.
                raise
            except (OSError, EOFError):
                if time.monotonic() - running.heard > SILENT_SECONDS:
                    raise
            time.sleep(AGAIN_SECONDS)

    def _pull_once(self, running: RunningFetch) -> None:
        fetch = running.fetch
        left = [arrival for arrival in running.arrivals if arrival.filled < arrival.length]
        channel = connect_once(
            fetch.endpoint, Hello(self._pool, PEER), self._credentials, fetch.name
        )
        try:
            channel.set_timeout(SILENT_SECONDS)
            blobs = [(each.digest, each.length, each.filled) for each in left]
            channel.send(Want(blobs, fetch.number))
            for arrival in left:
                while arrival.filled < arrival.length:
                    self._receive(channel, arrival)
                    running.heard = time.monotonic()
        finally:
            channel.close()

    def _receive(self, channel: Channel, arrival: Arrival) -> None:
        frame = channel.receive()
        part = messages.decode_as(Part, frame.kind, frame.meta)
        if not part.known:
            raise Unavailable
        start, count = arrival.filled, frame.body_length
        if start + count > arrival.length:
            raise ProtocolError(f"a peer sent more than the {arrival.length} bytes of a buffer")
        place = arrival.view[start : start + count]
        if frame.body is None:
            channel.read_body(
                frame, [place], lambda done: self._arrivals.advance([arrival], start + done)
            )
        else:
            place[:] = frame.body
        self._arrivals.advance([arrival], start + count)

    # The peer that has the buffers.

    def serve(self, channel: Channel) -> None:
        """Send a peer the buffers it asks for; returns when all are sent, or the peer is gone."""
        try:
            channel.set_timeout(2 * SILENT_SECONDS)
            frame = channel.receive()
            want = messages.decode_as(Want, frame.kind, frame.meta)
            for blob in want.blobs:
                self._send(channel, *blob, want.number)
            # The peer closes first: if this end did, the peer might lose bytes it has not read.
            channel.receive()
        except LookupError:
            with contextlib.suppress(OSError):
                channel.send(Part(False))
        except (OSError, EOFError, ProtocolError):
            pass
        finally:
            channel.close()

    def _send(self, channel: Channel, digest: bytes, length: int, start: int, number: int) -> None:
        """Send the rest of a buffer as it arrives; `LookupError` if it will not arrive."""
        known_at = time.monotonic()
        while start < length:
            with self._arrivals.lent(digest, length, start, number, BEAT_SECONDS) as view:
                if view is not None:
                    known_at = time.monotonic()
                    start += len(view)
                elif time.monotonic() - known_at > UNKNOWN_SECONDS:
                    raise LookupError
                channel.send(Part(True), [view] if view else [])
