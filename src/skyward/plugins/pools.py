"""The pool as a plugin sees it: how many calls it runs at once, and a way to run calls."""

from __future__ import annotations

from typing import Any, Protocol

from skyward.functions import Pending
from skyward.future import Future


class SlotCount(Protocol):
    """Says how many calls the pool runs at once."""

    def slots(self) -> int: ...


class OpenCompute(Protocol):
    """A `Compute` whose pool is open."""

    @property
    def _open_fleet(self) -> SlotCount: ...

    def submit(self, pending: Pending[Any], /) -> Future[Any]: ...
