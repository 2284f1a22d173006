"""Ray: nodes as bundles of a Ray cluster, from inside it or from a laptop through its jobs API."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Literal

from skyward import checks
from skyward.errors import ConfigurationError, PoolError, UnreachableError
from skyward.providers import Capabilities, Remains, Request
from skyward.providers.ray import records
from skyward.providers.ray.jobs_api import JobsApi
from skyward.providers.ray.link import Ask, RayAllocation, RaySettings
from skyward.providers.ray.programs import ChildProgram, DriverProgram, JobProgram

__all__ = ["Ray"]

_ADDRESS = re.compile(r"auto|local|https?://[^\s/]+(?:/\S*)?|[^\s/:]+:\d+")
_STRATEGIES = ("SPREAD", "STRICT_SPREAD", "PACK", "STRICT_PACK")
_DRIVER = "driver"
Strategy = Literal["SPREAD", "STRICT_SPREAD", "PACK", "STRICT_PACK"]


@dataclass(frozen=True)
class Ray:
    """Nodes in a Ray cluster: each is a bundle of a placement group with our agent in it.

    `address` is the dashboard's, "http://head:8265", and then no Ray is needed here; or, inside the
    cluster, "auto" or "host:port", as for `ray.init`. Left out, it is `RAY_API_SERVER_ADDRESS`,
    `RAY_ADDRESS`, or "auto". With `spread`, nodes go to different machines as far as there are
    enough; without, to as few as possible; or name a strategy of placement groups, such as
    "STRICT_SPREAD". `resources` are custom resources that each node needs besides the accelerators,
    the `vcpus` (1 if left out) and the `memory_gb` of the `Compute`.

    `python` names an interpreter on the machines that has skyward and all that is needed. `port` is
    the one port at which the driver listens, to forward it beside the dashboard's. `headers` go
    with requests to the dashboard; so do `RAY_JOB_HEADERS` and `RAY_AUTH_TOKEN`.

    >>> with sky.Compute(sky.Ray("http://head:8265"), nodes=2) as compute: ...
    """

    address: str | None = None
    _: KW_ONLY
    spread: bool | Strategy = True
    resources: Mapping[str, float] | None = None
    namespace: str | None = None
    python: str | None = None
    port: int | None = None
    headers: Mapping[str, str] | None = None
    direct: bool = True
    """Whether to try the nodes' own addresses before connections go through the driver."""
    autoscales: bool | None = None
    """Whether the cluster adds nodes by itself; if left out, the cluster is asked."""
    timeout: float = 1800.0
    """How many seconds a node may be pending."""

    name = "ray"
    capabilities = Capabilities(answers=True, collects=True, holds_keys=True, mounts_folders=False)

    def __post_init__(self) -> None:
        variables = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
        usual = next((os.environ[each] for each in variables if os.environ.get(each)), "auto")
        address = usual if self.address is None else checks.text(self, "address", self.address)
        if not _ADDRESS.fullmatch(address):
            hint = "; ray:// is Ray's own client, which cannot start agents" * ("ray://" in address)
            raise checks.refused(
                self,
                {"address": address},
                f"give 'http://head:8265', 'auto' or 'head:6379'{hint}",
            )
        if self.spread not in (True, False, *_STRATEGIES):
            raise checks.refused(
                self, {"spread": self.spread}, f"choose True, False or {', '.join(_STRATEGIES)}"
            )
        for what in ("namespace", "python"):
            if (value := getattr(self, what)) is not None:
                checks.text(self, what, value)
        for what in ("resources", "headers"):
            if (value := getattr(self, what)) is not None and not isinstance(value, Mapping):
                raise checks.refused(self, {what: value}, f"not a mapping: {checks.kind(value)}")
        for resource, amount in (self.resources or {}).items():
            if resource in ("CPU", "GPU", "memory") or not isinstance(amount, (int, float)):
                raise checks.refused(
                    self,
                    {"resources": self.resources},
                    f"{resource!r}: {amount!r}; name custom resources with numbers, and write "
                    "Compute(vcpus=, memory_gb=, accelerator=) for the others",
                )
        if self.port is not None:
            port = checks.whole(self, "port", self.port, at_least=1)
            if port >= 1 << 16:
                raise checks.refused(self, {"port": port}, "write a port from 1 to 65535")
        if self.autoscales is not None:
            checks.flag(self, "autoscales", self.autoscales)
        checks.store(
            self,
            address=address,
            direct=checks.flag(self, "direct", self.direct),
            timeout=checks.seconds(self, "timeout", self.timeout),
        )

    def __repr__(self) -> str:
        return checks.shown(self)

    def __hash__(self) -> int:
        return hash((self.address, self.spread, self.namespace, self.python, self.port))

    @property
    def _cluster(self) -> str:
        assert self.address is not None
        return self.address

    @property
    def _strategy(self) -> str:
        if isinstance(self.spread, str):
            return self.spread
        return "SPREAD" if self.spread else "PACK"

    async def ping(self) -> str:
        """Ask the dashboard its version, or connect to the cluster's head."""
        if "://" in self._cluster:
            api = JobsApi(self._cluster, self.headers)
            version = await asyncio.to_thread(api.version)
            return f"Ray {version} at {api.address}"
        host, _, port = (await asyncio.to_thread(_head, self._cluster)).rpartition(":")
        try:
            _, writer = await asyncio.open_connection(host, int(port))
        except OSError as problem:
            raise UnreachableError(
                f"Ray({self._cluster!r}): nobody answers at {host}:{port}: {problem}; start the "
                "cluster, or give its dashboard's address, as in 'http://head:8265'"
            ) from problem
        writer.close()
        return f"the head of a cluster at {host}:{port}"

    def check(self, request: Request) -> None:
        """Refuse volumes: nothing is mounted on a machine of the cluster."""
        for volume in request.volumes:
            if volume.target != volume.source:
                raise ConfigurationError(
                    f"{volume}: the files of a Ray node stay where they are; leave target out and "
                    "give the path as it is on the nodes, or use a provider with containers"
                )

    def describe(self) -> Mapping[str, Any]:
        """Where the cluster is; `headers` may hold secrets, and `sky down` reads the variables."""
        return {
            "address": self.address,
            "spread": self.spread,
            "resources": None if self.resources is None else dict(self.resources),
            "namespace": self.namespace,
            "python": self.python,
            "port": self.port,
            "direct": self.direct,
            "autoscales": self.autoscales,
            "timeout": self.timeout,
        }

    def price(self, request: Request) -> float | None:
        """None: what a cluster's machines cost is unknown."""
        return None

    def allocate(self, pool: str) -> RayAllocation:
        """The bundles that the pool's driver has."""
        return RayAllocation(
            pool,
            RaySettings(
                self._cluster,
                self.headers,
                program=self._program,
                given=self._given,
                ask=self._ask,
                python=self.python,
                direct=self.direct,
                timeout=self.timeout,
            ),
        )

    @property
    def _given(self) -> dict[str, Any]:
        """What a new driver has to know of these."""
        return {
            "namespace": self.namespace,
            "port": self.port or 0,
            "autoscales": self.autoscales,
        }

    def _program(self, pool: str, id: str = "") -> DriverProgram:
        if "://" in self._cluster:
            return JobProgram(JobsApi(self._cluster, self.headers), id)
        return ChildProgram(self._cluster, pool, id)

    def _ask(self, request: Request) -> Ask:
        bundle: dict[str, float] = {"CPU": request.vcpus or 1}
        if request.accelerator is not None:
            bundle["GPU"] = request.accelerator.count
        if request.memory_gb is not None:
            bundle["memory"] = int(request.memory_gb * 1e9)
        bundle.update(self.resources or {})
        kind = "" if request.accelerator is None else request.accelerator.name
        return Ask(bundle, self._strategy, kind, keeps_threads=request.vcpus is not None)

    @property
    def where(self) -> str:
        """Where `remains` looks, for people."""
        return f"ray at {self._cluster}"

    async def remains(self) -> Sequence[Remains]:
        """The drivers of all pools; those beside a client are known on its machine alone."""
        from skyward.providers.ray import remains

        if "://" in self._cluster:
            return await asyncio.to_thread(remains.jobs, JobsApi(self._cluster, self.headers))
        if ":" not in self._cluster and not records.pools():
            # Without a cluster there is nobody to ask, and "nothing" would be no answer.
            await asyncio.to_thread(_head, self._cluster)
        return await asyncio.to_thread(remains.processes, self._program)

    def export_keys(self, pool: str) -> Mapping[str, str]:
        """The keys to talk to the pool's driver, which has to be a job of the cluster."""
        if "://" not in self._cluster:
            raise PoolError(
                f"Ray({self._cluster!r}): the driver of this pool is a process of this machine, so "
                "no other machine can use the pool; make it with the address of the cluster's "
                "dashboard, as in sky.Ray('http://head:8265')"
            )
        if (record := records.read(pool)) is None:
            raise PoolError(
                "the keys to the driver of this pool are not on this machine; export its record on "
                "the machine that made it"
            )
        return {_DRIVER: records.encode(record)}

    def import_keys(self, pool: str, keys: Mapping[str, str]) -> None:
        """Write the keys to the pool's driver down."""
        if _DRIVER in keys:
            records.write(pool, records.decode(keys[_DRIVER]))


def _head(cluster: str) -> str:
    """The address of a cluster's head; "auto" is what Ray has written down on this machine."""
    if ":" in cluster:
        return cluster
    folder = Path(os.environ.get("RAY_TMPDIR") or "/tmp") / "ray"
    try:
        return (folder / "ray_current_cluster").read_text().strip()
    except OSError:
        raise ConfigurationError(
            "Ray(): no cluster runs on this machine; set RAY_API_SERVER_ADDRESS to the address of "
            "a dashboard, as in 'http://head:8265'"
        ) from None
