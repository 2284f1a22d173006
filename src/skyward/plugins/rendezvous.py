"""The port where a pool's workers meet: the head's first worker keeps it bound until it is used."""

from __future__ import annotations

import socket

from skyward.errors import SkywardError

_reserved: socket.socket | None = None


def reserve() -> int:
    """Bind a port that is free on this machine, and keep it; its number."""
    global _reserved
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    _reserved = socket.socket(family)
    _reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if family == socket.AF_INET6:
        _reserved.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    _reserved.bind(("", 0))
    return int(_reserved.getsockname()[1])


def take() -> socket.socket:
    """The bound socket, to listen on or to close right before another binds the port; once."""
    global _reserved
    taken, _reserved = _reserved, None
    if taken is None:
        raise SkywardError(
            "the port where the workers meet is taken, or this is not the head; a pool has one, "
            "so give it one plugin that needs it, sky.plugins.torch() or sky.plugins.jax()"
        )
    return taken
