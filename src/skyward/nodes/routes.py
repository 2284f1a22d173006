"""Routes: how the client, and other nodes, connect to the processes on a machine."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import socket

from skyward.nodes import provider_loop
from skyward.providers import Machine
from skyward.wire.connecting import direct, host_and_port

DIRECT_SECONDS = 1.5
"""How long the client tries a direct connection before it uses the machine's `dial`."""


class Routes:
    """The ways to one machine; processes there listen at endpoints, separated by spaces."""

    def __init__(self, machine: Machine, address: str, *, here: bool) -> None:
        """`address` is the machine's for other nodes; `here` says if it is the client's machine."""
        self._machine, self._address, self._here = machine, address, here
        self._is_direct = here and machine.direct is not None

    def try_direct(self, endpoints: str) -> None:
        """Find out whether a direct connection can be made, and use one from now on if so."""
        try:
            direct(self._direct_endpoint(endpoints), DIRECT_SECONDS).close()
        except (OSError, LookupError):
            self._is_direct = False
        else:
            self._is_direct = True

    def _direct_endpoint(self, endpoints: str) -> str:
        found = [each for each in endpoints.split() if each.startswith("tcp:")]
        if not found or self._machine.direct is None:
            raise LookupError(endpoints)
        return f"tcp:{self._machine.direct}:{found[0].rpartition(':')[2]}"

    def choose(self, endpoints: str) -> str:
        """The endpoint for the client to connect to."""
        if self._here:
            return endpoints.split()[0]
        if self._is_direct:
            return self._direct_endpoint(endpoints)
        if self._machine.forwards_to:
            listens = f":{self._machine.forwards_to}:"
            return next(each for each in endpoints.split() if listens in each)
        return next(each for each in endpoints.split() if each.startswith("unix:"))

    def near(self, endpoints: str) -> str:
        """The Unix socket, if the machine turns out to be the client's; else empty."""
        if self._here or not self._machine.may_be_here:
            return ""
        for endpoint in endpoints.split():
            path = endpoint.removeprefix("unix:")
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as end:
                if path != endpoint and os.stat(path).st_uid == os.getuid():
                    end.settimeout(DIRECT_SECONDS)
                    end.connect(path)
                    return endpoint
        return ""

    def for_peers(self, endpoints: str) -> tuple[str, ...]:
        """The endpoints that processes of other nodes may try.

        A Unix socket is for those on the same machine; the machine's own loopback is for none.
        """
        places = endpoints.split()
        found = [each for each in places if each.startswith("unix:")]
        found += [each for each in places if each.startswith("tcp:") and self._is_at(each)]
        if not self._here:
            with contextlib.suppress(LookupError):
                found.append(self._direct_endpoint(endpoints))
        return tuple(dict.fromkeys(found))

    def _is_at(self, endpoint: str) -> bool:
        wanted = self._address.removeprefix("[").removesuffix("]")
        return host_and_port(endpoint)[0] == wanted

    def dial(self, endpoint: str, seconds: float) -> socket.socket:
        """Connect to an endpoint.

        Raises `ConnectionRefusedError` only if it is known that no process listens there.
        """
        if self._is_direct and endpoint.startswith("tcp:"):
            return direct(endpoint, seconds)
        if endpoint.startswith("tcp:") and self._machine.forwards_to:
            opening = provider_loop.submit(self._machine.forward(endpoint))
        else:
            opening = provider_loop.submit(self._machine.dial(endpoint))
        try:
            return opening.result(seconds)
        except concurrent.futures.TimeoutError:
            opening.cancel()
            raise TimeoutError(f"{endpoint} on {self._machine.id} was not reached") from None
