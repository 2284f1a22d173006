"""A real Jupyter kernel, and what it shows under each cell."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

from jupyter_client import AsyncKernelManager

from .conftest import PATIENCE, wait_until

T = TypeVar("T")

_COLOUR = re.compile(r"\x1b\[[\d;]*m")


class Kernel:
    """A kernel with its client; messages are kept by the cell that they belong to."""

    def __init__(self, folder: Path) -> None:
        self.manager = AsyncKernelManager(connection_file=str(folder / "kernel.json"))
        self.first = ""
        """The cell that prepared the kernel for the tests."""
        self._folder = folder
        self._messages: dict[str, list[dict[str, Any]]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    def start(self) -> None:
        """Start the kernel and wait until it answers."""
        self._do(self._start())

    async def _start(self) -> None:
        environment = {
            **os.environ,
            "IPYTHONDIR": str(self._folder / ".ipython"),
            "JUPYTER_RUNTIME_DIR": str(self._folder / ".jupyter"),
        }
        await self.manager.start_kernel(cwd=str(self._folder), env=environment)
        await self._connect()

    async def _connect(self) -> None:
        self._client = self.manager.client()
        self._client.start_channels()
        await self._client.wait_for_ready(timeout=PATIENCE)
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        while True:
            message = await self._client.get_iopub_msg()
            cell = message["parent_header"].get("msg_id", "")
            self._messages.setdefault(cell, []).append(message)

    def shut_down(self) -> None:
        """End the kernel as a notebook server does."""
        self._do(self._shut_down())

    async def _disconnect(self) -> None:
        self._reading.cancel()
        await asyncio.wait([self._reading])
        self._client.stop_channels()

    async def _shut_down(self) -> None:
        await self._disconnect()
        await self.manager.shutdown_kernel()

    def restart(self) -> None:
        """Restart the kernel as a notebook server does."""
        self._do(self._restart())

    async def _restart(self) -> None:
        await self._disconnect()
        await self.manager.restart_kernel()
        # The new client numbers its cells from the beginning.
        self._messages = {}
        await self._connect()

    def close(self) -> None:
        """End the thread that talks to the kernel."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE)

    def begin(self, source: str) -> str:
        """Send a cell, and return its id at once."""
        return self._do(self._send(source))

    async def _send(self, source: str) -> str:
        return str(self._client.execute(source))

    def finish(self, cell: str, seconds: float = PATIENCE) -> None:
        """Wait until a cell is done."""
        wait_until(lambda: self._is_idle(cell), seconds, f"the end of the cell; {self.all(cell)}")

    def run(self, source: str, seconds: float = PATIENCE) -> str:
        """Run a cell to its end, and return its id; fails if the cell fails."""
        cell = self.begin(source)
        self.finish(cell, seconds)
        assert not self.error(cell), f"{source}\n{self.error(cell)}\n{self.text(cell)}"
        return cell

    def fail(self, source: str) -> str:
        """Run a cell that fails, and return the traceback that the user sees."""
        cell = self.begin(source)
        self.finish(cell)
        error = self.error(cell)
        assert error, f"it did not fail: {self.all(cell)}"
        return error

    def value(self, expression: str) -> str:
        """The repr of an expression."""
        cell = self.run(expression)
        return next(
            str(m["content"]["data"]["text/plain"]) for m in self._of(cell, "execute_result")
        )

    def interrupt(self) -> None:
        """What the button "interrupt kernel" does."""
        self._do(self.manager.interrupt_kernel())

    def text(self, cell: str, stream: str = "stdout") -> str:
        """The output of a cell, without colours."""
        parts = [
            m["content"]["text"] for m in self._of(cell, "stream") if m["content"]["name"] == stream
        ]
        return _COLOUR.sub("", "".join(parts))

    def displays(self, cell: str) -> list[dict[str, str]]:
        """The displays of a cell as they look now, each by MIME type."""
        shown: dict[str, dict[str, str]] = {}
        for message in self._of(cell, "display_data", "update_display_data", "execute_result"):
            content = message["content"]
            name = content.get("transient", {}).get("display_id") or message["msg_id"]
            shown[name] = content["data"]
        return list(shown.values())

    def updates(self, cell: str) -> int:
        """How often displays of a cell changed."""
        return len(self._of(cell, "update_display_data"))

    def error(self, cell: str) -> str:
        """The traceback of a cell, without colours; empty if the cell has not failed."""
        lines = [line for m in self._of(cell, "error") for line in m["content"]["traceback"]]
        return _COLOUR.sub("", "\n".join(lines))

    def all(self, cell: str) -> list[Any]:
        """Everything a cell has shown, for messages of tests."""
        return [m["content"] for m in self._messages.get(cell, [])]

    def _of(self, cell: str, *kinds: str) -> list[dict[str, Any]]:
        return [m for m in list(self._messages.get(cell, [])) if m["msg_type"] in kinds]

    def _is_idle(self, cell: str) -> bool:
        assert self._do(self.manager.is_alive()), "the kernel has died"
        states = [m["content"]["execution_state"] for m in self._of(cell, "status")]
        return "idle" in states


@contextlib.contextmanager
def kernel_in(folder: Path) -> Iterator[Kernel]:
    """A kernel whose notebook is in that folder."""
    kernel = Kernel(folder)
    try:
        kernel.start()
        yield kernel
    finally:
        kernel.shut_down()
        kernel.close()
