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
    command = "import sys; from ray.scripts.scripts import main; sys.argv[0] = 'ray'; main()"
    try:
        started = subprocess.run(
            [sys.executable, "-c", command, "start", *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        if started.returncode == 0:
            print("started", flush=True)
            while sys.stdin.buffer.read(1 << 16):
                pass
    finally:
        for _ in range(KILL_ROUNDS):
            found = marked(mark)
            for process in found:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            if not found:
                break
            time.sleep(0.02)
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
