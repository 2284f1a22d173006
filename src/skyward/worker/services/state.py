"""State: the owner of the pool's shared state, and its connections to the processes that use it.

One thread serves them all, so that the operations have one order. It never waits for a process:
answers that a connection does not take are kept until it does.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import ssl
import threading
import time
import traceback
from collections import deque
from typing import Any

import msgspec

from skyward.closing import Closing
from skyward.errors import ProtocolError
from skyward.state.link import SILENT_SECONDS
from skyward.state.owner import Asked, Owner, Session
from skyward.wire.channel import RECEIVE_SIZE, Channel
from skyward.wire.frames import HEADER, PROTOCOL, Frame
from skyward.wire.messages import ENCODER, MALFORMED, Question, Reply
from skyward.worker.services import Caller, answers

LOOK_SECONDS = 1.0
"""How often the owner looks for processes that wait or hold locks and have gone silent."""
UNSENT_MAX = 32 << 20
"""A process that leaves so many bytes of answers unread is not read from, either."""

_DONT_WAIT = int(socket.MSG_DONTWAIT)
_questions = msgspec.msgpack.Decoder(Question)


class RemoteSession(Session):
    """A process at the other end of a connection."""

    def __init__(self, channel: Channel, dirty: set[RemoteSession]) -> None:
        super().__init__()
        self.channel = channel
        self.sender, self.receiver = channel.detach()
        self.encrypted = channel.is_encrypted
        self.unsent = bytearray()
        self.blocked = False
        """Whether the connection did not take all answers at once."""
        self.direct = False
        """Whether the end of the connection is the end of the process."""
        self.parted = False
        """Whether the process has said that it leaves for good."""
        self.is_local = self.receiver.family == socket.AF_UNIX
        """Whether an error of the connection, too, is the end of the process: no network fails."""
        self.left = False
        """Whether the connection has ended, and the process waits for nothing any more."""
        self.ended = threading.Event()
        """Is set then."""
        self._dirty = dirty
        """The sessions that have something to send."""

    def answer(
        self, number: int, value: Any = None, problem: str = "", *, more: bool = False
    ) -> None:
        meta = ENCODER.encode(Reply(value, problem, more, number))
        self.unsent += HEADER.pack(Reply.KIND, 0, PROTOCOL, len(meta), 0) + meta
        self._dirty.add(self)

    def read(self, room: memoryview) -> list[Frame]:
        """The frames that have come; uses the room for their bytes."""
        if self.encrypted:
            return self.channel.poll()
        count = self.receiver.recv_into(room, 0, _DONT_WAIT)
        if not count:
            raise EOFError("the other end closed the connection")
        return self.channel.cut(room[:count])


class StateServer(Closing):
    """Serves the processes that use the state of this node's pool."""

    def __init__(self) -> None:
        self._owner = Owner()
        self._dirty: set[RemoteSession] = set()
        self._sessions: set[RemoteSession] = set()
        self._arrived: deque[RemoteSession] = deque()
        self._selector = selectors.DefaultSelector()
        self._woken, self._waking = socket.socketpair()
        self._woken.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._looked = 0.0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="skyward-state", daemon=True)
        self._thread.start()

    def serve(self, channel: Channel, who: str, process: str = "", direct: bool = False) -> None:
        """Serve a process, in words and by its name, until its connection ends.

        A process that is `direct` has ended when its connection has.
        """
        session = RemoteSession(channel, self._dirty)
        session.who, session.process, session.direct = who, process, direct
        channel.set_blocking(False)
        if session.encrypted:
            session.sender.setblocking(False)
        self._arrived.append(session)
        self._waking.send(b"\0")
        session.ended.wait()

    def close(self) -> None:
        """Drop all processes, and end the thread."""
        self._closed = True
        self._waking.send(b"\0")
        self._thread.join()
        for session in [*self._sessions, *self._arrived]:
            self._drop(session)
        self._selector.close()
        self._woken.close()
        self._waking.close()

    def _run(self) -> None:
        owner, dirty, room = self._owner, self._dirty, memoryview(bytearray(RECEIVE_SIZE))
        while not self._closed:
            pause = owner.expire() if owner.deadlines else None
            if dirty:
                pause = 0.0
            elif owner.watches and (pause is None or pause > LOOK_SECONDS):
                pause = LOOK_SECONDS
            for key, events in self._selector.select(pause):
                session = key.data
                if session is None:
                    self._take_arrived()
                    continue
                if events & selectors.EVENT_WRITE:
                    dirty.add(session)
                if events & selectors.EVENT_READ:
                    self._take(session, room)
            if owner.watches:
                self._look()
            while dirty:
                # A connection that is lost frees locks, which gives others answers to send.
                self._flush(dirty.pop())

    def _take_arrived(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(4096)
        while self._arrived:
            session = self._arrived.popleft()
            self._sessions.add(session)
            self._selector.register(session.receiver, selectors.EVENT_READ, session)
            self._owner.come(session)
            session.answer(0, self._owner.epoch)
            # Its next question may have come with the first, and be read already.
            self._take(session, None)

    def _take(self, session: RemoteSession, room: memoryview | None) -> None:
        """Perform what a process asks for; without a room, only what has been read already."""
        perform = self._owner.perform
        try:
            frames = session.channel.buffered() if room is None else session.read(room)
            session.heard = time.monotonic()
            for frame in frames:
                if frame.body_length or frame.kind != Question.KIND:
                    raise ProtocolError("only questions, without a body, are about shared state")
                question = _questions.decode(frame.meta)
                arguments = question.arguments
                if "of" in arguments:
                    waits, options = "waits" in arguments, arguments.get("options")
                    asked = Asked(session, question.number, waits, arguments.get("waits"))
                    kind, name = arguments["of"]
                    perform(asked, kind, name, question.what, arguments["with"], options)
                else:
                    self._note(session, question)
        except (BlockingIOError, ssl.SSLWantReadError):
            return
        except EOFError:
            self._drop(session, ended=session.direct)
        except OSError:
            self._drop(session, ended=session.direct and session.is_local)
        except (ProtocolError, *MALFORMED):
            self._drop(session)
        except Exception:
            # One process must not take the state from all others.
            traceback.print_exc()
            self._drop(session)

    def _note(self, session: RemoteSession, question: Question) -> None:
        """Note what a process says of itself."""
        match question.what:
            case "beat":
                session.answer(question.number)
            case "bye":
                session.parted = True
            case "keep":
                session.direct = False
            case "count":
                session.answer(question.number, self._owner.count)
            case "cancel":
                self._owner.cancel(session, *question.arguments["with"])
                session.answer(question.number)
            case what:
                raise ProtocolError(f"{what!r} is about nothing")

    def _flush(self, session: RemoteSession) -> None:
        """Send a process as much as its connection takes now."""
        if session.left:
            return
        try:
            while session.unsent:
                flags = 0 if session.encrypted else _DONT_WAIT
                del session.unsent[: session.sender.send(session.unsent, flags)]
        except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
            pass
        except OSError:
            self._drop(session, ended=session.direct and session.is_local)
            return
        if session.unsent or session.blocked:
            session.blocked = bool(session.unsent)
            self._watch(session)

    def _watch(self, session: RemoteSession) -> None:
        """Wait for what the connection can do next: bring questions, or take answers."""
        wanted: dict[socket.socket, int] = {session.sender: 0, session.receiver: 0}
        if len(session.unsent) < UNSENT_MAX:
            wanted[session.receiver] |= selectors.EVENT_READ
        if session.unsent:
            wanted[session.sender] |= selectors.EVENT_WRITE
        watched = self._selector.get_map()
        for end, events in wanted.items():
            if end not in watched:
                if events:
                    self._selector.register(end, events, session)
            elif not events:
                self._selector.unregister(end)
            elif watched[end].events != events:
                self._selector.modify(end, events, session)

    def _look(self) -> None:
        """Drop processes that wait and are silent, and free the locks of those that are."""
        now = time.monotonic()
        if now - self._looked < LOOK_SECONDS:
            return
        self._looked = now
        for session in list(self._owner.absent):
            self._owner.free_leases(session)
        self._owner.tidy_absent()
        for session in list(self._sessions):
            self._owner.free_leases(session)
            if session.waiters and now - session.heard > SILENT_SECONDS:
                self._drop(session)
        self._owner.watches = bool(self._owner.absent) or any(
            each.waiters or each.holds for each in self._sessions
        )

    def _drop(self, session: RemoteSession, *, ended: bool = False) -> None:
        if session.left:
            return
        session.left = True
        for end in {session.sender, session.receiver}:
            with contextlib.suppress(KeyError):
                self._selector.unregister(end)
        self._sessions.discard(session)
        self._owner.leave(session, ended=ended or session.parted)
        session.ended.set()


@answers("state")
def begin(caller: Caller, who: str, process: str = "", direct: bool = False) -> None:
    """Answer a process's questions about the state until the process leaves."""
    caller.node.own(StateServer).serve(caller.channel, who, process, direct)
