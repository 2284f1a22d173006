"""A connection to the owner of a pool's shared state, which all threads of a process share."""

from __future__ import annotations

import contextlib
import itertools
import queue
import select
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from skyward.errors import ConfigurationError, SkywardError, StateFullError, StateLostError
from skyward.state.owner import FULL
from skyward.wire import messages
from skyward.wire.channel import Channel
from skyward.wire.messages import Question, Reply

BEAT_SECONDS = 5.0
"""How often a process that waits or holds a lock shows that it is there."""
SILENT_SECONDS = 30.0
"""After so long without a word, an end with something open takes the other for lost."""
SLICE_SECONDS = 0.5
"""A waiting thread looks up so often: only then can its task be interrupted."""
SETTLE_SECONDS = 2.0
"""How long an interrupted operation waits to learn whether it was performed."""

Undo = Callable[[Any], tuple[str, tuple[Any, ...]] | None]
"""From the answer to an operation, the operation that takes it back."""


# Not frozen: that would take a tenth of the time of an increment.
@dataclass(slots=True)
class StateOperation:
    """What a handle asks for."""

    kind: str
    name: str
    what: str
    arguments: tuple[Any, ...] = ()
    options: dict[str, Any] | None = None
    waits: bool = False
    timeout: float | None = None
    undo: Undo | None = None


class Slot:
    """An operation whose answer has not come yet."""

    __slots__ = ("_told", "code", "lost", "over", "parts", "problem", "value")

    def __init__(self) -> None:
        self._told: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.over = False
        """Whether the answer has come, or will not come."""
        self.value: Any = None
        self.problem = ""
        self.code = ""
        self.lost = ""
        """Why there will be no answer."""
        self.parts: list[Any] | None = None

    def fill(self, value: Any, problem: str, *, more: bool) -> None:
        """Note an answer, or a part of it."""
        if problem:
            self.problem, self.code = problem, str(value)
        elif more:
            self.parts = [*(self.parts or ()), *value]
            return
        else:
            self.value = value if self.parts is None else [*self.parts, *value]
        self.over = True
        self._told.put(None)

    def lose(self, why: str) -> None:
        """Note that no answer will come."""
        self.lost = why
        self.over = True
        self._told.put(None)

    def wake(self) -> None:
        """Have the waiting thread look around: it may have to read the answers now."""
        self._told.put(None)

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the answer, or to be woken; in slices, so that a task can be interrupted."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while not self.over:
            left = SLICE_SECONDS if deadline is None else deadline - time.monotonic()
            try:
                self._told.get(timeout=min(SLICE_SECONDS, max(0.0, left)))
                return self.over
            except queue.Empty:
                if left <= 0:
                    return False
        return True


def wait_readable(poll: select.poll, seconds: float) -> bool:
    """Wait until there is something to read; a task may be interrupted here."""
    while not poll.poll(1000 * min(seconds, SLICE_SECONDS)):
        seconds -= SLICE_SECONDS
        if seconds <= 0:
            return False
    return True


def answered(slot: Slot) -> Any:
    """The value of an answer; raises the error that it tells of."""
    if not slot.problem:
        return slot.value
    raise (StateFullError if slot.code == FULL else ConfigurationError)(slot.problem)


