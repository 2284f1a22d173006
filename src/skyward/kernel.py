"""What the kernel offers beyond POSIX: Linux's extras, which SKYWARD_PORTABLE=1 does without.

Nothing here is needed: where an extra is missing, as on macOS, something slower or coarser stands
in for it. With the switch, Linux shows how that works.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import select
import selectors
import signal
import socket
import stat
import sys

PORTABLE = os.environ.get("SKYWARD_PORTABLE", "") not in ("", "0")
IS_LINUX = sys.platform == "linux" and not PORTABLE
"""Whether prctl, TCP_INFO and /proc are there."""
HAS_MEMORY_FILES = hasattr(os, "memfd_create") and not PORTABLE
"""Whether memory can be a file without a name: shared through a socket, or read by name."""
HAS_PEER_CREDENTIALS = hasattr(socket, "SO_PEERCRED") and not PORTABLE
"""Whether a Unix socket says who is at its other end; elsewhere the folder's mode has to do."""
CLOSE_ON_EXEC = 0 if PORTABLE else int(getattr(socket, "MSG_CMSG_CLOEXEC", 0))
"""The flag with which received descriptors are closed in programs that this process starts."""
KEEP_IDLE = "TCP_KEEPIDLE" if hasattr(socket, "TCP_KEEPIDLE") else "TCP_KEEPALIVE"
"""The option for how long a connection is idle before it is probed; macOS has its own name."""


CGROUPS = "/sys/fs/cgroup"


def processors() -> int:
    """How many processors this process may use, of the machine's or of its container's share."""
    allowed = getattr(os, "sched_getaffinity", None)
    there = len(allowed(0)) if allowed is not None else os.cpu_count() or 1
    return max(1, int(min(there, processor_share(CGROUPS))))


def processor_share(cgroups: str) -> float:
    """How many processors a container may use, by its cgroup; infinite if there is no limit."""
    with contextlib.suppress(OSError, ValueError):
        quota, period = _read(f"{cgroups}/cpu.max").split()
        return math.inf if quota == "max" else float(quota) / float(period)
    with contextlib.suppress(OSError, ValueError):
        # Of version 1 of cgroups; -1 is no limit.
        quota = _read(f"{cgroups}/cpu/cpu.cfs_quota_us")
        if float(quota) > 0:
            return float(quota) / float(_read(f"{cgroups}/cpu/cpu.cfs_period_us"))
    return math.inf


def _read(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        return file.read()


def adopt_orphans(adopt: bool = True) -> bool:
    """Be the parent of descendants whose own parent has ended; False where the kernel cannot."""
    pr_set_child_subreaper = 36
    return IS_LINUX and ctypes.CDLL(None).prctl(pr_set_child_subreaper, int(adopt), 0, 0, 0) == 0


def show_as(module: str) -> None:
    """Have `ps` show this process, which was forked, as one that runs the module, on Linux."""
    with open("/proc/self/stat", "rb") as stat, open("/proc/self/cmdline", "rb") as line:
        begin, end = map(int, stat.read().rpartition(b")")[2].split()[45:47])
        shown = b"%s\0-m\0%s\0" % (line.read().partition(b"\0")[0], module.encode())
    if begin and len(shown) <= end - begin:
        ctypes.memmove(begin, shown.ljust(end - begin, b"\0"), end - begin)


def raise_descriptors(count: float = math.inf) -> float:
    """Allow so many open files if the system permits it, and return how many are allowed now.

    Each shared memory segment is an open file.
    """
    # Not everywhere that clients run.
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed, most = (math.inf if each == resource.RLIM_INFINITY else each for each in (soft, hard))
    wanted = min(count, most)
    if wanted <= allowed:
        return allowed
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard if wanted == most else int(wanted), hard))
        return wanted
    return allowed


def end_with_parent() -> None:
    """Be killed when the thread of the parent that started this process ends, on Linux."""
    if IS_LINUX:
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def selector() -> selectors.BaseSelector:
    """What waits for many sockets at once."""
    return selectors.PollSelector() if PORTABLE else selectors.DefaultSelector()


HAS_EPOLL = hasattr(select, "epoll") and not PORTABLE
"""Whether a thread can change what another thread waits for, while that one waits."""
POLL_SECOND = 1 if HAS_EPOLL else 1000
"""One second, in the unit of the timeouts of `poller`."""


def poller() -> select.epoll | select.poll:
    """What one thread waits with for thousands of sockets."""
    return select.epoll() if HAS_EPOLL else select.poll()


def close_poller(poller: select.epoll | select.poll) -> None:
    """End a poller; one that is no file has no end."""
    if HAS_EPOLL and isinstance(poller, select.epoll):
        poller.close()


def is_own_folder(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a folder of this user's, and no link to one.

    Below /tmp, another user may have made any name first.
    """
    try:
        found = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


def reserve(descriptor: int, size: int) -> None:
    """Give a file its size, and where the system can, its place on the disk."""
    if hasattr(os, "posix_fallocate") and not PORTABLE:
        os.posix_fallocate(descriptor, 0, size)
    else:
        os.ftruncate(descriptor, size)


def keep_alive(end: socket.socket, idle: int = 15, every: int = 5, times: int = 4) -> None:
    """Have the kernel probe an idle connection, so that routers do not forget it.

    After `idle` seconds it sends a probe, and then one `every` so many; after so many `times`
    without an answer it gives the connection up. TCP_USER_TIMEOUT, a limit on unacknowledged bytes,
    is not set: it would also end the connection to a peer that is alive but too busy to read.
    """
    if end.family not in (socket.AF_INET, socket.AF_INET6):
        return
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((KEEP_IDLE, idle), ("TCP_KEEPINTVL", every), ("TCP_KEEPCNT", times)):
        if hasattr(socket, option):
            end.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
