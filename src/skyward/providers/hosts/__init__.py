"""Hosts over SSH, as people name them: "user@name:port", or in an ssh configuration file."""

from __future__ import annotations

import fnmatch
import glob
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from skyward.errors import HostKeyError, LoginError, UnreachableError

_ADDRESS = re.compile(
    r"(?:(?P<user>[^@\s]+)@)?"
    r"(?:\[(?P<bracketed>[0-9A-Fa-f:.]+(?:%[\w.-]+)?)\]|(?P<name>[^@\s\[\]:/,]+))"
    r"(?::(?P<port>\d{1,5}))?"
)
_DEEPEST_INCLUDE = 16
"""How deep ssh itself follows files that include others."""


@dataclass(frozen=True, slots=True)
class HostAddress:
    """A host's name with the user and port that were given along with it.

    >>> HostAddress.of("me@[fe80::1]:2222")
    HostAddress(name='fe80::1', user='me', port=2222)
    """

    name: str
    user: str | None = None
    port: int | None = None

    @classmethod
    def of(cls, text: str) -> HostAddress:
        """Read "name", "user@name:port" or "user@[address]:port"; raises `ValueError`."""
        match = _ADDRESS.fullmatch(text)
        if match is None and text.count(":") > 1 and "[" not in text:
            raise ValueError(f"an IPv6 address goes in brackets: write '[{text}]'")
        if match is None or (match["name"] or "").startswith("-"):
            raise ValueError("not a host; write 'name', 'user@name', 'name:port' or '[::1]:port'")
        port = int(match["port"]) if match["port"] else None
        if port is not None and not 0 < port < 1 << 16:
            raise ValueError(f"there is no port {port}; write one from 1 to 65535")
        return cls(match["name"] or match["bracketed"], match["user"], port)


@dataclass(frozen=True, slots=True)
class Destination:
    """A host with all options that decide how to connect to it."""

    host: HostAddress
    key: str | None
    config: str | None
    known_hosts: str | None
    jump: str | None
    """Hosts to go through, first to last, separated by commas; "none" for none at all."""
    timeout: float
    proxy: tuple[str, ...] = ()
    """A command whose standard input and output are the connection, as with ProxyCommand."""

    def through(self, jump: str) -> Destination:
        """The last of the jump hosts, as a destination of its own."""
        before, _, last = jump.rpartition(",")
        return Destination(
            HostAddress.of(last.strip().removeprefix("ssh://")),
            self.key,
            self.config,
            self.known_hosts,
            before or None,
            self.timeout,
        )


