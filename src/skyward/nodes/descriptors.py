"""Descriptors: the open files that a client needs for its nodes, and the limit on them."""

from __future__ import annotations

import resource

from skyward.errors import ConfigurationError

BESIDES = 256
"""Open files that the client, its provider and the user's program may need besides."""


def needed(nodes: int, executors: int, *, encrypted: bool) -> int:
    """How many files a client has open at most, with so many executors on each node.

    There is one connection to each agent and to each executor, or two if they are encrypted.
    """
    return nodes * (1 + executors) * (2 if encrypted else 1) + BESIDES


def allow(count: int, nodes: int) -> None:
    """Raise this process's limit of open files if it is lower; `nodes` is for the message."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or count <= soft:
        return
    if hard == resource.RLIM_INFINITY or count <= hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))
            return
        except (ValueError, OSError):
            # The kernel may have a limit of its own that is lower.
            hard = soft
    raise ConfigurationError(
        f"nodes={nodes}: the client needs up to {count} open files, and this process may have "
        f"{hard}; raise the hard limit (`ulimit -Hn`, LimitNOFILE= of a service), or start fewer "
        "nodes"
    )
