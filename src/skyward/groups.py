"""Groups of objects: one in every worker, for the client and for tasks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar, overload

from skyward.closing import Closing
from skyward.functions import Future

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
        # `copy` and `pickle` ask before there are members.
        return GroupMethod([each._method(name) for each in vars(self).get("_members", ())])

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


def _group(*members: Any) -> InstanceGroup[Any]:
    """A group that has been sent here."""
    return InstanceGroup(list(members))


class GroupMethod:
    """A method of the objects of a group."""

    def __init__(self, methods: Sequence[Any]) -> None:
        self._methods = methods

    def __call__(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Call the method of all objects at once; on the client, `BroadcastError` if one fails."""
        if not self._methods or not all(hasattr(each, "function") for each in self._methods):
            # In a task, where each call goes its own way.
            return [each.result() for each in self.submit(*args, **kwargs)]
        pendings = [each.pending(*args, **kwargs) for each in self._methods]
        results: list[Any] = self._methods[0].function.seat.run_together(pendings)
        return results

    def submit(self, *args: Any, **kwargs: Any) -> list[Future[Any]]:
        """Call the method of all objects without waiting."""
        return [each.submit(*args, **kwargs) for each in self._methods]
