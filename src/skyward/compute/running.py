"""Running: every way to make calls on the pool of a `Compute`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from skyward.calls.flow import Crowd, Flow, Results
from skyward.calls.task import Task
from skyward.classes import Making
from skyward.compute.awaiting import future_of
from skyward.compute.broadcasting import broadcast
from skyward.compute.making import make, make_everywhere, make_later
from skyward.compute.named.client import calls_of
from skyward.errors import ConfigurationError, PoolClosedError
from skyward.files.transfer import Synced
from skyward.former import METHODS, missing
from skyward.functions import Function, Pending, as_function, checked
from skyward.future import Future
from skyward.groups import InstanceGroup
from skyward.pool import Pool

T = TypeVar("T")
On = int | Literal["head"] | None


class Running:
    """The methods of a `Compute` that run functions."""

    name: str
    _pool: Pool | None = None
    """The pool; None before the first start."""

    @property
    def _open_pool(self) -> Pool:
        """The pool; raises `PoolClosedError` if there is none yet."""
        if self._pool is None:
            raise PoolClosedError(
                f"{self.name} has not been entered; write `with sky.Compute() as compute:` first, "
                "or call compute.start()"
            )
        return self._pool

    @overload
    def run(self, pending: Pending[T], on: On = None) -> T: ...
    @overload
    def run(self, pending: Making[T], on: On = None) -> T: ...
    def run(self, pending: Pending[Any] | Making[Any], on: On = None) -> Any:
        """Run on one node and wait; the same as `pending >> compute`.

        >>> compute.run(train(x), on="head")
        """
        pool = self._pool
        if pool is None or pool.has_folders:
            pool = self._pool_for_calls()
        if isinstance(pending, Making):
            return make(pool, pending, self._index(on))
        node = None if on is None else self._index(on)
        return pool.run(pool.prepare(checked(pending), on=node, keep=False))

    @overload
    def submit(
        self, pending: Pending[T], on: On = None, *, name: str | None = None
    ) -> Future[T]: ...
    @overload
    def submit(self, pending: Making[T], on: On = None) -> Future[T]: ...
    def submit(
        self, pending: Pending[Any] | Making[Any], on: On = None, *, name: str | None = None
    ) -> Future[Any]:
        """Run on one node and don't wait; the same as `pending > compute`.

        With a name, the call goes on when this client leaves the pool, which must be one that
        stays; `compute.result(name)` gets its result, from any client of the pool.

        >>> future = compute.submit(train(x), on=1)
        >>> compute.submit(train(x), name="run-7")
        """
        pool = self._pool_for_calls()
        if name is not None:
            return self._submit_named(pool, pending, name, on=self._index(on), everywhere=False)
        if isinstance(pending, Making):
            return make_later(pool, pending, self._index(on))
        return future_of(pool, pool.prepare(checked(pending), on=self._index(on), keep=True))

    @overload
    def broadcast(
        self, pending: Pending[T], on: None = None, *, name: None = None, fail_fast: bool = False
    ) -> list[T]: ...
    @overload
    def broadcast(
        self, pending: Pending[T], on: None = None, *, name: str, fail_fast: bool = False
    ) -> Future[list[T]]: ...
    @overload
    def broadcast(
        self, pending: Making[T], on: None = None, *, name: None = None, fail_fast: bool = False
    ) -> InstanceGroup[T]: ...
    def broadcast(
        self,
        pending: Pending[Any] | Making[Any],
        on: None = None,
        *,
        name: str | None = None,
        fail_fast: bool = False,
    ) -> Any:
        """Run on every worker at once; the same as `pending @ compute`.

        With `fail_fast`, it ends as soon as one worker has failed: the others are cancelled.
        Otherwise it waits for all; in a pool whose workers are a process group, those that are left
        are cancelled after `Options.fail_grace`.

        With a name, the broadcast is not waited for: the result is a `Future`, and the broadcast
        goes on when this client leaves, as with `submit`.

        >>> results = compute.broadcast(train())
        >>> compute.broadcast(train(), name="run-8")
        """
        pool = self._pool_for_calls()
        if on is not None:
            raise ConfigurationError(f"broadcast(on={on!r}): a broadcast runs everywhere; use run")
        if not isinstance(fail_fast, bool):
            raise ConfigurationError(f"broadcast(fail_fast={fail_fast!r}): give True or False")
        if name is not None:
            return self._submit_named(
                pool, pending, name, on=None, everywhere=True, fail_fast=fail_fast
            )
        if isinstance(pending, Making):
            return make_everywhere(pool, pending, fail_fast=fail_fast)
        return broadcast(pool, checked(pending), fail_fast=fail_fast)

    def _submit_named(
        self,
        pool: Pool,
        pending: Any,
        name: str,
        *,
        on: int | None,
        everywhere: bool,
        fail_fast: bool = False,
    ) -> Future[Any]:
        if isinstance(pending, Making):
            raise ConfigurationError(
                f"name={name!r}: an object of {pending.name} lives with its client; make it inside "
                "a function, and name the call of that function"
            )
        return calls_of(pool).submit(
            checked(pending), name, on=on, everywhere=everywhere, fail_fast=fail_fast
        )

    def run_all(self, pendings: Sequence[Pending[Any]]) -> list[Any]:
        """Run different calls in parallel and wait for all; the first failure is raised.

        >>> compute.run_all([a(), b()])
        """
        pool = self._pool_for_calls()
        tasks: list[Task] = []
        crowd = Crowd()
        try:
            for pending in pendings:
                task = pool.prepare(checked(pending), keep=True)
                task.when_done(crowd.left)
                crowd.joined()
                tasks.append(task)
                pool.submit(task)
            failed = crowd.wait()
            if failed is not None:
                pool.result(failed)
            return [pool.result(task) for task in tasks]
        except BaseException:
            for task in tasks:
                if task.cancellable:
                    pool.cancel(task)
            raise

    def stream_all(self, pendings: Sequence[Pending[Any]], *, ordered: bool) -> Iterator[Any]:
        """Run different calls in parallel, yielding results as they come or in order.

        >>> for result in compute.stream_all([f(1), f(2)], ordered=False): ...
        """
        return self._flow(iter(pendings), ordered, ahead=None)

    @overload
    def map(
        self, fn: Function[..., T], *iterables: Iterable[Any], ordered: bool = True
    ) -> Results[T]: ...
    @overload
    def map(
        self, fn: Callable[..., T], *iterables: Iterable[Any], ordered: bool = True
    ) -> Results[T]: ...
    def map(
        self, fn: Callable[..., Any], *iterables: Iterable[Any], ordered: bool = True
    ) -> Results[Any]:
        """Make one call per item; only a limited number of calls run ahead of the consumer.

        The results come one by one and are not kept. An index waits for all of them and keeps them.

        >>> for score in compute.map(evaluate, range(1000)): ...
        """
        if not iterables:
            raise ConfigurationError("map: give at least one iterable")
        for values in iterables:
            if not hasattr(values, "__iter__") and not hasattr(values, "__getitem__"):
                raise ConfigurationError(
                    f"map({fn!r}, {values!r}): that is not iterable; give a "
                    "list or another iterable for each argument"
                )
        call = as_function(fn)
        pool = self._pool_for_calls()
        pendings = (call(*items) for items in zip(*iterables, strict=False))
        sizes = [len(values) if isinstance(values, Sized) else None for values in iterables]
        known = [size for size in sizes if size is not None]
        count = min(known) if len(known) == len(sizes) else None
        results: Results[Any] = Results(pool, pendings, ordered, 4 * pool.slots() + 16, count)
        results.fill()
        return results

    def sync(self) -> Synced:
        """Send the nodes what has changed in the project, and remove there what was removed here.

        Modules that a worker has imported are not imported again.

        >>> compute.sync().files
        """
        if not self._open_pool.has_folders:
            raise ConfigurationError(
                "sync(): the nodes follow no folder; write sky.Compute(..., project='.')"
            )
        return self._open_pool.sync()

    def write_back(self) -> Synced:
        """Write what functions have written into volumes to where the volumes come from.

        That happens by itself when the pool ends.

        >>> compute.write_back().files
        """
        return self._open_pool.write_back()

    def _pool_for_calls(self) -> Pool:
        pool = self._open_pool if self._pool is None else self._pool
        if pool.has_folders:
            pool.before_calls()
        return pool

    def current_nodes(self) -> int:
        """How many nodes are ready now.

        >>> compute.current_nodes()
        2
        """
        return sum(view.state == "ready" for view in self._open_pool.views())

    if not TYPE_CHECKING:
        # Hidden from type checkers: to them, every name would be an attribute.
        def __getattr__(self, name: str) -> Any:
            if name in METHODS:
                raise missing("Compute", name, METHODS)
            # Once more, for the error: a property may have raised it.
            return object.__getattribute__(self, name)

    def _flow(
        self, pendings: Iterator[Pending[Any]], ordered: bool, ahead: int | None
    ) -> Iterator[Any]:
        flow: Flow[Any] = Flow(self._pool_for_calls(), pendings, ordered, ahead)
        flow.fill()
        return flow

    def _index(self, on: On) -> int | None:
        if on is None:
            return None
        if on == "head":
            return 0
        # Node 0 is the first that a pool without nodes starts.
        count = max(1, len(self._open_pool.nodes))
        if isinstance(on, bool) or not isinstance(on, int) or not 0 <= on < count:
            raise ConfigurationError(f"on={on!r}: give 'head' or a node from 0 to {count - 1}")
        return on
