"""The door of a driver: where it listens in the cluster, and connections to it."""

from __future__ import annotations

import asyncio
import json
import ssl
from urllib.parse import urlsplit

import msgspec

from skyward.errors import PoolStartError, UnreachableError
from skyward.providers.ray import programs
from skyward.providers.ray.driver import ANNOUNCED, FAILED
from skyward.providers.ray.programs import DriverProgram
from skyward.providers.ray.records import DriverAddress, Record

LOOK_SECONDS = 0.15
"""How often the client asks for the driver's log until the driver listens."""
STATE_SECONDS = 1.0
"""How often it asks meanwhile whether the driver still runs."""
CONNECT_SECONDS = 3.0
LONGEST_LINE = 1 << 20

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def announcement(program: DriverProgram, cluster: str) -> DriverAddress:
    """Where the driver listens, from its log; raises with the reason if it does not run."""
    loop, asked = asyncio.get_running_loop(), 0.0
    while True:
        log = await asyncio.to_thread(program.log)
        for line in log.splitlines():
            if line.startswith(FAILED):
                raise programs.failure(json.loads(line[len(FAILED) :]), cluster)
            if line.startswith(ANNOUNCED):
                return msgspec.json.decode(line[len(ANNOUNCED) :], type=DriverAddress)
        if loop.time() > asked + STATE_SECONDS:
            asked = loop.time()
            if why := await asyncio.to_thread(program.why_over):
                last = log.strip().splitlines()[-3:]
                said = f"; it said:\n{chr(10).join(last)}" if last else ""
                raise PoolStartError(f"Ray({cluster!r}): {why}{said}")
        await asyncio.sleep(LOOK_SECONDS)


class DriverDoor:
    """Connects to a driver that has said where it listens, and to its keepers."""

    def __init__(self, cluster: str, record: Record) -> None:
        assert record.driver is not None
        self._cluster, self._driver = cluster, record.driver
        # TLS with the driver that announced itself in the cluster, and with nobody else.
        self._tls: ssl.SSLContext = record.credentials.context(server=False)
        self._tls.check_hostname = False
        self._tls.load_verify_locations(cadata=record.driver.certificate)
        # The host of the dashboard comes first: its ports may be forwarded.
        named = urlsplit(cluster).hostname if "://" in cluster else "127.0.0.1"
        tried = [each for each in (named, *record.driver.addresses) if each]
        self._candidates = list(dict.fromkeys(tried))
        self._address = ""
        """The address at which the driver was reached."""

    async def connect(self) -> Streams:
        """A connection to the driver, at the first of its addresses that answers."""
        last: Exception = OSError("it has no address")
        for address in self._candidates:
            try:
                streams = await self.open(address, self._driver.port)
            except (OSError, TimeoutError) as problem:
                last = problem
                continue
            self._address = address
            return streams
        raise last

    async def again(self) -> Streams:
        """Another connection to the driver, where it was reached."""
        return await self.open(self._address, self._driver.port)

    async def open(self, address: str, port: int) -> Streams:
        """A connection to the driver or a keeper."""
        async with asyncio.timeout(CONNECT_SECONDS):
            return await asyncio.open_connection(
                address, port, ssl=self._tls, server_hostname="skyward", limit=LONGEST_LINE
            )

    def unreachable(self, last: Exception) -> UnreachableError:
        """What to do about a driver that listens, but not for this machine."""
        where = " and ".join(f"{each}:{self._driver.port}" for each in self._candidates)
        return UnreachableError(
            f"Ray({self._cluster!r}): the driver runs in the cluster, but this machine cannot "
            f"connect to it at {where} ({last}); open the ports of the head node to this machine, "
            f"or have one forwarded beside the dashboard's: sky.Ray(..., port=8266), with "
            f"`ssh -L 8265:localhost:8265 -L 8266:localhost:8266 head`"
        )
