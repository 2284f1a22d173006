"""Connections to a host that the program `ssh` carries: a control master, which is our child.

Bytes pass no interpreter: a command gets its sockets through the master's own socket, and a dialled
socket is one that the master forwards. docs/providers.md says what the user sees of it.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import hashlib
import importlib.util
import math
import os
import random
import re
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Any, TypeVar
from weakref import ref

from skyward.errors import ConfigurationError, SkywardError, UnreachableError
from skyward.providers.hosts import (
    CLOSE_SECONDS,
    KEEPALIVE_MISSES,
    KEEPALIVE_SECONDS,
    STANDARD_PORT,
    Destination,
    HostLogin,
)

T = TypeVar("T")

OLDEST = (8, 5)
"""The first OpenSSH with LogVerbose, from which we know what becomes of each channel."""
BUFFER = 1 << 20
"""How many unread bytes the kernel holds, and what is kept of a command's standard error."""
_USUAL_CONFIG = "~/.ssh/config"
_SYSTEM_CONFIG = "/etc/ssh/ssh_config"
_MOST_ENVIRONMENT = 64 << 10
"""A master takes requests of 256 KiB."""
_PAUSES = (0.3, 0.6, 1.2, 2.4, 4.8)
"""How long to wait before the next attempt to log in through a jump host that drops logins."""
_LONGEST_FOLDER = 70
"""A socket's path may have 104 bytes on some systems, and a master adds 17 of them for a while."""

# Ends with the client, however that ends: then the pipe that is its standard input is closed. Ends
# with the master, too, and then says so by closing its standard output.
_KEEPER = """
folder=$1; shift
exec 3<&0 </dev/null
"$@" 3<&- >/dev/null &
master=$!
{ read -r _ <&3; kill "$master"; } >/dev/null 2>&1 &
exec 3<&- 2>/dev/null
wait "$master"
kill $!
rm -rf "$folder"
"""

# What LogVerbose has a master say on its standard error.
_OF_LOGINS = "*:verify_host_key():*,*:userauth_pubkey():*"
_OF_CHANNELS = "*:channel_new():*,*:channel_free():*,*:channel_input_open_confirmation():*"
_LISTENS = re.compile(r"channel \d+: new .*\[(?P<path>.*)\]")
_CHANNEL = re.compile(
    r"channel (?P<number>\d+): (?:(?P<new>new) .*\[direct-|(?P<opened>open confirm)"
    r"|(?P<freed>free):|open failed: (?P<refused>.*))"
)
_LOGGED = re.compile(r"debug\d: \S+\(\):\d+ \(.*?pid=\d+\): ")

# What it says of a login that fails.
_SHOWN = re.compile(r"Server host key: (\S+ \S+)")
_OFFERED = re.compile(r"Offering public key: (.*) \S+ (SHA256:\S+)(.*)")
_UNKNOWN_KEY = re.compile(r"No \S+ host key is known for (\S+) and you have requested")
_CHANGED_KEY = re.compile(r"Host key for (\S+) has changed and you have requested")
_OFFENDING = re.compile(r"Offending .*key in (.*):(\d+)")
_NO_LOGIN = re.compile(r"(?:(\S+)@(\S+): )?(Permission denied \(.*\)|.*Too many authentication.*)")
_NO_NAME = re.compile(r"Could not resolve hostname (\S+): (.*)")
_NO_CONNECTION = re.compile(r"connect to (?:host )?(\S+) port (\d+): (.*)")
_BAD_KEY = re.compile(r'Load key "(.*)": (.*)')

# The protocol between a master and its clients: OpenSSH's PROTOCOL.mux.
_HELLO, _VERSION = 0x00000001, 4
_NEW_SESSION, _ALIVE_CHECK = 0x10000002, 0x10000004
_OPEN_FORWARD, _CLOSE_FORWARD, _LOCAL = 0x10000006, 0x10000007, 1
_OK, _DENIED, _FAILURE = 0x80000001, 0x80000002, 0x80000003
_EXIT = 0x80000004
_UNIX_PORT = 0xFFFFFFFE
"""Stands for a port where the host is the path of a Unix socket."""
_NO_ESCAPE = 0xFFFFFFFF


