"""The handshake: opens a connection to a listener, encrypts it and shakes hands."""

from __future__ import annotations

import os
import secrets
import socket
import ssl
import time
from collections.abc import Callable
from typing import Any

import msgspec

from skyward.errors import AuthenticationError, ProtocolError, SkywardError
from skyward.wire import messages
from skyward.wire.channel import Channel
from skyward.wire.frames import Frame, FrameDecoder
from skyward.wire.identity import Credentials, check_peer, client_context
from skyward.wire.messages import Hello, Welcome

SESSION_UNKNOWN = "unknown session"
"""The listener refuses a connection with these words if it does not know the connection's link."""
GREETING_SECONDS = 30.0
"""How long a first connection may take: a busy machine answers late, one without the process
refuses at once."""
AGAIN_SECONDS = 5.0
"""How long one of several attempts may take: the next one's packets are not those that got lost."""

Dial = Callable[[str, float], socket.socket]
"""Opens a connection to an endpoint; raises if that takes more than the given seconds."""


class SessionUnknownError(AuthenticationError):
    """The listening process does not know the link: it is not the process the link was with."""


def host_and_port(endpoint: str) -> tuple[str, int]:
    """The host and the port of "tcp:HOST:PORT"; brackets around an IPv6 address are optional."""
    host, _, port = endpoint.partition(":")[2].rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def direct(endpoint: str, seconds: float) -> socket.socket:
    """Connect to an endpoint straight over the network, without a provider's transport."""
    end = socket.create_connection(host_and_port(endpoint), seconds)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return end


def dial_here(endpoint: str) -> socket.socket:
    """Connect to a socket of this machine."""
    family, _, place = endpoint.partition(":")
    if family != "unix":
        return socket.create_connection(host_and_port(endpoint))
    end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        end.connect(place)
    except OSError:
        end.close()
        raise
    return end


def connect(
    endpoint: str,
    hello: Hello,
    credentials: Credentials | None,
    name: str,
    seconds: float = GREETING_SECONDS,
    dial: Dial = direct,
) -> tuple[Channel, Welcome]:
    """Open a channel to a listener and shake hands; when a connection ends, the channel ends."""
    if credentials is None:
        end, decoder, welcome = connect_one(endpoint, hello, None, name, seconds, dial)
        return Channel(end, decoder=decoder), welcome
    context = context_for(endpoint, credentials)
    hello = msgspec.structs.replace(hello, session=secrets.token_hex(8))
    sender, receiver, welcome = connect_pair(endpoint, hello, context, name, seconds, dial)
    return Channel(sender, receiver), welcome


def connect_peer(
    endpoints: str, hello: Hello, credentials: Credentials | None, name: str
) -> Channel:
    """Open a channel from a process of a node to one of any node, at the first place that answers.

    `OSError` if none does: it says why.
    """
    problems = []
    for endpoint in endpoints.split():
        if endpoint.startswith("unix:") and not os.path.exists(endpoint.removeprefix("unix:")):
            continue
        if endpoint.startswith("tcp:") and credentials is None:
            problems.append("only a worker has the certificates, not a process that it starts")
            continue
        own = credentials if endpoint.startswith("tcp:") else None
        try:
            return connect(endpoint, hello, own, name)[0]
        except (OSError, EOFError, SkywardError) as problem:
            problems.append(str(problem))
    raise ConnectionError("; ".join(problems))


def connect_once(
    endpoint: str, hello: Hello, credentials: Credentials | None, name: str
) -> Channel:
    """Open a channel of one connection for both directions, for two ends that take turns."""
    context = context_for(endpoint, credentials) if credentials is not None else None
    end, decoder, _ = connect_one(endpoint, hello, context, name, GREETING_SECONDS, direct)
    return Channel(end, decoder=decoder)


