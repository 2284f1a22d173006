"""A sky device on the client's side: its index, and the connections to its process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import ExitStack

from skyward.device import generation, recovery, remembered
from skyward.device.core import core
from skyward.device.library import DeviceProcess
from skyward.device.meeting import BACKLOGS, ON_ONE_HOST, Whereabouts
from skyward.device.processors import spared
from skyward.device.recovery import recoveries
from skyward.errors import DeviceError
from skyward.wire.channel import Channel
from skyward.wire.messages import DeviceUp
from skyward.wire.native import NativeLink


class Device:
    """One opened device.

    With `again`, it takes the place of a lost device of that index, and has the tensors of its
    checkpoint. Over a network, `connect` returns channels that outlive their connections. When such
    a channel ends, `lost` is called with the reason, on a thread that must not call `close`.
    """

    def __init__(
        self,
        connect: Callable[[str], Channel],
        up: DeviceUp,
        node: int,
        whereabouts: Whereabouts,
        *,
        lost: Callable[[str], None],
        again: int | None = None,
    ) -> None:
        kind, properties = up.kind, up.properties
        self.pid = up.pid
        """The number of its process on the node."""
        self._where = f"{kind} of node {node}"
        ways: list[int] = []
        links: list[NativeLink] = []
        with ExitStack() as opened:
            shares_memory = False
            for role in BACKLOGS:
                if shares_memory and role not in ON_ONE_HOST:
                    break
                channel = connect(role)
                opened.callback(channel.close)
                shares_memory = channel.shares_memory
                if shares_memory:
                    ways.append(channel.detach()[0].fileno())
                else:
                    links.append(channel.native_link)
                    ways.append(links[-1].address)
            on_cpu = kind.startswith("cpu")
            if shares_memory and not on_cpu:
                opened.enter_context(spared())
            process = DeviceProcess(
                tuple(ways), shares_memory, on_cpu, self._where, properties, whereabouts
            )
            generation.install()
            if again is None:
                self.index = core().open(process)
            else:
                self.index = again
                kept, texts = recovery.inheritance(core(), again)
                core().reopen(
                    again, process, kept, {life.slot: text for life, text in texts.items()}
                )
                recoveries.opened_again(again, frozenset(texts))
            core().count_on_wire(self.index, lambda: sum(link.sent for link in links))
            for link in links:
                link.on_end(lost)
            self._remembered = None if shares_memory else remembered.file_for(properties)
            if self._remembered is not None:
                core().remember(self.index, remembered.read(self._remembered))
            self._opened = opened.pop_all()

    def end(self, why: str) -> None:
        """End the device because its user wants that; errors name no tensors as lost."""
        DeviceError.leave_unexplained(self.index)
        self.close(why)

    def close(self, why: str) -> None:
        """End the device; using its tensors raises an error that says why."""
        if self._remembered is not None:
            # A device that has ended itself has nothing to tell.
            with contextlib.suppress(DeviceError):
                remembered.add(self._remembered, *core().learned(self.index))
        core().close(self.index, f"sky:{self.index} ({self._where}) is gone: {why}")
        self._opened.close()
