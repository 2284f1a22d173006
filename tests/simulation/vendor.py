"""A provider over the simulated market; each simulated process has a copy of this module.

It is as simple as a provider may be: what it relies on is what `SharedAllocation` promises.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skyward.errors import PoolError, PoolStartError, UnavailableError, UnreachableError
from skyward.providers import Capabilities, Machine, Remains, Request, owner
from skyward.providers.allocation import SharedAllocation
from skyward.wire.handshake import dial_here

from .market import APPEAR_SECONDS, Asked, Rented, market

BOOT_SECONDS = 200.0
"""How long a machine may take to run."""
LOOK_SECONDS = 0.05
TERM_SECONDS = 5.0
"""How long an agent has to end."""


@dataclass(frozen=True)
class Vendor:
    """Machines of the market."""

    timeout: float | None = None
    notices: bool = False

    name = "vendor"
    capabilities = Capabilities(collects=True, mounts_folders=False)
    where = "the market"

    def check(self, request: Request) -> None:
        """Refuse nothing."""

    def describe(self) -> Mapping[str, Any]:
        """The arguments."""
        return {"timeout": self.timeout, "notices": self.notices}

    def price(self, request: Request) -> float | None:
        """None: the market names no price."""
        return None

    def allocate(self, pool: str) -> VendorAllocation:
        """The pool's machines, asked for together."""
        return VendorAllocation(self, pool)

    async def remains(self) -> Sequence[Remains]:
        """The machines of all pools."""
        found: dict[str, list[Rented]] = {}
        for each in await answer(market().ask("list", "")):
            found.setdefault(each.pool, []).append(each)
        return [
            Remains(pool, of[0].name, of[0].owner, of[0].pid, tuple(f"machine {m.id}" for m in of))
            for pool, of in found.items()
        ]


async def answer(asked: Asked) -> Any:
    """What the market answers."""
    await asyncio.sleep(max(0.0, asked.back - time.monotonic()))
    if asked.silent:
        raise UnreachableError("the market does not answer")
    if asked.refusal:
        raise UnavailableError(f"the market: {asked.refusal}")
    return asked.answer


class VendorAllocation(SharedAllocation["VendorMachine"]):
    """The machines of one pool."""

    def __init__(self, vendor: Vendor, pool: str) -> None:
        super().__init__(pool)
        self.vendor, self.timeout = vendor, vendor.timeout
        self._asked_at = -APPEAR_SECONDS

    async def ask(self, nodes: Sequence[int]) -> None:
        """Ask for machines once; each is handed out when it runs."""
        name = self.wanted[nodes[0]].order.name
        self._asked_at = time.monotonic()
        asked = market().ask("make", self.pool, nodes, owner(), os.getpid(), name)
        given: dict[int, str] = {}
        more = []
        for node, id in await answer(asked):
            if given.setdefault(node, id) != id:
                more.append(id)
        missing = [node for node in nodes if node not in given]
        self.refuse(missing, UnavailableError("the market has no machine for it"))
        for node, id in given.items():
            self.start(self._boot(node, id))
        for id in more:
            self.start(self._return(id))

    async def _boot(self, node: int, id: str) -> None:
        machine = VendorMachine(self, market().machines[id], node)
        deadline = time.monotonic() + BOOT_SECONDS
        while not machine.runs:
            if time.monotonic() > deadline or machine.rented.ended is not None:
                self.refuse([node], PoolStartError(f"node {node}: {id} did not start"))
                return
            await asyncio.sleep(LOOK_SECONDS)
        self.give(node, machine)

    async def _return(self, id: str) -> None:
        # If it fails, the machine is found by its mark when the node is given back.
        with contextlib.suppress(PoolError):
            await answer(market().ask("destroy", id))

    async def shrink(self, gone: Sequence[int]) -> None:
        """Remove the machines that have the marks of these nodes."""
        found = await self.find()
        await self._end([each.rented.id for each in found if each.node in gone])

    async def remove(self) -> None:
        """Remove all machines of the pool that are nobody's."""
        await self._end([each.rented.id for each in await self.find()])

    async def _end(self, ids: Sequence[str]) -> None:
        asked = [answer(market().ask("destroy", id)) for id in ids]
        for problem in await asyncio.gather(*asked, return_exceptions=True):
            if isinstance(problem, BaseException):
                raise problem

    async def find(self) -> Sequence[VendorMachine]:
        """The machines with the mark of the pool."""
        # The list may lack what was asked for a moment ago.
        await asyncio.sleep(max(0.0, self._asked_at + APPEAR_SECONDS - time.monotonic()))
        there = await answer(market().ask("list", self.pool))
        return [VendorMachine(self, each, each.node) for each in there]


