"""Memory that two processes of one host can share, written once and mapped copy-on-write.

Blobs are large buffers in such memory, named by their content.
"""

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
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import xxhash

from skyward import kernel
from skyward.errors import BlobStoreFullError, ProtocolError

CHUNK = 1 << 20
"""The unit of parallel hashing and copying; also fixed by the digest's definition."""

ALIGNMENT = 64
"""Buffers of a payload, and the data of a store's files, begin at multiples of this many bytes; the
wire format fixes it."""

BLOB_MIN = 256 << 10
"""Smaller buffers travel in the frame's body."""

SOURCES_MAX = 1024

SEGMENTS_MAX = 256
"""Each segment takes a file descriptor on both sides."""

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


@dataclass(slots=True, eq=False)
class Blob:
    """One buffer's content, kept in a segment of this process."""

    digest: bytes
    segment: Segment
    offset: int
    length: int

    def view(self) -> memoryview:
        """The bytes, for sending."""
        return memoryview(self.segment.shared())[self.offset : self.offset + self.length]


class BlobStore:
    """The blobs of this process; above the cap, the least recently used blobs are evicted.

    A segment is reused only when it has no blob and is not pinned. It is pinned as long as this
    process or another one maps it.
    """

    def __init__(self, cap: int, folder: str | None = None) -> None:
        self.cap = cap
        self.arena = Arena(cap, folder)
        self.retired: deque[int] = deque()
        """Segments without blobs, which other processes should unmap."""
        self.evicted: deque[bytes] = deque()
        self._blobs: OrderedDict[bytes, Blob] = OrderedDict()
        self._in_segment: dict[int, int] = {}
        self._pins: dict[int, int] = {}
        self._segments: dict[int, Segment] = {}
        self._size = 0
        self._lock = threading.RLock()

    def place(
        self, buffers: Sequence[memoryview], names: Sequence[bytes] | None = None
    ) -> list[Blob]:
        """Keep these contents; copies only new ones. The caller must unpin the blobs.

        `names` are the digests of the contents, if they are known already.
        """
        names = digests(buffers) if names is None else names
        with self._lock:
            blobs: dict[bytes, Blob] = {}
            for name in names:
                known = self._find(name)
                if known is not None:
                    blobs[name] = known
                    self.pin(known.segment)
        new = {
            name: buffer for name, buffer in zip(names, buffers, strict=True) if name not in blobs
        }
        if new:
            offsets, size = aligned([len(buffer) for buffer in new.values()])
            segment: Segment | None = None
            try:
                segment = self.arena.allocate(size)
                segment.write(list(zip(offsets, new.values(), strict=True)))
            except BaseException:
                if segment is not None:
                    segment.close()
                for held in blobs.values():
                    self.unpin(held.segment.id)
                raise
            self.pin(segment)
            for (name, buffer), offset in zip(new.items(), offsets, strict=True):
                blobs[name] = self.add(Blob(name, segment, offset, len(buffer)), pinned=True)
            # Another thread may have placed the same contents: then this segment is free again.
            self.unpin(segment.id)
        for name in _repeated(names):
            self.pin(blobs[name].segment)
        self._shrink()
        return [blobs[name] for name in names]

    def place_new(self, buffers: Sequence[memoryview]) -> list[Blob]:
        """Like `place`, for contents that are probably new: hashes them while it copies them."""
        offsets, size = aligned([len(buffer) for buffer in buffers])
        segment = self.arena.allocate(size)
        try:
            names = segment.write_hashing(list(zip(offsets, buffers, strict=True)))
        except BaseException:
            segment.close()
            raise
        self.pin(segment)
        blobs = [
            self.add(Blob(name, segment, offset, len(buffer)), pinned=True)
            for name, offset, buffer in zip(names, offsets, buffers, strict=True)
        ]
        # If all contents were kept already, the segment is free again.
        self.unpin(segment.id)
        self._shrink()
        return blobs

    def add(self, blob: Blob, *, pinned: bool = False) -> Blob:
        """Keep a blob whose bytes are in their segment already."""
        with self._lock:
            known = self._find(blob.digest)
            kept = known or blob
            if known is None:
                self._blobs[blob.digest] = blob
                self._segments[blob.segment.id] = blob.segment
                self._in_segment[blob.segment.id] = self._in_segment.get(blob.segment.id, 0) + 1
                self._size += blob.length
            if pinned:
                self.pin(kept.segment)
            return kept

    def find(self, digest: bytes) -> Blob | None:
        """The blob of that content, pinned for the caller; None if it is not kept."""
        with self._lock:
            blob = self._find(digest)
            if blob is not None:
                self.pin(blob.segment)
            return blob

    def has(self, digest: bytes) -> bool:
        """Whether that content is kept."""
        return digest in self._blobs

    def evict(self, digest: bytes) -> int | None:
        """Drop one blob, whatever the cap.

        Returns the blob's segment if that has no other blob; then only pins keep the segment.
        """
        with self._lock:
            blob = self._blobs.pop(digest, None)
            if blob is None:
                return None
            self._drop(digest, blob)
            return None if blob.segment.id in self._in_segment else blob.segment.id

    def _find(self, digest: bytes) -> Blob | None:
        blob = self._blobs.get(digest)
        if blob is not None:
            self._blobs.move_to_end(digest)
        return blob

    def pin(self, segment: Segment) -> None:
        """Keep a segment's bytes unchanged until `unpin`."""
        with self._lock:
            self._segments[segment.id] = segment
            self._pins[segment.id] = self._pins.get(segment.id, 0) + 1

    def unpin(self, segment_id: int) -> None:
        """Undo one `pin`."""
        with self._lock:
            left = self._pins.get(segment_id, 0) - 1
            if left > 0:
                self._pins[segment_id] = left
            else:
                self._pins.pop(segment_id, None)
                self._reuse(segment_id)

    def trim(self) -> None:
        """Evict blobs until the others fit the cap."""
        self._shrink()

    def _shrink(self) -> None:
        with self._lock:
            while len(self._blobs) > 1 and (
                self._size > self.cap or len(self._in_segment) > SEGMENTS_MAX
            ):
                self._drop(*self._blobs.popitem(last=False))

    def _drop(self, digest: bytes, blob: Blob) -> None:
        self._size -= blob.length
        self.evicted.append(digest)
        left = self._in_segment[blob.segment.id] - 1
        if left:
            self._in_segment[blob.segment.id] = left
        else:
            del self._in_segment[blob.segment.id]
            self.retired.append(blob.segment.id)
            self._reuse(blob.segment.id)

    def _reuse(self, segment_id: int) -> None:
        if segment_id in self._pins or segment_id in self._in_segment:
            return
        segment = self._segments.pop(segment_id, None)
        if segment is not None:
            self.arena.recycle(segment)

    def close(self) -> None:
        """Give all memory back."""
        with self._lock:
            for segment in self._segments.values():
                segment.close()
            self._segments.clear()
            self._blobs.clear()
            self._in_segment.clear()
        self.arena.close()


