"""Objects: puts those of `@sky.cls` classes into workers, and calls them there."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, TypeVar, cast

from skyward import handles
from skyward.calls.scheduler import Load
from skyward.calls.task import Task
from skyward.classes import Instance, Making, Residence
from skyward.compute.broadcasts import outcomes_of
from skyward.errors import SerializationError, SkywardError
from skyward.functions import Future, Pending
from skyward.groups import InstanceGroup
from skyward.handles import ObjectPlace
from skyward.nodes.fleet import Fleet
from skyward.staff import Staff

C = TypeVar("C")
Worker = tuple[int, int]

_freeing = Staff("skyward-instances", 1)


class Seat:
    """One worker process of a pool, which has an object."""

    def __init__(self, fleet: Fleet, load: Load[Task]) -> None:
        self.load = load
        self.dispatcher = fleet.dispatcher
        self._fleet = fleet

    @property
    def lost(self) -> bool:
        """Whether the process is gone."""
        return not self._fleet.closed and not self.dispatcher.lanes.has(self.load)

    @property
    def where(self) -> str:
        """The process's node and worker, in words."""
        return self.load.where

    def run(self, pending: Pending[Any]) -> Any:
        """Run a call there, and wait."""
        return self.dispatcher.run(self.dispatcher.prepare(pending, keep=False, pinned=self.load))

    def submit(self, pending: Pending[Any]) -> Future[Any]:
        """Run a call there, and don't wait."""
        return self.dispatcher.future(self.dispatcher.prepare(pending, keep=True))

    def run_together(self, pendings: list[Pending[Any]]) -> list[Any]:
        """Run calls of objects of this pool at once; `BroadcastError` if any of them fails."""
        tasks = [self.dispatcher.prepare(pending, keep=False) for pending in pendings]
        places = [(load.node, load.worker) for task in tasks if (load := task.pinned) is not None]
        return outcomes_of(self._fleet, pendings[0].function.name, places, tasks)

    def free(self, pending: Pending[Any]) -> None:
        """Run a call there some time, for whom nobody waits; a finalizer may ask for it."""
        # A finalizer may run wherever this thread is just now, also where it holds a lock.
        self.dispatcher.call_soon(functools.partial(self._hand_over, pending))

    def offer(self, instance: Instance) -> ObjectPlace:
        """Have tasks call the object; it lives until `take_back`, or until the client leaves."""
        if self._fleet.closed:
            raise SerializationError(
                f"{instance!r} cannot be sent: its client has left the pool; make another one"
            )
        self.dispatcher.offered[instance._residence.key] = instance
        handles.offered[instance._residence.key] = instance
        endpoints, certified = self.dispatcher.lanes.offer(self.load)
        return ObjectPlace(self._fleet.id, endpoints, certified, self.where)

    def take_back(self, key: str) -> None:
        """Forget an object that was offered."""
        self.dispatcher.offered.pop(key, None)

    @property
    def default_timeout(self) -> float | None:
        """How long a call may take whose class and method don't say, in seconds."""
        return self.dispatcher.default_timeout

    def _hand_over(self, pending: Pending[Any]) -> None:
        _freeing.submit(self._free, pending)

    def _free(self, pending: Pending[Any]) -> None:
        with contextlib.suppress(SkywardError, OSError):
            self.dispatcher.submit(self.dispatcher.prepare(pending, keep=True, pinned=self.load))


def make(fleet: Fleet, making: Making[C], at: Worker | int | None) -> C:
    """Make one object, in that worker, in a worker of that node, or in any."""
    key = making.new_key()
    task = fleet.dispatcher.prepare(making.call(key), keep=False, **_aim(at))
    with _freed_on_failure(fleet, making, [key], [task]):
        fleet.dispatcher.run(task)
    return _instance(fleet, making, key, task, at)


def _aim(at: Worker | int | None) -> dict[str, Any]:
    return {"worker": at} if isinstance(at, tuple) else {"on": at}


def make_later(fleet: Fleet, making: Making[C], on: int | None) -> Future[C]:
    """Make one object, and don't wait."""
    key = making.new_key()
    task = fleet.dispatcher.prepare(making.call(key), keep=True, on=on)
    return fleet.dispatcher.future(
        task,
        lambda _: _instance(fleet, making, key, task, on),
        lambda: _free(fleet, making, key, task),
    )


def make_everywhere(fleet: Fleet, making: Making[C], *, fail_fast: bool) -> InstanceGroup[C]:
    """Make one object in every worker."""
    fleet.wake()
    keys: list[str] = []
    tasks: list[Task] = []
    places = fleet.workers()
    for place in places:
        keys.append(making.new_key())
        tasks.append(fleet.dispatcher.prepare(making.call(keys[-1]), keep=False, worker=place))
    with _freed_on_failure(fleet, making, keys, tasks):
        outcomes_of(fleet, making.name, places, tasks, fail_fast=fail_fast)
    made = zip(places, keys, tasks, strict=True)
    return InstanceGroup([_instance(fleet, making, key, task, at) for at, key, task in made])


def _instance(fleet: Fleet, making: Making[C], key: str, task: Task, at: Worker | int | None) -> C:
    """The handle of an object that a task has made."""
    again = functools.partial(_make_again, fleet, making, at)
    residence = Residence(making, key, _seat_of(fleet, task), again)
    # To its user, the handle is what it stands for, as the data of `sky.put` is.
    return cast(C, Instance(residence))


def _make_again(fleet: Fleet, making: Making[Any], at: Worker | int | None, key: str) -> Seat:
    task = fleet.dispatcher.prepare(making.call(key), keep=False, **_aim(at))
    with _freed_on_failure(fleet, making, [key], [task]):
        fleet.dispatcher.run(task)
    return _seat_of(fleet, task)


@contextlib.contextmanager
def _freed_on_failure(
    fleet: Fleet, making: Making[Any], keys: list[str], tasks: list[Task]
) -> Iterator[None]:
    """Free the objects that tasks have made, or still make, if nobody gets all of them."""
    try:
        yield
    except BaseException:
        for key, task in zip(keys, tasks, strict=True):
            _free(fleet, making, key, task)
        raise


def _free(fleet: Fleet, making: Making[Any], key: str, task: Task) -> None:
    """Free the object of a task that some worker was given."""
    if task.load is not None and not fleet.closed:
        _seat_of(fleet, task).free(making.freeing(key))


def _seat_of(fleet: Fleet, task: Task) -> Seat:
    assert task.load is not None
    return Seat(fleet, task.load)