def program() -> str | None:
    """The path of an `ssh` that can carry connections; None if there is none."""
    found = shutil.which("ssh")
    return found if found and _version(found) >= OLDEST else None


def check(provider: str) -> None:
    """Refuse a provider that neither `ssh` nor asyncssh can reach machines for."""
    if importlib.util.find_spec("asyncssh") is None and program() is None:
        raise ConfigurationError(
            f"{provider} needs the program `ssh`, OpenSSH {'.'.join(map(str, OLDEST))} or newer; "
            "or else the package asyncssh, install it with: pip install "
            f"'skyward-torch[{provider.lower()}]'"
        )


def why_not() -> str:
    """Why `ssh` carries no connections here; empty if it does."""
    found = shutil.which("ssh")
    if found is None:
        return "there is no program `ssh` here"
    if _version(found) < OLDEST:
        return f"{found} is not OpenSSH {'.'.join(map(str, OLDEST))} or newer"
    return ""


@lru_cache
def _version(path: str) -> tuple[int, ...]:
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        said = subprocess.run([path, "-V"], capture_output=True, text=True, timeout=20, check=False)
        if match := re.search(r"OpenSSH_\D*(\d+)\.(\d+)", said.stderr + said.stdout):
            return int(match[1]), int(match[2])
    return ()


# Options: what the arguments and the ssh configuration file come to.


def _configuration(destination: Destination) -> str:
    """A configuration file with what is always so, the arguments, and then the user's own.

    It is a file, because `ssh` hands no options on to the processes that lead to jump hosts. Of
    several values, the first counts.
    """
    lines = [
        "Host *",
        "BatchMode yes",
        "StrictHostKeyChecking yes",
        f"ConnectTimeout {math.ceil(destination.timeout)}",
        f"ServerAliveInterval {KEEPALIVE_SECONDS}",
        f"ServerAliveCountMax {KEEPALIVE_MISSES}",
        "LogLevel INFO",
        f"LogVerbose {_OF_LOGINS}",
        "VisualHostKey no",
        "ForwardAgent no",
        "ForwardX11 no",
    ]
    if destination.known_hosts is not None:
        lines += [
            f"UserKnownHostsFile {_quoted(destination.known_hosts)}",
            "GlobalKnownHostsFile /dev/null",
        ]
    if destination.key is not None:
        lines += [f"IdentityFile {_quoted(destination.key)}", "IdentitiesOnly yes"]
    if destination.config is not None:
        lines.append(f"Include {_quoted(destination.config, escape=False)}")
        if destination.config == _USUAL_CONFIG:
            lines.append(f"Include {_SYSTEM_CONFIG}")
    # AES-GCM carries twice as much per second as the first choice of OpenSSH.
    lines += ["Host *", "Ciphers ^aes128-gcm@openssh.com,aes256-gcm@openssh.com"]
    return "\n".join([*lines, ""])


def _quoted(path: str, *, escape: bool = True) -> str:
    full = str(Path(path).expanduser().absolute())
    return f'"{full.replace("%", "%%") if escape else full}"'


def _arguments(destination: Destination) -> list[str]:
    """The arguments that are for the host itself, and not for those on the way to it."""
    host, words = destination.host, []
    if host.user is not None:
        words += ["-l", host.user]
    if host.port is not None:
        words += ["-p", str(host.port)]
    if destination.proxy:
        words += ["-o", f"ProxyCommand={shlex.join(destination.proxy).replace('%', '%%')}"]
    elif destination.jump is not None:
        words += ["-J", destination.jump.replace(" ", "")]
    return [*words, "--", host.name]


