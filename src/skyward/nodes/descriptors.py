"""Descriptors: the open files that a client needs for its nodes, and the limit on them."""

from __future__ import annotations

import os
import resource

from skyward.errors import ConfigurationError

BESIDES = 256
"""Open files that the client, its provider and the user's program may need besides."""
ROOM = 2
"""How many times what a pool may need is asked for: other pools may start at the same time."""
DIALLED = 2
"""How many files a connection takes that a provider carries: both ends of a pair are here."""


def connections(nodes: int, executors: int, *, encrypted: bool) -> int:
    """How many connections a client has to so many nodes, with so many executors on each.

    There is one to each agent and to each executor, or two if they are encrypted.
    """
    return nodes * (1 + executors) * (2 if encrypted else 1)


def allow(count: int, nodes: int, *, dialled: bool) -> None:
    """Raise this process's limit of open files if so many more connections may exceed it.

    `dialled` says whether the provider may carry the connections, and `nodes` is for the message.
    Only a limit that is certainly too low is an error.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = open_now()
    least = opened + count
    enough = opened + count * ROOM * (DIALLED if dialled else 1) + BESIDES
    if soft == resource.RLIM_INFINITY or enough <= soft:
        return
    highest = enough if hard == resource.RLIM_INFINITY else hard
    for limit in (min(enough, highest), least):
        if max(least, soft) <= limit <= highest and _set(limit, hard):
            return
    if least > soft:
        # The kernel may have a limit of its own that is lower.
        allowed = hard if least > highest else soft
        raise ConfigurationError(
            f"nodes={nodes}: the client needs at least {least} open files, and this process may "
            f"have {allowed}; raise the hard limit (`ulimit -Hn`, LimitNOFILE= of a service), or "
            "start fewer nodes, or fewer processes on each (sky.Worker(concurrency=...))"
        )


def _set(soft: int, hard: int) -> bool:
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    except (ValueError, OSError):
        return False
    return True


def open_now() -> int:
    """How many files this process has open; 0 if the system does not say."""
    try:
        return len(os.listdir("/dev/fd"))
    except OSError:
        return 0
