"""Memory that two processes of one host can share, written once and mapped copy-on-write."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import mmap
import os
import queue
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import xxhash

from skyward import kernel
from skyward.errors import BlobStoreFullError

CHUNK = 1 << 20
"""The unit of parallel hashing and copying; also fixed by the digest's definition."""

ALIGNMENT = 64
"""Buffers of a payload, and the data of a store's files, begin at multiples of this many bytes; the
wire format fixes it."""

GRANULE = mmap.ALLOCATIONGRANULARITY
_ROUND = 1 << 20
_WRITE = 64 << 20
"""One system call moves at most 2 GiB; at this size the calls no longer show."""
_MAKE_PAGES = 23
"""MADV_POPULATE_WRITE of Linux 5.14."""
_libc = ctypes.CDLL(None, use_errno=True)
_scratch = threading.local()
_ids = itertools.count(1)
Item = TypeVar("Item")
Made = TypeVar("Made")


class Crew:
    """A few threads that hash and copy.

    An executor of the standard library costs five times as much per job, and a Ctrl-C at the wrong
    moment leaves its locks locked for ever. A SimpleQueue is written in C, where a Ctrl-C cannot
    interrupt it.
    """

    def __init__(self, size: int) -> None:
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        for _ in range(size):
            threading.Thread(target=self._work, name="skyward-copy", daemon=True).start()

    def map(self, action: Callable[[Item], Made], items: Sequence[Item]) -> list[Made]:
        """The action's results, in order; raises a failure after every thread is done."""
        done: queue.SimpleQueue[tuple[int, Made, BaseException | None]] = queue.SimpleQueue()
        for job in enumerate(items):
            self._jobs.put((done, action, *job))
        results: dict[int, Made] = {}
        failure: BaseException | None = None
        for _ in items:
            index, result, problem = done.get()
            results[index] = result
            failure = failure or problem
        if failure is not None:
            raise failure
        return [results[index] for index in range(len(items))]

    def _work(self) -> None:
        while True:
            done, action, index, item = self._jobs.get()
            try:
                done.put((index, action(item), None))
            except BaseException as problem:
                done.put((index, None, problem))
            # The thread must not keep these objects alive until the next job comes.
            del done, action, item


_crew: Crew | None = None
_crew_lock = threading.Lock()


def _pool() -> Crew:
    global _crew
    with _crew_lock:
        if _crew is None:
            processors = kernel.processors()
            _crew = Crew(min(4, processors))
        return _crew


def _forget_threads() -> None:
    global _crew, _crew_lock
    _crew, _crew_lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget_threads)


def digests(buffers: Sequence[memoryview]) -> list[bytes]:
    """Name buffers by their content: XXH3-128 over the XXH3-128 of each chunk."""
    chunks = [buffer[at : at + CHUNK] for buffer in buffers for at in range(0, len(buffer), CHUNK)]
    if len(chunks) > 4:
        leaves = itertools.chain.from_iterable(_pool().map(_hash_run, _runs(chunks)))
    else:
        leaves = itertools.chain(_hash_run(chunks))
    return _names(buffers, leaves)


def write_named(descriptor: int, start: int, buffer: memoryview) -> bytes:
    """Write a buffer to a file; returns the digest of the bytes that were written."""
    chunks = [(start + at, buffer[at : at + CHUNK]) for at in range(0, len(buffer), CHUNK)]

    def run(batch: Sequence[tuple[int, memoryview]]) -> list[bytes]:
        return [_write_chunk(descriptor, *each) for each in batch]

    leaves = itertools.chain.from_iterable(_pool().map(run, _runs(chunks, 4)))
    return _names([buffer], leaves)[0]


def _write_chunk(descriptor: int, at: int, chunk: memoryview) -> bytes:
    # Hashing a copy that is still in the processor's cache costs next to nothing.
    copy = getattr(_scratch, "block", None)
    if copy is None:
        copy = _scratch.block = fresh(CHUNK)
    origin = address(chunk)
    if origin is None:
        copy[: len(chunk)] = chunk
    else:
        ctypes.memmove(ctypes.addressof(ctypes.c_char.from_buffer(copy)), origin, len(chunk))
    write_all(descriptor, at, copy[: len(chunk)])
    return xxhash.xxh3_128_digest(copy[: len(chunk)])


def write_all(descriptor: int, at: int, data: memoryview) -> None:
    """Write at an offset of a file, in as many system calls as it takes."""
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done : done + _WRITE], at + done)


