"""A headless Chromium, driven over its DevTools protocol, for tests and pictures of the page."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.request import urlopen

import websocket

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser")
START_SECONDS = 60.0


class Chromium:
    """One browser with one tab; `with` ends it."""

    def __init__(self) -> None:
        assert PROGRAM is not None
        self._folder = tempfile.mkdtemp(prefix="chromium-")
        arguments = ["--headless=new", "--remote-debugging-port=0", "--no-first-run"]
        arguments += ["--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
        arguments += ["--remote-allow-origins=*", f"--user-data-dir={self._folder}"]
        if os.getuid() == 0:
            arguments.append("--no-sandbox")
        self._process = subprocess.Popen(
            [PROGRAM, *arguments, "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            # It leaves files of its own in these folders.
            env=os.environ | {"XDG_RUNTIME_DIR": self._folder, "HOME": self._folder},
        )
        try:
            self._tab = self._connect()
        except BaseException:
            self.close()
            raise
        self._numbers = itertools.count(1)
        self.problems: list[str] = []
        """What the page has reported to its console, and exceptions that nobody caught."""
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def _connect(self) -> websocket.WebSocket:
        deadline = time.monotonic() + START_SECONDS
        port = Path(self._folder, "DevToolsActivePort")
        while time.monotonic() < deadline and self._process.poll() is None:
            with contextlib.suppress(OSError, IndexError, ValueError):
                number = int(port.read_text().split()[0])
                with urlopen(f"http://127.0.0.1:{number}/json", timeout=5) as answer:
                    tabs = [tab for tab in json.load(answer) if tab["type"] == "page"]
                url = tabs[0]["webSocketDebuggerUrl"]
                return websocket.create_connection(url, timeout=START_SECONDS)
            time.sleep(0.05)
        raise TimeoutError("Chromium did not start")

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Give a command of the protocol, and return its answer."""
        number = next(self._numbers)
        self._tab.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._tab.recv())
            match message.get("method"):
                case "Runtime.exceptionThrown":
                    self.problems.append(json.dumps(message["params"]["exceptionDetails"]))
                case "Log.entryAdded":
                    self.problems.append(message["params"]["entry"]["text"])
            if message.get("id") == number:
                assert "error" not in message, message["error"]
                result: dict[str, Any] = message["result"]
                return result

    def open(self, url: str) -> None:
        """Go to an address, and wait until the page is there."""
        self.ask("Page.navigate", url=url)
        self.until("document.body && document.readyState === 'complete'")

    def value(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        answer = self.ask("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def until(self, expression: str, seconds: float = 30.0) -> Any:
        """Wait until an expression is true, and return its value."""
        deadline = time.monotonic() + seconds
        while not (found := self.value(expression)):
            assert time.monotonic() < deadline, f"{expression} did not become true"
            time.sleep(0.02)
        return found

    def show(self, width: int, height: int, *, dark: bool = False, scale: float = 1.0) -> None:
        """Set the size of the window, and the colour scheme."""
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])

    def picture(self, path: Path) -> None:
        """Save what the window shows."""
        data = self.ask("Page.captureScreenshot", format="png")["data"]
        path.write_bytes(base64.b64decode(data))

    def offline(self, is_so: bool) -> None:
        """Cut the tab off the network, or connect it again."""
        self.ask(
            "Network.emulateNetworkConditions",
            offline=is_so,
            latency=0,
            downloadThroughput=-1,
            uploadThroughput=-1,
        )

    def close(self) -> None:
        """End the browser and all its processes."""
        with contextlib.suppress(AttributeError, OSError, websocket.WebSocketException):
            self._tab.close()
        self._process.terminate()
        try:
            self._process.wait(100)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, 9)
            self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
