"""A bridge: a socket here whose other end is a socket on a host, with an SSH channel in between."""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
from collections.abc import Callable
from typing import Any

import asyncssh

from skyward.providers.ssh.connections import opened

WINDOW = 8 << 20
"""How much a host may send unread: enough for 100 MB/s at a round trip of 80 ms."""
BUFFER = 1 << 20
"""How many unread bytes the kernel and the event loop each hold."""


class Bridge(asyncio.Protocol):
    """Copies bytes between one end of a socket pair and a channel, until either is closed."""

    def __init__(self, ended: Callable[[Bridge], None]) -> None:
        self._ended = ended
        self._far: _BridgeChannel | None = None
        self._near: asyncio.Transport | None = None
        self.over = False

    @classmethod
    async def built(
        cls,
        connection: asyncssh.SSHClientConnection,
        endpoint: str,
        ended: Callable[[Bridge], None],
    ) -> tuple[Bridge, socket.socket]:
        """Open a channel to an endpoint, and return the socket that leads to it.

        The endpoint "exec:COMMAND" is the standard input and output of a command on the host.
        """
        bridge = cls(ended)
        family, _, place = endpoint.partition(":")
        if family == "unix":
            await opened(connection.create_unix_connection(bridge._session, place, window=WINDOW))
        elif family == "exec":
            start = connection.create_session(bridge._session, place, encoding=None, window=WINDOW)
            await opened(start)
        else:
            host, _, port = place.rpartition(":")
            at = host.strip("[]"), int(port)
            await opened(connection.create_connection(bridge._session, *at, window=WINDOW))
        ours, theirs = socket.socketpair()
        try:
            for end in (ours, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
            ours.setblocking(False)
            await asyncio.get_running_loop().connect_accepted_socket(lambda: bridge, ours)
        except BaseException:
            ours.close()
            theirs.close()
            bridge.close()
            raise
        return bridge, theirs

    def _session(self) -> _BridgeChannel:
        self._far = _BridgeChannel(self)
        return self._far

    def close(self) -> None:
        """Close both sides at once; readers see the end of the stream."""
        if self._near is not None:
            self._near.abort()
        if self._far is not None:
            self._far.channel.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start reading the channel: its data can be written to the socket now."""
        assert isinstance(transport, asyncio.Transport)
        assert self._far is not None
        self._near = transport
        transport.set_write_buffer_limits(BUFFER)
        self._far.join(transport)

    def data_received(self, data: bytes) -> None:
        """Write what the client sent to the channel."""
        assert self._far is not None
        with contextlib.suppress(BrokenPipeError):
            self._far.channel.write(data)

    def eof_received(self) -> bool:
        """Pass on that the client writes no more; close the channel if it does not read either."""
        assert self._far is not None
        assert self._near is not None
        with contextlib.suppress(BrokenPipeError):
            if _closed_by_peer(self._near.get_extra_info("socket")):
                self._far.channel.close()
            else:
                self._far.channel.write_eof()
        return not self._far.at_end

    def pause_writing(self) -> None:
        """Stop reading the channel: the client does not read."""
        assert self._far is not None
        self._far.channel.pause_reading()

    def resume_writing(self) -> None:
        """Read the channel again: the client reads."""
        assert self._far is not None
        self._far.channel.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """Close the channel with the socket."""
        if self._far is not None:
            self._far.channel.close()
            if self._far.gone:
                self.finish()

    def finish(self) -> None:
        """Tell the owner, once, that the bridge is closed."""
        if not self.over:
            self.over = True
            self._ended(self)


class _BridgeChannel(
    asyncssh.SSHTCPSession[bytes],
    asyncssh.SSHUNIXSession[bytes],
    asyncssh.SSHClientSession[bytes],
):
    """The side of a bridge that is the SSH channel."""

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge
        self._near: asyncio.Transport | None = None
        self.channel: Any
        self.at_end = False
        self.gone = False

    def connection_made(self, chan: Any) -> None:
        """Keep the channel."""
        self.channel = chan

    def session_started(self) -> None:
        """Leave data in the channel until there is a socket to write it to."""
        if self._near is None:
            self.channel.pause_reading()

    def join(self, near: asyncio.Transport) -> None:
        """Take the socket to write to."""
        self._near = near
        if self.gone:
            near.close()
            return
        self.channel.resume_reading()
        if self.at_end:
            self._end_near()

    def data_received(self, data: bytes, datatype: int | None = None) -> None:
        """Write what the host sent to the socket, but not what a command says of its failure."""
        assert self._near is not None
        if datatype is None:
            self._near.write(data)

    def eof_received(self) -> bool:
        """Pass on that the host will send no more; this is called on paused channels, too."""
        self.at_end = True
        self._end_near()
        return True

    def _end_near(self) -> None:
        if self._near is not None and not self._near.is_closing():
            with contextlib.suppress(OSError):
                self._near.write_eof()

    def pause_writing(self) -> None:
        """Stop reading the socket: the host does not read."""
        if self._near is not None:
            self._near.pause_reading()

    def resume_writing(self) -> None:
        """Read the socket again: the host reads."""
        if self._near is not None:
            self._near.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """Close the socket with the channel, after writing what has arrived."""
        self.gone = True
        if self._near is not None:
            if exc is not None:
                self._near.abort()
            else:
                self._near.close()
        self._bridge.finish()


def _closed_by_peer(end: Any) -> bool:
    """Whether the other end of a socket pair is closed for reading, too."""
    poll = select.poll()
    poll.register(end.fileno(), 0)
    return any(events & select.POLLHUP for _, events in poll.poll(0))