def _repeated(names: Sequence[bytes]) -> list[bytes]:
    seen: set[bytes] = set()
    again = []
    for name in names:
        if name in seen:
            again.append(name)
        seen.add(name)
    return again


class Sources:
    """Remembers the contents last sent from each buffer, to notice when the caller changes one.

    Otherwise a buffer that changes between calls would fill the cache with versions that no call
    will use again, each in memory that has to be touched for the first time.
    """

    def __init__(self) -> None:
        self._last: OrderedDict[tuple[int, int], tuple[bytes, bytes]] = OrderedDict()
        """For each address and length: the digest of the buffer, and of its first chunk alone."""
        self._lock = threading.Lock()

    def replaced(self, buffers: Sequence[memoryview], names: Sequence[bytes]) -> list[bytes]:
        """The digests of contents that have been replaced in their buffers."""
        stale = []
        with self._lock:
            for buffer, name in zip(buffers, names, strict=True):
                start = address(buffer)
                if start is None:
                    continue
                old = self._last.pop((start, len(buffer)), None)
                self._last[start, len(buffer)] = (name, first_leaf(buffer))
                if old is not None and old[0] != name:
                    stale.append(old[0])
            while len(self._last) > SOURCES_MAX:
                self._last.popitem(last=False)
        return stale

    def surely_new(self, buffers: Sequence[memoryview]) -> list[bytes] | None:
        """The former digests of these buffers if every buffer has surely changed; else None."""
        before = []
        with self._lock:
            for buffer in buffers:
                start = address(buffer)
                if start is None:
                    return None
                old = self._last.get((start, len(buffer)))
                if old is not None and old[1] == first_leaf(buffer):
                    return None
                if old is not None:
                    before.append(old[0])
        return before


class Mapped:
    """Segments of the other process, mapped here piece by piece and released when unused."""

    def __init__(self, notify: Callable[[], None] = lambda: None) -> None:
        self.released: deque[int] = deque()
        """Segments that this process maps no more; finalizers append to it, so it has no lock."""
        self._notify = notify
        self._open: dict[int, tuple[int, int]] = {}
        self._counts: dict[int, list[int]] = {}

    def add(self, segment: int, size: int, descriptor: int) -> None:
        """Take over a descriptor received for a segment."""
        if os.fstat(descriptor).st_size < size:
            os.close(descriptor)
            raise ProtocolError(f"a segment said to have {size} bytes has fewer")
        old = self._open.pop(segment, None)
        if old is not None:
            os.close(old[0])
        self._open[segment] = (descriptor, size)
        self._counts.setdefault(segment, [0, 0])

    def view(self, segment: int, offset: int, length: int) -> memoryview:
        """A private copy-on-write view of part of a segment."""
        held = self._open.get(segment)
        if held is None:
            raise ProtocolError(f"a payload names segment {segment}, which is not here")
        descriptor, size = held
        if offset < 0 or length <= 0 or offset + length > size or offset % GRANULE:
            raise ProtocolError(f"bytes {offset}+{length} of a segment of {size}")
        count = self._counts[segment]
        count[0] += 1
        return map_private(descriptor, offset, length, lambda: self._gone(segment, count))

    def _gone(self, segment: int, count: list[int]) -> None:
        count[0] -= 1
        if not count[0] and count[1]:
            self._counts.pop(segment, None)
            self.released.append(segment)
            self._notify()

    def drop(self, segment: int) -> None:
        """Make no new views of a segment; it is released when its last view is freed."""
        held = self._open.pop(segment, None)
        if held is None:
            return
        os.close(held[0])
        count = self._counts[segment]
        count[1] = 1
        if not count[0]:
            self._counts.pop(segment, None)
            self.released.append(segment)
            self._notify()

    def close(self) -> None:
        """Close every descriptor; live views stay valid."""
        for segment in list(self._open):
            self.drop(segment)
