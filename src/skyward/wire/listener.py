"""A listener: accepts connections to a process, from peers that prove who they are."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

from skyward import kernel
from skyward.closing import shut
from skyward.errors import AuthenticationError, ProtocolError
from skyward.wire import messages
from skyward.wire.channel import Channel
from skyward.wire.frames import GREETING_LIMIT, FrameDecoder
from skyward.wire.handshake import (
    CLIENT,
    GREETING_SECONDS,
    PEER,
    SESSION_UNKNOWN,
    Credentials,
    TlsContext,
    certified_name,
    check_peer,
    host_and_port,
    with_tls,
)
from skyward.wire.link.link import Link
from skyward.wire.link.pair import Pair
from skyward.wire.messages import Hello, Welcome
from skyward.wire.native import CALLS, NativeLink, Terms, carries_calls

UNPROVEN_PEERS = 16
_NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


def _listening(place: str) -> tuple[str, socket.socket]:
    """A socket that listens at "unix:PATH" or "tcp:HOST:PORT", and its real endpoint."""
    family, _, address = place.partition(":")
    if family == "unix":
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listening.bind(address)
        os.chmod(address, 0o600)
        listening.listen(64)
        return place, listening
    host, port = host_and_port(place)
    # The name is resolved here, since `bind` drops the zone of an address like fe80::1%eth0.
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    version, *_, at = min(found, key=lambda each: each[0] != socket.AF_INET)
    listening = socket.create_server(at, family=version, backlog=64)
    return f"tcp:{address.rpartition(':')[0]}:{listening.getsockname()[1]}", listening


def _is_elsewhere(problem: OSError) -> bool:
    """Whether listening failed because this machine does not have the address or know the name."""
    return isinstance(problem, socket.gaierror) or problem.errno in _NOT_HERE


def _of_calls(hello: Hello) -> Terms:
    return CALLS


class Listener:
    """Accepts connections, and passes on those whose peer has proven its identity.

    Each unproven peer gets a short-lived thread of its own and a deadline, so that a silent or slow
    peer delays no other. At most `UNPROVEN_PEERS`, the latest ones, may be unproven at a time.

    `where` and `endpoint` are one place or several, separated by spaces: plain Unix sockets, and
    TCP with TLS. If there are several, the listener leaves out a TCP address that this machine does
    not have, and a name that it does not know.
    """

    def __init__(
        self,
        where: str,
        pool: str,
        credentials: Credentials | None,
        accept: Callable[[Channel, Hello], None],
        seconds: float = GREETING_SECONDS,
        *,
        versions: dict[str, str] | None = None,
        terms: Callable[[Hello], Terms] | None = None,
    ) -> None:
        """`versions` are sent to every peer; only an agent sends them, for all its processes.

        The native core carries the bytes of links where it can, and always if there are `terms`.
        """
        if terms is None and credentials is not None and carries_calls():
            terms = _of_calls
        self._sockets: dict[str, socket.socket] = {}
        places = where.split(" ")
        for place in places:
            try:
                endpoint, listening = _listening(place)
            except OSError as problem:
                if place.startswith("tcp:") and len(places) > 1 and _is_elsewhere(problem):
                    continue
                raise
            self._sockets[endpoint] = listening
        self.endpoint = " ".join(self._sockets)
        self._pool = pool
        self._terms = terms
        self._context: TlsContext | None = None
        if credentials is not None:
            kind = credentials.context if terms is None else credentials.native_context
            self._context = kind(server=True)
        self._accept = accept
        self._seconds = seconds
        self._versions = versions or {}
        self._unproven: dict[int, socket.socket] = {}
        self._halves: dict[tuple[str, int, str], socket.socket] = {}
        self._links: dict[str, Link | NativeLink] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._numbers = itertools.count()
        for endpoint, listening in self._sockets.items():
            threading.Thread(
                target=self._serve,
                args=(listening, None if endpoint.startswith("unix:") else self._context),
                name="skyward-listener",
                daemon=True,
            ).start()

    def _serve(self, listening: socket.socket, context: TlsContext | None) -> None:
        while True:
            try:
                end, _ = listening.accept()
            except OSError:
                if self._closed:
                    return
                # Out of descriptors, for example, which may pass; the peer will try again.
                time.sleep(0.05)
                continue
            with self._lock:
                number = next(self._numbers)
                oldest = next(iter(self._unproven), 0)
                crowd = len(self._unproven) >= UNPROVEN_PEERS
                crowded_out = self._unproven.pop(oldest) if crowd else None
                self._unproven[number] = end
            if crowded_out is not None:
                shut(crowded_out)
            threading.Thread(
                target=self._greet,
                args=(number, end, context),
                name="skyward-greeting",
                daemon=True,
            ).start()

    def _greet(self, number: int, end: socket.socket, context: TlsContext | None) -> None:
        try:
            deadline = time.monotonic() + self._seconds
            end.settimeout(self._seconds)
            if context is not None:
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                kernel.keep_alive(end)
                end = with_tls(context, end, server_side=True, do_handshake_on_connect=False)
                with self._lock:
                    if number not in self._unproven:
                        # The socket that was shut is not this one, which would live on.
                        raise EOFError("newer peers have crowded this one out")
                    self._unproven[number] = end
                cast("ssl.SSLSocket", end).do_handshake()
            else:
                check_peer(end)
            decoder = FrameDecoder(meta_limit=GREETING_LIMIT, body_limit=0)
            hello = self._read_hello(end, decoder, deadline)
            decoder.accept_large()
            refusal = self._refusal(end, hello)
            received = self._received_of(hello) if hello.attempt and not refusal else 0
            if received is None:
                refusal, received = SESSION_UNKNOWN, 0
            Channel(end).send(Welcome(self._versions, os.getpid(), refusal, received))
            if refusal:
                raise AuthenticationError(refusal)
            end.settimeout(None)
        except (OSError, EOFError, ProtocolError):
            # The peer does not belong to this pool, and gets no answer.
            end.close()
            return
        finally:
            with self._lock:
                self._unproven.pop(number, None)
        channel = self._joined(end, decoder, hello)
        if channel is not None:
            self._accept(channel, hello)

    def _refusal(self, end: socket.socket, hello: Hello) -> str:
        """Why the listener refuses a peer whose identity is proven; empty if it does not."""
        if hello.pool != self._pool:
            return "this worker belongs to another pool"
        name = certified_name(end)
        kind, *numbers = hello.role.split("-")
        if name in (CLIENT, None):
            return ""
        if kind != PEER:
            return f"only the client asks for {hello.role!r}"
        is_link = len(numbers) == 2 and all(each.isdecimal() for each in numbers)
        if name == PEER and not is_link:
            return f"a device of another pool does not ask for {hello.role!r}"
        return ""

    def _received_of(self, hello: Hello) -> int | None:
        """How many bytes of the client's link have arrived; None if the link cannot go on here."""
        with self._lock:
            link = self._links.get(hello.session)
        if hello.stripe:
            joins = link is not None and link.connections.takes_stripes(hello.attempt)
            return 0 if joins else None
        if link is not None:
            return link.connections.suspend(hello.attempt)
        return None if hello.received else 0

    def _joined(self, end: socket.socket, decoder: FrameDecoder, hello: Hello) -> Channel | None:
        """A new channel; None if its other connection is missing, or if an old link goes on."""
        if hello.direction == "both":
            return Channel(end, decoder=decoder)
        opposite = "send" if hello.direction == "receive" else "receive"
        with self._lock:
            if self._closed or decoder.buffered:
                end.close()
                return None
            if hello.stripe:
                link = self._links.get(hello.session)
                if link is None:
                    end.close()
                else:
                    to_send = hello.direction == "receive"
                    link.connections.add_stripe(hello.attempt, hello.stripe, end, to_send=to_send)
                return None
            other = self._halves.pop((hello.session, hello.attempt, opposite), None)
            if other is None:
                key = (hello.session, hello.attempt, hello.direction)
                stale = [self._halves.pop(key, None)]
                self._halves[key] = end
                if len(self._halves) > UNPROVEN_PEERS:
                    stale.append(self._halves.pop(next(iter(self._halves))))
                for half in filter(None, stale):
                    half.close()
                return None
            # The client's sending connection is the receiving one here.
            sender, receiver = (end, other) if hello.direction == "receive" else (other, end)
            if not hello.attempt:
                return Channel(sender, receiver)
            pair = Pair(sender, receiver, hello.received, hello.attempt)
            link = self._links.get(hello.session)
            if link is None:
                kept = self._links.items()
                self._links = {key: each for key, each in kept if not each.connections.ended}
                if self._terms is not None:
                    link = NativeLink(pair, self._terms(hello), attempt=hello.attempt)
                else:
                    link = Link(pair, attempt=hello.attempt)
                self._links[hello.session] = link
                return Channel.over(link)
        link.install(pair, hello.attempt)
        return None

    @staticmethod
    def _read_hello(end: socket.socket, decoder: FrameDecoder, deadline: float) -> Hello:
        while (frame := decoder.next()) is None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("the peer took too long to introduce itself")
            end.settimeout(left)
            data = end.recv(GREETING_LIMIT)
            if not data:
                raise EOFError("the peer left before it introduced itself")
            decoder.feed(data)
        hello = messages.decode_as(Hello, frame.kind, frame.meta)
        if hello.direction not in ("both", "send", "receive"):
            raise ProtocolError(f"a connection in the direction {hello.direction!r}")
        return hello

    def close(self) -> None:
        """Stop accepting and remove the socket's file."""
        with self._lock:
            self._closed = True
        for endpoint, listening in self._sockets.items():
            with contextlib.suppress(OSError):
                listening.shutdown(socket.SHUT_RDWR)
            listening.close()
            family, _, address = endpoint.partition(":")
            if family == "unix":
                Path(address).unlink(missing_ok=True)
        with self._lock:
            halves, self._halves = self._halves, {}
        for end in halves.values():
            end.close()
