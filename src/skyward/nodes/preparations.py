"""Preparations: what plugins do on nodes and in worker processes, encoded to be sent."""

from __future__ import annotations

from dataclasses import dataclass, field

from skyward import checks
from skyward.errors import PluginError, SerializationError
from skyward.plugins.plugin import Cluster, Plugin
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
