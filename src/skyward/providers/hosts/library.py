"""Connections to a host that the library asyncssh carries, where there is no `ssh` that can."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import errno
import hashlib
import os
import select
import signal as signals
import socket
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import asyncssh

from skyward.errors import ConfigurationError, SkywardError
from skyward.providers.hosts import (
    CLOSE_SECONDS,
    KEEPALIVE_MISSES,
    KEEPALIVE_SECONDS,
    Destination,
    HostLogin,
)

WINDOW = 8 << 20
"""How much a host may send unread: enough for 100 MB/s at a round trip of 80 ms."""
BUFFER = 1 << 20
"""How many unread bytes the kernel and the event loop each hold."""


class LibraryConnection:
    """A connection of asyncssh's, and the one to the jump host that it goes through."""

    def __init__(
        self, connection: asyncssh.SSHClientConnection, through: LibraryConnection | None
    ) -> None:
        self._connection, self._through = connection, through

    @classmethod
    async def started(cls, destination: Destination) -> LibraryConnection:
        """Connect, through jump hosts where the destination names them."""
        options = await asyncio.to_thread(_options, destination)
        login = _login(destination, options)
        attempt = await asyncio.to_thread(_Attempt, login, options)
        through = None
        jump = destination.jump or options.tunnel
        if jump and jump != "none":
            before = destination.through(str(jump))
            # `Host *` with a ProxyJump names the jump host itself, too.
            if before.host.name not in (destination.host.name, options.host):
                through = await cls.started(before)
        try:
            with attempt.explained():
                # `connect` takes for not given what is not repeated here.
                connection = await asyncssh.connect(
                    destination.host.name,
                    () if destination.host.port is None else destination.host.port,
                    tunnel=None if through is None else through._connection,
                    config=_config_files(destination.config),
                    options=options,
                    known_hosts=attempt.known,
                    client_factory=lambda: _HostKeyRecorder(attempt),
                    encryption_algs=() if options.config.get("Ciphers", None) else CIPHERS,
                )
        except BaseException:
            if through is not None:
                through.close()
                await through.finish()
            raise
        return cls(connection, through)

    def is_closed(self) -> bool:
        """Whether it carries nothing more."""
        return self._connection.is_closed()

    def close(self) -> None:
        """Have it end, with all its channels."""
        self._connection.close()

    async def finish(self) -> None:
        """Wait for the end of a closed connection, and of the one that it went through."""
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._connection.wait_closed()
        except TimeoutError:
            self._connection.abort()
        if self._through is not None:
            self._through.close()
            await self._through.finish()

    async def open(
        self, endpoint: str, ended: Callable[[Bridge], None]
    ) -> tuple[Bridge, socket.socket]:
        """Open a channel to an endpoint, and return the socket that leads to it."""
        try:
            return await Bridge.built(self._connection, endpoint, ended)
        except asyncssh.ChannelOpenError as error:
            # asyncssh also reports a refused channel when the connection was lost meanwhile.
            if self._connection.is_closed():
                raise ConnectionResetError(str(error)) from error
            if error.code == asyncssh.OPEN_CONNECT_FAILED or endpoint.startswith("exec:"):
                raise ConnectionRefusedError(error.reason) from error
            if error.code == asyncssh.OPEN_ADMINISTRATIVELY_PROHIBITED:
                raise PermissionError(error.reason) from error
            raise ConnectionResetError(str(error)) from error
        except asyncssh.Error as error:
            raise ConnectionResetError(str(error)) from error


def resolved(destination: Destination) -> HostLogin:
    """Where a login leads."""
    return _login(destination, _options(destination))


def _login(destination: Destination, options: asyncssh.SSHClientConnectionOptions) -> HostLogin:
    return HostLogin(
        destination,
        str(options.host),
        int(options.port),
        str(options.username),
        tuple(_known_hosts_files(destination, options)),
        is_behind=bool(destination.jump or options.tunnel or options.proxy_command),
    )


class _HostKeyRecorder(asyncssh.SSHClient):
    """Keeps the host key that was not accepted, for the error message."""

    def __init__(self, attempt: _Attempt) -> None:
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


