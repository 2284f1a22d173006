"""Shared state: dicts, sets, counters, queues, locks, barriers and events that a pool shares.

The classes have the names here that users know; in this module, these hide Python's own.
"""

from __future__ import annotations

from skyward.state.counters import SharedCounter
from skyward.state.locks import SharedBarrier, SharedEvent, SharedLock
from skyward.state.mappings import SharedDict, SharedSet
from skyward.state.queues import SharedQueue

dict = SharedDict
set = SharedSet
counter = SharedCounter
queue = SharedQueue
lock = SharedLock
barrier = SharedBarrier
event = SharedEvent
