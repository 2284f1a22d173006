"""A channel: frames in both directions between two authenticated ends; a service asked over one."""

from __future__ import annotations

import array
import os
import socket
import ssl
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import msgspec

from skyward.closing import Closing, shut
from skyward.errors import PoolError, ProtocolError
from skyward.kernel import CLOSE_ON_EXEC
from skyward.wire import messages
from skyward.wire.frames import (
    DESCRIPTOR_LIMIT,
    HEADER,
    INLINE_BODY,
    PROTOCOL,
    Frame,
    FrameDecoder,
)
from skyward.wire.link.incoming import NotConnected
from skyward.wire.link.link import Link
from skyward.wire.messages import ENCODER, MALFORMED, Message, Question, Reply, Result
from skyward.wire.native import NativeLink, NativeSocket

Bytes = bytes | bytearray | memoryview

RECEIVE_SIZE = 256 << 10
# One system call per vector; the kernel takes at most 1024 parts (IOV_MAX).
PARTS_PER_CALL = 512
# Small writes are joined: a TLS record, and a system call, cost more than copying a few KiB.
JOIN_BELOW = 16 << 10
# OpenSSL takes int lengths; a bounded write also keeps the interpreter's lock hand-overs fair.
TLS_WRITE = 4 << 20
# Plain numbers: combining the enum's members costs more than the call they go into.
_DONT_WAIT = int(socket.MSG_DONTWAIT)
_PEEK = int(socket.MSG_DONTWAIT | socket.MSG_PEEK)
_WHOLE = int(socket.MSG_WAITALL)
# A larger result is not looked at before it is taken: that would copy it twice.
PEEK_SIZE = 16 << 10
_results = msgspec.msgpack.Decoder(Result)
_DESCRIPTOR_SPACE = socket.CMSG_SPACE(DESCRIPTOR_LIMIT * array.array("i").itemsize)


