"""Detached: a process that lives on when the command and the connection that started it end."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

LOG = "agent.log"
PID = "agent.pid"
_LAST_WORDS = 8192


def leave(folder: Path) -> None:
    """Fork, and go on in a new process with a session of its own; call it before starting threads.

    The first process prints the first line that the new process prints, and ends. If the new
    process ends without a line, the first process prints the log and fails.
    """
    announced, announcing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(announcing)
        _stay_behind(folder, announced, pid)
    os.close(announced)
    os.setsid()
    log = os.open(folder / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for here, there in ((os.open(os.devnull, os.O_RDONLY), 0), (announcing, 1), (log, 2)):
        os.dup2(here, there)
        os.close(here)
    # Whoever cleans temporary folders passes over one that is locked; held until the process ends.
    fcntl.flock(os.open(folder, os.O_RDONLY | os.O_CLOEXEC), fcntl.LOCK_SH)
    mark = folder / f"{PID}.new"
    mark.write_text(f"{os.getpid()} {start_mark(os.getpid())}\n", encoding="ascii")
    mark.rename(folder / PID)


def _stay_behind(folder: Path, announced: int, pid: int) -> None:
    # When the SSH connection ends, SIGPIPE may end this process: the new one does not need it.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    with os.fdopen(announced, "rb") as line:
        said = line.readline()
    code = 0
    if not said:
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status) or 1
        with contextlib.suppress(OSError):
            said = (folder / LOG).read_bytes()[-_LAST_WORDS:]
    sys.stdout.buffer.write(said)
    sys.stdout.buffer.flush()
    os._exit(code if code > 0 else 1 if code else 0)


def running(folder: Path) -> int:
    """The number of the detached process of a folder; 0 if it does not run."""
    try:
        number, mark = (folder / PID).read_text(encoding="ascii").split()
        return int(number) if start_mark(int(number)) == mark else 0
    except (OSError, ValueError):
        return 0


def start_mark(pid: int) -> str:
    """The start time of a process in the system's form, since process numbers are reused.

    Empty for one that has ended: in a container whose first process reaps nobody, it stays listed.
    """
    with contextlib.suppress(OSError):
        # The name, in parentheses, may hold any text; the start is the 20th field after it.
        status = Path(f"/proc/{pid}/stat").read_text("ascii", "replace").rpartition(") ")[2].split()
        return "" if status[0] == "Z" else status[19]
    shown = subprocess.run(
        ["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False
    )
    return "-".join(shown.stdout.split())
