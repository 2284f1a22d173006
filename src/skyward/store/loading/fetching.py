"""Fetching objects from a remote store: in parallel, and a bounded amount ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from skyward.errors import StoreDamagedError
from skyward.objects import memory
from skyward.store.format.manifest import Region, StoredObject, object_path
from skyward.store.format.safetensors import HEADER_LIMIT
from skyward.store.places.files import Files

PART = 8 << 20
"""A read is cut into ranges of this size; several ranges are fetched at once."""
TOGETHER = 128 << 20
"""Objects up to this size are read whole if at least half of their bytes are needed."""
AHEAD = 64 << 20
"""How many bytes are fetched ahead while earlier objects are verified and used."""
STREAMS = 8
_HEAD = 64 << 10

Wanted = tuple[StoredObject, list[Region]]
Damaged = Callable[[str, str], StoreDamagedError]
"""Makes the error for a file and what is wrong with it."""


@dataclass(frozen=True, slots=True)
class _Fetch:
    """An object that is being fetched."""

    path: str
    head: Future[bytes] | None
    """None if the head is the beginning of the only block."""
    blocks: list[tuple[int, memoryview]]
    parts: list[tuple[memoryview, Future[int]]]
    size: int


def fetched(
    files: Files, wanted: Sequence[Wanted], damaged: Damaged, advance: Callable[[int], None]
) -> Iterator[tuple[bytes, list[memoryview]]]:
    """The head of each object and the bytes of its regions, in order.

    `advance` is called with numbers of bytes that arrived; their sum is the size of the regions.
    """
    pool = ThreadPoolExecutor(STREAMS, thread_name_prefix="skyward-store")
    fetches: deque[_Fetch] = deque()
    waiting = deque(wanted)

    def start() -> None:
        while waiting:
            held = sum(fetch.size for fetch in fetches)
            if fetches and held + _extent(waiting[0][1]) > AHEAD:
                return
            fetches.append(_start(files, pool, *waiting.popleft(), damaged))

    try:
        start()
        for _, regions in wanted:
            arrived = _arrived(fetches.popleft(), regions, damaged, advance)
            start()
            yield arrived
            del arrived
    finally:
        pool.shutdown(cancel_futures=True)


def _extent(regions: list[Region]) -> int:
    return max(region.start + region.size for region in regions)


def _start(
    files: Files,
    pool: ThreadPoolExecutor,
    stored: StoredObject,
    regions: list[Region],
    damaged: Damaged,
) -> _Fetch:
    path = object_path(stored.name)
    end = _extent(regions)
    needed = sum(region.size for region in regions)
    together = 2 * needed >= end and (len(regions) == 1 or end <= TOGETHER)
    blocks = (
        [(0, memory.fresh(end))]
        if together
        else [(region.start, memory.fresh(region.size)) for region in regions]
    )
    head = None if together else pool.submit(_head, files, path, damaged)
    parts = [
        (part, pool.submit(files.read_into, path, start + at, part))
        for start, block in blocks
        for at in range(0, len(block), PART)
        for part in (block[at : at + PART],)
    ]
    return _Fetch(path, head, blocks, parts, sum(len(block) for _, block in blocks))


def _arrived(
    fetch: _Fetch, regions: list[Region], damaged: Damaged, advance: Callable[[int], None]
) -> tuple[bytes, list[memoryview]]:
    needed = sum(region.size for region in regions)
    try:
        for part, count in fetch.parts:
            if count.result() != len(part):
                raise damaged(fetch.path, "the file is too short")
            advance(min(len(part), needed))
            needed -= min(len(part), needed)
        if fetch.head is not None:
            return fetch.head.result(), [block for _, block in fetch.blocks]
    except FileNotFoundError:
        raise damaged(fetch.path, "the file is missing") from None
    ((_, whole),) = fetch.blocks
    head = bytes(whole[: head_end(whole, fetch.path, damaged)])
    return head, [whole[region.start : region.start + region.size] for region in regions]


def _head(files: Files, path: str, damaged: Damaged) -> bytes:
    start = files.read(path, 0, _HEAD)
    end = head_end(memoryview(start), path, damaged)
    return start[:end] if end <= len(start) else files.read(path, 0, end)


def head_end(start: memoryview, path: str, damaged: Damaged) -> int:
    """The length of an object's head, read from the first bytes of the object."""
    length = int.from_bytes(start[:8], "little")
    if len(start) < 8 or length > HEADER_LIMIT:
        raise damaged(path, "it does not begin with a header")
    return 8 + length
