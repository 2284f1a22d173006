"""The keeper: a process on a Ray node that runs a machine's commands and connects to its sockets.

Ray's own Python runs this file on the node, so it needs the standard library alone. An actor of Ray
starts the keeper and holds a pipe to it. When the pipe closes, by whatever end of the actor, the
keeper kills all that it started, removes the machine's folder, and ends.

A connection is TLS 1.3 with the pool's certificates. It begins with one line of JSON that says what
to do. The keeper answers with a frame s(tart), which is empty unless it says why there is nothing.
More frames follow, each with a letter and a length: i(nput), o(utput), e(nd).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import ssl
import struct
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MARK = "SKYWARD_RAY_MACHINE"
"""The variable that all processes of a machine have."""
FRAME = struct.Struct("!cI")
CHUNK = 1 << 18
LONGEST_LINE = 1 << 17
KILL_ROUNDS = 50
"""How often the keeper looks for processes that a dying process has started, 20 ms apart."""


def context(authority: str, identity: str, *, server: bool) -> ssl.SSLContext:
    """TLS that accepts the pool's client, or the pool's keepers, and nobody else."""
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    # One certificate is known to both ends: it says more than a host's name.
    made.check_hostname = False
    made.verify_mode = ssl.CERT_REQUIRED
    made.load_verify_locations(cadata=authority)
    with tempfile.TemporaryDirectory(prefix="sky-") as folder:
        path = os.path.join(folder, "identity.pem")
        with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "w", encoding="ascii") as file:
            file.write(identity)
        made.load_cert_chain(path)
    return made


def listening(port: int) -> socket.socket:
    """A socket that listens at one port of every address, of IPv4 and IPv6."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


