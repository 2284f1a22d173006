"""Which client starts a lost node, if the agents that are asked do not answer."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from skyward.nodes import kept

from ..conftest import PATIENCE


class HungAgent:
    """A connection to an agent that does not answer, until the connection is aborted."""

    def __init__(self) -> None:
        self.aborted = threading.Event()
        self.channel = SimpleNamespace(abort=self.aborted.set)

    def ask(self, what: str, **arguments: Any) -> Any:
        self.aborted.wait(PATIENCE)
        raise EOFError

    def close(self) -> None:
        pass


class GoodAgent(HungAgent):
    def ask(self, what: str, **arguments: Any) -> Any:
        return {"granted": True, "facts": None}


async def granted(agents: list[HungAgent]) -> Any:
    asked: Any = {index + 1: lambda agent=agent: agent for index, agent in enumerate(agents)}
    async with kept.leased(0, lambda: asked, lambda: True) as lease:
        return lease._connection


def test_a_hung_agent_does_not_stop_the_start_of_another_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kept, "ANSWER_SECONDS", 0.2)
    hung, good = HungAgent(), GoodAgent()

    async def within(agents: list[HungAgent]) -> Any:
        return await asyncio.wait_for(granted(agents), 10)

    assert asyncio.run(within([hung, good])) is good
    assert hung.aborted.is_set()
    assert asyncio.run(within([HungAgent()])) is None  # it goes on without a lease
