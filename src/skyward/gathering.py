"""Gathering: any number of calls at once, with their results in a list or as they come."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Generic, Literal, TypeVar, cast, overload

from skyward.functions import Group, Pending, Where, call_target, checked

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Gather(Generic[T_co]):
    """Any number of calls; made by `gather`."""

    __slots__ = ("_ordered", "_pendings", "_stream")

    def __init__(self, pendings: tuple[Pending[Any], ...], stream: bool, ordered: bool) -> None:
        self._pendings, self._stream, self._ordered = pendings, stream, ordered

    def with_timeout(self, seconds: float) -> Gather[T_co]:
        """The same calls, each with that timeout.

        >>> sky.gather(f(1), f(2)).with_timeout(60) >> compute
        """
        changed = tuple(pending.with_timeout(seconds) for pending in self._pendings)
        return Gather(changed, self._stream, self._ordered)

    def __and__(self, other: Pending[Any] | Group[Any] | Gather[Any]) -> Gather[T_co]:
        """Add more calls."""
        more = other if isinstance(other, (Group, Gather)) else (checked(other),)
        return Gather((*self._pendings, *more), self._stream, self._ordered)

    def __len__(self) -> int:
        return len(self._pendings)

    def __iter__(self) -> Iterator[Pending[Any]]:
        return iter(self._pendings)

    def __repr__(self) -> str:
        return f"<gather of {len(self._pendings)} calls>"

    def __rshift__(self, where: Where) -> T_co:
        """Run all of them."""
        target = call_target(where)
        result: Any
        if self._stream:
            result = target.stream_all(self._pendings, ordered=self._ordered)
        elif self._ordered:
            result = target.run_all(self._pendings)
        else:
            result = list(target.stream_all(self._pendings, ordered=False))
        return cast(T_co, result)


@overload
def gather(
    *pendings: Pending[T], stream: Literal[False] = False, ordered: bool = True
) -> Gather[list[T]]: ...
@overload
def gather(
    *pendings: Pending[T], stream: Literal[True], ordered: bool = True
) -> Gather[Iterator[T]]: ...
def gather(*pendings: Pending[Any], stream: bool = False, ordered: bool = True) -> Gather[Any]:
    """Any number of calls at once: a list, or with `stream` an iterator of results.

    >>> sky.gather(*[score(x) for x in xs]) >> compute
    """
    return Gather(tuple(checked(pending) for pending in pendings), stream, ordered)
