"""The pool as a plugin sees it: what it has room for, and a way to run calls there."""

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
    def _open_pool(self) -> SlotCount: ...

    def submit(self, pending: Pending[Any], /) -> Future[Any]: ...
