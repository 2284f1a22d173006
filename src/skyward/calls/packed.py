"""Packed calls: calls that another process has encoded, to be sent as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from skyward.functions import Function, Pending
from skyward.objects import modules
from skyward.objects.encoding import Code, Encoded


class PackedHandle:
    """Data from `put`, or a call's result, that another process has encoded."""

    __slots__ = ("__weakref__", "encoded", "fresh", "key")

    def __init__(self, key: bytes, encoded: Encoded, *, fresh: bool = False) -> None:
        """`fresh`: each task gets an object of its own, as of a call's result."""
        self.key, self.encoded, self.fresh = key, encoded, fresh


class PackedFunction(Function[..., Any]):
    """A function that only workers decode."""

    def __init__(
        self,
        key: bytes,
        encoded: Encoded,
        *,
        name: str,
        timeout: float | None,
        retries: int,
        fail_fast: bool,
    ) -> None:
        super().__init__(
            _elsewhere, name=name, timeout=timeout, retries=retries, fail_fast=fail_fast
        )
        self._packed = Code(key, encoded, modules.References(_elsewhere))

    def code(self) -> Code:
        """The body as it came."""
        return self._packed


class PackedCall(Pending[Any]):
    """A call whose arguments only workers decode."""

    __slots__ = ("_encoded",)

    _encoded: Encoded

    def __init__(self, function: Function[..., Any], arguments: Encoded) -> None:
        super().__init__(function, (), {})
        object.__setattr__(self, "_encoded", arguments)

    @property
    def arguments(self) -> Encoded:
        """The arguments, for one task."""
        ours = self._encoded
        return Encoded(ours.pieces, list(ours.buffers), ours.storages, ours.handles)


def encoded_of(
    pickle: memoryview,
    buffers: Sequence[memoryview],
    storages: Sequence[tuple[int, int]],
    handles: Sequence[PackedHandle],
) -> Encoded:
    """An encoded object that was received, to be sent again."""
    return Encoded([pickle], list(buffers), list(storages), list(handles))


def _elsewhere() -> None:
    raise NotImplementedError("the body of a packed function is on workers alone")
