"""Changes: wakes those who look at a node when something there has changed.

The agent tells of changes, and so do its children, which inherit the descriptor. Whoever listens
takes nothing from the others who do: each is woken.
"""

from __future__ import annotations

import contextlib
import os
import select

from skyward import kernel
from skyward.closing import Closing

_CAN_WAKE = kernel.IS_LINUX and hasattr(os, "eventfd")


def tell(descriptor: int) -> None:
    """Wake all who listen; nobody listens at -1, nor if a child has closed the descriptor."""
    if descriptor >= 0:
        with contextlib.suppress(OSError):
            os.eventfd_write(descriptor, 1)


class Changes:
    """The agent's end."""

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) if _CAN_WAKE else -1
        """What children inherit; -1 where nobody can be woken so, and has to look often."""

    def tell(self) -> None:
        """Wake all who listen."""
        tell(self.descriptor)

    def listen(self) -> ChangeListener | None:
        """A new listener, which the caller closes; None where nobody can be woken."""
        return ChangeListener(self.descriptor) if self.descriptor >= 0 else None

    def close(self) -> None:
        """Give the descriptor back."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class ChangeListener(Closing):
    """One who listens: the descriptor is readable if something has changed since `clear`."""

    def __init__(self, descriptor: int) -> None:
        self._told = select.epoll()
        # By edges: nobody reads the counter, so each change is an edge for every listener.
        self._told.register(descriptor, select.EPOLLIN | select.EPOLLET)

    def fileno(self) -> int:
        """The descriptor to wait on."""
        return self._told.fileno()

    def clear(self) -> None:
        """Forget the changes so far."""
        self._told.poll(0)

    def close(self) -> None:
        """Listen no more."""
        self._told.close()
