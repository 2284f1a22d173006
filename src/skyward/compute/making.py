"""Making: puts objects of `@sky.cls` classes into workers, and calls them there."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, TypeVar, cast

from skyward.calls.scheduler import Load
from skyward.calls.task import Task
from skyward.classes import Instance, Making, Residence
from skyward.compute.awaiting import future_of
from skyward.compute.broadcasting import outcomes_of
from skyward.compute.serving import offer
from skyward.errors import SkywardError
from skyward.functions import Pending
from skyward.future import Future
from skyward.groups import InstanceGroup
from skyward.pool import Pool
from skyward.staff import Staff

C = TypeVar("C")
Place = tuple[int, int]

_freeing = Staff("skyward-instances", 1)


class Seat:
    """One worker process of a pool, which has an object."""

    def __init__(self, pool: Pool, load: Load[Task]) -> None:
        self.pool, self.load = pool, load

    @property
    def lost(self) -> bool:
        """Whether the process is gone."""
        return not self.pool.closed and not self.pool.has(self.load)

    @property
    def where(self) -> str:
        """The process's node and worker, in words."""
        return self.load.where

    def run(self, pending: Pending[Any]) -> Any:
        """Run a call there, and wait."""
        return self.pool.run(self.pool.prepare(pending, keep=False, pinned=self.load))

    def submit(self, pending: Pending[Any]) -> Future[Any]:
        """Run a call there, and don't wait."""
        return future_of(self.pool, self.pool.prepare(pending, keep=True))

    def run_together(self, pendings: list[Pending[Any]]) -> list[Any]:
        """Run calls of objects of this pool at once; `BroadcastError` if any of them fails."""
        tasks = [self.pool.prepare(pending, keep=False) for pending in pendings]
        places = [(load.node, load.worker) for task in tasks if (load := task.pinned) is not None]
        return outcomes_of(self.pool, pendings[0].function.name, places, tasks)

    def free(self, pending: Pending[Any]) -> None:
        """Run a call there some time, for whom nobody waits; a finalizer may ask for it."""
        # A finalizer may run wherever this thread is just now, also where it holds a lock.
        self.pool.call_soon(functools.partial(self._hand_over, pending))

    def _hand_over(self, pending: Pending[Any]) -> None:
        _freeing.submit(self._free, pending)

    def _free(self, pending: Pending[Any]) -> None:
        with contextlib.suppress(SkywardError, OSError):
            self.pool.submit(self.pool.prepare(pending, keep=True, pinned=self.load))


def make(pool: Pool, making: Making[C], on: int | None) -> C:
    """Make one object, in a worker of that node or of any."""
    key = making.new_key()
    task = pool.prepare(making.call(key), keep=False, on=on)
    with _freed_on_failure(pool, making, [key], [task]):
        pool.run(task)
    return _instance(pool, making, key, task, on)


def make_later(pool: Pool, making: Making[C], on: int | None) -> Future[C]:
    """Make one object, and don't wait."""
    key = making.new_key()
    task = pool.prepare(making.call(key), keep=True, on=on)
    return future_of(
        pool,
        task,
        lambda _: _instance(pool, making, key, task, on),
        lambda: _free(pool, making, key, task),
    )


def make_everywhere(pool: Pool, making: Making[C], *, fail_fast: bool) -> InstanceGroup[C]:
    """Make one object in every worker."""
    pool.wake()
    keys: list[str] = []
    tasks: list[Task] = []
    places = pool.workers()
    for place in places:
        keys.append(making.new_key())
        tasks.append(pool.prepare(making.call(keys[-1]), keep=False, worker=place))
    with _freed_on_failure(pool, making, keys, tasks):
        outcomes_of(pool, making.name, places, tasks, fail_fast=fail_fast)
    made = zip(places, keys, tasks, strict=True)
    return InstanceGroup([_instance(pool, making, key, task, at) for at, key, task in made])


def _instance(pool: Pool, making: Making[C], key: str, task: Task, at: Place | int | None) -> C:
    """The handle of an object that a task has made."""
    again = functools.partial(_make_again, pool, making, at)
    send = functools.partial(offer, pool)
    residence = Residence(making, key, _seat_of(pool, task), again, send)
    # To its user, the handle is what it stands for, as the data of `sky.put` is.
    return cast(C, Instance(residence))


def _make_again(pool: Pool, making: Making[Any], at: Place | int | None, key: str) -> Seat:
    worker = at if isinstance(at, tuple) else None
    on = at if isinstance(at, int) else None
    task = pool.prepare(making.call(key), keep=False, on=on, worker=worker)
    with _freed_on_failure(pool, making, [key], [task]):
        pool.run(task)
    return _seat_of(pool, task)


@contextlib.contextmanager
def _freed_on_failure(
    pool: Pool, making: Making[Any], keys: list[str], tasks: list[Task]
) -> Iterator[None]:
    """Free the objects that tasks have made, or still make, if nobody gets all of them."""
    try:
        yield
    except BaseException:
        for key, task in zip(keys, tasks, strict=True):
            _free(pool, making, key, task)
        raise


def _free(pool: Pool, making: Making[Any], key: str, task: Task) -> None:
    """Free the object of a task that some worker was given."""
    if task.load is not None and not pool.closed:
        _seat_of(pool, task).free(making.freeing(key))


def _seat_of(pool: Pool, task: Task) -> Seat:
    assert task.load is not None
    return Seat(pool, task.load)
