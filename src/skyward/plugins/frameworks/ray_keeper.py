"""Run as a module: Ray's processes on one node, which end when this process's input does.

Ray's own processes leave the process groups that start them, and outlive a worker that is killed.
All of them inherit a variable by which they are found.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
import uuid

import psutil

from skyward import kernel

MARK = "SKYWARD_RAY_NODE"
KILL_ROUNDS = 100
TRIES = 3
LOOK_SECONDS = 0.1
OWN_TIMEOUT = "timed out during startup"
"""What Ray says if its own processes on a node took too long, as on a busy machine."""


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
    if not kernel.is_own_folder(folder):
        sys.exit(f"{folder} belongs to somebody else, who could pass for Ray there; remove it")
    environment = {**os.environ, MARK: mark, "RAY_TMPDIR": folder}
    environment.pop("RAY_ADDRESS", None)
    try:
        if _start(arguments, environment, mark):
            print("started", flush=True)
            while not _input_ends(None):
                pass
    finally:
        _kill(mark)
        shutil.rmtree(folder, ignore_errors=True)


def _start(arguments: list[str], environment: dict[str, str], mark: str) -> bool:
    """Start Ray, again if it did not wait long enough; says whether it has started."""
    for _ in range(TRIES):
        code, said = _try(arguments, environment)
        sys.stderr.write(said)
        sys.stderr.flush()
        if code == 0:
            return True
        _kill(mark)
        if code is None or OWN_TIMEOUT not in said:
            return False
    return False


def _try(arguments: list[str], environment: dict[str, str]) -> tuple[int | None, str]:
    """Run `ray start`; returns its exit code, None if the input ended first, and its output."""
    command = "import sys; from ray.scripts.scripts import main; sys.argv[0] = 'ray'; main()"
    # No pipe: Ray's processes go on, and may have its end.
    with tempfile.TemporaryFile() as output:
        starting = subprocess.Popen(
            [sys.executable, "-c", command, "start", *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
        while (code := starting.poll()) is None:
            if _input_ends(LOOK_SECONDS):
                starting.kill()
                starting.wait()
                break
        output.seek(0)
        return code, output.read().decode(errors="replace")


def _input_ends(seconds: float | None) -> bool:
    """Whether the input ends within so many seconds; None waits until something comes."""
    descriptor = sys.stdin.fileno()
    ready, _, _ = select.select([descriptor], [], [], seconds)
    return bool(ready) and not os.read(descriptor, 1 << 16)


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
