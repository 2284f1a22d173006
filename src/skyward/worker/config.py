"""What an agent and its executors are told when they start."""

from __future__ import annotations

import msgspec


class AgentConfig(msgspec.Struct):
    """Everything a node needs to know, sent to the agent on its standard input."""

    pool: str
    node: int
    address: str
    """Where this node listens: "unix" or a host name or address for TCP with TLS."""
    folder: str
    """A private directory for sockets and logs."""
    workers: int
    slots: int
    """Processes per worker, or threads in its one process."""
    threads: bool
    compute_pool: list[str]
    """The COMPUTE_POOL value of each worker."""
    visible: list[str]
    """CUDA_VISIBLE_DEVICES of each worker, empty to leave it alone."""
    env: dict[str, str]
    search_path: list[str]
    working_directory: str
    orphan_timeout: float
    client_pid: int
    """The client's process when it is on this host, else 0."""
    credentials: tuple[str, str, str] | None
    blob_cap: int
    plugged: bool
    """Whether plugins have hooks that executors are to leave before they end."""
    hooks_first: bool = False
    """Whether executors start only once the plugins' hooks for the node are entered, so that they
    have the environment that these hooks leave."""
    direct: str = ""
    """An address on which a node that listens on Unix sockets is to listen with TLS as well."""
    private: str = ""
    """An address on which the node's executors listen for executors of other nodes as well."""

    def place(self, name: str, *, for_peers: bool = False) -> str:
        """Where a process of this node is to listen, as a `Listener` takes it."""
        if self.address != "unix":
            return f"tcp:{self.address}:0"
        addresses = [self.direct, self.private if for_peers else ""] if self.credentials else []
        places = [f"tcp:{address}:0" for address in dict.fromkeys(addresses) if address]
        return " ".join([*places, f"unix:{self.folder}/{name}"])


class DeviceConfig(msgspec.Struct):
    """What the process of one torch device is told on its standard input."""

    pool: str
    where: str
    kind: str
    credentials: tuple[str, str, str] | None
    search_path: list[str]
    orphan_timeout: float
    """How long the process waits for a client whose connection was lost."""
    status: int
    """Descriptor to announce the endpoint on."""
    lifeline: int
    """Descriptor that reaches its end when the agent is gone."""


class ExecutorConfig(msgspec.Struct):
    """Everything one executor process needs to know, sent on its standard input."""

    pool: str
    node: int
    worker: int
    slot: int
    where: str
    threads: int
    """Tasks run at once, each on its own thread; 0 runs one at a time on the main thread."""
    search_path: list[str]
    credentials: tuple[str, str, str] | None
    blob_cap: int
    status: int
    """Descriptor to announce the endpoint on."""
    lifeline: int
    """Descriptor that reaches its end when the agent is gone."""
    output: tuple[int, int]
    """Read ends of this process's own stdout and stderr."""
