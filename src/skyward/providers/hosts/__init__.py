"""Hosts over SSH, as people name them: "user@name:port", or in an ssh configuration file."""

from __future__ import annotations

import fnmatch
import glob
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

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
