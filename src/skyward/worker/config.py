"""The configuration that an agent, an executor or a device process gets when it starts."""

from __future__ import annotations

import msgspec

STALLED_SECONDS = 2.0
"""After so long between two looks at who is there, the looking process itself stood still, and
could hear nobody: a machine that slept, say. An agent and its client both forgive as much."""


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
    """CUDA_VISIBLE_DEVICES of each worker; empty to leave the variable unchanged."""
    env: dict[str, str]
    search_path: list[str]
    working_directory: str
    orphan_timeout: float
    client_pid: int
    """The number of the client's process if that is on this host, else 0."""
    credentials: tuple[str, str, str] | None
    blob_cap: int
    plugged: bool
    """Whether plugins have hooks that executors must leave before they end."""
    hooks_first: bool = False
    """Whether the agent enters the plugins' hooks for the node before it starts the executors, so
    that the executors have the environment that these hooks set."""
    own_directory: bool = False
    """Whether the workers need a working directory that is not the client's: files are sent to
    it."""
    direct: str = ""
    """An address on which a node listens with TLS, in addition to its Unix sockets."""
    forwarded: str = ""
    """An address on which a node also listens, with TLS, for connections that a provider
    forwards: mostly its loopback."""
    ttl: float | None = None
    """After how many seconds the node ends, whatever runs on it."""
    notice: str = ""
    """A module that says when the provider takes the machine back; empty if there is none."""
    private: str = ""
    """An address on which the node's executors also listen, for executors of other nodes."""
    client: str = ""
    """The tenant that the client which starts the agent is; empty unless the pool is to stay."""
    identity: dict[str, str] = {}
    """Who that client is: user, host, process and command."""
    vcpus: float | None = None
    """How many processors the node was asked for: as many threads has PyTorch in a worker, but not
    more than there are processors."""

    def place(self, name: str, *, for_peers: bool = False) -> str:
        """Where a process of this node listens, in the form that a `Listener` takes.

        With `for_peers`, also where processes of other nodes reach it, and of this machine.
        """
        if self.address != "unix":
            return f"tcp:{self.address}:0" + (f" unix:{self.folder}/{name}" if for_peers else "")
        addresses = [self.direct, self.private if for_peers else ""] if self.credentials else []
        if self.forwarded and self.credentials:
            addresses.append(self.forwarded)
        places = [f"tcp:{address}:0" for address in dict.fromkeys(addresses) if address]
        return " ".join([*places, f"unix:{self.folder}/{name}"])


class DeviceConfig(msgspec.Struct):
    """Everything the process of one torch device needs to know, sent on its standard input."""

    pool: str
    where: str
    kind: str
    credentials: tuple[str, str, str] | None
    search_path: list[str]
    orphan_timeout: float
    """How long the process waits for a client whose connection was lost."""
    ticket: str
    """What a rank of the same mesh shows to take the client's place; empty if none may."""
    status: int
    """Descriptor to announce the endpoint on."""
    lifeline: int
    """Descriptor that reaches its end when the agent is gone."""
    stacks: int
    """Descriptor to tell the agent on where the threads of this process are."""
    line: int
    """Descriptor of the socket on which the agent says what stays when the client leaves."""


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
    kept_output: str
    """A folder in which the last output of tasks is kept; empty to keep none."""
    stacks: int
    """Descriptor to tell the agent on where the threads of this process are."""
    board: int
    """Descriptor of memory that shows the agent which tasks run."""
    changes: int = -1
    """Descriptor to wake those who look at the node; -1 if there is none."""
