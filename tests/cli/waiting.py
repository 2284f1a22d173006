"""Run as a script: `sky` with a store that waits before it writes a file, until it is told to."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from skyward.cli.main import main

signs = Path(sys.argv.pop(1))


class WaitingFileSystem(LocalFileSystem):
    """Says that it is about to write, and goes on when the test has seen what it wants to see."""

    protocol = ("waiting",)

    def pipe_file(self, path: str, *args: Any, **settings: Any) -> Any:
        (signs / "writing").touch()
        while not (signs / "go").exists():
            time.sleep(0.01)
        return super().pipe_file(path, *args, **settings)


fsspec.register_implementation("waiting", WaitingFileSystem)
main()
