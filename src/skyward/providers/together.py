"""Together: waits for the orders of nodes that a pool orders at the same time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

GATHER_SECONDS = 0.05
"""How long a provider waits for the orders, or the ends, of other nodes of a pool."""
TOGETHER_SECONDS = 5.0
"""How long it waits for orders that are known to come, by `Order.together`."""


async def gather(is_complete: Callable[[], bool]) -> None:
    """Wait until all orders have come, however slow this machine is.

    A node of the same moment may need no machine, or may have been given up: the wait has an end.
    """
    deadline = time.monotonic() + TOGETHER_SECONDS
    await asyncio.sleep(GATHER_SECONDS)
    while not is_complete() and time.monotonic() < deadline:
        await asyncio.sleep(GATHER_SECONDS)
