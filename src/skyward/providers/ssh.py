"""SSH: machines of the user's own, reached with the names and keys that `ssh` uses."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from skyward import checks
from skyward.errors import ConfigurationError, PoolStartError
from skyward.providers import Allocation, Capabilities, Order, Request, file_here
from skyward.providers.hosts import Destination, HostAddress, inventory, openssh

if TYPE_CHECKING:
    from skyward.providers.hosts.machine import SSHMachine

__all__ = ["SSH"]

_CONFIG = "~/.ssh/config"


@dataclass(frozen=True)
class SSH:
    """Hosts of your own: node 0 is the first of `hosts`, and so on.

    Write a host as for `ssh`: "name", "user@name:port", or an alias of the ssh configuration file.
    A host that is listed twice serves two nodes. `user`, `port` and `key` apply to all hosts that
    do not name their own. Without `key`, keys come from the ssh agent and from ~/.ssh. `jump` names
    the hosts to go through, first to last: "me@bastion" or "outer,inner".

    Host keys are always verified, against `known_hosts` or the files that `ssh` would use.
    `addresses` gives the addresses at which nodes reach each other, if these are not the hosts'
    names, such as {"gpu1": "10.0.0.1"}. With `direct`, this process connects to the nodes without
    SSH if it can.

    >>> with sky.Compute(sky.SSH(["gpu1", "me@gpu2:2222"]), nodes=2) as compute: ...
    """

    hosts: Sequence[str]
    _: KW_ONLY
    user: str | None = None
    port: int | None = None
    key: str | None = None
    config: str | None = _CONFIG
    known_hosts: str | None = None
    jump: str | None = None
    addresses: Mapping[str, str] | Sequence[tuple[str, str]] = ()
    direct: bool | Literal["auto"] = "auto"
    timeout: float = 15.0

    name = "ssh"
    capabilities = Capabilities(answers=True, moves=True, mounts_folders=False)

    def __post_init__(self) -> None:
        hosts = checks.texts(self, "hosts", self.hosts)
        if not hosts:
            raise checks.refused(
                self,
                {"hosts": hosts},
                "no hosts; name them, or take them from your ssh configuration: "
                "SSH.from_config('gpu-*')",
            )
        for host in hosts:
            self._address(host, hosts=[host])
        for name in ("user", "key", "config", "known_hosts"):
            if (content := getattr(self, name)) is not None:
                checks.text(self, name, content)
        if self.port is not None:
            port = checks.whole(self, "port", self.port, at_least=1)
            if port >= 1 << 16:
                raise checks.refused(self, {"port": port}, "write a port from 1 to 65535")
            checks.store(self, port=port)
        if self.jump is not None:
            for each in checks.text(self, "jump", self.jump).split(","):
                self._address(each.strip(), jump=self.jump)
        if self.direct not in (True, False, "auto"):
            raise checks.refused(self, {"direct": self.direct}, "choose True, False or 'auto'")
        checks.store(
            self,
            hosts=hosts,
            addresses=self._pairs(hosts),
            timeout=checks.seconds(self, "timeout", self.timeout),
        )
        openssh.check("SSH")

    def __repr__(self) -> str:
        return checks.shown(self)

    @classmethod
    def from_config(cls, pattern: str = "*", *, config: str = _CONFIG, **options: Any) -> SSH:
        """The hosts of an ssh configuration file whose names match, in the file's order.

        >>> sky.SSH.from_config("gpu-*", user="me")
        """
        path = Path(config).expanduser()
        try:
            hosts = inventory(path, pattern)
        except OSError as error:
            raise ConfigurationError(
                f"SSH.from_config(config={config!r}): {error.strerror}; name the file, or list "
                "the hosts: SSH(['gpu1', 'gpu2'])"
            ) from error
        if not hosts:
            there = ", ".join(inventory(path, "*")) or "none"
            raise ConfigurationError(
                f"SSH.from_config({pattern!r}): no Host of {config} matches; there are: {there}"
            )
        return cls(hosts, config=config, **options)

    async def ping(self) -> str:
        """Log in to every host, and run nothing but a look at our own folder."""
        from skyward.providers.hosts.machine import labels

        hosts = list(dict.fromkeys(self.hosts))
        tried = await asyncio.gather(
            *(labels(self._destination(host)) for host in hosts), return_exceptions=True
        )
        problems = [each for each in tried if isinstance(each, BaseException)]
        if not problems:
            return f"login to {', '.join(hosts)}"
        if len(problems) == 1 or not isinstance(problems[0], PoolStartError):
            raise problems[0]
        raise PoolStartError("; ".join(map(str, problems)))

    def check(self, request: Request) -> None:
        """Refuse more nodes than there are hosts."""
        if request.most_nodes > len(self.hosts):
            raise ConfigurationError(
                f"a pool of up to {request.most_nodes} nodes: {self._too_few()}"
            )

    def describe(self) -> dict[str, Any]:
        """The arguments, with the paths of keys and never the keys."""
        return {
            "hosts": list(self.hosts),
            "user": self.user,
            "port": self.port,
            "key": self.key,
            "config": self.config,
            "known_hosts": self.known_hosts,
            "jump": self.jump,
            "addresses": dict(self.addresses),
            "direct": self.direct,
            "timeout": self.timeout,
        }

    @classmethod
    def arguments_here(cls, arguments: Mapping[str, Any], home: str) -> Mapping[str, Any]:
        """The files of the record that are here; else the user's own, as `ssh` would use them."""
        files = {name: file_here(arguments.get(name), home) for name in ("key", "known_hosts")}
        told = arguments.get("config")
        return {**arguments, **files, "config": told and (file_here(told, home) or _CONFIG)}

    def price(self, request: Request) -> float | None:
        """None: the price of the user's own machines is unknown."""
        return None

    def allocate(self, pool: str) -> Allocation[SSHMachine]:
        """The pool's machines, made one by one."""
        return Allocation(self, pool)

    async def create(self, order: Order) -> SSHMachine:
        """Connect, and make the machine's folder on the host."""
        if order.node >= len(self.hosts):
            raise PoolStartError(f"node {order.node}: {self._too_few()}")
        if order.node == 0 and (why := openssh.why_not()):
            order.note(f"SSH is carried by asyncssh, since {why}")
        machine = await self._machine(order.pool, order.node)
        await machine.make()
        return machine

    def _too_few(self) -> str:
        count = len(self.hosts)
        return (
            f"SSH has {count} {'host' if count == 1 else 'hosts'} ({', '.join(self.hosts)}), one "
            "for each node; list more, or list a host as often as it is to serve a node"
        )

    async def find(self, pool: str) -> list[SSHMachine]:
        """The machines whose folders are still on the hosts.

        A host that is out of reach may have such a folder: `find` lists its machines, too, and
        their `destroy` raises an error that says why.
        """
        nodes: dict[Destination, list[int]] = {}
        for node, host in enumerate(self.hosts):
            nodes.setdefault(self._destination(host), []).append(node)
        found = await asyncio.gather(*(self._left(pool, *each) for each in nodes.items()))
        return [await self._machine(pool, node) for node in sorted(chain.from_iterable(found))]

    async def _left(self, pool: str, destination: Destination, nodes: list[int]) -> list[int]:
        """The nodes of a host that have a folder there, or may have one."""
        from skyward.providers.hosts.machine import label, labels

        try:
            there = await labels(destination)
        except PoolStartError:
            return nodes
        # Hosts may share a home folder: only the nodes that belong on this one count.
        return [node for node in nodes if label(pool, node) in there]

    async def _machine(self, pool: str, node: int) -> SSHMachine:
        from skyward.providers.hosts.machine import SSHMachine, resolve_host

        host = self.hosts[node]
        destination = self._destination(host)
        name, jumps = await resolve_host(destination)
        address = dict(self.addresses).get(host, name)
        reachable = self.direct is True or (self.direct == "auto" and not jumps)
        return SSHMachine(pool, node, destination, address, name if reachable else None)

    def destination(self, node: int) -> Destination:
        """The host of a node, with all that decides how to connect to it."""
        return self._destination(self.hosts[node])

    def _destination(self, host: str) -> Destination:
        given = HostAddress.of(host)
        address = HostAddress(given.name, given.user or self.user, given.port or self.port)
        return Destination(
            address, self.key, self.config, self.known_hosts, self.jump, self.timeout
        )

    def _address(self, text: str, **given: object) -> HostAddress:
        try:
            return HostAddress.of(text)
        except ValueError as error:
            raise checks.refused(self, given, str(error)) from None

    def _pairs(self, hosts: Sequence[str]) -> tuple[tuple[str, str], ...]:
        """The addresses as a tuple, which can be hashed."""
        given = {"addresses": self.addresses}
        try:
            pairs = dict(self.addresses)
        except (TypeError, ValueError):
            raise checks.refused(
                self, given, "addresses maps hosts to addresses; write {'gpu1': '10.0.0.1'}"
            ) from None
        for host, address in pairs.items():
            if host not in hosts:
                raise checks.refused(
                    self, given, f"{host!r} is not one of the hosts {', '.join(hosts)}"
                )
            checks.text(self, f"addresses[{host!r}]", address)
        return tuple(pairs.items())
