"""The head's page: the page that a pool's head node serves, brought to this machine."""

from __future__ import annotations

import contextlib
from typing import Any

from skyward.closing import Closing
from skyward.compute.workbench.forwarding import Forwarding
from skyward.errors import ConfigurationError, NodeLostError, PoolError
from skyward.nodes.kept import ReachedPool, way_back


class HeadPage(Closing):
    """The page of a pool's head; the page stays when this is closed.

    >>> with HeadPage(pool) as page:
    ...     print(page.url)
    """

    def __init__(self, pool: ReachedPool, *, port: int = 0) -> None:
        """`port` is the port of this machine's loopback; 0 for any that is free."""
        self.node = _head(pool)
        """The node that serves the page."""
        environment, private = way_back(pool.record)
        name = self._name = pool.record.name
        self._connection = pool.service(self.node, "page")
        try:
            told = self._ask("open", name=name, environment=environment, private=private)
            self._forwarding = Forwarding(pool, self.node, int(told["port"]), here=port)
        except BaseException:
            self._connection.close()
            raise
        self._job = str(told["job"])
        self.found = bool(told["found"])
        """Whether the page was served already."""
        self.address = f"http://127.0.0.1:{self._forwarding.port}"
        """Where the page is on this machine, without the token."""
        self.url = f"{self.address}/?token={told['token']}"
        """The address to open in a browser; who has it sees the pool."""

    def _ask(self, what: str, **arguments: Any) -> Any:
        try:
            return self._connection.ask(what, **arguments)
        except (EOFError, OSError) as problem:
            raise _lost(self._name, problem) from problem

    def wait(self) -> str:
        """Wait until the page has ended, and return why; `close` of another thread ends this."""
        try:
            return str(self._connection.ask("wait", job=self._job))
        except (PoolError, EOFError, OSError) as problem:
            return f"the pool has ended, or cannot be reached: {problem}"

    def close(self) -> None:
        """End the way here; the page stays on the head."""
        with contextlib.suppress(OSError):
            self._connection.channel.abort()
        self._forwarding.close()
        self._connection.close()


def stop_page(pool: ReachedPool) -> bool:
    """End the page of a pool's head; whether there was one."""
    with pool.service(_head(pool), "page") as connection:
        try:
            return bool(connection.ask("stop"))
        except (EOFError, OSError) as problem:
            raise _lost(pool.record.name, problem) from problem


def _head(pool: ReachedPool) -> int:
    if not pool.nodes:
        raise ConfigurationError(f"{pool.record.name} has no node now")
    return min(pool.nodes)


def _lost(name: str, problem: Exception) -> NodeLostError:
    return NodeLostError(
        f"the head of {name} is gone: {problem}; `sky ps` shows the pools that are there"
    )
