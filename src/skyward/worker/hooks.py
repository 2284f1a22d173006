"""Plugins' hooks on a node: the client sends them; they are entered in order, left in reverse."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from skyward.context import InstanceInfo
from skyward.errors import PluginError
from skyward.objects import encoding
from skyward.worker.commands import Commands

if TYPE_CHECKING:
    from skyward.plugins.plugin import Around, Decorate


@dataclass(frozen=True, slots=True)
class Hooks:
    """What one plugin does in a process."""

    plugin: str
    around: Around | None = None
    decorate: Decorate | None = None
    commands: tuple[str, ...] = ()


def encode(hooks: Sequence[Hooks]) -> bytes:
    """The hooks as bytes, with the user's code that they refer to."""
    encoded = encoding.encode(list(hooks), own_modules=True, what="a plugin's hook")
    pickle = b"".join(bytes(piece) for piece in encoded.pieces)
    buffers = [bytes(buffer) for buffer in encoded.buffers]
    return msgspec.msgpack.encode((pickle, buffers, encoded.storages))


def decode(data: bytes) -> list[Hooks]:
    """The hooks that `encode` was given."""
    pickle, buffers, storages = msgspec.msgpack.decode(
        data, type=tuple[bytes, list[bytes], list[tuple[int, int]]]
    )
    views = [memoryview(bytearray(buffer)) for buffer in buffers]
    hooks: list[Hooks] = encoding.decode(pickle, views, storages)
    return hooks


class Entered:
    """The hooks of one process, once they are entered."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._commands = Commands()
        self._ending = False
        self.decorators: list[tuple[str, Decorate]] = []

    def enter(self, data: bytes, info: InstanceInfo) -> None:
        """Run commands and enter contexts, plugin by plugin; if one fails, leave the others."""
        # Here, because it takes 14 ms, and the processes of most pools enter no hooks.
        from skyward.plugins.plugin import entered

        plugin, hook = "", "decoding"
        try:
            for hooks in decode(data):
                plugin = hooks.plugin
                hook = "bootstrap"
                for command in hooks.commands:
                    if self._ending:
                        raise InterruptedError("the node is ending")
                    self._commands.run(command)
                hook = "around hook"
                if hooks.around is not None:
                    self._stack.enter_context(entered(hooks.around, info))
                if hooks.decorate is not None:
                    self.decorators.append((plugin, hooks.decorate))
        except Exception as problem:
            # With the problem, so that a hook knows that the start has failed.
            try:
                self._stack.__exit__(type(problem), problem, problem.__traceback__)
            except Exception:
                traceback.print_exc()
            raise PluginError(_told(plugin, hook, problem)) from problem

    def leave(self) -> None:
        """End the command that runs, leave the hooks in reverse order, and end all daemons."""
        self._ending = True
        if self._commands.running:
            self._commands.close()
        try:
            self._stack.close()
        finally:
            self._commands.close()

    def decorated(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function in all plugins' wrappers; the first plugin's wrapper is outermost."""
        for plugin, decorate in reversed(self.decorators):
            try:
                function = decorate(function)
            except Exception as problem:
                raise PluginError(_told(plugin, "decorate", problem)) from problem
        return function


def _told(plugin: str, hook: str, problem: BaseException) -> str:
    trace = "".join(traceback.format_exception(problem)).rstrip()
    what = f"plugin {plugin!r}: its {hook} failed" if plugin else "the plugins did not arrive"
    return f"{what}: {type(problem).__name__}: {problem}\n{trace}"