class VendorMachine(Machine):
    """A machine of the market."""

    def __init__(self, allocation: VendorAllocation, rented: Rented, node: int) -> None:
        self._allocation, self.rented = allocation, rented
        self.id, self.node = rented.id, node
        self.address = self.direct = rented.id
        self.python = sys.executable
        self.notice = __name__ if allocation.vendor.notices else ""

    @property
    def runs(self) -> bool:
        """Whether it has started."""
        return market().reach(self.id) is not None

    def _there(self) -> Rented:
        there = market().reach(self.id)
        if there is None:
            raise UnreachableError(f"{self.id} is out of reach")
        return there

    async def run(
        self,
        command: Sequence[str],
        *,
        input: bytes = b"",
        output: Callable[[bytes], None] | None = None,
    ) -> int:
        """Run a process there; what the shell is asked for is done here."""
        await asyncio.sleep(0.01)
        machine = self._there()
        if command[0] == "sh":
            status, said = await self._shell(machine, command, input.decode())
        else:
            market().begin_agent(machine, self._allocation.pool, self.node)
            process, taken = market().start(machine, [*command], input)
            try:
                while not process.dead:
                    await asyncio.sleep(LOOK_SECONDS)
                    self._there()
            finally:
                market().kernel.signal(process, signal.SIGKILL)
            status, said = process.status, bytes(taken.data)
        if output is not None and said:
            output(said)
        return status if status >= 0 else 128 - status

    async def _shell(self, machine: Rented, command: Sequence[str], text: str) -> tuple[int, bytes]:
        folder = f"{machine.folder}/sky.{self._allocation.pool}.{self.node}"
        agent = f"{folder}/agent.pid"
        if command[1] == "-c":
            pid = int(command[2].split()[2])
            return (0 if any(each.pid == pid for each in market().running(machine)) else 3), b""
        if "tell removed" in text:
            await self._remove(machine, agent)
            return 0, b"@sky removed yes\n"
        os.makedirs(f"{folder}/work", exist_ok=True)
        facts = {
            "hostname": machine.id,
            "cache": machine.folder,
            "platform": "Linux x86_64 gnu",
            "python": sys.executable,
            "folder": folder,
            "prepared": "yes",
        }
        return 0, "".join(f"@sky {name} {value}\n" for name, value in facts.items()).encode()

    async def _remove(self, machine: Rented, agent: str) -> None:
        """What the script `remove` does: end the agent, then all that is left."""
        kernel = market().kernel
        with contextlib.suppress(OSError, ValueError):
            with open(agent) as file:
                pid = int(file.read().split()[0])
            for process in market().running(machine):
                if process.pid == pid:
                    kernel.signal(process, signal.SIGTERM)
                    kernel.signal(process, signal.SIGCONT)
            deadline = time.monotonic() + TERM_SECONDS
            while any(p.pid == pid for p in market().running(machine)):
                if time.monotonic() > deadline:
                    break
                await asyncio.sleep(0.1)
        self._there()
        for process in market().running(machine):
            kernel.signal(process, signal.SIGKILL)
        market().agents.pop(machine.id, None)

    async def dial(self, endpoint: str) -> socket.socket:
        """Connect to a socket there."""
        self._there()
        return dial_here(endpoint)

    async def alive(self) -> bool:
        """What the market says."""
        return bool(await answer(market().ask("look", self.id)))

    async def destroy(self) -> None:
        """Give the machine back, and what else has the node's mark."""
        await answer(market().ask("destroy", self.id))
        await self._allocation.release(self.node)


def main() -> None:
    """Wait for the notice that this machine is taken back."""
    machine = market().machines[socket.gethostname()]
    while not machine.notice:
        market().kernel.wait((machine.noticed,))
    print(machine.notice, flush=True)


if __name__ == "__main__":
    main()
