"""The connections to one host over SSH, shared by all that this process does there."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import errno
import hashlib
import os
import shlex
import socket
import weakref
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import asyncssh

from skyward.errors import (
    ConfigurationError,
    HostKeyError,
    LoginError,
    SkywardError,
    UnreachableError,
)
from skyward.providers.hosts import Destination

CLOSE_SECONDS = 3.0
"""How long a host that may be dead has to confirm that a connection is closed."""
COMMANDS_EACH = 8
"""How many commands share a connection. An sshd allows 10 unless its configuration says otherwise;
one that allows fewer refuses a command, and that connection gets no more from then on."""


class HostConnections:
    """The connections to one host on one event loop; opened when needed, and again when lost."""

    def __init__(self, destination: Destination) -> None:
        self.destination = destination
        self.users = 0
        self._open: list[_Connection] = []
        self._opening: dict[bool, asyncio.Task[_Connection]] = {}
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def connected(self) -> bool:
        """Whether there is a connection that nobody has closed."""
        return any(not each.connection.is_closed() for each in self._open)

    async def connection(
        self, *, busy: bool = False
    ) -> tuple[asyncssh.SSHClientConnection, Callable[[], None]]:
        """A connection for one stream, and what the caller calls, once, when the stream is over.

        Busy streams, which may carry much, share a connection of their own: on a slow network they
        would delay the others for so long that the host looked dead.
        """
        chosen = await self._choose(lambda each: each.busy == busy, busy)
        chosen.streams += 1

        def over() -> None:
            chosen.streams -= 1
            self._close_if_unused(chosen)

        return chosen.connection, over

    async def command_place(self) -> CommandPlace:
        """The place of one command, on a connection that takes one more."""
        chosen = await self._choose(lambda each: not each.busy and each.commands < each.room)
        chosen.commands += 1
        return CommandPlace(chosen, self._close_if_unused)

    async def _choose(self, fits: Callable[[_Connection], bool], busy: bool = False) -> _Connection:
        """An open connection that fits, or else the next that opens and has room for us too."""
        while True:
            for each in list(self._open):
                if each.connection.is_closed():
                    self._remove(each)
            for each in self._open:
                if fits(each) and not each.retired:
                    return each
            new = await self._next(busy)
            # Several callers may have waited for this connection, and it takes only so many.
            if fits(new):
                return new

    def _close_if_unused(self, connection: _Connection) -> None:
        """Close a retired connection after its last command and stream."""
        unused = not connection.commands and not connection.streams
        if connection.retired and unused and connection in self._open:
            connection.connection.close()
            self._remove(connection)

    def _remove(self, connection: _Connection) -> None:
        """Wait in the background until a closed connection has ended."""
        self._open.remove(connection)
        closing = asyncio.create_task(connection.finish())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def _next(self, busy: bool) -> _Connection:
        """The next connection that opens.

        Opening goes on when a caller gives up: on a slow network every caller would.
        """
        opening = self._opening.get(busy)
        if opening is None:
            opening = self._opening[busy] = asyncio.create_task(self._connect(busy))
            opening.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(opening)

    async def _connect(self, busy: bool) -> _Connection:
        try:
            connection = _Connection(*await _connected(self.destination), busy)
            self._open.append(connection)
            return connection
        finally:
            del self._opening[busy]

    def retire(self, connection: asyncssh.SSHClientConnection | None = None) -> None:
        """Start nothing new on a connection that does not answer; on None, on any of them.

        Its commands and streams go on until the connection is known to be dead. After the last of
        them the connection is closed.
        """
        for each in list(self._open):
            each.retired |= connection in (None, each.connection)
            self._close_if_unused(each)

    async def close(self) -> None:
        """Close all connections, and let go of the hosts that they go through."""
        for opening in list(self._opening.values()):
            opening.cancel()
            await asyncio.wait({opening})
        closed, self._open = self._open, []
        for each in closed:
            each.connection.close()
        for each in closed:
            await each.finish()
        while self._closing:
            await asyncio.wait(self._closing)


class _Connection:
    """One connection to a host, and how many commands and streams use it."""

    def __init__(
        self, connection: asyncssh.SSHClientConnection, jump: _JumpStream | None, busy: bool
    ) -> None:
        self.connection = connection
        self.busy = busy
        self.retired = False
        self._jump = jump
        self.commands = 0
        self.room = COMMANDS_EACH
        self.streams = 0

    async def finish(self) -> None:
        """Wait for the end of a closed connection, and let go of the host it went through."""
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self.connection.wait_closed()
        except TimeoutError:
            self.connection.abort()
        if self._jump is not None:
            await self._jump.close()


class CommandPlace:
    """The place of a command on a connection, which takes only so many."""

    def __init__(self, connection: _Connection, left: Callable[[_Connection], None]) -> None:
        self._on, self._left = connection, left

    @property
    def connection(self) -> asyncssh.SSHClientConnection:
        """The connection itself."""
        return self._on.connection

    def was_full(self) -> bool:
        """Whether a host that refused the command may take it on another connection.

        To be asked when the place has been given back: the connection takes no more from then on.
        """
        if self._on.commands == 0:
            return False
        self._on.room = self._on.commands
        return True

    def leave(self) -> None:
        """Give the place back, once."""
        self._on.commands -= 1
        self._left(self._on)


class _JumpStream:
    """A stream through a jump host, which carries a connection to the host behind it."""

    def __init__(self, host: HostConnections) -> None:
        self._host = host
        self._over: Callable[[], None] | None = None

    async def open(self) -> asyncssh.SSHClientConnection:
        """The connection to the jump host."""
        connection, self._over = await self._host.connection()
        return connection

    async def close(self) -> None:
        """Let go of the jump host."""
        if self._over is not None:
            self._over()
        await release(self._host)


_held: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Destination, HostConnections]] = (
    weakref.WeakKeyDictionary()
)
"""A connection belongs to the loop that opened it."""


def hold(destination: Destination) -> HostConnections:
    """The connections to a destination; they stay until released as often as held."""
    here = _held.setdefault(asyncio.get_running_loop(), {})
    host = here.get(destination)
    if host is None:
        host = here[destination] = HostConnections(destination)
    host.users += 1
    return host


async def release(host: HostConnections) -> None:
    """Let go of a host; the last user to do so closes its connections."""
    host.users -= 1
    if host.users == 0:
        here = _held.get(asyncio.get_running_loop(), {})
        if here.get(host.destination) is host:
            del here[host.destination]
        await host.close()


class _HostKeyRecorder(asyncssh.SSHClient):
    """Keeps the host key that was not accepted, for the error message."""

    def __init__(self, attempt: ConnectionAttempt) -> None:
        self._attempt = attempt

    def validate_host_public_key(
        self, host: str, addr: str, port: int, key: asyncssh.SSHKey
    ) -> bool:
        """Refuse the key; asyncssh asks only about keys that are not known."""
        self._attempt.shown = key
        return False

    def validate_host_ca_key(self, host: str, addr: str, port: int, key: asyncssh.SSHKey) -> bool:
        """Refuse the authority of a certificate likewise."""
        self._attempt.shown = key
        return False


async def _connected(
    destination: Destination,
) -> tuple[asyncssh.SSHClientConnection, _JumpStream | None]:
    """Connect, through jump hosts where the destination names them."""
    options = await asyncio.to_thread(resolved, destination)
    files = known_hosts_files(destination, options)
    attempt = await asyncio.to_thread(ConnectionAttempt, destination, options, files)
    through = None
    jump = destination.jump or options.tunnel
    if jump and jump != "none":
        before = destination.through(str(jump))
        # `Host *` with a ProxyJump names the jump host itself, too.
        if before.host.name not in (destination.host.name, options.host):
            through = _JumpStream(hold(before))
    try:
        tunnel = await through.open() if through is not None else None
        with attempt.explained():
            # `connect` takes for not given what is not repeated here.
            connection = await asyncssh.connect(
                destination.host.name,
                () if destination.host.port is None else destination.host.port,
                tunnel=tunnel,
                config=config_files(destination.config),
                options=options,
                known_hosts=attempt.known,
                client_factory=lambda: _HostKeyRecorder(attempt),
                encryption_algs=() if options.config.get("Ciphers", None) else CIPHERS,
            )
    except BaseException:
        if through is not None:
            await through.close()
        raise
    return connection, through


async def opened(opening: Coroutine[Any, Any, tuple[Any, Any]]) -> None:
    """Open a channel; one that opens after its opener was cancelled is closed again."""
    task = asyncio.create_task(opening)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(_abandon)
        raise


def _abandon(task: asyncio.Task[tuple[Any, Any]]) -> None:
    if not task.cancelled() and task.exception() is None:
        task.result()[0].abort()


# Options: what the arguments and the ssh configuration file come to.

CIPHERS = (
    "aes128-gcm@openssh.com",
    "aes256-gcm@openssh.com",
    "chacha20-poly1305@openssh.com",
    "aes256-ctr",
    "aes128-ctr",
)
"""AES-GCM comes first: it carries twice as much per second as asyncssh's own first choice."""
KEEPALIVE_SECONDS = 10
KEEPALIVE_MISSES = 3
"""The client gives up a silent host after 30 to 40 s, and does not notice a shorter outage."""


