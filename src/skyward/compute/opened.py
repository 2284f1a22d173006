"""An opened pool, and what it has around it: console, listeners, page, the plugins' contexts."""

from __future__ import annotations

import contextlib
import time

from skyward.compute.broadcasting import broadcast
from skyward.compute.listening import Listening, OnEvent
from skyward.compute.named.client import leave
from skyward.compute.quoting import quoted, readiness, without_end
from skyward.compute.running import Running
from skyward.compute.showing import Showing
from skyward.compute.stats import done
from skyward.console import console_for
from skyward.errors import PluginError
from skyward.events import PoolClosed, PoolReady, PoolStarted
from skyward.nodes.reaching import Adoption
from skyward.nodes.spec import PoolSpec
from skyward.plugins.plugin import Plugin, entered
from skyward.pool import Pool


class OpenedPool:
    """One pool of a `Compute`, from its start to its end."""

    def __init__(
        self, spec: PoolSpec, plugins: tuple[Plugin, ...], adoption: Adoption | None
    ) -> None:
        self._spec, self._plugins, self._adoption = spec, plugins, adoption
        several = spec.worker.per_node != 1
        self._console = console_for(spec.options.console, several_workers=several)
        self.pool = Pool(spec, self._console, broadcast, adoption)
        self.was_ready = False
        self.showing: Showing | None = None
        """The pool on the page; None before the start and after the end."""
        self._listening: Listening | None = None
        self._around = contextlib.ExitStack()
        self._closed = False

    def start(self, compute: Running, on_event: OnEvent | None) -> None:
        """Start the pool; if that fails, the caller closes it.

        `compute` is what the plugins' `around_client` gets.
        """
        spec, pool, console, adoption = self._spec, self.pool, self._console, self._adoption
        started = time.monotonic()
        count = spec.nodes.desired if adoption is None else len(adoption.machines)
        attached = adoption is not None
        self._listening = Listening(pool, on_event, console.note, attached=attached)
        self.showing = Showing(pool)
        pool.events.emit(PoolStarted, spec.provider.name, count)
        doing = "attaching" if adoption is not None else f"starting {quoted(spec)}"
        console.begin(f"{spec.name}: {doing}", count)
        if adoption is None:
            for note in spec.notes:
                self._note(note)
        pool.start()
        self._enter_plugins(compute)
        if spec.keep is not None and adoption is None:
            pool.keep()
            if warning := without_end(spec, pool.ledger.hourly_cost):
                console.note(warning)
        seconds, hourly = time.monotonic() - started, pool.ledger.hourly_cost
        ready = readiness(pool.ready_nodes(), spec.nodes, seconds, hourly)
        pool.events.emit(PoolReady, pool.ready_nodes(), seconds)
        console.ready(f"{spec.name}: {ready}")
        # The block's output must follow this line, and not disturb a display that is redrawn.
        console.drain()
        self.was_ready = True

    def _enter_plugins(self, compute: Running) -> None:
        for plugin in self._plugins:
            if plugin.around_client is None:
                continue
            try:
                self._around.enter_context(entered(plugin.around_client, compute))
            except Exception as problem:
                raise PluginError(
                    f"plugin {plugin.name!r}: its around_client failed: "
                    f"{type(problem).__name__}: {problem}"
                ) from problem

    def close(self, seconds: float) -> None:
        """Take everything down, or leave a pool that stays; a second call does nothing more.

        Whatever fails of it, all of it is done; then the failure is raised.
        """
        with contextlib.ExitStack() as last_first:
            last_first.callback(self._end, seconds)
            if self.pool.stays and not self.pool.closed:
                last_first.callback(self.pool.finish_devices, self._note)
            last_first.callback(self._around.close)

    def _note(self, text: str) -> None:
        self._console.note(f"{self._spec.name}: {text}")

    def _end(self, seconds: float) -> None:
        pool, stays = self.pool, ""
        leave(pool)
        if pool.stays and not pool.closed:
            pool.detach(seconds)
            stays = f"it stays, until `sky down {self._spec.name}`"
        else:
            pool.close(seconds)
        listening, self._listening = self._listening, None
        if listening is not None:
            pool.events.emit(PoolClosed, pool.ledger.cost)
            listening.close()
        showing, self.showing = self.showing, None
        if showing is not None:
            showing.close()
        if not self._closed:
            self._closed = True
            self._console.close(self._last_line(stays))

    def _last_line(self, stays: str) -> str:
        name, receipt = self._spec.name, self.pool.ledger.receipt()
        if self.was_ready:
            counts = self.pool.counts
            calls = done(counts) if counts.submitted else ""
            parts = [each for each in (calls, receipt, stays) if each]
            return f"{name}: {'; '.join(parts) or 'closed'}"
        return f"{name}: did not start; {receipt}" if receipt else ""