class Channel:
    """Frames over one plain socket, over one TLS socket for each direction, or over a link.

    OpenSSL does not allow two threads to read and write one connection at once, so an encrypted
    channel is a pair of connections. Any thread may send; one thread at a time receives. A link
    replaces a lost pair by a new one, and the channel's users notice only a delay.
    """

    def __init__(
        self,
        sender: socket.socket,
        receiver: socket.socket | None = None,
        decoder: FrameDecoder | None = None,
        link: Link | NativeLink | None = None,
    ) -> None:
        self.link = link
        """The link that carries the frames; None if the channel ends with its connections."""
        self._sender = sender
        self._receiver = receiver or sender
        self.is_encrypted = isinstance(sender, (ssl.SSLSocket, NativeSocket))
        self._holds_bytes = self.is_encrypted or isinstance(link, NativeLink)
        """Whether bytes may have come that no selector sees."""
        # Two plain connections lead to another machine, through a provider's own transport.
        self.shares_memory = link is None and receiver is None and sender.family == socket.AF_UNIX
        self.reads_ahead = isinstance(link, NativeLink) and link.is_of_calls
        """Whether a large body may have brought bytes of the next frames, which the link holds."""
        self.can_take_results = self.shares_memory or self.reads_ahead
        """Whether a thread that a Ctrl-C may interrupt can read a result: see `take_result`."""
        self.has_rest = False
        """Whether that thread may have left bytes here that no selector sees."""
        self._decoder = decoder or FrameDecoder()
        self._send_lock = threading.Lock()
        self.reading = threading.Lock()
        """Held by the thread that takes frames, if several may, until it has dealt with them."""
        self.bytes_sent = 0
        self.bytes_received = 0
        self.closed = False
        self.aborted = False

    @classmethod
    def over(cls, link: Link | NativeLink) -> Channel:
        """A channel that outlives its connections."""
        pair = link.first
        return cls(pair.sender, pair.receiver, link=link)

    def fileno(self) -> int:
        """The descriptor to wait on for incoming frames."""
        return self._receiver.fileno() if self.link is None else self.link.incoming.fileno()

    @property
    def is_to_a_socket_here(self) -> bool:
        """Whether the listener's own socket is at the other end, with no tunnel between.

        The end of a tunnel is one of a pair of sockets, which have no names.
        """
        end = self._receiver
        return self.link is None and end.family == socket.AF_UNIX and bool(end.getpeername())

    @property
    def native_link(self) -> NativeLink:
        """The link of a device over a network."""
        assert isinstance(self.link, NativeLink)
        return self.link

    # What a link adds. Without one, a channel is connected until it is lost.

    @property
    def resumes(self) -> bool:
        """Whether the channel survives the loss of its connections."""
        return self.link is not None

    @property
    def connected(self) -> bool:
        """Whether the channel has a connection now."""
        return not self.closed if self.link is None else self.link.connections.connected

    @property
    def exhausted(self) -> bool:
        """Whether the connection is lost, and everything that it brought has been read."""
        return self.closed if self.link is None else self.link.connections.current is None

    @property
    def ended(self) -> bool:
        """Whether the channel is known to have ended."""
        return self.closed or (self.link is not None and self.link.connections.ended)

    def ready(self, again: Callable[[], None]) -> bool:
        """Whether frames can arrive; if not, `again` is called when they can, or never will."""
        return self.link is None or self.link.incoming.ready(again)

    def on_change(self, told: Callable[[bool], None]) -> None:
        """Call `told`, on any thread, when a connection is lost (False) and made (True)."""
        if self.link is not None:
            self.link.connections.watch(told)

    def expect_end(self) -> None:
        """Over a link, connect no more once the other end, which was told to end, has done so."""
        if self.link is not None:
            self.link.connections.ending = True

    @property
    def expects_end(self) -> bool:
        """Whether the other end of a link was told to end the connection."""
        return self.link is not None and self.link.connections.ending

    def reconnect(self) -> None:
        """Over a link, give up a connection that seems dead; the client makes a new one."""
        if self.link is not None:
            self.link.connections.reconnect()

    def be_patient(self) -> None:
        """From now on, `send` waits until the kernel has the frame, if there is a connection."""
        if self.link is not None:
            self.link.outgoing.patient = True

    def wait_for_room(self) -> None:
        """Wait while the link keeps many bytes that have not arrived at the other end."""
        if self.link is not None:
            self.link.outgoing.wait_for_room()

    def send(
        self, message: Message, body: Sequence[Bytes] = (), descriptors: Sequence[int] = ()
    ) -> None:
        """Send one frame; returns when the kernel, or the link, has all of it."""
        meta = ENCODER.encode(message)
        length = sum(map(len, body)) if body else 0
        head = HEADER.pack(message.KIND, len(descriptors), PROTOCOL, len(meta), length) + meta
        if length < JOIN_BELOW and not descriptors:
            whole = b"".join((head, *body)) if body else head
            if self.link is not None:
                self.link.outgoing.send(whole)
            else:
                with self._send_lock:
                    self._sender.sendall(whole)
        elif self.link is not None:
            try:
                self.link.outgoing.send_parts(_joined([head, *body]))
            except BaseException:
                self.abort()
                raise
        else:
            with self._send_lock:
                self._send_parts([head, *body], descriptors)
        self.bytes_sent += len(head) + length

    def send_many(self, messages: Iterable[tuple[Message, Sequence[Bytes]]]) -> None:
        """Send several small frames in one write."""
        parts: list[Bytes] = []
        for message, body in messages:
            meta = ENCODER.encode(message)
            length = sum(map(len, body))
            parts.append(HEADER.pack(message.KIND, 0, PROTOCOL, len(meta), length) + meta)
            parts += body
        joined = b"".join(parts)
        if self.link is not None:
            self.link.outgoing.send(joined)
        else:
            with self._send_lock:
                self._sender.sendall(joined)
        self.bytes_sent += len(joined)

    def abort(self) -> None:
        """End the connection for the readers of both ends; the owner must still close it."""
        self.aborted = True
        if self.link is not None:
            # The other end takes this for an outage, unless the channel's owner has told it.
            self.link.connections.end("the channel was aborted")
            return
        for end in {self._sender, self._receiver}:
            shut(end)

    def _send_parts(self, parts: list[Bytes], descriptors: Sequence[int]) -> None:
        views = _joined(parts)
        counts: list[int] = []
        length = sum(map(len, views))
        try:
            if self.is_encrypted:
                self._send_encrypted(views)
            else:
                self._send_vectors(views, descriptors, counts)
        except BaseException:
            # After a Ctrl-C within a frame, the other end would read later bytes as its rest.
            if sum(counts) != length:
                self.abort()
            raise

    def _send_encrypted(self, views: list[memoryview]) -> None:
        for view in views:
            for start in range(0, len(view), TLS_WRITE):
                self._sender.sendall(view[start : start + TLS_WRITE])

    def _send_vectors(
        self, views: list[memoryview], descriptors: Sequence[int], counts: list[int]
    ) -> None:
        ancillary = []
        if descriptors:
            rights = array.array("i", descriptors).tobytes()
            ancillary.append((socket.SOL_SOCKET, socket.SCM_RIGHTS, rights))
        at = 0
        while at < len(views):
            # One step for the interpreter: no Ctrl-C between the call and noting its count.
            counts.extend(
                map(self._sender.sendmsg, (views[at : at + PARTS_PER_CALL],), (ancillary,))
            )
            sent = counts[-1]
            ancillary = []
            while at < len(views) and sent >= len(views[at]):
                sent -= len(views[at])
                at += 1
            if sent:
                views[at] = views[at][sent:]

    def poll(self) -> list[Frame]:
        """The frames that can be read without waiting; `EOFError` when the other end is gone."""
        self.has_rest = False
        try:
            part = self._receive_some(_DONT_WAIT)
        except (BlockingIOError, ssl.SSLWantReadError):
            return []
        frames = self.cut(part)
        while self._holds_bytes and (not frames or frames[-1].body is not None):
            # OpenSSL or the link may hold bytes that the selector cannot see.
            link = self.link
            holder = cast(ssl.SSLSocket, self._receiver) if link is None else link.incoming
            if not holder.pending():
                break
            try:
                frames += self.cut(self._receive_some(_DONT_WAIT))
            except (BlockingIOError, ssl.SSLWantReadError):
                # The first bytes of a record that is not whole yet.
                break
            except (NotConnected, EOFError, OSError):
                # The next look says so again; these frames would be lost.
                if frames:
                    break
                raise
        return frames

    def take_result(self, task: int) -> tuple[Result, memoryview] | None:
        """The result of a task and its pickle, if they have come and are small; else takes nothing.

        Only where `can_take_results`. Unlike the other methods that read, this one is for threads
        that a Ctrl-C may interrupt: it looks at the bytes that have come, and takes them with its
        last call. So no other frame is lost, or taken in part.
        """
        if not self._decoder.at_boundary:
            return None
        room, link = _arrival_room(), self.link
        try:
            if isinstance(link, NativeLink):
                self.has_rest = True
                count = link.peek(room, PEEK_SIZE)
            else:
                count = self._receiver.recv_into(room, PEEK_SIZE, _PEEK)
            kind, descriptors, protocol, meta, length = HEADER.unpack_from(room)
            body = HEADER.size + meta
            end = body + length
            if kind != Result.KIND or descriptors or protocol != PROTOCOL or end > count:
                return None
            result = _results.decode(room[HEADER.size : body])
        except (OSError, *MALFORMED):
            # Whoever reads next finds it, too.
            return None
        payload = result.payload
        if result.task != task or payload is None or payload.buffers or payload.pickle != length:
            return None
        pickle = memoryview(bytes(room[body:end]))
        if isinstance(link, NativeLink):
            link.skip(end)
            # What was looked at may be all that fits, and not all that is there.
            self.has_rest = count > end or count == PEEK_SIZE
        else:
            self._receiver.recv_into(room, end, _WHOLE)
        self.bytes_received += end
        return result, pickle

    def receive(self) -> Frame:
        """Wait for the next frame; `EOFError` when the other end is gone."""
        while True:
            frame = self._decoder.next()
            if frame is not None:
                return frame
            self._decoder.feed(self._receive_some(0))

    def buffered(self) -> list[Frame]:
        """Frames already read but not yet returned, after a large body was taken."""
        return self.cut(None)

    def cut(self, part: memoryview | None) -> list[Frame]:
        """The frames that are whole with these bytes, which the caller has read."""
        decoder, frames = self._decoder, []
        if part is not None:
            decoder.feed(part)
        while not decoder.at_boundary and (frame := decoder.next()) is not None:
            frames.append(frame)
            if frame.body is None:
                break
        return frames

    def _receive_some(self, flags: int) -> memoryview:
        if self.link is not None:
            part = self.link.incoming.receive(_arrival_room())
            self.bytes_received += len(part)
            return part
        room = _arrival_room()
        if not self.shares_memory:
            count = (
                self._receiver.recv_into(room)
                if isinstance(self._receiver, ssl.SSLSocket)
                else self._receiver.recv_into(room, 0, flags)
            )
        else:
            count, ancillary, _, _ = self._receiver.recvmsg_into(
                [room], _DESCRIPTOR_SPACE, flags | CLOSE_ON_EXEC
            )
            for level, kind, data in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    rights = array.array("i")
                    rights.frombytes(data[: len(data) - len(data) % rights.itemsize])
                    if not CLOSE_ON_EXEC:
                        for descriptor in rights:
                            os.set_inheritable(descriptor, False)
                    self._decoder.attach(rights.tolist())
        if not count:
            raise EOFError("the other end closed the connection")
        self.bytes_received += count
        return room[:count]

    def read_body(
        self,
        frame: Frame,
        places: Sequence[memoryview],
        told: Callable[[int], None] = lambda done: None,
    ) -> None:
        """Read the large body of a frame straight into its final places.

        Calls `told` now and then with the number of bytes that have been read.
        """
        if sum(map(len, places)) != frame.body_length:
            raise ProtocolError(
                f"a body of {frame.body_length} bytes for places of {sum(map(len, places))}"
            )
        views = [place[self._decoder.take(place) :] for place in places]
        views = [view for view in views if len(view)]
        received = self.bytes_received
        before = frame.body_length - sum(map(len, views))

        def told_of_all(done: int) -> None:
            self.bytes_received = received + done
            told(before + done)

        if self.link is not None:
            self.link.incoming.fill(views, told_of_all)
            return
        done = 0
        for view in views:
            at = 0
            while at < len(view):
                count = self._receiver.recv_into(view[at : at + (64 << 20)])
                if not count:
                    raise EOFError("the other end closed the connection in a frame's middle")
                at += count
                told_of_all(done + at)
            done += len(view)

    def set_timeout(self, seconds: float) -> None:
        """How long one read or write of a channel without a link may take: then `TimeoutError`."""
        for end in {self._sender, self._receiver}:
            end.settimeout(seconds)

    def set_blocking(self, blocking: bool) -> None:
        """Whether reads of an encrypted channel wait; plain ones choose per call."""
        if self.link is not None:
            self.link.incoming.set_blocking(blocking)
        elif self.is_encrypted:
            self._receiver.setblocking(blocking)

    def detach(self) -> tuple[socket.socket, socket.socket]:
        """Give up the sockets to send and receive on; the caller uses another protocol there."""
        assert self.link is None
        return self._sender, self._receiver

    def close(self) -> None:
        """Wake the threads that read or write, and close the sockets."""
        self.closed = True
        if self.link is not None:
            self.link.connections.close()
            return
        for end in {self._sender, self._receiver}:
            shut(end)
            end.close()
        for descriptor in self._decoder.drain_descriptors():
            os.close(descriptor)


