"""Local: worker processes on this machine, with nothing to set up."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from skyward import checks, kernel
from skyward.errors import ConfigurationError
from skyward.providers import Allocation, Capabilities, Order, Request
from skyward.providers.local import image
from skyward.providers.local.cards import check_accelerator, installed_cards
from skyward.providers.local.machine import LocalMachine
from skyward.worker.usage import memory_there


@dataclass(frozen=True)
class Local:
    """Workers on this machine.

    `transport` is how the client reaches them: "unix" (sockets and shared memory, the default) or
    "tcp" (loopback with TLS 1.3, as over a network).

    >>> with sky.Compute(sky.Local(transport="tcp"), nodes=2) as compute: ...
    """

    transport: Literal["auto", "unix", "tcp"] = "auto"

    def __post_init__(self) -> None:
        if self.transport not in ("auto", "unix", "tcp"):
            raise ConfigurationError(
                f"Local(transport={self.transport!r}): choose 'auto', 'unix' or 'tcp'"
            )
        if self.transport == "tcp":
            checks.store(self, capabilities=replace(self.capabilities, encrypted=True))

    name = "local"
    capabilities = Capabilities(here=True, encrypted=False, mounts_folders=False)

    def describe(self) -> dict[str, Any]:
        """The arguments."""
        return {"transport": self.transport}

    def price(self, request: Request) -> float | None:
        """0: this machine costs nothing more."""
        return 0.0

    def allocate(self, pool: str) -> Allocation[LocalMachine]:
        """The pool's machines, made one by one."""
        return Allocation(self, pool)

    async def create(self, order: Order) -> LocalMachine:
        """Make a folder of this machine, in which commands run."""
        wanted = order.request.image
        if wanted.pip or wanted.apt or wanted.includes:
            await asyncio.to_thread(image.check, wanted)
        cards = installed_cards()
        machine = LocalMachine.made(
            order, accelerators=len(cards), accelerator=cards[0].name if cards else None
        )
        if wanted.includes:
            try:
                await asyncio.to_thread(machine.place_includes, wanted)
            except BaseException:
                await machine.destroy()
                raise
        return machine

    async def find(self, pool: str) -> list[LocalMachine]:
        """The machines of a pool whose folders still exist."""
        return LocalMachine.of(pool)

    def machine_at(self, machine: str) -> LocalMachine:
        """The machine of a pool that stays, by its id."""
        return LocalMachine(Path(machine))

    def lacking(self, vcpus: float | None, memory_gb: float | None) -> tuple[str, ...]:
        """What to tell the user of more processors or memory than this machine has.

        That is no error, so that a program for a cloud can be tried here.
        """
        told = []
        if vcpus is not None and vcpus > (processors := kernel.processors()):
            told.append(f"vcpus={vcpus:g}: this machine has {processors}, and workers use those")
        if memory_gb is not None and memory_gb * 1e9 > (there := memory_there()):
            told.append(f"memory_gb={memory_gb:g}: this machine has {there / 1e9:.3g} GB")
        return tuple(told)

    def check(self, request: Request) -> None:
        """Refuse a request for what this machine does not have."""
        image.check_python(request.image)
        check_accelerator(request.accelerator)
        for volume in request.volumes:
            if volume.target != volume.source or not Path(volume.source).exists():
                raise ConfigurationError(
                    f"{volume}: local workers see this machine's files where they are; give an "
                    "existing path without a different target, or use a provider with containers"
                )