def context_for(endpoint: str, credentials: Credentials) -> ssl.SSLContext | None:
    """The TLS context for an endpoint; None for a Unix socket, whose transport is private."""
    return None if endpoint.startswith("unix:") else client_context(credentials)


def connect_pair(
    endpoint: str,
    hello: Hello,
    context: ssl.SSLContext | None,
    name: str,
    seconds: float,
    dial: Dial,
) -> tuple[socket.socket, socket.socket, Welcome]:
    """Open the two connections of one session: one to send on, one to receive on."""
    ends: list[socket.socket] = []
    try:
        for direction in ("send", "receive"):
            half = msgspec.structs.replace(hello, direction=direction)
            end, decoder, welcome = connect_one(endpoint, half, context, name, seconds, dial)
            ends.append(end)
            if decoder.buffered:
                raise ProtocolError(f"{endpoint} sent more than a Welcome")
    except BaseException:
        for end in ends:
            end.close()
        raise
    sender, receiver = ends
    return sender, receiver, welcome


def connect_one(
    endpoint: str,
    hello: Hello,
    context: ssl.SSLContext | None,
    name: str,
    seconds: float,
    dial: Dial,
) -> tuple[socket.socket, FrameDecoder, Welcome]:
    """Open one connection; returns it with its decoder and the listener's `Welcome`."""
    family, _, address = endpoint.partition(":")
    is_here = family == "unix" and dial is direct
    if is_here:
        end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    else:
        end = dial(endpoint, seconds)
    try:
        end.settimeout(seconds)
        if is_here:
            _connect_unix(end, address, seconds)
            check_peer(end)
        elif family == "tcp":
            if context is None:
                raise AuthenticationError(f"no credentials for {endpoint}")
            keep_alive(end)
            try:
                end = with_tls(context, end, server_hostname=name)
            except ssl.SSLError as problem:
                raise AuthenticationError(f"{endpoint} is not {name}: {problem}") from problem
        decoder = FrameDecoder()
        Channel(end).send(hello)
        frame = _read_exactly_one(end, decoder)
        welcome = messages.decode_as(Welcome, frame.kind, frame.meta)
        if welcome.refusal == SESSION_UNKNOWN:
            raise SessionUnknownError(f"{endpoint} refused to go on: {welcome.refusal}")
        if welcome.refusal:
            raise AuthenticationError(f"{endpoint} refused the connection: {welcome.refusal}")
        end.settimeout(None)
    except BaseException:
        end.close()
        raise
    return end, decoder, welcome


def _read_exactly_one(end: socket.socket, decoder: FrameDecoder) -> Frame:
    """Read one frame and no further byte: the bytes after it belong to the next reader."""
    while (frame := decoder.next()) is None:
        data = end.recv(decoder.missing)
        if not data:
            raise EOFError("the other end closed the connection")
        decoder.feed(data)
    return frame


def keep_alive(end: socket.socket) -> None:
    """Have the kernel send probes on an idle connection, so that routers do not forget it.

    TCP_USER_TIMEOUT, a limit on unacknowledged bytes, is not set: it would also end the connection
    to a peer that is alive but too busy to read.
    """
    if end.family not in (socket.AF_INET, socket.AF_INET6):
        return
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, option):
            end.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def with_tls(context: ssl.SSLContext, end: socket.socket, **options: Any) -> ssl.SSLSocket:
    """The connection with TLS; leaves nothing open if the peer has reset it by now.

    `wrap_socket` raises then after it has made its new socket, which it does not close.
    """
    try:
        return context.wrap_socket(end, **options)
    except OSError as problem:
        trace = problem.__traceback__
        while trace is not None:
            made = trace.tb_frame.f_locals.get("self")
            if isinstance(made, ssl.SSLSocket):
                made.close()
            trace = trace.tb_next
        raise


def _connect_unix(end: socket.socket, address: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            end.connect(address)
            return
        except BlockingIOError:
            # The listener's backlog is full, and `connect` on a Unix socket does not wait for room.
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)