def resolved(destination: Destination) -> asyncssh.SSHClientConnectionOptions:
    """Combine the arguments with the ssh configuration file; this reads key files."""
    host = destination.host
    given: dict[str, Any] = {}
    if host.user is not None:
        given["username"] = host.user
    if host.port is not None:
        given["port"] = host.port
    if destination.proxy:
        given["proxy_command"] = list(destination.proxy)
    if destination.key is not None:
        given |= _with_key(Path(destination.key).expanduser())
    try:
        return asyncssh.SSHClientConnectionOptions(
            host=host.name,
            config=config_files(destination.config),
            connect_timeout=destination.timeout,
            keepalive_interval=KEEPALIVE_SECONDS,
            keepalive_count_max=KEEPALIVE_MISSES,
            password_auth=False,
            kbdint_auth=False,
            agent_forwarding=False,
            x11_forwarding=False,
            request_pty=False,
            encoding=None,
            **given,
        )
    except (asyncssh.Error, asyncssh.KeyImportError, OSError, ValueError) as error:
        source = f" with {destination.config}" if destination.config else ""
        raise ConfigurationError(f"SSH host {host.name!r}{source}: {error}") from error


def config_files(config: str | None) -> list[str]:
    path = Path(config).expanduser() if config else None
    return [str(path)] if path is not None and os.access(path, os.R_OK) else []


