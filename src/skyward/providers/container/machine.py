"""A container as a machine: commands run in it, and connections to what listens there."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import socket
import struct
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from skyward.errors import PoolStartError, UnreachableError
from skyward.providers import Machine
from skyward.providers.container.service import (
    NODE,
    POOL,
    TIMEOUT,
    Service,
    check_socket,
    remove_unused_network,
    said,
)
from skyward.providers.piped import Piped, relay_command

_ENDING_SECONDS = 5.0
_HEADER = struct.Struct(">BxxxL")
"""Before each piece of a command's output: the stream it belongs to, and its length."""


class ContainerMachine(Piped, Machine):
    """One container."""

    # A program that ends before it has read all of its input resets the connection, and what it
    # has written last is lost.
    reads_rest = True

    def __init__(self, service: Service, container: Any, python: str | None) -> None:
        self._service = service
        self.id = str(container.name)
        self.python = python
        self.node = int(container.labels.get(NODE, 0))
        self._pool = str(container.labels.get(POOL, ""))
        self._copying: list[threading.Thread] = []
        """One thread for each connection; it ends with the connection or with the container."""
        container.reload()
        self.ended = str(container.status) not in ("running", "paused")
        """Whether it did not run when it was found."""
        networks = container.attrs["NetworkSettings"]["Networks"].values()
        self.address = next((each["IPAddress"] for each in networks if each["IPAddress"]), "")
        # On the same kernel the client can reach it.
        local = self._service.address.startswith("unix:") and sys.platform == "linux"
        self.direct = self.address if local and self.address else None

    async def pipe(self, command: Sequence[str]) -> socket.socket:
        """Run a program in the container, and copy between its streams and a socket."""
        return await asyncio.to_thread(self._pipe, command)

    async def why_lost(self) -> str:
        """What the service says of the container."""
        state = "is there" if await self.alive() else "has ended"
        return f"container {self.id}: the streams of a command were lost; the container {state}"

    async def dial(self, endpoint: str) -> socket.socket:
        """Connect through a process in the container that copies its streams to the socket."""
        command, text = relay_command(self.python, endpoint)
        end = await self.pipe(command)
        try:
            await asyncio.to_thread(end.sendall, text)
        except BaseException:
            end.close()
            raise
        return end

    def _pipe(self, command: Sequence[str]) -> socket.socket:
        executing = self._executing(command)
        stream = executing.__enter__()
        near, far = socket.socketpair()

        def upward() -> None:
            with contextlib.suppress(OSError):
                while data := far.recv(1 << 18):
                    stream.sendall(data)
                stream.shutdown(socket.SHUT_WR)

        def downward() -> None:
            try:
                with contextlib.suppress(OSError):
                    for data in _output(stream):
                        far.sendall(data)
                    far.shutdown(socket.SHUT_WR)
                sender.join()
            finally:
                far.close()
                executing.__exit__(None, None, None)

        sender = threading.Thread(target=upward, name="skyward-dial", daemon=True)
        sender.start()
        receiver = threading.Thread(target=downward, name="skyward-dial", daemon=True)
        receiver.start()
        self._copying = [each for each in self._copying if each.is_alive()] + [receiver]
        return near

    @contextlib.contextmanager
    def _executing(self, command: Sequence[str]) -> Iterator[socket.socket]:
        with self._service.connected() as docker:
            try:
                # Podman drops what a process writes before Podman has attached to it: on a busy
                # machine, all of a short command's output. What we send arrives after that.
                started = ["sh", "-c", 'read -r _ && exec "$@"', "sh", *command]
                process = docker.api.exec_create(self.id, started, stdin=True)["Id"]
                raw = docker.api.exec_start(process, socket=True)
            except Exception as problem:
                raise PoolStartError(
                    f"node {self.node}: `{shlex.join(command)[:80]}` could not be run in container "
                    f"{self.id}: {said(problem)}"
                ) from problem
            # The docker package returns a wrapper, whose close leaves the socket open.
            stream = getattr(raw, "_sock", raw)
            try:
                with contextlib.suppress(OSError):
                    stream.sendall(b"\n")
                yield stream
            finally:
                raw.close()
                stream.close()

    async def alive(self) -> bool:
        """Whether the container runs, or is only paused."""
        return await asyncio.to_thread(self._alive)

    def _alive(self) -> bool:
        from docker.errors import NotFound

        try:
            check_socket(self._service.address)
            with self._service.connected() as docker:
                return docker.containers.get(self.id).status in ("running", "paused")
        except NotFound:
            return False
        except Exception as problem:
            raise UnreachableError(
                f"container {self.id}: {self._service.address} does not say what became of it: "
                f"{said(problem)}"
            ) from problem

    async def destroy(self) -> None:
        """Remove the container, and with the last one the pool's network."""
        await asyncio.to_thread(self._destroy)

    def _destroy(self) -> None:
        from docker.errors import APIError, NotFound

        with self._service.connected() as docker:
            try:
                container = docker.containers.get(self.id)
                try:
                    container.remove(force=True, v=True)
                except APIError as problem:
                    # The container is being removed already: wait for the end of that.
                    if problem.status_code != 409:
                        raise
                    container.wait(condition="removed", timeout=TIMEOUT)
            except NotFound:
                pass
            remove_unused_network(docker, self._pool)
        for thread in self._copying:
            thread.join(_ENDING_SECONDS)


def _output(stream: socket.socket) -> Iterator[bytes]:
    """What a program writes to its standard output, piece by piece."""
    buffer = b""
    left, wanted = 0, False
    while data := _received(stream):
        buffer += data
        while buffer:
            if not left:
                if len(buffer) < _HEADER.size:
                    break
                kind, left = _HEADER.unpack_from(buffer)
                wanted = kind == 1
                buffer = buffer[_HEADER.size :]
                continue
            piece, buffer = buffer[:left], buffer[left:]
            left -= len(piece)
            if wanted:
                yield piece


def _received(stream: socket.socket) -> bytes:
    try:
        return stream.recv(1 << 18)
    except ConnectionResetError:
        # A command that did not read all of its input ends like this.
        return b""
