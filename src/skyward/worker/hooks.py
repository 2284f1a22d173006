"""Plugins' hooks on a node: the client sends them; they are entered in order, left in reverse."""

from __future__ import annotations

import contextlib
import re
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from skyward.context import InstanceInfo
from skyward.errors import PluginError
from skyward.objects import encoding

if TYPE_CHECKING:
    from skyward.plugins.plugin import Around, Decorate
    from skyward.worker.jobs import Jobs

COMMAND_SECONDS = 1800.0
"""How long one command may take."""


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

    def __init__(self, jobs: Jobs | None = None) -> None:
        """`jobs` are the node's, in its agent: only there plugins have commands."""
        self._stack = contextlib.ExitStack()
        self._jobs = jobs
        self._commands: list[str] = []
        """The jobs that run the commands, and hold the daemons that these leave behind."""
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
                    self._run(plugin, command)
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

    def _run(self, plugin: str, command: str) -> None:
        """Run a shell command as a job; a daemon that it starts lives as long as the node."""
        jobs = self._jobs
        if self._ending or jobs is None:
            raise InterruptedError("the node is ending")
        job = jobs.begin(re.sub(r"[^A-Za-z0-9_-]", "_", plugin)[:40], "daemon")
        self._commands.append(job.id)
        jobs.start(job, ["/bin/sh", "-c", command])
        if self._is_ending():
            jobs.end(job.id)
        timer = threading.Timer(COMMAND_SECONDS, jobs.end, (job.id,))
        timer.daemon = True
        timer.start()
        try:
            ran = jobs.ran(job.id)
        finally:
            timer.cancel()
        if ran.code is None:
            raise InterruptedError(
                f"`{command}` was ended: its node ends, or it ran longer than {COMMAND_SECONDS:g} s"
            )
        if ran.code:
            raise RuntimeError(
                f"`{command}` ended with exit status {ran.code}:\n{jobs.last_words(ran)}"
            )

    def _is_ending(self) -> bool:
        return self._ending

    def leave(self) -> None:
        """End the command that runs, leave the hooks in reverse order, and end all daemons."""
        self._ending = True
        if self._jobs is None:
            self._stack.close()
            return
        self._jobs.end(*(name for name in self._commands if self._jobs.is_running(name)))
        try:
            self._stack.close()
        finally:
            self._jobs.end(*self._commands)

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
