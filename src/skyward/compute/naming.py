"""Naming: calls of a `Compute` that go on without their client, by their names."""

from __future__ import annotations

from typing import Any

from skyward.compute.named.client import NamedCall, NamedCalls, calls_of
from skyward.compute.running import Running


class Naming(Running):
    """The methods of a `Compute` for calls that `submit` and `broadcast` have given a name."""

    def result(self, name: str, timeout: float | None = None) -> Any:
        """Wait for a call by its name; returns its value, or raises its exception.

        Any client of the pool may ask, as often as it likes. After `timeout` seconds it raises
        `TimeoutError`, and the call goes on.

        >>> sky.attach("train").result("run-7")
        """
        return self._calls.result(name, timeout)

    def calls(self) -> list[NamedCall]:
        """The calls that have names, in the order in which they were made, with their states.

        >>> [call.name for call in compute.calls() if call.state == "running"]
        """
        return self._calls.all()

    def cancel(self, name: str) -> None:
        """End a call by its name: its worker is interrupted. A call that has ended stays as it is.

        >>> compute.cancel("run-7")
        """
        self._calls.cancel(name)

    @property
    def _calls(self) -> NamedCalls:
        return calls_of(self._open_pool)