def _with_key(path: Path) -> dict[str, Any]:
    """The options for one key: its file, or the ssh agent's copy if the file has a passphrase."""
    try:
        asyncssh.read_private_key(path)
    except asyncssh.KeyEncryptionError:
        public = path.with_name(path.name + ".pub")
        identities = {"agent_identities": [str(public)]} if public.exists() else {}
        return {"client_keys": [str(path)], "ignore_encrypted": True, **identities}
    except asyncssh.KeyImportError as error:
        if "passphrase" in str(error).lower():
            return {"client_keys": [str(path)], "ignore_encrypted": True}
        raise ConfigurationError(f"SSH(key={str(path)!r}): not a private key: {error}") from error
    except OSError as error:
        raise ConfigurationError(
            f"SSH(key={str(path)!r}): {error.strerror}; name the private key's file, or leave key "
            "out to use your agent and the keys in ~/.ssh"
        ) from error
    return {"client_keys": [str(path)], "agent_path": None}


def known_hosts_files(
    destination: Destination, options: asyncssh.SSHClientConnectionOptions
) -> list[Path]:
    if destination.known_hosts is not None:
        return [Path(destination.known_hosts).expanduser()]
    configured: Any = options.config.get("UserKnownHostsFile", None)
    mine = configured or ["~/.ssh/known_hosts"]
    shared: Any = options.config.get("GlobalKnownHostsFile", None) or ["/etc/ssh/ssh_known_hosts"]
    return [Path(each).expanduser() for each in [*mine, *shared]]


