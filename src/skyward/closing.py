"""Things that a `with` block closes when it is left."""

from __future__ import annotations

from types import TracebackType
from typing import Self


class Closing:
    """The end of a `with` block calls `close`, also after a failure."""

    def close(self) -> None:
        """End what this has, for good; a second call does nothing."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