@dataclass(slots=True, eq=False)
class StateConnection:
    """One connection to an owner: any thread asks, and one thread at a time reads the answers."""

    channel: Channel
    who: str
    threaded: bool
    """Whether a thread of its own reads the answers, so that interrupts reach no thread that
    reads; else that is so only while the process holds locks."""
    process: str = ""
    """Names this process to the owner, so that a second connection keeps the locks of the first."""
    direct: bool = False
    """Whether nothing is between this process and the owner that can end the connection alone."""
    held: set[tuple[str, int]] = field(default_factory=set)
    """The locks that the process holds, by name and token."""
    epoch: str = field(init=False, default="")
    lost: str = field(init=False, default="")
    """Why the connection is of no more use; empty if it is."""
    _slots: dict[int, Slot] = field(init=False, default_factory=dict)
    _numbers: itertools.count[int] = field(init=False, default_factory=lambda: itertools.count(1))
    _lock: threading.Lock = field(init=False, default_factory=threading.Lock)
    _reader: threading.Thread | None = field(init=False, default=None)
    _reading: threading.Lock = field(init=False, default_factory=threading.Lock)
    """Held by the thread that reads."""
    _poll: select.poll = field(init=False, default_factory=select.poll)
    _heard: float = field(init=False, default_factory=time.monotonic)

    def __post_init__(self) -> None:
        try:
            self.channel.set_timeout(BEAT_SECONDS)
            about = {"who": self.who, "process": self.process, "direct": self.direct}
            self.channel.send(Question("begin", about))
            reply = self._next_reply()
            if reply.problem:
                raise StateLostError(reply.problem)
            self.epoch = str(reply.value[1])
        except BaseException:
            self.channel.close()
            raise
        # Only poll() reads from now on: it does not wait.
        self.channel.set_blocking(False)
        self._poll.register(self.channel.fileno(), select.POLLIN)
        if self.threaded or self.held:
            self._start_reader()

    def perform(self, operation: StateOperation) -> Any:
        """The owner's answer to an operation."""
        slot = Slot()
        number = next(self._numbers)
        arguments: dict[str, Any] = {
            "n": number,
            "of": (operation.kind, operation.name),
            "with": operation.arguments,
        }
        if operation.options:
            arguments["options"] = operation.options
        if operation.waits:
            arguments["waits"] = operation.timeout
        try:
            self._ask(number, slot, Question(operation.what, arguments))
            self._await(slot)
            if operation.kind == "lock":
                self._note_lock(operation, slot)
        except BaseException:
            self._settle(number, slot, operation)
            raise
        if slot.lost:
            raise StateLostError(slot.lost)
        return answered(slot)

    def _note_lock(self, operation: StateOperation, slot: Slot) -> None:
        """Note a lock that the process holds now, or holds no more."""
        if operation.what == "acquire" and slot.value:
            with self._lock:
                self.held.add((operation.name, slot.value[0]))
            # From now on, the owner must hear of this process while it does other things.
            self._start_reader()
        elif operation.what == "release":
            with self._lock:
                self.held.discard((operation.name, operation.arguments[0]))

    def _ask(self, number: int, slot: Slot, question: Question) -> None:
        with self._lock:
            if self.lost:
                raise StateLostError(self.lost)
            if not self._slots:
                # Before, nobody listened.
                self._heard = time.monotonic()
            self._slots[number] = slot
        try:
            self.channel.send(question)
        except OSError as problem:
            # Perhaps in the middle of a frame: nothing can follow.
            self._lose(f"the connection to it was lost ({problem})")

    def _settle(self, number: int, slot: Slot, operation: StateOperation) -> None:
        """Cancel an operation whose caller was interrupted, or take back what it has done."""
        if operation.undo is None and not operation.waits:
            with self._lock:
                self._slots.pop(number, None)
            return
        with contextlib.suppress(StateLostError, OSError):
            cancelling, other = Slot(), next(self._numbers)
            self._ask(other, cancelling, Question("cancel", {"n": other, "with": (number,)}))
            # The owner answers in order: an answer to the operation has come before this one.
            self._await(cancelling, SETTLE_SECONDS)
            with self._lock:
                is_open = self._slots.pop(number, None) is not None
            undone = None
            if not is_open and operation.undo is not None and not (slot.problem or slot.lost):
                undone = operation.undo(slot.value)
            if undone is not None:
                what, arguments = undone
                self.perform(StateOperation(operation.kind, operation.name, what, arguments))

    def _await(self, slot: Slot, seconds: float | None = None) -> None:
        """Wait for an answer.

        Without a thread that reads, one of the waiting threads does: two threads that wake each
        other for every answer would take twice the processor time.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        while not slot.over:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return
            if self._reader is not None or not self._reading.acquire(blocking=False):
                # Not for longer: the thread that is to read next may have been interrupted.
                slot.wait(SLICE_SECONDS if left is None else min(left, SLICE_SECONDS))
                continue
            try:
                while not slot.over and not self.lost and (left is None or left > 0):
                    self._read_some(left)
                    left = None if deadline is None else deadline - time.monotonic()
            finally:
                self._reading.release()
                self._pass_on()

    def _pass_on(self) -> None:
        """Have another waiting thread read, if there is one."""
        with self._lock:
            following = next(iter(self._slots.values()), None)
        if following is not None:
            following.wake()

    def _start_reader(self) -> None:
        """Have a thread of its own read from now on."""
        with self._lock:
            if self._reader is not None or self.lost:
                return
            self._reader = threading.Thread(target=self._read, name="skyward-state", daemon=True)
            self._reader.start()

    def _read(self) -> None:
        with self._reading:
            while not self.lost:
                self._read_some(None)

    def _read_some(self, seconds: float | None) -> None:
        """Wait for answers, for so long and at most until the next beat, and hand them out."""
        pause = BEAT_SECONDS if seconds is None else min(BEAT_SECONDS, seconds)
        if not wait_readable(self._poll, pause):
            if pause == BEAT_SECONDS:
                self._beat()
            return
        try:
            for frame in self.channel.poll():
                self._take(messages.decode_as(Reply, frame.kind, frame.meta))
        except (EOFError, OSError, SkywardError, TypeError, ValueError) as problem:
            self._lose(f"the connection to it was lost ({problem})")

    def _take(self, reply: Reply) -> None:
        number, value = reply.value
        self._heard = time.monotonic()
        with self._lock:
            slot = self._slots.get(number) if reply.more else self._slots.pop(number, None)
        if slot is not None:
            slot.fill(value, reply.problem, more=reply.more)

    def _next_reply(self) -> Reply:
        frame = self.channel.receive()
        return messages.decode_as(Reply, frame.kind, frame.meta)

    def _beat(self) -> None:
        """Show the owner that this process is there, if that matters, and ask the same of it."""
        if not self._slots and not self.held:
            self._heard = time.monotonic()
            return
        silent = time.monotonic() - self._heard
        if silent > SILENT_SECONDS:
            self._part("keep")
            self._lose(f"it has not answered for {silent:.0f} s")
            return
        try:
            self.channel.send(Question("beat", {"n": 0}))
        except OSError as problem:
            self._lose(f"the connection to it was lost ({problem})")

    def _part(self, what: str) -> None:
        """Tell the owner, if it hears it, whether the locks of this process are free now."""
        if self.held and not self.lost:
            with contextlib.suppress(OSError):
                self.channel.send(Question(what, {"n": 0}))

    def _lose(self, why: str) -> None:
        with self._lock:
            if self.lost:
                return
            self.lost = why
            slots, self._slots = self._slots, {}
        self.channel.abort()
        for slot in slots.values():
            slot.lose(why)

    def close(self) -> None:
        """End the connection; what still waits is told so, and locks of this process are free."""
        self._part("bye")
        self._lose("the pool of this state is closed")
        reader = self._reader
        if reader is not None and threading.current_thread() is not reader:
            reader.join()
        # A thread that reads looks up when the connection ends, and lets go.
        with self._reading:
            self.channel.close()
