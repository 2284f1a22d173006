"""The specification of a pool, which `Compute` makes from its arguments."""

from __future__ import annotations

from dataclasses import dataclass, field

from skyward import checks
from skyward.accelerators import Accelerator
from skyward.errors import PluginError, SerializationError
from skyward.nodes.deliveries import SentFolder
from skyward.plugins.plugin import Cluster, Plugin
from skyward.providers import Provider, Request
from skyward.spec import Nodes, Options, Volume, Worker
from skyward.worker import hooks
from skyward.worker.hooks import Hooks


@dataclass(frozen=True, slots=True)
class Preparations:
    """The hooks of a pool's plugins; the bytes may carry a token, so they are shown nowhere."""

    for_nodes: bytes = field(repr=False)
    for_processes: bytes = field(repr=False)
    together: bool
    """Whether no worker is of use without the others."""

    @classmethod
    def of(cls, plugins: tuple[Plugin, ...], cluster: Cluster) -> Preparations:
        """Encode the hooks of these plugins; raises `PluginError` for one that cannot be sent."""
        on_nodes = [Hooks(p.name, p.around_app, commands=_commands(p, cluster)) for p in plugins]
        in_processes = [Hooks(p.name, p.around_process, p.decorate) for p in plugins]
        together = any(plugin.distributed for plugin in plugins)
        return cls(_encoded(on_nodes), _encoded(in_processes), together)

    def __bool__(self) -> bool:
        return bool(self.for_nodes or self.for_processes)


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """Everything that decides how a pool starts and runs."""

    provider: Provider
    nodes: Nodes
    accelerator: Accelerator | None
    worker: Worker
    options: Options
    request: Request
    name: str
    preparations: Preparations
    keep: float | None = None
    """After how many seconds without a client a kept pool ends; 0 if it does not, None if the
    pool ends with its client."""
    recorded: str = field(default="", repr=False, compare=False)
    """What another client of a kept pool needs of this, for the pool's record."""
    id: str = ""
    """The id of a pool that exists, or was stopped; empty for a new one."""
    folders: tuple[SentFolder, ...] = ()
    """Folders of the client that nodes have, too; the first may be the project."""
    volumes: tuple[Volume, ...] = ()
    """The volumes that nodes mount or copy by themselves."""
    notes: tuple[str, ...] = ()
    """What the user asked for and does not get, said once when the pool starts."""

    @property
    def has_files(self) -> bool:
        """Whether nodes get files of the client."""
        return bool(self.folders or self.volumes)


def _commands(plugin: Plugin, cluster: Cluster) -> tuple[str, ...]:
    if plugin.bootstrap is None:
        return ()
    try:
        commands = plugin.bootstrap(cluster)
        return checks.texts(plugin, "bootstrap", commands)
    except Exception as problem:
        raise PluginError(
            f"plugin {plugin.name!r}: its bootstrap failed: {type(problem).__name__}: {problem}"
        ) from problem


def _encoded(given: list[Hooks]) -> bytes:
    useful = [h for h in given if h.around is not None or h.decorate is not None or h.commands]
    for each in useful:
        try:
            hooks.encode([each])
        except SerializationError as problem:
            raise PluginError(f"plugin {each.plugin!r} cannot be sent: {problem}") from problem
    return hooks.encode(useful) if useful else b""