_rooms = threading.local()


def _arrival_room() -> memoryview:
    """Memory for arriving bytes: one piece for each thread, since the decoder copies them at once.

    A piece for each channel would be half a gigabyte for a thousand nodes.
    """
    room: memoryview | None = getattr(_rooms, "view", None)
    if room is None:
        room = _rooms.view = memoryview(bytearray(RECEIVE_SIZE))
    return room


def _joined(parts: list[Bytes]) -> list[memoryview]:
    views: list[memoryview] = []
    small: list[Bytes] = []
    for part in parts:
        if len(part) < JOIN_BELOW:
            small.append(part)
            continue
        if small:
            views.append(memoryview(b"".join(small)))
            small = []
        views.append(memoryview(part).cast("B"))
    if small:
        views.append(memoryview(b"".join(small)))
    return views


# Services.


PART = INLINE_BODY // 2
"""How many bytes the body of a question or a reply has, at most, if bytes come in parts."""


class ServiceConnection(Closing):
    """The asking end of a connection to a service; one thread at a time asks."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        """For services that take turns in other ways than question and answer."""

    def ask(self, what: str, **arguments: Any) -> Any:
        """The answer to a question; `PoolError` if the service refuses or fails.

        >>> connection.ask("facts")["pid"]
        """
        self.channel.send(Question(what, arguments))
        return self.next_reply().value

    def next_reply(self) -> Reply:
        """Wait for the next reply; `PoolError` if it tells of a failure."""
        frame = self.channel.receive()
        reply = messages.decode_as(Reply, frame.kind, frame.meta)
        if reply.problem:
            raise PoolError(reply.problem)
        return reply

    def send(self, what: str, body: Bytes = b"", **arguments: Any) -> None:
        """Send a question, or a part of one, without waiting for an answer."""
        self.channel.send(Question(what, arguments), (body,) if body else ())

    def next_part(self) -> tuple[Reply, bytearray]:
        """The next reply, with its body; `PoolError` if it tells of a failure."""
        frame = self.channel.receive()
        reply = messages.decode_as(Reply, frame.kind, frame.meta)
        if reply.problem:
            raise PoolError(reply.problem)
        return reply, part_of(frame)

    def close(self) -> None:
        """End the connection."""
        self.channel.close()


def next_part(channel: Channel) -> tuple[Question, bytearray]:
    """Wait for the next question or the next part of one, with its body."""
    frame = channel.receive()
    return messages.decode_as(Question, frame.kind, frame.meta), part_of(frame)


def part_of(frame: Frame) -> bytearray:
    """The body of a frame whose sender sends bytes in parts."""
    if frame.body is None:
        raise ProtocolError(
            f"a service was sent {frame.body_length} bytes at once; bytes come in parts of at most "
            f"{PART} bytes"
        )
    return frame.body


def whole_of(channel: Channel, frame: Frame) -> bytearray:
    """The body of a frame, however long it is."""
    if frame.body is not None:
        return frame.body
    body = bytearray(frame.body_length)
    channel.read_body(frame, [memoryview(body)])
    return body
