"""The connections to a host: who shares one, who gets another, and who waits for nobody."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from skyward.providers.hosts import machine as ssh_machine

DESTINATION: Any = None
"""No test depends on it."""
MOMENT = 30.0
"""Enough for what waits for nothing, however slow the machine is."""


class Connection:
    """One that sees its end only when it is told so."""

    def __init__(self) -> None:
        self.closed = False
        self.over = asyncio.Event()

    def is_closed(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    async def finish(self) -> None:
        await self.over.wait()


class Host:
    """Connections to it are made as soon as it answers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers = asyncio.Event()
        self.answers.set()
        self.connections: list[Connection] = []
        monkeypatch.setattr(ssh_machine, "connect", self.connect)

    async def connect(self, _: Any) -> Connection:
        await self.answers.wait()
        self.connections.append(Connection())
        return self.connections[-1]


def test_who_has_a_connection_does_not_wait_for_another_that_is_being_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        host, to_it = Host(monkeypatch), ssh_machine.HostConnections(DESTINATION)
        control, _ = await to_it.connection()
        host.answers.clear()
        data = asyncio.create_task(to_it.connection(busy=True))
        await asyncio.sleep(0)
        async with asyncio.timeout(MOMENT):
            assert (await to_it.connection())[0] is control
        assert not data.done()
        host.answers.set()
        assert (await data)[0] is not control

    asyncio.run(scenario())


def test_who_needs_a_connection_does_not_wait_for_the_end_of_a_lost_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        host, to_it = Host(monkeypatch), ssh_machine.HostConnections(DESTINATION)
        await to_it.connection()
        lost = host.connections[0]
        lost.closed = True
        async with asyncio.timeout(MOMENT):
            await to_it.connection()
        assert len(host.connections) == 2

        ending = asyncio.create_task(to_it.close())
        host.connections[1].over.set()
        done, _ = await asyncio.wait({ending}, timeout=0.1)
        assert not done, "the end of the lost one is awaited before close returns"
        lost.over.set()
        await ending

    asyncio.run(scenario())


def test_commands_that_wait_for_a_connection_share_as_few_as_have_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        host, to_it = Host(monkeypatch), ssh_machine.HostConnections(DESTINATION)
        places = [to_it.command_place() for _ in range(2 * ssh_machine.COMMANDS_EACH + 1)]
        async with asyncio.timeout(MOMENT):
            found = await asyncio.gather(*places)
        assert [
            sum(place.connection is each for place in found)  # type: ignore[comparison-overlap]
            for each in host.connections
        ] == [ssh_machine.COMMANDS_EACH, ssh_machine.COMMANDS_EACH, 1]

    asyncio.run(scenario())


def test_a_retired_connection_is_closed_after_its_last_command_and_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        host, to_it = Host(monkeypatch), ssh_machine.HostConnections(DESTINATION)
        _, first_over = await to_it.connection()
        _, second_over = await to_it.connection()
        place = await to_it.command_place()
        to_it.retire()
        first_over()
        await to_it.connection()
        retired, other = host.connections
        second_over()
        assert not retired.closed, "it still runs a command"
        place.leave()
        assert retired.closed
        assert not other.closed
        for each in host.connections:
            each.over.set()
        await to_it.close()

    asyncio.run(scenario())


def test_an_idle_connection_is_closed_as_soon_as_it_is_retired(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        host, to_it = Host(monkeypatch), ssh_machine.HostConnections(DESTINATION)
        _, over = await to_it.connection()
        over()
        await to_it.connection(busy=True)
        idle, busy = host.connections
        assert not idle.closed
        to_it.retire()
        assert idle.closed
        assert not busy.closed
        for each in host.connections:
            each.over.set()
        await to_it.close()

    asyncio.run(scenario())