# Errors for a host that cannot be reached: the reason, and what the user can do next.

_STANDARD_PORT = 22


class ConnectionAttempt:
    """One attempt to connect: the host, the keys on record for it, and the key it showed."""

    def __init__(
        self,
        destination: Destination,
        options: asyncssh.SSHClientConnectionOptions,
        files: list[Path],
    ) -> None:
        self._destination = destination
        self._options = options
        self._files = files
        self._records = _read(files)
        self._expected: list[asyncssh.SSHKey] = []
        self._authorities: list[asyncssh.SSHKey] = []
        self._revoked: list[asyncssh.SSHKey] = []
        self.shown: asyncssh.SSHKey | None = None

    def known(
        self, host: str, addr: str, port: int | None
    ) -> tuple[list[asyncssh.SSHKey], list[asyncssh.SSHKey], list[asyncssh.SSHKey]]:
        """The keys, authorities and revoked keys on record for a host."""
        keys, authorities, revoked, *_ = self._records.match(host, addr, port)
        self._expected, self._authorities = list(keys), list(authorities)
        self._revoked = list(revoked)
        return self._expected, self._authorities, self._revoked

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Turn the errors of asyncssh and of the network into Skyward's."""
        try:
            yield
        except SkywardError:
            raise
        except asyncssh.HostKeyNotVerifiable as error:
            raise self._wrong_key(error) from None
        except asyncssh.PermissionDenied as error:
            raise self._login_refused(error) from None
        except TimeoutError:
            raise self._unreachable(
                f"no answer within {self._destination.timeout:g} s",
                "is the machine up, and its address right? a firewall may drop the packets; "
                "SSH(timeout=...) waits longer",
            ) from None
        except ConnectionRefusedError:
            raise self._unreachable(
                "connection refused", "is sshd running there, and is this its port?"
            ) from None
        except socket.gaierror as error:
            raise self._unreachable(
                f"no such name ({error.strerror})",
                "check the spelling, or say where it is with a Host entry in ~/.ssh/config",
            ) from None
        except asyncssh.ChannelOpenError as error:
            raise self._unreachable(
                f"the jump host could not connect to it: {error.reason}",
                "is the address right as seen from there, and does its sshd allow TCP forwarding?",
            ) from None
        except (asyncssh.Error, OSError) as error:
            raise self._unreachable(_reason(error), f"try: {self._ssh()}") from error

    @property
    def _where(self) -> str:
        host, port = self._options.host, self._options.port
        name = self._destination.host.name
        also = f" ({name})" if name != host else ""
        return f"{f'[{host}]' if ':' in host else host}:{port}{also}"

    def _ssh(self) -> str:
        """The command that makes the same connection by hand."""
        parts = ["ssh"]
        if self._destination.config not in (None, "~/.ssh/config"):
            parts += ["-F", str(self._destination.config)]
        if self._destination.key is not None:
            parts += ["-i", self._destination.key]
        if self._destination.known_hosts is not None:
            parts += ["-o", f"UserKnownHostsFile={self._destination.known_hosts}"]
        if self._destination.jump is not None:
            parts += ["-J", self._destination.jump]
        if self._options.port != _STANDARD_PORT:
            parts += ["-p", str(self._options.port)]
        return shlex.join([*parts, f"{self._options.username}@{self._destination.host.name}"])

    def _unreachable(self, problem: str, advice: str) -> UnreachableError:
        return UnreachableError(f"SSH host {self._where}: {problem}; {advice}")

    def _wrong_key(self, error: asyncssh.HostKeyNotVerifiable) -> HostKeyError:
        host, port, file = self._options.host, self._options.port, str(self._files[0])
        entry = host if port == _STANDARD_PORT else f"[{host}]:{port}"
        if self.shown is None:
            return HostKeyError(f"SSH host {self._where}: {error.reason}")
        shown = f"{self.shown.get_algorithm()} {self.shown.get_fingerprint()}"
        scan = f"ssh-keyscan -p {port} {shlex.quote(host)} >> {shlex.quote(file)}"
        if self._expected:
            known = ", ".join(dict.fromkeys(key.get_fingerprint() for key in self._expected))
            return HostKeyError(
                f"SSH host {self._where}: ITS HOST KEY HAS CHANGED. It showed {shown}, and "
                f"{file} knows it by {known}. Either the machine was made anew, or somebody is "
                "in between. Nothing was sent. If you know why, and the new fingerprint is "
                f"right, replace the old key:\n  ssh-keygen -f {shlex.quote(file)} -R "
                f"{shlex.quote(entry)}\n  {scan}"
            )
        authority = " and no authority for it" if self._authorities else ""
        files = " and ".join(
            str(path) if path.exists() else f"{path} (no such file)" for path in self._files
        )
        return HostKeyError(
            f"SSH host {self._where}: its host key is not known. It showed {shown}, and "
            f"{files} had no entry for {entry}{authority}. "
            "Compare that fingerprint with the machine's own (ssh-keygen -lf "
            "/etc/ssh/ssh_host_ed25519_key.pub there), then either log in once, or add it:\n"
            f"  {self._ssh()}\n  {scan}"
        )

    def _login_refused(self, error: asyncssh.PermissionDenied) -> LoginError:
        tried, locked = self._keys()
        message = (
            f"SSH host {self._where}: no login as {self._options.username!r} ({error.reason}); "
            f"tried {', '.join(tried) or 'no key, for there was none'}."
        )
        if locked:
            message += (
                f" {' and '.join(locked)} has a passphrase, which is never asked for here: give "
                f"it to your agent with: ssh-add {shlex.join(locked)}."
            )
        return LoginError(
            f"{message} Try it by hand: {self._ssh()}\n  To let a key in: ssh-copy-id -i "
            f"KEY.pub -p {self._options.port} {self._options.username}@{self._options.host}"
        )

    def _keys(self) -> tuple[list[str], list[str]]:
        """The keys that were offered, and the files that could not be read without a passphrase."""
        loaded: list[str] = []
        for pair in self._options.client_keys or ():
            digest = base64.b64encode(hashlib.sha256(pair.public_data).digest()).decode()
            name = pair.get_comment() or pair.get_algorithm()
            loaded.append(f"{name} (SHA256:{digest.rstrip('=')})")
        configured = self._options.config.get("IdentityFile", None)
        files = [self._destination.key] if self._destination.key else list(_strings(configured))
        paths = [Path(each).expanduser() for each in files]
        if not files:
            paths = sorted(Path("~/.ssh").expanduser().glob("id_*[!b]"))
        locked = [str(path) for path in paths if _has_passphrase(path)]
        if self._options.agent_path:
            loaded.append("the agent's keys")
        elif self._destination.key is None and not os.environ.get("SSH_AUTH_SOCK"):
            loaded.append("no agent (SSH_AUTH_SOCK is not set)")
        return loaded, locked


def _strings(content: object) -> list[str]:
    return [str(each) for each in content] if isinstance(content, list) else []


def _has_passphrase(path: Path) -> bool:
    try:
        asyncssh.read_private_key(path)
    except asyncssh.KeyEncryptionError:
        return True
    except asyncssh.KeyImportError as error:
        return "passphrase" in str(error).lower()
    except (OSError, ValueError):
        return False
    return False


def _read(files: list[Path]) -> asyncssh.SSHKnownHosts:
    """The records of those files that exist."""
    there = [str(path) for path in files if path.is_file()]
    try:
        return asyncssh.read_known_hosts(there)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"cannot read {' or '.join(there)}: {error}; repair the file, or name another with "
            "SSH(known_hosts=...)"
        ) from error


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        if error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH):
            return "no route to it"
        return error.strerror or str(error)
    return getattr(error, "reason", "") or str(error) or type(error).__name__
