"""Run on a node: ends, with a line, when Slurm says that it will end the job.

The line is "SECONDS REASON". The keeper of the job knows, since the job's script tells it.
"""

from __future__ import annotations

import os
import socket
import sys
import time

from skyward.providers.on_node.keeper import VARIABLE

PAUSE_SECONDS = 5.0


def notice(folder: str) -> str:
    """The keeper's notice; empty if the keeper has ended without one."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.path.join(folder, "s"))
        connection.sendall(b'{"ask": "wait"}\n')
        with connection.makefile() as answer:
            return answer.readline().strip()


def main() -> None:
    """Wait for the notice, and print it."""
    folder = os.environ.get(VARIABLE)
    if folder is None:
        sys.exit(f"{VARIABLE} is not set: this runs below the keeper of a job")
    while True:
        try:
            found = notice(folder)
        except OSError:
            found = ""
        if found:
            print(found, flush=True)
            return
        time.sleep(PAUSE_SECONDS)


if __name__ == "__main__":
    main()