def _check_key(destination: Destination) -> None:
    if destination.key is not None:
        path = Path(destination.key).expanduser()
        try:
            path.open("rb").close()
        except OSError as error:
            raise ConfigurationError(
                f"SSH(key={str(path)!r}): {error.strerror}; name the private key's file, or leave "
                "key out to use your agent and the keys in ~/.ssh"
            ) from error


def resolved(destination: Destination) -> HostLogin:
    """Ask `ssh` where a login leads."""
    _check_key(destination)
    asked = subprocess.run(
        [program() or "ssh", "-G", "-F", "/dev/stdin", *_arguments(destination)],
        input=_configuration(destination),
        capture_output=True,
        text=True,
        check=False,
    )
    if asked.returncode:
        raise _misconfigured(destination, asked.stderr.splitlines())
    found: dict[str, str] = {}
    for line in asked.stdout.splitlines():
        name, _, value = line.partition(" ")
        found.setdefault(name, value)
    if destination.known_hosts is not None:
        files = [destination.known_hosts]
    else:
        told = f"{found.get('userknownhostsfile', '')} {found.get('globalknownhostsfile', '')}"
        files = [each for each in told.split() if not each.endswith("known_hosts2")]
    ways = [found.get(each, "none") for each in ("proxyjump", "proxycommand")]
    return HostLogin(
        destination,
        found.get("hostname", destination.host.name),
        int(found.get("port", STANDARD_PORT)),
        found.get("user", ""),
        tuple(Path(each).expanduser() for each in files) or (Path("~/.ssh/known_hosts"),),
        is_behind=any(each != "none" for each in ways),
    )


def _misconfigured(destination: Destination, said: list[str]) -> ConfigurationError:
    source = f" with {destination.config}" if destination.config else ""
    # Ours is called /dev/stdin there; what is wrong is in a file of the user's.
    text = "; ".join(said).replace("/dev/stdin", "the arguments")
    return ConfigurationError(f"SSH host {destination.host.name!r}{source}: {text}")


# Errors of a login: the reason, and what the user can do next.


def _explained(destination: Destination, said: list[str]) -> SkywardError:
    """The error for a login that failed, from what `ssh` has said of it."""
    try:
        login = resolved(destination)
    except ConfigurationError as problem:
        return problem
    lines = [_LOGGED.sub("", line) for line in said]
    text = "\n".join(lines)
    plain = [line for line in said if not _LOGGED.match(line)]
    shown = next((found[1] for line in reversed(lines) if (found := _SHOWN.search(line))), "a key")
    if found := _UNKNOWN_KEY.search(text):
        authority = " and no authority for it" if _has_authority(login) else ""
        return login.on_the_way(*_place(found[1])).unknown_key(shown, authority)
    if found := _CHANGED_KEY.search(text):
        return login.on_the_way(*_place(found[1])).changed_key(shown, _offending(text))
    if "Host key verification failed" in text or "host key for" in text:
        return login.refused_key("; ".join(plain))
    if destination.key and (found := _BAD_KEY.search(text)):
        key = str(Path(destination.key).expanduser())
        if found[1] == key and "passphrase" not in found[2]:
            advice = f": chmod 600 {shlex.quote(key)}" if "permissions" in found[2] else ""
            return ConfigurationError(
                f"SSH(key={key!r}): {'not a private key: ' if not advice else ''}{found[2]}{advice}"
            )
    if found := _NO_LOGIN.search(text):
        if found[2] and found[2] not in (login.host, destination.host.name):
            login = login.on_the_way(found[2], login.port)
        return login.refused(found[3].strip(), *_keys(destination, text))
    if found := _NO_NAME.search(text):
        return login.on_the_way(found[1], login.port).unreachable(
            f"no such name ({found[2]})",
            "check the spelling, or say where it is with a Host entry in ~/.ssh/config",
        )
    if found := _CHANNEL.search(text):
        return login.unreachable(
            f"the jump host could not connect to it: {found['refused']}",
            "is the address right as seen from there, and does its sshd allow TCP forwarding?",
        )
    if "timed out" in text:
        return login.unreachable(
            f"no answer within {destination.timeout:g} s",
            "is the machine up, and its address right? a firewall may drop the packets; "
            "SSH(timeout=...) waits longer",
        )
    if found := _NO_CONNECTION.search(text):
        there = login.on_the_way(found[1], int(found[2]))
        if found[3] == "Connection refused":
            return there.unreachable(
                "connection refused", "is sshd running there, and is this its port?"
            )
        if found[3] in ("No route to host", "Network is unreachable"):
            return there.unreachable(f"no route to it ({found[3]})")
        return there.unreachable(found[3])
    return login.unreachable("; ".join(plain[-3:]) or "`ssh` ended and said nothing")


