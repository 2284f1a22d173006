"""Run the example notebook in a real browser, and take pictures of it in a light and a dark theme.

Needs `pip install jupyterlab playwright` and Debian's `chromium`:

    .venv/bin/python tools/notebook_in_browser.py docs/images
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).parents[1] / "examples" / "notebook.ipynb"
SECONDS = 90
WIDTH, HEIGHT = 1150, 3200
"""So high that JupyterLab renders all cells: it leaves out those that are out of sight."""


def main() -> None:
    """Run the notebook, check what the browser shows, and write the pictures."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("folder", type=Path, help="where the pictures go")
    options.add_argument("--chromium", default=shutil.which("chromium"))
    given = options.parse_args()
    if not given.chromium:
        sys.exit("there is no chromium; install it, or name a browser with --chromium")
    with tempfile.TemporaryDirectory() as folder, _lab(Path(folder)) as address:
        _look(address, given.chromium, given.folder)


@contextlib.contextmanager
def _lab(folder: Path) -> Iterator[str]:
    """A JupyterLab with the notebook, on the loopback; its address has the token."""
    shutil.copy(NOTEBOOK, folder)
    token = secrets.token_hex(16)
    homes = {name: str(folder / name) for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR")}
    runtime = folder / "runtime"
    environment = {**os.environ, **homes, "JUPYTER_RUNTIME_DIR": str(runtime)}
    environment["IPYTHONDIR"] = str(folder / "ipython")
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--port=0"]
    command += [f"--ServerApp.root_dir={folder}", f"--IdentityProvider.token={token}"]
    command += ["--LabApp.news_url=None", "--LabApp.check_for_updates_class="]
    command[-1] += "jupyterlab.NeverCheckForUpdate"
    log = folder / "lab.log"
    with log.open("w") as out:
        server = subprocess.Popen(command, env=environment, stdout=out, stderr=out)
    try:
        yield f"{_address(runtime, server, log)}lab/tree/{NOTEBOOK.name}?token={token}"
    finally:
        server.terminate()
        server.wait(30)


def _address(runtime: Path, server: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline and server.poll() is None:
        for file in runtime.glob("jpserver-*.json"):
            with contextlib.suppress(OSError, ValueError):
                told = json.loads(file.read_text())
                urllib.request.urlopen(f"{told['url']}api", timeout=5).close()
                return str(told["url"])
        time.sleep(0.1)
    sys.exit(f"JupyterLab did not start:\n{log.read_text()}")


def _look(address: str, chromium: str, folder: Path) -> None:
    # By name, since types are checked where it is not installed.
    playwright_api = importlib.import_module("playwright.sync_api")
    folder.mkdir(parents=True, exist_ok=True)
    with playwright_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        page.goto(address)
        page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=SECONDS * 1000)
        page.wait_for_selector("text=Python 3 (ipykernel) | Idle", timeout=SECONDS * 1000)
        page.click("text=Run >> nth=0")
        page.click("text=Run All Cells")
        try:
            page.wait_for_selector(
                ".jp-CodeCell:last-child >> text=calls succeeded", timeout=SECONDS * 1000
            )
        except Exception:
            page.screenshot(path=str(folder / "failed.png"))
            raise
        failed = page.locator("[data-mime-type='application/vnd.jupyter.stderr']").all_inner_texts()
        assert not failed, f"cells have errors: {failed}"
        page.wait_for_selector(".jp-CodeCell:has-text('later = train') >> text=width 256: loss")
        _picture(page, folder / "notebook.png")
        _command(page, "Theme: JupyterLab Dark")
        page.wait_for_timeout(2000)
        _picture(page, folder / "notebook-dark.png")
        browser.close()


def _command(page: Any, name: str) -> None:
    page.keyboard.press("Control+Shift+C")
    page.wait_for_selector(".lm-CommandPalette-input")
    page.fill(".lm-CommandPalette-input", name)
    page.wait_for_timeout(500)
    page.keyboard.press("Enter")


def _picture(page: Any, file: Path) -> None:
    """The notebook from the cell that trains to the result of the magic."""
    first = page.locator(".jp-CodeCell:has-text('widths = [')").bounding_box()
    last = page.locator(".jp-CodeCell:has-text('counted, sum(counted)')").bounding_box()
    height = last["y"] + last["height"] - first["y"]
    page.screenshot(path=str(file), clip={**first, "height": height})


if __name__ == "__main__":
    main()
