"""A profile of sky devices: one trace of the client, the wire and the workers."""

from __future__ import annotations

import os
import threading
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from skyward.device import trace
from skyward.device.breakdown import Breakdown
from skyward.device.core import core, index_of
from skyward.device.recording import Recording
from skyward.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class OperationTime:
    """How often an operation ran in a profiled block, and for how long altogether."""

    name: str
    count: int
    seconds: float


class profile:  # noqa: N801 - a context manager, named like a function as in torch.profiler
    """Record what sky devices do in a block, and say where the time went.

    >>> with sky.profile(device) as p:
    ...     train()
    >>> print(p)  # five lines for each device
    >>> p.export("trace.json")  # for https://ui.perfetto.dev or chrome://tracing

    Without a device, the current one is recorded. The end of the block waits for everything issued
    in it. The first 4 million operations are recorded.
    """

    def __init__(self, *devices: Any) -> None:
        self._core = core()
        self._indices = [index_of(device, "sky.profile") for device in devices or ("sky",)]
        self._running: list[tuple[int, str, int]] | None = None
        self._threads: dict[int, str] = {}
        self._captured: dict[str, str] = {}
        self._recorded: list[trace.Recorded] | None = None

    def __enter__(self) -> profile:
        if self._running is not None:
            raise ConfigurationError("sky.profile: one profile is of one block; make another")
        self._running = []
        with ExitStack() as undo:
            for index in self._indices:
                serial = self._core.start_profile(index)
                undo.callback(self._core.stop_profile, serial)
                self._running.append((index, self._core.place(index), serial))
            undo.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._threads = {t.native_id: t.name for t in threading.enumerate() if t.native_id}
        self._captured = {f"sky:{i}": self._core.stats(i).captured for i in self._indices}
        self._recorded = [
            trace.Recorded(f"sky:{index}", place, Recording.read(self._core.stop_profile(serial)))
            for index, place, serial in self._running or ()
        ]

    def export(self, path: str | os.PathLike[str]) -> None:
        """Write the trace as JSON, to be opened with Perfetto or chrome://tracing."""
        recorded = self._ended("export")
        notes = {
            each.name: {
                "device": each.place,
                "clock_error_us": each.recording.clock_error / 1000,
                "operations_dropped": each.recording.operations_dropped,
                "spans_dropped": each.recording.spans_dropped,
                "missing": each.recording.missing,
            }
            for each in recorded
        }
        trace.write(Path(path), recorded, self._threads, notes)

    def breakdown(self, device: Any = None) -> Breakdown:
        """Where the time went, in seconds; the device is needed if there are several."""
        return Breakdown.of(self._one("breakdown", device).recording)

    def operations(self, device: Any = None) -> list[OperationTime]:
        """The operations that ran, those that took the longest altogether first."""
        recording = self._one("operations", device).recording
        counts, took = Counter[str](), Counter[str]()
        for o in recording.operations:
            name = recording.names[o.name]
            counts[name] += 1
            on_gpu = o.kernel_end > 0
            took[name] += o.kernel_end - o.kernel_start if on_gpu else o.run_end - o.run_start
        return [OperationTime(name, counts[name], ns / 1e9) for name, ns in took.most_common()]

    def summary(self) -> str:
        """Where the time went, in five lines for each device."""
        lines = []
        for name, place, recording in self._ended("summary"):
            first, *rest = Breakdown.of(recording).lines()
            lines += [f"{name} ({place}): {first}", *rest]
            if captured := self._captured.get(name):
                lines.append(f"Outside of profiles: {captured}")
            if recording.missing:
                lines.append(f"The worker's part is missing: {recording.missing}")
            if recording.operations_dropped:
                lines.append(
                    f"The last {recording.operations_dropped} operations were not recorded; "
                    "profile fewer steps"
                )
        return "\n".join(lines)

    def __str__(self) -> str:
        return repr(self) if self._recorded is None else self.summary()

    def _ended(self, what: str) -> list[trace.Recorded]:
        if self._recorded is None:
            raise ConfigurationError(
                f"{what}: the profiled block has not ended; use the profile after its `with` block"
            )
        return self._recorded

    def _one(self, what: str, device: Any) -> trace.Recorded:
        recorded = self._ended(what)
        if device is None and len(recorded) == 1:
            return recorded[0]
        if device is not None:
            wanted = f"sky:{index_of(device, what)}"
            for each in recorded:
                if each.name == wanted:
                    return each
        names = ", ".join(each.name for each in recorded)
        raise ConfigurationError(f"{what}({device!r}): name one of the profiled devices: {names}")
