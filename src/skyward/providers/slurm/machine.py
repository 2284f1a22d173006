"""A node of a Slurm job as a machine: commands run below its keeper, and relays reach sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Sequence
from typing import Protocol

from skyward.errors import UnreachableError
from skyward.providers import Machine
from skyward.providers.piped import Piped
from skyward.providers.slurm.states import JobStates
from skyward.wire.connecting import host_and_port

NOTICE = "skyward.providers.slurm.notice"


class JobNodes(Protocol):
    """The nodes of a pool's jobs, for the machines that they are."""

    states: JobStates

    async def pipe(self, job: str, host: str, target: str) -> socket.socket:
        """A socket whose other end is one on a node."""

    async def connect(self, address: str, port: int) -> socket.socket:
        """Connect to a port of a node from the login node."""

    async def end(self, job: str, node: int, host: str) -> None:
        """Give a node back, and with the last one the job."""


class SlurmMachine(Piped, Machine):
    """One node of a job, for one node of the pool."""

    def __init__(
        self,
        jobs: JobNodes,
        job: str,
        node: int,
        host: str,
        address: str,
        token: str,
        *,
        python: str | None,
        direct: bool,
    ) -> None:
        """`host` is empty while the job waits."""
        self._jobs, self.job, self.host, self.token = jobs, job, host, token
        self.id = f"{job}.{node}"
        self.node, self.python = node, python
        self.address = address or host or "pending"
        self.direct = address if direct and address else None
        # Without a way of its own to the nodes, the client goes through the login node.
        self.forwards_to = "" if direct else self.address
        self.notice = NOTICE
        self._destroyed = False

    def __repr__(self) -> str:
        return f"SlurmMachine({self.id!r})"

    async def pipe(self, command: Sequence[str]) -> socket.socket:
        """Have the keeper run a program."""
        self._check()
        end = await self._jobs.pipe(self.job, self.host, "keeper")
        asked = json.dumps({"ask": "run", "command": list(command)})
        end.setblocking(False)
        try:
            # If nobody takes it, the socket is at its end.
            with contextlib.suppress(OSError):
                await asyncio.get_running_loop().sock_sendall(end, asked.encode() + b"\n")
        except BaseException:
            end.close()
            raise
        end.setblocking(True)
        return end

    async def why_lost(self) -> str:
        """What Slurm says of the job, and of the node."""
        return (
            f"job {self.job}: a command on {self.host} ended with its connection; "
            f"{await self._jobs.states.how_it_is(self.job, self.host)}"
        )

    async def dial(self, endpoint: str) -> socket.socket:
        """Connect through a step of the job on that node."""
        self._check()
        return await self._jobs.pipe(self.job, self.host, endpoint)

    async def forward(self, endpoint: str) -> socket.socket:
        """Connect through the login node; if that forwards nothing, through a step."""
        self._check()
        host, port = host_and_port(endpoint)
        try:
            return await self._jobs.connect(host, port)
        except UnreachableError:
            return await self.dial(endpoint)

    async def alive(self) -> bool:
        """Whether the job has this node, and its keeper runs."""
        if self._destroyed or not self.host:
            return False
        return await self._jobs.states.has(self.job, self.host, self.token)

    async def destroy(self) -> None:
        """Give the node back, and with the last node of the job the job."""
        if not self._destroyed:
            await self._jobs.end(self.job, self.node, self.host)
            self._destroyed = True

    def _check(self) -> None:
        if self._destroyed or not self.host:
            state = "is gone" if self._destroyed else "waits in the queue"
            raise UnreachableError(f"node {self.node}: job {self.job} {state}")