def _names(buffers: Sequence[memoryview], leaves: Iterator[bytes]) -> list[bytes]:
    names = []
    for buffer in buffers:
        count = -(-len(buffer) // CHUNK)
        tree = b"".join(itertools.islice(leaves, count)) + len(buffer).to_bytes(8, "little")
        names.append(xxhash.xxh3_128_digest(tree))
    return names


def first_leaf(buffer: memoryview) -> bytes:
    """The digest of a buffer's first chunk: if the digest differs, the buffer differs."""
    return xxhash.xxh3_128_digest(buffer[:CHUNK])


def _hash_run(chunks: Sequence[memoryview]) -> list[bytes]:
    return [xxhash.xxh3_128_digest(chunk) for chunk in chunks]


def _runs(chunks: Sequence[Item], per_run: int = 8) -> list[Sequence[Item]]:
    # Handing a chunk to a thread costs about as much as hashing it, so a thread gets several.
    return [chunks[at : at + per_run] for at in range(0, len(chunks), per_run)]


def fresh(size: int) -> memoryview:
    """New private memory; huge pages, where the kernel has them, make its first touch cheap."""
    block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= 4 << 20 and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            block.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(block)


def placeholder(size: int) -> memoryview:
    """A stand-in for a buffer whose bytes are kept elsewhere: address space without memory."""
    return memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


class Segment:
    """One piece of shareable memory, made and written by its owner, mapped by others.

    Several threads make its pages, which costs eight times as much as writing to them: with
    `pwrite` a page costs a quarter less, but the kernel lets one thread at a time write to a file.
    A reused segment has its pages, and is written at memory speed.
    """

    def __init__(self, size: int, folder: str | None = None) -> None:
        self.id = next(_ids)
        self.size = -(-size // _ROUND) * _ROUND
        if folder is None and kernel.HAS_MEMORY_FILES:
            self.descriptor = os.memfd_create("skyward-segment", os.MFD_CLOEXEC)
            os.ftruncate(self.descriptor, self.size)
        else:
            folder = folder or tempfile.gettempdir()
            self.descriptor, path = tempfile.mkstemp(prefix="sky-segment-", dir=folder)
            os.unlink(path)
            try:
                # Reserved now: a full disk must be an error here, not a SIGBUS later.
                kernel.reserve(self.descriptor, self.size)
            except OSError as problem:
                os.close(self.descriptor)
                if problem.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise BlobStoreFullError(
                        errno.ENOSPC,
                        f"{self.size >> 20} MiB of arguments do not fit in {folder} "
                        f"({shutil.disk_usage(folder).free >> 20} MiB free); make room there, or "
                        "point SKYWARD_BLOB_DIR elsewhere (unset, memory is used)",
                    ) from None
                raise
        self._shared: mmap.mmap | None = None

    def write(self, pieces: Sequence[tuple[int, memoryview]]) -> None:
        """Copy each buffer to its offset."""
        anchor = ctypes.c_char.from_buffer(self.shared())
        base = ctypes.addressof(anchor)
        jobs = []
        for at, source in pieces:
            origin = address(source)
            if origin is None:
                self.shared()[at : at + len(source)] = source
                continue
            for start in range(0, len(source), 4 * CHUNK):
                count = min(4 * CHUNK, len(source) - start)
                jobs.append((base + at + start, origin + start, count))

        # After a Ctrl-C the threads go on copying: `alive` keeps source and destination mapped.
        def copy(job: tuple[int, int, int], alive: object = (anchor, pieces)) -> None:
            ctypes.memmove(*job)

        _pool().map(copy, jobs)

    def write_hashing(self, pieces: Sequence[tuple[int, memoryview]]) -> list[bytes]:
        """Copy each buffer to its offset and name it, reading its memory only once."""
        # Keeps the mapping alive after a Ctrl-C, when the threads go on copying.
        anchor = ctypes.c_char.from_buffer(self.shared())
        chunks = [
            (at + start, source[start : start + CHUNK])
            for at, source in pieces
            for start in range(0, len(source), CHUNK)
        ]

        def run(batch: Sequence[tuple[int, memoryview]], alive: object = anchor) -> list[bytes]:
            leaves = []
            for at, chunk in batch:
                self._put(at, chunk)
                leaves.append(xxhash.xxh3_128_digest(chunk))
            return leaves

        leaves = itertools.chain.from_iterable(_pool().map(run, _runs(chunks)))
        return _names([source for _, source in pieces], leaves)

    def _put(self, at: int, chunk: memoryview) -> None:
        origin = address(chunk)
        if origin is None:
            self.shared()[at : at + len(chunk)] = chunk
            return
        anchor = ctypes.c_char.from_buffer(self.shared(), at)
        ctypes.memmove(ctypes.addressof(anchor), origin, len(chunk))

    def shared(self) -> mmap.mmap:
        """The owner's own view of the memory."""
        if self._shared is None:
            self._shared = mmap.mmap(self.descriptor, self.size, flags=mmap.MAP_SHARED)
            anchor = ctypes.c_char.from_buffer(self._shared)
            base = ctypes.addressof(anchor)

            def make_pages(at: int, alive: object = anchor) -> None:
                self._make_pages(base + at, min(4 * CHUNK, self.size - at))

            if kernel.IS_LINUX:
                _pool().map(make_pages, range(0, self.size, 4 * CHUNK))
        return self._shared

    def _make_pages(self, start: int, size: int) -> None:
        refused = _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), _MAKE_PAGES)
        # An older kernel does not know how, and makes each page when it is first touched. If there
        # is no memory, that must be an error here, not a SIGBUS later.
        if refused and ctypes.get_errno() in (errno.ENOMEM, errno.EFAULT):
            raise OSError(
                errno.ENOMEM,
                f"the machine has no memory for {self.size >> 20} MiB of arguments or results; "
                "free some, or point SKYWARD_BLOB_DIR at a folder on a disk",
            )

    def close(self) -> None:
        """Free the memory when no process maps it any more."""
        os.close(self.descriptor)
        # A live memoryview keeps the mapping; dropping this reference is enough then.
        with contextlib.suppress(BufferError):
            if self._shared is not None:
                self._shared.close()
        self._shared = None


