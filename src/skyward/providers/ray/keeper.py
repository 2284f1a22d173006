"""The keeper: a process on a Ray node that runs a machine's commands and connects to its sockets.

Ray's own Python runs this file on the node, so it needs the standard library alone. An actor of Ray
starts the keeper and holds a pipe to it. When the pipe closes, by whatever end of the actor, the
keeper kills all that it started, removes the machine's folder, and ends.

A connection is TLS 1.3 with the pool's certificates. It begins with one line of JSON that says what
to do; frames follow, each with a letter and a length: i(nput), o(utput), e(nd), s(tatus).
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
CLOSE_SECONDS = 30.0
"""How long the client may take to close a connection whose command has ended."""
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
            if asked["do"] == "run":
                await self.run(asked["command"], reader, writer)
            else:
                await self.dial(asked["endpoint"], reader, writer)
        except (OSError, EOFError, ValueError, KeyError):
            pass  # Whoever connected is gone, or is not our client.
        finally:
            writer.close()

    # Commands.

    async def run(
        self, command: list[str], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Run a command; if the connection ends first, so does the command."""
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                cwd=self.folder,
                env=self.environment,
                start_new_session=True,
            )
        except OSError as problem:
            write_frame(writer, b"o", f"{command[0]}: {problem.strerror}\n".encode())
            write_frame(writer, b"s", b"127" if isinstance(problem, FileNotFoundError) else b"126")
            await writer.drain()
            await asyncio.wait({asyncio.ensure_future(reader.read())}, timeout=CLOSE_SECONDS)
            return
        assert process.stdin is not None
        assert process.stdout is not None
        self.groups.add(process.pid)
        feeding = asyncio.ensure_future(feed(process.stdin, reader))
        try:
            printing = asyncio.ensure_future(show(process.stdout, writer))
            # The frames of the input end with the connection, not with the input.
            await asyncio.wait({feeding, printing}, return_when=asyncio.FIRST_COMPLETED)
            if not printing.done():
                kill_group(process.pid)
            await printing
            status = await process.wait()
            write_frame(writer, b"s", str(status if status >= 0 else 128 - status).encode())
            await writer.drain()
            # Closed while input is still coming, a connection is reset, and the status is lost.
            await asyncio.wait({feeding}, timeout=CLOSE_SECONDS)
        finally:
            feeding.cancel()
            if process.returncode is None:
                kill_group(process.pid)
                await process.wait()
            self.groups.discard(process.pid)

    # Connections.

    async def dial(
        self, endpoint: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Connect to a socket of this host, and copy what comes both ways."""
        family, _, place = endpoint.partition(":")
        try:
            if family == "unix":
                there, back = await asyncio.open_unix_connection(place)
            else:
                host, _, port = place.rpartition(":")
                there, back = await asyncio.open_connection(host, int(port))
        except OSError as problem:
            write_frame(writer, b"s", f"{problem.errno or 0} {problem.strerror}".encode())
            await writer.drain()
            return
        write_frame(writer, b"s", b"")
        copying = asyncio.ensure_future(show(there, writer))
        try:
            await asyncio.gather(feed(back, reader), copying)
        finally:
            copying.cancel()
            back.close()

    # The end.

    def end(self) -> None:
        """Kill every process of the machine, and remove its folders."""
        for group in self.groups:
            kill_group(group)
        clear(self.label, self.folder, self.given["node_folder"])


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
