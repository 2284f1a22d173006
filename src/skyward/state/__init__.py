"""Shared state: dicts, sets, counters, queues, locks, barriers and events that a pool shares.

The classes have the names here that users know; in this module, these hide Python's own.
"""

from __future__ import annotations

from skyward.state.shared import (
    SharedBarrier,
    SharedCounter,
    SharedDict,
    SharedEvent,
    SharedLock,
    SharedQueue,
    SharedSet,
)

dict = SharedDict
set = SharedSet
counter = SharedCounter
queue = SharedQueue
lock = SharedLock
barrier = SharedBarrier
event = SharedEvent
