"""Notices: the agent waits for the provider to say that it takes the machine back."""

from __future__ import annotations

import contextlib
import math
import subprocess
import sys
import threading
from collections.abc import Callable

from skyward.wire.messages import Message, Reclaim
from skyward.worker.process import kill_group

PAUSE_SECONDS = 10.0
"""How long the agent waits before it starts a module again that ended without a notice."""
START_SECONDS = 1.5
"""How long the agent leaves the processors to the start of its workers: importing the module of a
provider took 0.2 s, and a node is not taken back as soon as it has started."""
REASON_LENGTH = 500


class Notices:
    """Owns the process that waits for a notice, and passes the notice on."""

    def __init__(self, module: str, tell: Callable[[Message], None]) -> None:
        self._module, self._tell = module, tell
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="skyward-notices", daemon=True)

    def start(self) -> None:
        """Wait for the notice from now on."""
        if self._module:
            self._thread.start()

    def _watch(self) -> None:
        self._closed.wait(START_SECONDS)
        while not self._closed.is_set():
            notice = self._await_notice()
            if notice is not None:
                self._tell(notice)
                return
            self._closed.wait(PAUSE_SECONDS)

    def _await_notice(self) -> Reclaim | None:
        """Run the module; returns its notice, or None if it ends without one."""
        with self._lock:
            if self._closed.is_set():
                return None
            process = self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "skyward.worker.notice", self._module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
        assert process.stdin is not None
        assert process.stdout is not None
        with process.stdin, process.stdout:
            found = next(filter(None, map(_read, process.stdout)), None)
            kill_group(process.pid)
        process.wait()
        return found

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._closed.set()
            if self._process is not None and self._process.poll() is None:
                kill_group(self._process.pid)
        if self._thread.is_alive():
            self._thread.join()


def _read(line: bytes) -> Reclaim | None:
    """The notice in a line "SECONDS REASON"; None if it has none."""
    words = line.decode("utf-8", "replace").split(maxsplit=1)
    with contextlib.suppress(ValueError):
        seconds = float(words[0]) if words else math.nan
        if math.isfinite(seconds):
            reason = words[1].strip() if len(words) > 1 else "no reason was given"
            return Reclaim(max(0.0, seconds), reason[:REASON_LENGTH])
    return None
