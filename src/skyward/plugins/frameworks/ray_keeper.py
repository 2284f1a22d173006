"""Run as a module: Ray's processes on one node, which end when this process's input does.

Ray's own processes leave the process groups that start them, and outlive a worker that is killed.
All of them inherit a variable by which they are found.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
import uuid

import psutil

MARK = "SKYWARD_RAY_NODE"
KILL_ROUNDS = 100
TRIES = 3
GIVES_UP_SECONDS = 30.0
"""How long Ray waits for its own processes on a node; on a busy machine they take longer."""


def marked(mark: str) -> list[psutil.Process]:
    """The processes that have the mark, but for this one."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and process.environ().get(MARK) == mark:
                found.append(process)
    return found


def main() -> None:
    """Start Ray in a folder, with arguments of `ray start`; when the input ends, kill it."""
    folder, *arguments = sys.argv[1:]
    mark = uuid.uuid4().hex
    os.makedirs(folder, 0o700, exist_ok=True)
    environment = {**os.environ, MARK: mark, "RAY_TMPDIR": folder}
    environment.pop("RAY_ADDRESS", None)
    try:
        if _start(arguments, environment, mark):
            print("started", flush=True)
            while sys.stdin.buffer.read(1 << 16):
                pass
    finally:
        _kill(mark)
        shutil.rmtree(folder, ignore_errors=True)


def _start(arguments: list[str], environment: dict[str, str], mark: str) -> bool:
    """Start Ray, again if it did not wait long enough; says whether it has started."""
    command = "import sys; from ray.scripts.scripts import main; sys.argv[0] = 'ray'; main()"
    for _ in range(TRIES):
        began = time.monotonic()
        started = subprocess.run(
            [sys.executable, "-c", command, "start", *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        if started.returncode == 0:
            return True
        _kill(mark)
        if time.monotonic() - began < GIVES_UP_SECONDS:
            return False
    return False


def _kill(mark: str) -> None:
    """End all processes that have the mark."""
    for _ in range(KILL_ROUNDS):
        found = marked(mark)
        for process in found:
            with contextlib.suppress(psutil.Error):
                process.kill()
        if not found:
            break
        time.sleep(0.02)


if __name__ == "__main__":
    main()