@dataclass(frozen=True, slots=True)
class HostLogin:
    """Where a login leads, as the arguments and the ssh configuration come to; and its errors."""

    destination: Destination
    host: str
    port: int
    user: str
    """Empty if it is not known, as on a jump host."""
    known_hosts: tuple[Path, ...]
    is_behind: bool
    """Whether the way leads through another host, or through a command."""

    @property
    def entry(self) -> str:
        """The host's name in a file of known hosts."""
        return self.host if self.port == STANDARD_PORT else f"[{self.host}]:{self.port}"

    def on_the_way(self, host: str, port: int) -> HostLogin:
        """A host that the way leads through."""
        if (host, port) == (self.host, self.port):
            return self
        jump = replace(self.destination, host=HostAddress(host, None, port), jump=None, proxy=())
        return HostLogin(jump, host, port, "", self.known_hosts, is_behind=False)

    def unreachable(self, problem: str, advice: str = "") -> UnreachableError:
        """The error for a host that was not reached; the usual advice is to try it by hand."""
        return UnreachableError(f"{self._host}: {problem}; {advice or f'try: {self.by_hand}'}")

    def unknown_key(self, shown: str, more: str = "") -> HostKeyError:
        """The error for a host whose key is on no record, and how to make it known."""
        files = " and ".join(
            str(path) if path.exists() else f"{path} (no such file)" for path in self.known_hosts
        )
        return HostKeyError(
            f"{self._host}: its host key is not known. It showed {shown}, and "
            f"{files} had no entry for {self.entry}{more}. "
            "Compare that fingerprint with the machine's own (ssh-keygen -lf "
            "/etc/ssh/ssh_host_ed25519_key.pub there), then either log in once, or add it:\n"
            f"  {self.by_hand}\n  {self._scan}"
        )

    def changed_key(self, shown: str, known: str) -> HostKeyError:
        """The error for a host with another key than the one on record."""
        file = shlex.quote(str(self.known_hosts[0]))
        return HostKeyError(
            f"{self._host}: ITS HOST KEY HAS CHANGED. It showed {shown}, and "
            f"{self.known_hosts[0]} knows it by {known}. Either the machine was made anew, or "
            "somebody is in between. Nothing was sent. If you know why, and the new fingerprint "
            f"is right, replace the old key:\n  ssh-keygen -f {file} -R "
            f"{shlex.quote(self.entry)}\n  {self._scan}"
        )

    def refused_key(self, reason: str) -> HostKeyError:
        """The error for any other key that does not count, such as a revoked one."""
        return HostKeyError(f"{self._host}: {reason}")

    def refused(self, reason: str, tried: Sequence[str], locked: Sequence[str]) -> LoginError:
        """The error for a host that lets nobody in; `locked` are the keys with a passphrase."""
        who = f" as {self.user!r}" if self.user else ""
        message = (
            f"{self._host}: no login{who} ({reason}); "
            f"tried {', '.join(tried) or 'no key, for there was none'}."
        )
        if locked:
            message += (
                f" {' and '.join(locked)} has a passphrase, which is never asked for here: give "
                f"it to your agent with: ssh-add {shlex.join(locked)}."
            )
        return LoginError(
            f"{message} Try it by hand: {self.by_hand}\n  To let a key in: ssh-copy-id -i "
            f"KEY.pub -p {self.port} {f'{self.user}@' if self.user else ''}{self.host}"
        )

    @property
    def _host(self) -> str:
        name = self.destination.host.name
        also = f" ({name})" if name != self.host else ""
        return f"SSH host {f'[{self.host}]' if ':' in self.host else self.host}:{self.port}{also}"

    @property
    def _scan(self) -> str:
        file = shlex.quote(str(self.known_hosts[0]))
        return f"ssh-keyscan -p {self.port} {shlex.quote(self.host)} >> {file}"

    @property
    def by_hand(self) -> str:
        """The command that makes the same connection."""
        to, parts = self.destination, ["ssh"]
        if to.config not in (None, "~/.ssh/config"):
            parts += ["-F", str(to.config)]
        if to.key is not None:
            parts += ["-i", to.key]
        if to.known_hosts is not None:
            parts += ["-o", f"UserKnownHostsFile={to.known_hosts}"]
        if to.jump is not None:
            parts += ["-J", to.jump]
        if self.port != STANDARD_PORT:
            parts += ["-p", str(self.port)]
        return shlex.join([*parts, f"{f'{self.user}@' if self.user else ''}{to.host.name}"])


STANDARD_PORT = 22
KEEPALIVE_SECONDS = 10
KEEPALIVE_MISSES = 3
"""The client gives up a silent host after 30 to 40 s, and does not notice a shorter outage."""
CLOSE_SECONDS = 3.0
"""How long a host that may be dead has to confirm that a connection is closed."""


class NamedHosts(Protocol):
    """Hosts, with all that decides how to connect to them: what `sky.SSH` is."""

    @property
    def hosts(self) -> Sequence[str]:
        """The hosts, as for `ssh`."""

    def destination(self, node: int) -> Destination:
        """How to connect to one of them."""

    def describe(self) -> dict[str, Any]:
        """The arguments, for JSON."""


def inventory(path: Path, pattern: str) -> list[str]:
    """The concrete hosts of an ssh configuration file whose names match, in its order."""
    names = (name for name in _host_names(path, 0) if not re.search(r"[*?!]", name))
    return list(dict.fromkeys(name for name in names if fnmatch.fnmatchcase(name, pattern)))


def _host_names(path: Path, depth: int) -> Iterator[str]:
    for line in path.read_text(errors="replace").splitlines():
        word, _, rest = re.sub(r"\s*=\s*|\s+", " ", line.strip(), count=1).partition(" ")
        if word.lower() not in ("host", "include"):
            continue
        try:
            values = shlex.split(rest, comments=True)
        except ValueError:
            continue
        if word.lower() == "host":
            yield from values
        elif depth < _DEEPEST_INCLUDE:
            for value in values:
                # A relative path is relative to ~/.ssh, wherever the including file is.
                where = Path("~/.ssh").expanduser() / Path(value).expanduser()
                for found in sorted(glob.glob(str(where))):
                    if Path(found).is_file():
                        yield from _host_names(Path(found), depth + 1)