def _was_dropped(said: Iterable[str]) -> bool:
    """Whether a jump host has closed the connection instead of greeting, and we ours for that."""
    closed = re.compile(r"kex_exchange_identification: .*(closed|reset)")
    return sum(closed.match(line) is not None for line in said) > 1


def _place(entry: str) -> tuple[str, int]:
    """The host and the port of an entry of known hosts: "name", or "[name]:port"."""
    if match := re.fullmatch(r"\[(.*)\]:(\d+)", entry):
        return match[1], int(match[2])
    return entry, STANDARD_PORT


def _has_authority(login: HostLogin) -> bool:
    for path in login.known_hosts:
        with contextlib.suppress(OSError):
            if "@cert-authority" in path.read_text(errors="replace"):
                return True
    return False


def _offending(text: str) -> str:
    """The fingerprint of the key on record, or where it is."""
    found = _OFFENDING.search(text)
    if found is None:
        return "another"
    with contextlib.suppress(OSError, IndexError, binascii.Error):
        line = Path(found[1]).read_text(errors="replace").splitlines()[int(found[2]) - 1]
        key = next(word for word in line.split() if word.startswith("AAAA"))
        return _fingerprint(base64.b64decode(key))
    return f"the one at {found[1]}:{found[2]}"


def _fingerprint(key: bytes) -> str:
    return f"SHA256:{base64.b64encode(hashlib.sha256(key).digest()).decode().rstrip('=')}"


def _keys(destination: Destination, text: str) -> tuple[list[str], list[str]]:
    """The keys that were offered, and the files that could not be read without a passphrase."""
    tried = [f"{name} ({digest})" for name, digest, _ in _OFFERED.findall(text)]
    files = [destination.key] if destination.key else [name for name, *_ in _OFFERED.findall(text)]
    if not files:
        files = [str(path) for path in sorted(Path("~/.ssh").expanduser().glob("id_*[!b]"))]
    if destination.key is None:
        agent = os.environ.get("SSH_AUTH_SOCK")
        tried.append("the agent's keys" if agent else "no agent (SSH_AUTH_SOCK is not set)")
    return tried, [path for path in map(_expanded, files) if _has_passphrase(path)]


def _expanded(path: str) -> str:
    return str(Path(path).expanduser())


def _has_passphrase(path: str) -> bool:
    if not os.access(path, os.R_OK):
        return False
    asked = subprocess.run(
        ["ssh-keygen", "-y", "-P", "", "-f", path], capture_output=True, text=True, check=False
    )
    return asked.returncode != 0 and "passphrase" in asked.stderr


# One channel of a master.


