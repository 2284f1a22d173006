"""Groups of objects: one in every worker, as the client has them, and as a task has them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar, overload

from skyward.closing import Closing
from skyward.functions import Future
from skyward.handles import TaskHandle, TaskMethod

C = TypeVar("C")


class InstanceGroup(Closing, Generic[C]):
    """One object in every worker, in rank order; a method runs in all at once."""

    def __init__(self, members: list[C]) -> None:
        self._members = tuple(members)

    def __len__(self) -> int:
        return len(self._members)

    @overload
    def __getitem__(self, rank: int) -> C: ...
    @overload
    def __getitem__(self, rank: slice) -> InstanceGroup[C]: ...
    def __getitem__(self, rank: int | slice) -> C | InstanceGroup[C]:
        """The object of a rank, or the group of some."""
        if isinstance(rank, slice):
            return InstanceGroup(list(self._members[rank]))
        return self._members[rank]

    def __iter__(self) -> Iterator[C]:
        return iter(self._members)

    def __getattr__(self, name: str) -> GroupMethod:
        members: Any = self._members
        return GroupMethod([member._function(name) for member in members])

    def __call__(self, *args: Any, **kwargs: Any) -> list[Any]:
        return self.__getattr__("__call__")(*args, **kwargs)

    def close(self) -> None:
        """Close all objects."""
        members: Any = self._members
        for member in members:
            member.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _group, self._members

    def __repr__(self) -> str:
        return f"<group of {len(self)} objects>"


def _group(*members: Any) -> InstanceGroup[Any] | TaskHandleGroup:
    """A group that has been sent here."""
    if any(isinstance(member, TaskHandle) for member in members):
        return TaskHandleGroup(members)
    return InstanceGroup(list(members))


class GroupMethod:
    """A method of the objects of a group."""

    def __init__(self, functions: Sequence[Any]) -> None:
        self._functions = functions

    def __call__(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Call the method of all objects at once; `BroadcastError` if any of them fails."""
        pendings = [function(*args, **kwargs) for function in self._functions]
        if not pendings:
            return []
        results: list[Any] = self._functions[0].seat.run_together(pendings)
        return results

    def submit(self, *args: Any, **kwargs: Any) -> list[Future[Any]]:
        """Call the method of all objects without waiting."""
        return [each.seat.submit(each(*args, **kwargs)) for each in self._functions]


class TaskHandleGroup:
    """One object in every worker, as a task has them; a method runs in all at once."""

    def __init__(self, members: tuple[TaskHandle, ...]) -> None:
        self._members = members

    def __len__(self) -> int:
        return len(self._members)

    @overload
    def __getitem__(self, rank: int) -> TaskHandle: ...
    @overload
    def __getitem__(self, rank: slice) -> TaskHandleGroup: ...
    def __getitem__(self, rank: int | slice) -> TaskHandle | TaskHandleGroup:
        """The object of a rank, or the group of some."""
        if isinstance(rank, slice):
            return TaskHandleGroup(self._members[rank])
        return self._members[rank]

    def __iter__(self) -> Iterator[TaskHandle]:
        return iter(self._members)

    def __getattr__(self, name: str) -> TaskGroupMethod:
        return TaskGroupMethod([getattr(member, name) for member in vars(self).get("_members", ())])

    def __call__(self, *args: Any, **kwargs: Any) -> list[Any]:
        methods = [TaskMethod(member, "__call__") for member in self._members]
        return TaskGroupMethod(methods)(*args, **kwargs)

    def close(self) -> None:
        """Close all objects."""
        for member in self._members:
            member.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return TaskHandleGroup, (self._members,)


class TaskGroupMethod:
    """A method of the objects of a group, as a task has it."""

    def __init__(self, methods: list[TaskMethod]) -> None:
        self._methods = methods

    def __call__(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Call the method of all objects at once."""
        return [each.result() for each in self.submit(*args, **kwargs)]

    def submit(self, *args: Any, **kwargs: Any) -> list[Future[Any]]:
        """Call the method of all objects without waiting."""
        return [each.submit(*args, **kwargs) for each in self._methods]
