"""Options of an SSH connection: what the arguments and the ssh configuration file come to."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import asyncssh

from skyward.errors import ConfigurationError
from skyward.providers.ssh.hosts import Destination

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
