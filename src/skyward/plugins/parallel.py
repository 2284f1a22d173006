"""A joblib backend that sends batches of calls to the nodes of a pool."""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from joblib import parallel, parallel_config, register_parallel_backend
from joblib.parallel import AutoBatchingMixin, FallbackToBackend, ParallelBackendBase

from skyward.functions import Function, Future, Pending


class SlotCount(Protocol):
    """Says how many calls the pool runs at once."""

    def slots(self) -> int: ...


class OpenCompute(Protocol):
    """A `Compute` whose pool is open."""

    @property
    def _open_fleet(self) -> SlotCount: ...

    def submit(self, pending: Pending[Any], /) -> Future[Any]: ...


NAME = "skyward"

Batch = Callable[[], list[Any]]
Told = Callable[[Future[Any]], None]


@contextlib.contextmanager
def default(compute: OpenCompute) -> Iterator[None]:
    """Make the pool joblib's default backend."""
    before, factory = parallel.DEFAULT_BACKEND, parallel.BACKENDS.get(NAME)
    register_parallel_backend(NAME, functools.partial(PoolBackend, compute), make_default=True)
    # The default gives way to `prefer="threads"`, as in forests; what is configured does not.
    configured = _configuration()
    chosen, configured["backend"] = configured["backend"], PoolBackend(compute, nesting_level=0)
    try:
        yield
    finally:
        configured["backend"] = chosen
        if before in parallel.BACKENDS:  # not one of a pool that has been left before
            register_parallel_backend(before, parallel.BACKENDS[before], make_default=True)
        if factory is None:
            del parallel.BACKENDS[NAME]
        else:
            parallel.BACKENDS[NAME] = factory


def _configuration() -> dict[str, Any]:
    """What `parallel_config` has set in this thread, to be changed in place.

    A pool is left on another thread than it was entered on, where its context cannot be undone.
    """
    context = parallel_config()
    if context.old_parallel_config is parallel.default_parallel_config:
        # Nothing was set; the copy that is in its place now sets nothing either.
        return context.parallel_config  # type: ignore[no-any-return]
    context.unregister()
    return context.old_parallel_config  # type: ignore[no-any-return]


class PoolBackend(AutoBatchingMixin, ParallelBackendBase):  # type: ignore[misc]
    """Runs the batches of one `Parallel` on a pool.

    joblib shares the backend of a context among all `Parallel` objects in it. A shared backend
    gives each of them a backend of its own, so that aborting one does not affect the others.
    """

    supports_retrieve_callback = True

    def __init__(
        self, compute: OpenCompute, nesting_level: int | None = None, *, shared: bool = True
    ) -> None:
        super().__init__(nesting_level=nesting_level)
        self._compute = compute
        self._shared = shared
        self._limit: int | None = None
        self._batches: Batches | None = None

    def effective_n_jobs(self, n_jobs: int | None) -> int:
        """How many batches run at once: -1 is all that the pool has places for, -2 one less."""
        if n_jobs == 0:
            raise ValueError("n_jobs == 0 in Parallel has no meaning")
        if n_jobs is None or n_jobs == 1:
            return 1
        slots = self._compute._open_fleet.slots()
        if n_jobs < 0:
            n_jobs = slots + 1 + n_jobs
        # With 1, joblib would not ask the pool but run everything in this process.
        return max(2, min(n_jobs, slots))

    def configure(self, n_jobs: int = 1, parallel: Any = None, **_: Any) -> int:
        """Get ready for a `Parallel`."""
        if self._shared:
            raise FallbackToBackend(PoolBackend(self._compute, self.nesting_level, shared=False))
        self.parallel = parallel
        count = self.effective_n_jobs(n_jobs)
        # joblib gives out twice as many, so that the next one is where the last one ends.
        self._limit = count if count < self._compute._open_fleet.slots() else None
        return count

    def start_call(self) -> None:
        """Begin the call of a `Parallel`."""
        self._batches = Batches(self._compute, self._limit)

    def stop_call(self) -> None:
        """End the call, which has succeeded or failed."""
        if self._batches is not None:
            self._batches.end()
            self._batches = None

    def terminate(self) -> None:
        """Forget the statistics of the batches; the pool stays open."""
        self.reset_batch_stats()

    def submit(self, func: Batch, callback: Told) -> None:
        """Send a batch when it may run; the callback gets its future once that is done."""
        assert self._batches is not None
        self._batches.add(func, callback)

    def retrieve_result_callback(self, out: Future[Any]) -> list[Any]:
        """The values of a batch, or the exception of the one that failed."""
        values: list[Any] = out.result()
        return values

    def abort_everything(self, ensure_ready: bool = True) -> None:
        """Cancel the batches that were sent, and send no more."""
        if self._batches is not None:
            self._batches.cancel()


class Batches:
    """The batches of one call: up to `limit` are sent, the others wait."""

    def __init__(self, compute: OpenCompute, limit: int | None) -> None:
        self._compute, self._limit = compute, limit
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Batch, Told]] = deque()
        self._out: set[Future[Any]] = set()
        self._sending = 0
        self._cancelled = False
        self._done: queue.SimpleQueue[tuple[Told, Future[Any]] | None] = queue.SimpleQueue()
        # A thread of its own: told of a result, joblib takes the caller's next items, however slow.
        threading.Thread(target=self._tell, name="skyward-joblib", daemon=True).start()

    def add(self, batch: Batch, told: Told) -> None:
        """Add a batch."""
        with self._lock:
            self._waiting.append((batch, told))
        self._send()

    def cancel(self) -> None:
        """Cancel all batches."""
        with self._lock:
            self._cancelled = True
            self._waiting.clear()
            out = list(self._out)
        for future in out:
            future.cancel()

    def end(self) -> None:
        """Stop telling joblib; does not wait, as the caller's items may be slow."""
        self._done.put(None)

    def _send(self) -> None:
        while True:
            with self._lock:
                full = self._limit is not None and len(self._out) + self._sending >= self._limit
                if not self._waiting or full:
                    return
                batch, told = self._waiting.popleft()
                self._sending += 1
            try:
                future = self._compute.submit(_batch(batch))
            except Exception as problem:
                # The caller waits for this batch, perhaps on another thread.
                future = Future()
                future.set_exception(problem)
            with self._lock:
                self._sending -= 1
                self._out.add(future)
                cancelled = self._cancelled
            future.add_done_callback(functools.partial(self._note, told))
            if cancelled:
                future.cancel()

    def _note(self, told: Told, future: Future[Any]) -> None:
        self._done.put((told, future))

    def _tell(self) -> None:
        while (entry := self._done.get()) is not None:
            told, future = entry
            with self._lock:
                self._out.discard(future)
            self._send()
            told(future)


def _run(batch: Batch) -> list[Any]:
    return batch()


_batch: Function[[Batch], list[Any]] = Function(_run, name="joblib")