async def read_frame(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """The next frame: its letter and its content; raises at the end of the connection."""
    kind, length = FRAME.unpack(await reader.readexactly(FRAME.size))
    if length > CHUNK:
        raise ConnectionError(f"a frame of {length} bytes")
    return kind, await reader.readexactly(length)


def write_frame(writer: asyncio.StreamWriter, kind: bytes, data: bytes = b"") -> None:
    """Write frames that hold the data; at least one."""
    for start in range(0, len(data) or 1, CHUNK):
        piece = data[start : start + CHUNK]
        writer.write(FRAME.pack(kind, len(piece)))
        writer.write(piece)


class NodeKeeper:
    """One machine: its folder and the processes in it."""

    def __init__(self, given: dict[str, Any], environment: dict[str, str]) -> None:
        self.label = str(given["label"])
        self.given = given
        self.folder = machine_folder(self.label)
        self.environment = {**environment, MARK: self.label}
        self.groups: set[int] = set()

    async def serve(self) -> None:
        """Listen, say so on the standard output, and go on until the actor's pipe closes."""
        over = asyncio.Event()
        asyncio.get_running_loop().add_reader(0, lambda: over.set() if not os.read(0, 64) else None)
        tls = context(self.given["authority"], self.given["identity"], server=True)
        sock = listening(0)
        server = await asyncio.start_server(self.answer, sock=sock, ssl=tls, limit=LONGEST_LINE)
        port = server.sockets[0].getsockname()[1]
        os.write(1, json.dumps({"port": port, "folder": self.folder}).encode() + b"\n")
        await over.wait()
        server.close()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Do what a connection asks for."""
        try:
            asked = json.loads(await reader.readline())
            await self.lead(asked, reader, writer)
        except (OSError, EOFError, ValueError, KeyError):
            pass  # Whoever connected is gone, or is not our client.
        finally:
            writer.close()

    async def lead(
        self, asked: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Copy what comes both ways, to a program or to a socket of this host.

        A program that still runs when the connection ends is killed.
        """
        process = None
        try:
            if asked["do"] == "run":
                process, there, back = await self.start(asked["command"])
            else:
                there, back = await connected(asked["endpoint"])
        except OSError as problem:
            write_frame(writer, b"s", f"{problem.errno or 0} {problem.strerror}".encode())
            await writer.drain()
            return
        write_frame(writer, b"s")
        copying = asyncio.ensure_future(show(there, writer))
        copying.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            await feed(back, reader)
        finally:
            copying.cancel()
            back.close()
            if process is not None:
                if process.returncode is None:
                    kill_group(process.pid)
                await process.wait()
                self.groups.discard(process.pid)

    async def start(
        self, command: list[str]
    ) -> tuple[asyncio.subprocess.Process, asyncio.StreamReader, asyncio.StreamWriter]:
        """Run a program in the machine's folder; gives the socket that is its input and output."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    *command,
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno(),
                    stderr=asyncio.subprocess.DEVNULL,
                    cwd=self.folder,
                    env=self.environment,
                    start_new_session=True,
                )
            self.groups.add(process.pid)
            return (process, *await asyncio.open_unix_connection(sock=ours))
        except BaseException:
            ours.close()
            raise

    # The end.

    def end(self) -> None:
        """Kill every process of the machine, and remove its folders."""
        for group in self.groups:
            kill_group(group)
        clear(self.label, self.folder, self.given["node_folder"])


async def connected(endpoint: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection to a socket of this host."""
    family, _, place = endpoint.partition(":")
    if family == "unix":
        return await asyncio.open_unix_connection(place)
    host, _, port = place.rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def feed(pipe: asyncio.StreamWriter, reader: asyncio.StreamReader) -> None:
    """Write the frames of the input, until the connection ends."""
    open_ = True
    with contextlib.suppress(asyncio.IncompleteReadError):
        while True:
            kind, data = await read_frame(reader)
            if not open_:
                continue
            # A command that does not read its input is no reason to end it.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                if kind == b"i":
                    pipe.write(data)
                    await pipe.drain()
                    continue
                pipe.write_eof()
            open_ = False


async def show(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Send what a process or a socket gives, and its end."""
    while data := await reader.read(CHUNK):
        write_frame(writer, b"o", data)
        await writer.drain()
    write_frame(writer, b"e")
    await writer.drain()


def cache_folder() -> str:
    """Where what is made for nodes is kept."""
    return os.environ.get("SKYWARD_CACHE") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "skyward"
    )


def machine_folder(label: str) -> str:
    """Make the machine's private folder, below the cache folder if that can be."""
    for base in (os.path.join(cache_folder(), "machines"), tempfile.gettempdir()):
        path = os.path.join(base, label)
        with contextlib.suppress(OSError):
            os.makedirs(base, 0o700, exist_ok=True)
            os.mkdir(path, 0o700)
            return path
    raise OSError(f"no folder can be made in {cache_folder()} or {tempfile.gettempdir()}")


def kill_group(leader: int) -> None:
    """Kill a process group, if it is still there."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def mark_of(pid: int) -> bytes:
    """The machine that a process belongs to; empty if it belongs to none, or has ended."""
    with contextlib.suppress(OSError):
        for variable in Path("/proc", str(pid), "environ").read_bytes().split(b"\0"):
            if variable.startswith(MARK.encode() + b"="):
                return variable.partition(b"=")[2]
    return b""


def marked(label: str) -> list[int]:
    """The processes of a machine, but for this one."""
    pids = [int(folder.name) for folder in Path("/proc").glob("[0-9]*")]
    return [pid for pid in pids if pid != os.getpid() and mark_of(pid) == label.encode()]


def clear(label: str, folder: str, node_folder: str) -> None:
    """Kill the processes of a machine, and remove its folder and that of its agent."""
    for _ in range(KILL_ROUNDS):
        found = marked(label)
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not found:
            break
        time.sleep(0.02)
    shutil.rmtree(folder, ignore_errors=True)
    for base in ("/tmp", "/var/tmp", cache_folder()):
        path = Path(base, node_folder)
        with contextlib.suppress(OSError, ValueError):
            agent = int((path / "agent.pid").read_text("ascii").split()[0])
            # The node's next machine may be on this host, too, and has a folder of this name.
            if mark_of(agent) not in (b"", label.encode()):
                continue
        with contextlib.suppress(OSError):
            if path.stat().st_uid == os.getuid():
                shutil.rmtree(path, ignore_errors=True)


def main(given: dict[str, Any]) -> None:
    """Leave the actor's process group, and keep the machine until the pipe closes."""
    # Ray kills the children of an actor's process: as a grandchild, the keeper ends in order.
    if os.fork():
        os._exit(0)
    os.setsid()
    os.umask(0o077)
    keeper = NodeKeeper(given, dict(given["environment"]))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))
    try:
        asyncio.run(keeper.serve())
    finally:
        keeper.end()
