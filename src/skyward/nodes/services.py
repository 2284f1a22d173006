"""The client's connections to the services of its nodes' agents."""

from __future__ import annotations

import os

from skyward.errors import ConfigurationError, NodeLostError
from skyward.nodes.roster import Roster
from skyward.wire.asking import ServiceConnection
from skyward.wire.connecting import connect
from skyward.wire.identity import Credentials, node_name
from skyward.wire.messages import Hello


class ServiceDesk:
    """Opens connections to services; any thread may ask for one."""

    def __init__(self, pool_id: str, roster: Roster, credentials: Credentials | None) -> None:
        self._id, self._roster, self._credentials = pool_id, roster, credentials

    def open(self, index: int, name: str) -> ServiceConnection:
        """A connection to a service of a node; the caller closes it."""
        node = self._roster.get(index)
        if node is None or not node.host.endpoint:
            there = [each.index for each in self._roster.nodes]
            raise ConfigurationError(f"node {index} is not there; the pool's nodes are {there}")
        try:
            channel, _ = connect(
                node.host.routes.choose(node.host.endpoint),
                Hello(self._id, f"service-{name}", pid=os.getpid()),
                self._credentials,
                node_name(self._id, index),
                dial=node.host.routes.dial,
            )
        except (OSError, EOFError) as problem:
            raise NodeLostError(
                f"the agent of node {index} cannot be reached: {problem}; see `compute.nodes`"
            ) from problem
        return ServiceConnection(channel)
