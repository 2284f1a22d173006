"""Shared counters."""

from __future__ import annotations

import operator
from typing import SupportsIndex

from skyward.errors import ConfigurationError
from skyward.state.shared import SharedObject


class SharedCounter(SharedObject):
    """A whole number that the whole pool shares, 0 at first; made by `sky.counter(name)`.

    >>> sky.counter("images").add(64)
    64
    """

    KIND = "counter"

    def _whole(self, number: SupportsIndex) -> int:
        try:
            return operator.index(number)
        except TypeError:
            raise ConfigurationError(
                f"{self!r} counts in whole numbers, not in {number!r}; use a sky.dict for others"
            ) from None

    def add(self, amount: SupportsIndex = 1) -> int:
        """Add to the counter, and return what it is then."""
        return int(self._call("add", self._whole(amount)))

    def increment(self, n: SupportsIndex = 1) -> int:
        """The same as `add`."""
        return self.add(n)

    def decrement(self, n: SupportsIndex = 1) -> int:
        """Subtract from the counter, and return what it is then."""
        return self.add(-self._whole(n))

    @property
    def value(self) -> int:
        """What the counter is now."""
        return int(self._call("get"))

    def set(self, value: SupportsIndex) -> None:
        """Set the counter."""
        self._call("set", self._whole(value))

    def reset(self, value: SupportsIndex = 0) -> None:
        """The same as `set`; 0 if nothing is given."""
        self.set(value)

    def compare_and_set(self, expected: SupportsIndex, new: SupportsIndex) -> bool:
        """Set the counter if it is what is expected; says whether it was."""
        return bool(self._call("replace", self._whole(expected), self._whole(new)))

    def __int__(self) -> int:
        return self.value
