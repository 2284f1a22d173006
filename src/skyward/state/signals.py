"""Locks, barriers and events of a pool's shared state as their owner has them."""

from __future__ import annotations

import itertools
from typing import Any

from skyward.state.owner import (
    MISUSED,
    WAITING,
    Asked,
    Holding,
    Line,
    OwnedObject,
    Owner,
    Refused,
    Waiter,
)


class OwnedLock(OwnedObject):
    """Who holds a lock, and who waits for it."""

    KIND = "lock"

    def __init__(self, owner: Owner, name: str, options: dict[str, Any]) -> None:
        super().__init__(owner, name, options)
        self._holding: Holding | None = None
        self._abandoned = False
        """Whether the last holder was lost while it held the lock."""
        self._waiters = Line()
        self._tokens = itertools.count(1)

    def deleted(self) -> None:
        if self._holding is not None:
            self._holding.session.holds.discard(self._holding)
        self.dismiss(self._waiters)

    def do_acquire(self, asked: Asked, lease: float) -> Any:
        """Hold the lock: its token, and whether the holder before was lost; None if not in time."""
        if self._holding is None:
            return self._grant(asked.session, lease)
        if not asked.waits:
            return None
        self._waiters.append(self.wait(asked, lease))
        return WAITING

    def _grant(self, session: Any, lease: float) -> tuple[int, bool]:
        self._holding = Holding(session, next(self._tokens), lease, self._abandon)
        session.holds.add(self._holding)
        abandoned, self._abandoned = self._abandoned, False
        return self._holding.token, abandoned

    def do_release(self, asked: Asked, token: int) -> bool:
        """Let the lock go; False if it is not held with this token."""
        if self._holding is None or self._holding.token != token:
            return False
        self._free()
        return True

    def _abandon(self) -> None:
        self._abandoned = True
        self._free()

    def _free(self) -> None:
        assert self._holding is not None
        self._holding.session.holds.discard(self._holding)
        self._holding = None
        waiter = self._waiters.next()
        if waiter is not None:
            waiter.answer(self._grant(waiter.session, waiter.payload))

    def do_owner(self, asked: Asked) -> str | None:
        return None if self._holding is None else self._holding.session.who


class OwnedBarrier(OwnedObject):
    """Who waits for the others."""

    KIND = "barrier"

    def __init__(self, owner: Owner, name: str, options: dict[str, Any]) -> None:
        super().__init__(owner, name, options)
        self._parties: int = options["parties"]
        self._waiters: list[Waiter] = []
        self._broken = ""
        """Why the barrier is broken; empty if it is not."""

    def check(self, options: dict[str, Any]) -> None:
        if options["parties"] != self._parties:
            raise Refused(
                MISUSED,
                f"sky.barrier({self.name!r}, parties={options['parties']}): the barrier is there, "
                f"with parties={self._parties}; give that number, or use another name",
            )

    def deleted(self) -> None:
        self._break("it was deleted")

    def do_wait(self, asked: Asked) -> Any:
        """Wait for the others: the number of the waiter, or why the barrier is broken."""
        if self._broken:
            return self._broken
        waiters = self._waiters
        if len(waiters) + 1 < self._parties:
            if not asked.waits:
                return None
            waiters.append(self.wait(asked))
            return WAITING
        self._waiters = []
        for number, waiter in enumerate(waiters):
            waiter.answer(number)
        return self._parties - 1

    def timed_out(self, waiter: Waiter) -> None:
        self._waiters.remove(waiter)
        waiter.answer(None)
        self._break("one that waited there did not wait any longer")

    def left(self, waiter: Waiter) -> None:
        self._waiters.remove(waiter)
        self._break(f"{waiter.session.who}, which waited there, was cancelled or ended")

    def _break(self, why: str) -> None:
        self._broken = why
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter.answer(why)

    def do_abort(self, asked: Asked) -> None:
        self._break("it was aborted")

    def do_reset(self, asked: Asked) -> None:
        self._break("it was reset")
        self._broken = ""

    def do_facts(self, asked: Asked) -> tuple[int, int, bool]:
        """How many must come, how many wait, and whether the barrier is broken."""
        return self._parties, len(self._waiters), bool(self._broken)


class OwnedEvent(OwnedObject):
    """Whether something has happened, and who waits for it."""

    KIND = "event"

    def __init__(self, owner: Owner, name: str, options: dict[str, Any]) -> None:
        super().__init__(owner, name, options)
        self._is_set = False
        self._waiters = Line()

    def deleted(self) -> None:
        self.dismiss(self._waiters)

    def do_set(self, asked: Asked) -> None:
        self._is_set = True
        while (waiter := self._waiters.next()) is not None:
            waiter.answer(True)

    def do_clear(self, asked: Asked) -> None:
        self._is_set = False

    def do_get(self, asked: Asked) -> bool:
        return self._is_set

    def do_wait(self, asked: Asked) -> Any:
        if self._is_set or not asked.waits:
            return True if self._is_set else None
        self._waiters.append(self.wait(asked))
        return WAITING