class Stream:
    """A command that runs on a host, or a connection to a socket there."""

    def __init__(self, ended: Callable[[Stream], None]) -> None:
        self._ended = ended
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # Whoever waited for it may have given up.
        self.opened.add_done_callback(lambda done: done.cancelled() or done.exception())
        self.closed = asyncio.Event()
        self.status: int | None = None
        """The exit status of a command, after its end."""
        self.errors = bytearray()
        """The last that a command wrote to its standard error."""
        self.control: Control | None = None
        self.end: Callable[[], socket.socket | None] = lambda: None
        """The socket that leads to the channel, as long as somebody has it."""

    def close(self) -> None:
        """Close the channel; whoever reads its socket sees the end."""
        if self.control is not None:
            self.control.close()
        elif (end := self.end()) is not None:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def finish(self, problem: Exception | None = None) -> None:
        """Tell the owner, once, that the channel is closed."""
        if not self.opened.done():
            self.opened.set_exception(problem or ConnectionResetError("the channel was closed"))
        if not self.closed.is_set():
            self.closed.set()
            self._ended(self)


class Control(asyncio.Protocol):
    """A connection to a master's own socket, for questions or for one command."""

    def __init__(self, lost: Callable[[], None]) -> None:
        self._lost = lost
        self._ids = count()
        self._asked: dict[int, asyncio.Future[tuple[int, bytes]]] = {}
        self._held = b""
        self._transport: asyncio.Transport | None = None
        self.status: int | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the connection."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def close(self) -> None:
        """Hang up; the command's channel is closed with it."""
        if self._transport is not None:
            self._transport.abort()

    async def ask(self, kind: int, *words: int | str, files: tuple[int, ...] = ()) -> str:
        """Ask for something, with open files; returns why it was refused, or nothing."""
        assert self._transport is not None
        if self._transport.is_closing():
            raise ConnectionResetError("the connection was lost")
        number = next(self._ids)
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        self._transport.write(_packed(kind, number, *words))
        end = self._transport.get_extra_info("socket")
        for file in files:
            # A master reads a request and then its files: no byte may overtake another.
            while self._transport.get_write_buffer_size() or not _passed(end, file):
                await asyncio.sleep(0.001)
        reply, body = await answer
        if reply in (_DENIED, _FAILURE):
            return body[4:].decode(errors="replace") or "no reason given"
        return ""

    def data_received(self, data: bytes) -> None:
        """Take the answers apart."""
        self._held += data
        while len(self._held) >= 8:
            size, kind = struct.unpack_from(">II", self._held)
            if len(self._held) < 4 + size:
                break
            body, self._held = self._held[8 : 4 + size], self._held[4 + size :]
            if kind == _EXIT:
                self.status = int.from_bytes(body[4:8], "big")
            elif kind != _HELLO and len(body) >= 4:
                answer = self._asked.pop(int.from_bytes(body[:4], "big"), None)
                if answer is not None and not answer.done():
                    answer.set_result((kind, body[4:]))

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail what was asked."""
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(ConnectionResetError("the connection was lost"))
                answer.exception()
        self._lost()


def _packed(kind: int, *words: int | str) -> bytes:
    body = struct.pack(">I", kind)
    for word in words:
        if isinstance(word, int):
            body += struct.pack(">I", word)
        else:
            text = word.encode(errors="surrogateescape")
            body += struct.pack(">I", len(text)) + text
    return struct.pack(">I", len(body)) + body


def _passed(end: socket.socket, file: int) -> bool:
    try:
        # asyncio's socket of a transport has no method for this.
        with socket.socket(fileno=os.dup(end.fileno())) as own:
            socket.send_fds(own, [b"\0"], [file])
    except BlockingIOError:
        return False
    return True


# The master.


@dataclass(eq=False)
class Master:
    """A running `ssh`, and the channels that it carries."""

    destination: Destination
    folder: str
    _process: subprocess.Popen[bytes]
    _said: deque[str] = field(default_factory=lambda: deque(maxlen=200))
    """What it has said of other things than channels."""
    _channels: dict[int, Stream] = field(default_factory=dict)
    """The connections to sockets of the host, by the master's own numbers."""

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._control: Control | None = None
        self._paths = count()
        self._accepting = asyncio.Lock()
        self._accepted: tuple[Stream, asyncio.Future[int]] | None = None
        self._refusal = ""
        self._line = b""
        self._closing = False
        self._background: set[asyncio.Task[Any]] = set()
        self._listening: asyncio.Future[bool] = self._loop.create_future()
        self._over = asyncio.Event()
        output, errors = self._process.stdout, self._process.stderr
        assert output is not None
        assert errors is not None
        os.set_blocking(errors.fileno(), False)
        self._loop.add_reader(errors.fileno(), self._read)
        self._loop.add_reader(output.fileno(), self._end)

    @classmethod
    async def started(cls, destination: Destination) -> Master:
        """Log in; what `ssh` says of a failure becomes an error of ours.

        A jump host may drop logins that come together, and all nodes behind it start together.
        """
        for pause in _PAUSES:
            master = await cls._begun(destination)
            if master is not None:
                return master
            await asyncio.sleep(pause * random.uniform(0.5, 1.5))
        raise (await asyncio.to_thread(resolved, destination)).unreachable(
            "the jump host closes the connection before the login",
            "it may have too many logins at once: see MaxStartups in its sshd_config",
        )

    @classmethod
    async def _begun(cls, destination: Destination) -> Master | None:
        """One attempt to log in; None if a jump host has dropped it."""
        _check_key(destination)
        base = tempfile.gettempdir()
        folder = tempfile.mkdtemp(
            prefix="sky-ssh-", dir=base if len(base) < _LONGEST_FOLDER else "/tmp"
        )
        try:
            Path(folder, "config").write_text(_configuration(destination))
            # `ssh` itself checks no rights of a file that is named to it; the folder is private.
            command = [
                *(program() or "ssh", "-F", f"{folder}/config"),
                *("-M", "-S", f"{folder}/control".replace("%", "%%"), "-N", "-T"),
                *("-o", "ControlPersist=no", "-o", "ClearAllForwardings=yes"),
                *("-o", "RemoteCommand=none", "-o", "PermitLocalCommand=no"),
                *("-o", f"LogVerbose={_OF_CHANNELS},{_OF_LOGINS}"),
                *_arguments(destination),
            ]
            process = subprocess.Popen(
                ["/bin/sh", "-c", _KEEPER, "sh", folder, *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                # Ctrl-C in a terminal is for the client, which decides what ends.
                start_new_session=True,
            )
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        master = cls(destination, folder, process)
        try:
            if not await master._listening:
                if _was_dropped(master._said):
                    await master.finish()
                    return None
                raise await asyncio.to_thread(_explained, destination, list(master._said))
            master._control = await master._connected(master._lose)
        except BaseException as problem:
            await master.finish()
            if isinstance(problem, SkywardError | asyncio.CancelledError):
                raise
            raise UnreachableError(
                f"SSH host {destination.host.name}: the connection was lost: {problem}"
            ) from problem
        return master

    async def _connected(self, lost: Callable[[], None]) -> Control:
        """A connection to the master's own socket."""
        try:
            _, control = await self._loop.create_unix_connection(
                lambda: Control(lost), f"{self.folder}/control"
            )
        except OSError as error:
            self._lose()
            raise ConnectionAbortedError(str(self.lost())) from error
        assert control._transport is not None
        end = control._transport.get_extra_info("socket")
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
        control._transport.write(_packed(_HELLO, _VERSION))
        return control

    # Its life.

    def is_closed(self) -> bool:
        """Whether it carries nothing more."""
        return self._closing or self._over.is_set()

    def close(self) -> None:
        """Have it end, with all its channels."""
        self._closing = True
        if self._control is not None:
            self._control.close()
        self._let_go()

    def _let_go(self) -> None:
        """Tell what keeps the master to end it; a process that was forked has the pipe, too."""
        pipe = self._process.stdin
        if pipe is not None and not pipe.closed:
            with contextlib.suppress(OSError):
                pipe.write(b"\n")
            pipe.close()

    async def finish(self) -> None:
        """Wait for the end of a master that is closed; if nobody waits, kill it."""
        self.close()
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._over.wait()
        except TimeoutError:
            self._kill()
        except asyncio.CancelledError:
            self._kill()
            raise
        while self._background:
            await asyncio.wait(self._background)

    def _kill(self) -> None:
        """End it here and now."""
        if not self._over.is_set():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._end()
            shutil.rmtree(self.folder, ignore_errors=True)

    def _lose(self) -> None:
        """Start nothing more: it has closed its own socket, and is about to end."""
        self._closing = True
        self._let_go()

    def _end(self) -> None:
        """Take note that it has ended; what keeps it says nothing before."""
        output, errors = self._process.stdout, self._process.stderr
        assert output is not None
        assert errors is not None
        self._read()
        for each in (output, errors):
            self._loop.remove_reader(each.fileno())
            each.close()
        self.close()
        self._process.wait()
        self._over.set()
        if not self._listening.done():
            self._listening.set_result(False)
        problem = self.lost()
        if self._accepted is not None and not self._accepted[1].done():
            self._accepted[1].set_exception(problem)
        streams, self._channels = list(self._channels.values()), {}
        for stream in streams:
            stream.finish(problem)

    def lost(self) -> ConnectionResetError:
        """The error of what was under way when the connection was lost."""
        plain = [line for line in self._said if not _LOGGED.match(line)]
        return ConnectionResetError(plain[-1] if plain else "the connection was lost")

    # What it says.

    def _read(self) -> None:
        errors = self._process.stderr
        if errors is None or errors.closed:
            return
        while True:
            try:
                data = os.read(errors.fileno(), 1 << 16)
            except BlockingIOError:
                return
            if not data:
                self._loop.remove_reader(errors.fileno())
                return
            *lines, self._line = (self._line + data).split(b"\n")
            for line in lines:
                self._hear(line.decode(errors="replace").strip())

    def _hear(self, line: str) -> None:
        if not self._listening.done() and (found := _LISTENS.search(line)):
            self._listening.set_result(found["path"] == f"{self.folder}/control")
            return
        said = _CHANNEL.search(line)
        if said is None:
            if line:
                self._said.append(line)
            return
        number = int(said["number"])
        if said["new"]:
            if self._accepted is not None:
                stream, accepted = self._accepted
                self._accepted, self._channels[number] = None, stream
                if not accepted.done():
                    accepted.set_result(number)
            return
        stream_there = self._channels.get(number)
        if said["refused"]:
            self._refusal = said["refused"]
            if not self._listening.done():
                self._said.append(line)
        if stream_there is None:
            return
        if said["freed"]:
            del self._channels[number]
            stream_there.finish()
        elif not stream_there.opened.done():
            if said["opened"]:
                stream_there.opened.set_result(None)
            else:
                kind: type[OSError] = ConnectionResetError
                if said["refused"].startswith("connect failed"):
                    kind = ConnectionRefusedError
                elif said["refused"].startswith("administratively prohibited"):
                    kind = PermissionError
                stream_there.opened.set_exception(kind(said["refused"]))

    # Its channels.

    async def open(
        self, endpoint: str, ended: Callable[[Stream], None]
    ) -> tuple[Stream, socket.socket]:
        """Open a channel to an endpoint, and return the socket that leads to it.

        The endpoint "exec:COMMAND" is the standard input and output of a command on the host.
        """
        family, _, place = endpoint.partition(":")
        if family == "exec":
            return await self._run(place, ended)
        stream = Stream(ended)
        accepting = self._later(self._accept(stream, endpoint))
        end: socket.socket | None = None
        try:
            end = await asyncio.shield(accepting)
            await asyncio.shield(stream.opened)
            end.setblocking(True)
        except BaseException:
            if end is not None:
                end.close()
            else:
                accepting.add_done_callback(_close_late)
            raise
        return stream, end

    async def _accept(self, stream: Stream, endpoint: str) -> socket.socket:
        """A socket that the master has accepted, and forwards to the endpoint.

        Not to be cancelled: the next socket would be taken for this one.
        """
        family, _, place = endpoint.partition(":")
        if family == "unix":
            there: tuple[str, int] = (place, _UNIX_PORT)
        else:
            host, _, port = place.rpartition(":")
            there = (host.strip("[]"), int(port))
        async with self._accepting:
            assert self._control is not None
            path = f"{self.folder}/{next(self._paths)}"
            forward = (_LOCAL, path, _UNIX_PORT, *there)
            try:
                refused = await self._control.ask(_OPEN_FORWARD, *forward)
            except OSError as error:
                raise ConnectionAbortedError(str(self.lost())) from error
            if refused:
                raise ConnectionResetError(f"{refused}: {self.lost()}")
            end = socket.socket(socket.AF_UNIX)
            try:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
                end.setblocking(False)
                accepted = self._loop.create_future()
                self._accepted = stream, accepted
                await self._loop.sock_connect(end, path)
                await accepted
                stream.end = ref(end)
                await self._control.ask(_CLOSE_FORWARD, *forward)
            except OSError as error:
                end.close()
                raise self.lost() from error
            except BaseException:
                end.close()
                raise
            finally:
                self._accepted = None
                with contextlib.suppress(OSError):
                    os.unlink(path)
            return end

    async def _run(
        self, line: str, ended: Callable[[Stream], None]
    ) -> tuple[Stream, socket.socket]:
        stream = Stream(ended)
        parts = {"control", "errors"}

        def part_over(part: str) -> None:
            parts.discard(part)
            if not parts:
                self._later(self._ended(stream))

        control = stream.control = await self._connected(lambda: part_over("control"))
        ours, theirs = socket.socketpair()
        reading, writing = os.pipe()
        try:
            for each in (ours, theirs):
                each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
            os.set_blocking(reading, False)

            def read_errors() -> None:
                data = os.read(reading, 1 << 16)
                stream.errors += data
                del stream.errors[:-BUFFER]
                if not data:
                    self._loop.remove_reader(reading)
                    os.close(reading)
                    part_over("errors")

            self._loop.add_reader(reading, read_errors)
            words: tuple[int | str, ...] = ("", 0, 0, 0, 0, _NO_ESCAPE, "", line, *_environment())
            asked = control.ask(
                _NEW_SESSION,
                *words,
                files=(theirs.fileno(), theirs.fileno(), writing),
            )
            try:
                refused = await asked
            finally:
                theirs.close()
                os.close(writing)
            if refused:
                self._read()
                raise ConnectionRefusedError(self._refusal or refused)
        except BaseException:
            ours.close()
            control.close()
            raise
        stream.opened.set_result(None)
        return stream, ours

    async def _ended(self, stream: Stream) -> None:
        """Take the command's status; one that a signal has killed has none, and `ssh` says 255."""
        assert stream.control is not None
        stream.status = stream.control.status
        if stream.status is None and self._control is not None:
            with contextlib.suppress(OSError):
                await self._control.ask(_ALIVE_CHECK)
                stream.status = 255
        stream.finish()

    def _later(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task


def _close_late(accepting: asyncio.Task[socket.socket]) -> None:
    if not accepting.cancelled() and accepting.exception() is None:
        accepting.result().close()


def _environment() -> list[str]:
    """What the user's SendEnv may choose from: the master sends nothing else."""
    found = [f"{name}={value}" for name, value in os.environ.items()]
    if sum(len(each.encode(errors="surrogateescape")) + 4 for each in found) > _MOST_ENVIRONMENT:
        return [each for each in found if each.startswith(("LANG=", "LC_"))]
    return found