def map_private(
    descriptor: int, offset: int, length: int, gone: Callable[[], None] | None = None
) -> memoryview:
    """A copy-on-write view: reading copies nothing, and no other process sees a write."""
    block = mmap.mmap(
        descriptor,
        length,
        flags=mmap.MAP_PRIVATE,
        prot=mmap.PROT_READ | mmap.PROT_WRITE,
        offset=offset,
    )
    if gone is not None:
        weakref.finalize(block, gone).atexit = False
    return memoryview(block)


def address(view: memoryview) -> int | None:
    """The address of a writable buffer; None for a read-only one."""
    if view.readonly:
        return None
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def aligned(lengths: Sequence[int]) -> tuple[list[int], int]:
    """Page-aligned offsets for buffers laid one after another, and the space they take."""
    offsets, at = [], 0
    for length in lengths:
        offsets.append(at)
        at += rounded_up(length, GRANULE)
    return offsets, at


def rounded_up(size: int, unit: int = ALIGNMENT) -> int:
    """The smallest multiple of `unit` that is not less than `size`."""
    return -(-size // unit) * unit


class Arena:
    """The segments of one owner: free segments are reused, and kept up to a cap."""

    def __init__(self, idle_cap: int, folder: str | None = None) -> None:
        self._idle_cap = idle_cap
        self._folder = folder
        self._free: list[Segment] = []
        # Finalizers release views, and may run while this very thread holds the lock.
        self._lock = threading.RLock()
        self._returned = threading.Condition(self._lock)

    def allocate(self, size: int) -> Segment:
        """A segment of at least that size."""
        with self._lock:
            fitting = [s for s in self._free if size <= s.size <= 2 * size + _ROUND]
            if fitting:
                best = min(fitting, key=lambda s: s.size)
                self._free.remove(best)
                return best
        return Segment(size, self._folder)

    def await_return(self, segment_id: int, seconds: float) -> bool:
        """Wait until a segment is free again, for so many seconds at most."""
        with self._returned:
            return self._returned.wait_for(
                lambda: any(segment.id == segment_id for segment in self._free), seconds
            )

    def recycle(self, segment: Segment) -> None:
        """Take back a segment that no process maps any more."""
        with self._lock:
            self._free.append(segment)
            self._returned.notify_all()
            surplus = []
            while self._free and sum(s.size for s in self._free) > self._idle_cap:
                surplus.append(self._free.pop(0))
        for old in surplus:
            old.close()

    def close(self) -> None:
        """Close every idle segment."""
        with self._lock:
            free, self._free = self._free, []
        for segment in free:
            segment.close()


def machine_memory() -> int:
    """Bytes of memory in this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
