"""A shared object: the handle through which tasks and the client use state of a pool by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal, Self

from skyward.errors import ConfigurationError, StateLostError
from skyward.former import SHARED, missing
from skyward.state.connection import StateOperation, Undo
from skyward.state.reaching import link_for

NAME_MAX = 200


class SharedObject:
    """The common part of all handles."""

    KIND: ClassVar[str]

    def __init__(
        self,
        name: str,
        *,
        on: Any = None,
        consistency: Literal["strong", "eventual"] | None = None,
    ) -> None:
        """`consistency` is there for programs that give it: every object here is strong."""
        if consistency not in ("strong", "eventual", None):
            raise ConfigurationError(
                f"sky.{self.KIND}({name!r}, consistency={consistency!r}): leave it out; every "
                "object is 'strong' here, and 'eventual' asks for less"
            )
        if not isinstance(name, str) or not 0 < len(name) <= NAME_MAX:
            raise ConfigurationError(
                f"sky.{self.KIND}({name!r}): give a name of 1 to {NAME_MAX} characters"
            )
        self.name = name
        self._on = on
        self._epoch = ""
        """Names the owner whose state this handle has seen; empty if none."""
        self._made_with: dict[str, Any] | None = None
        """The options that this handle has given that owner."""

    def _options(self) -> dict[str, Any] | None:
        """What the object is made with, if it is not there."""
        return None

    def _call(
        self,
        what: str,
        *arguments: Any,
        waits: bool = False,
        timeout: float | None = None,
        undo: Undo | None = None,
    ) -> Any:
        """Have the owner perform an operation."""
        link = link_for(self._on)
        try:
            epoch = self._epoch or link.epoch()
            if not self._epoch:
                self._made_with = self._options()
            # Always sent: somebody may have deleted the object, and this call makes it anew.
            operation = StateOperation(
                self.KIND, self.name, what, arguments, self._made_with, waits, timeout, undo
            )
            value = link.perform(operation, epoch)
        except StateLostError as problem:
            knew, self._epoch = self._epoch, ""
            raise self._lost(problem, knew=bool(knew)) from problem.__cause__
        self._epoch = epoch
        return value

    def _lost(self, problem: StateLostError, *, knew: bool) -> StateLostError:
        after = (
            "; what it had may be gone: the next call uses the state that is there then"
            if knew
            else ""
        )
        return StateLostError(f"{self!r} cannot be reached: {problem}{after}")

    def _wait(
        self, what: str, *arguments: Any, timeout: float | None, undo: Undo | None = None
    ) -> Any:
        """Have the owner perform an operation that may wait; None if it waited too long."""
        self._check_timeout(timeout)
        return self._call(what, *arguments, waits=True, timeout=timeout, undo=undo)

    def _check_timeout(self, timeout: Any) -> None:
        is_number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
        if timeout is not None and not (is_number and timeout >= 0):
            raise ConfigurationError(
                f"{self!r}: timeout={timeout!r}; give seconds, 0 or more, or None to wait for any "
                "time"
            )

    def delete(self) -> None:
        """Remove the object from the pool; one of this name that is used later is new.

        >>> sky.dict("scores").delete()
        """
        self._call("delete")

    def __getattr__(self, name: str) -> Any:
        raise missing(f"sky.{self.KIND}", name, SHARED)

    def __reduce__(self) -> tuple[Callable[..., Self], tuple[Any, ...]]:
        """In another process, the handle belongs to the pool of that process."""
        return type(self), (self.name,)

    def __repr__(self) -> str:
        return f"<sky.{self.KIND} {self.name!r}>"
