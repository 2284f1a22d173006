"""Errors for a host that cannot be reached: the reason, and what the user can do next."""

from __future__ import annotations

import base64
import contextlib
import errno
import hashlib
import os
import shlex
import socket
from collections.abc import Iterator
from pathlib import Path

import asyncssh

from skyward.errors import (
    ConfigurationError,
    HostKeyError,
    LoginError,
    SkywardError,
    UnreachableError,
)
from skyward.providers.ssh.hosts import Destination

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