class Bridge(asyncio.Protocol):
    """Copies bytes between one end of a socket pair and a channel, until either is closed."""

    def __init__(self, ended: Callable[[Bridge], None]) -> None:
        self._ended = ended
        self._far: _BridgeChannel | None = None
        self._near: asyncio.Transport | None = None
        self.closed = asyncio.Event()
        self.status: int | None = None
        """The exit status of a command, after its end."""
        self.errors = bytearray()
        """The last that a command wrote to its standard error."""

    @classmethod
    async def built(
        cls,
        connection: asyncssh.SSHClientConnection,
        endpoint: str,
        ended: Callable[[Bridge], None],
    ) -> tuple[Bridge, socket.socket]:
        """Open a channel to an endpoint, and return the socket that leads to it.

        The endpoint "exec:COMMAND" is the standard input and output of a command on the host.
        """
        bridge = cls(ended)
        family, _, place = endpoint.partition(":")
        if family == "unix":
            await opened(connection.create_unix_connection(bridge._session, place, window=WINDOW))
        elif family == "exec":
            start = connection.create_session(bridge._session, place, encoding=None, window=WINDOW)
            await opened(start)
        else:
            host, _, port = place.rpartition(":")
            at = host.strip("[]"), int(port)
            await opened(connection.create_connection(bridge._session, *at, window=WINDOW))
        ours, theirs = socket.socketpair()
        try:
            for end in (ours, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
            ours.setblocking(False)
            await asyncio.get_running_loop().connect_accepted_socket(lambda: bridge, ours)
        except BaseException:
            ours.close()
            theirs.close()
            bridge.close()
            raise
        return bridge, theirs

    def _session(self) -> _BridgeChannel:
        self._far = _BridgeChannel(self)
        return self._far

    def close(self) -> None:
        """Close both sides at once; readers see the end of the stream."""
        if self._near is not None:
            self._near.abort()
        if self._far is not None:
            self._far.channel.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start reading the channel: its data can be written to the socket now."""
        assert isinstance(transport, asyncio.Transport)
        assert self._far is not None
        self._near = transport
        transport.set_write_buffer_limits(BUFFER)
        self._far.join(transport)

    def data_received(self, data: bytes) -> None:
        """Write what the client sent to the channel."""
        assert self._far is not None
        with contextlib.suppress(BrokenPipeError):
            self._far.channel.write(data)

    def eof_received(self) -> bool:
        """Pass on that the client writes no more; close the channel if it does not read either."""
        assert self._far is not None
        assert self._near is not None
        with contextlib.suppress(BrokenPipeError):
            if _closed_by_peer(self._near.get_extra_info("socket")):
                self._far.channel.close()
            else:
                self._far.channel.write_eof()
        return not self._far.at_end

    def pause_writing(self) -> None:
        """Stop reading the channel: the client does not read."""
        assert self._far is not None
        self._far.channel.pause_reading()

    def resume_writing(self) -> None:
        """Read the channel again: the client reads."""
        assert self._far is not None
        self._far.channel.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """Close the channel with the socket."""
        if self._far is not None:
            self._far.channel.close()
            if self._far.gone:
                self.finish()

    def finish(self) -> None:
        """Tell the owner, once, that the bridge is closed."""
        if not self.closed.is_set():
            self.closed.set()
            self._ended(self)


class _BridgeChannel(
    asyncssh.SSHTCPSession[bytes],
    asyncssh.SSHUNIXSession[bytes],
    asyncssh.SSHClientSession[bytes],
):
    """The side of a bridge that is the SSH channel."""

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge
        self._near: asyncio.Transport | None = None
        self.channel: Any
        self.at_end = False
        self.gone = False

    def connection_made(self, chan: Any) -> None:
        """Keep the channel."""
        self.channel = chan

    def session_started(self) -> None:
        """Leave data in the channel until there is a socket to write it to."""
        if self._near is None:
            self.channel.pause_reading()

    def join(self, near: asyncio.Transport) -> None:
        """Take the socket to write to."""
        self._near = near
        if self.gone:
            near.close()
            return
        self.channel.resume_reading()
        if self.at_end:
            self._end_near()

    def data_received(self, data: bytes, datatype: int | None = None) -> None:
        """Write what the host sent to the socket; keep what a command says of its failure."""
        assert self._near is not None
        if datatype is None:
            self._near.write(data)
        else:
            self._bridge.errors += data
            del self._bridge.errors[:-BUFFER]

    def exit_status_received(self, status: int) -> None:
        """Keep the exit status."""
        self._bridge.status = status

    def exit_signal_received(self, signal: str, core_dumped: bool, msg: str, lang: str) -> None:
        """Keep the signal that killed the command."""
        number = getattr(signals, f"SIG{signal}", 0)
        self._bridge.status = 128 + int(number)

    def eof_received(self) -> bool:
        """Pass on that the host will send no more; this is called on paused channels, too."""
        self.at_end = True
        self._end_near()
        return True

    def _end_near(self) -> None:
        if self._near is not None and not self._near.is_closing():
            with contextlib.suppress(OSError):
                self._near.write_eof()

    def pause_writing(self) -> None:
        """Stop reading the socket: the host does not read."""
        if self._near is not None:
            self._near.pause_reading()

    def resume_writing(self) -> None:
        """Read the socket again: the host reads."""
        if self._near is not None:
            self._near.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """Close the socket with the channel, after writing what has arrived."""
        self.gone = True
        if self._near is not None:
            if exc is not None:
                self._near.abort()
            else:
                self._near.close()
        self._bridge.finish()


def _closed_by_peer(end: Any) -> bool:
    """Whether the other end of a socket pair is closed for reading, too."""
    poll = select.poll()
    poll.register(end.fileno(), 0)
    return any(events & select.POLLHUP for _, events in poll.poll(0))


# Options: what the arguments and the ssh configuration file come to.

CIPHERS = (
    "aes128-gcm@openssh.com",
    "aes256-gcm@openssh.com",
    "chacha20-poly1305@openssh.com",
    "aes256-ctr",
    "aes128-ctr",
)
"""AES-GCM comes first: it carries twice as much per second as asyncssh's own first choice."""


def _options(destination: Destination) -> asyncssh.SSHClientConnectionOptions:
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
            config=_config_files(destination.config),
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


def _config_files(config: str | None) -> list[str]:
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


def _known_hosts_files(
    destination: Destination, options: asyncssh.SSHClientConnectionOptions
) -> list[Path]:
    if destination.known_hosts is not None:
        return [Path(destination.known_hosts).expanduser()]
    configured: Any = options.config.get("UserKnownHostsFile", None)
    mine = configured or ["~/.ssh/known_hosts"]
    shared: Any = options.config.get("GlobalKnownHostsFile", None) or ["/etc/ssh/ssh_known_hosts"]
    return [Path(each).expanduser() for each in [*mine, *shared]]


# Errors for a host that cannot be reached: the reason, and what the user can do next.


class _Attempt:
    """One attempt to connect: the host, the keys on record for it, and the key it showed."""

    def __init__(self, login: HostLogin, options: asyncssh.SSHClientConnectionOptions) -> None:
        self._login = login
        self._options = options
        self._records = _read(login.known_hosts)
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
            raise self._login.refused(error.reason, *self._keys()) from None
        except TimeoutError:
            raise self._login.unreachable(
                f"no answer within {self._login.destination.timeout:g} s",
                "is the machine up, and its address right? a firewall may drop the packets; "
                "SSH(timeout=...) waits longer",
            ) from None
        except ConnectionRefusedError:
            raise self._login.unreachable(
                "connection refused", "is sshd running there, and is this its port?"
            ) from None
        except socket.gaierror as error:
            raise self._login.unreachable(
                f"no such name ({error.strerror})",
                "check the spelling, or say where it is with a Host entry in ~/.ssh/config",
            ) from None
        except asyncssh.ChannelOpenError as error:
            raise self._login.unreachable(
                f"the jump host could not connect to it: {error.reason}",
                "is the address right as seen from there, and does its sshd allow TCP forwarding?",
            ) from None
        except (asyncssh.Error, OSError) as error:
            raise self._login.unreachable(_reason(error)) from error

    def _wrong_key(self, error: asyncssh.HostKeyNotVerifiable) -> SkywardError:
        if self.shown is None:
            return self._login.refused_key(error.reason)
        shown = f"{self.shown.get_algorithm()} {self.shown.get_fingerprint()}"
        if self._expected:
            known = ", ".join(dict.fromkeys(key.get_fingerprint() for key in self._expected))
            return self._login.changed_key(shown, known)
        return self._login.unknown_key(
            shown, " and no authority for it" if self._authorities else ""
        )

    def _keys(self) -> tuple[list[str], list[str]]:
        """The keys that were offered, and the files that could not be read without a passphrase."""
        loaded: list[str] = []
        for pair in self._options.client_keys or ():
            digest = base64.b64encode(hashlib.sha256(pair.public_data).digest()).decode()
            name = pair.get_comment() or pair.get_algorithm()
            loaded.append(f"{name} (SHA256:{digest.rstrip('=')})")
        configured = self._options.config.get("IdentityFile", None)
        key = self._login.destination.key
        files = [key] if key else list(_strings(configured))
        paths = [Path(each).expanduser() for each in files]
        if not files:
            paths = sorted(Path("~/.ssh").expanduser().glob("id_*[!b]"))
        locked = [str(path) for path in paths if _has_passphrase(path)]
        if self._options.agent_path:
            loaded.append("the agent's keys")
        elif key is None and not os.environ.get("SSH_AUTH_SOCK"):
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


def _read(files: tuple[Path, ...]) -> asyncssh.SSHKnownHosts:
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
