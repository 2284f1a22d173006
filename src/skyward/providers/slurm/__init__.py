"""Slurm: nodes as tasks of a job on a cluster, through nothing but Slurm's own commands."""

from __future__ import annotations

import datetime
import os
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

from skyward import checks
from skyward.errors import ConfigurationError, UnreachableError
from skyward.providers import Capabilities, Remains, Request, find_provider
from skyward.providers.hosts import NamedHosts
from skyward.providers.slurm.commands import SlurmCluster, check_has_cluster
from skyward.providers.slurm.jobs import SlurmAllocation
from skyward.providers.slurm.login import Here, Login, Remote
from skyward.providers.slurm.submission import Submission

__all__ = ["Slurm"]

PYTHON = "SKYWARD_SLURM_PYTHON"
_OWNED = {
    **dict.fromkeys(("-J", "--job-name", "--comment"), "`sky ps` finds the job by them"),
    **dict.fromkeys(
        ("-N", "--nodes", "-n", "--ntasks", "--ntasks-per-node", "-a", "--array"),
        "the pool's nodes= says how many",
    ),
    **dict.fromkeys(
        ("-M", "--clusters", "--cluster"),
        "Slurm's other commands would not follow; set SLURM_CLUSTERS where they run",
    ),
    **dict.fromkeys(("--wrap", "-W", "--wait", "--parsable", "--test-only", "-k", "--no-kill"), ""),
}
"""Options of `sbatch` that are the provider's own, and why."""


@dataclass(frozen=True)
class Slurm:
    """Nodes of a Slurm cluster: one job, with one task on each node.

    `partition`, `account`, `qos`, `constraint` and `time` are the options of `sbatch`, and `extra`
    has any others. Without `login`, Slurm's commands run on this machine; with "me@cluster", on
    that host over SSH, and an `SSH` says more about the way there. `container` names an image for
    pyxis or apptainer, whichever the site has.

    >>> with sky.Compute(sky.Slurm(partition="gpu", time="2:00:00"), nodes=2) as compute: ...
    """

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    time: str | datetime.timedelta | None = None
    login: str | NamedHosts | Mapping[str, Any] | None = None
    container: str | None = None
    extra: Sequence[str] = ()
    _: KW_ONLY
    python: str | None = None
    """An interpreter on the nodes, or in the container, that has skyward and all that is needed;
    without it, `SKYWARD_SLURM_PYTHON`, or else the environment of the image is built."""
    timeout: float | None = None
    """How many seconds the job may wait; None for as long as it takes."""
    name: str = field(default="slurm", init=False, repr=False)
    capabilities = Capabilities(answers=True, collects=True, mounts_folders=False)

    def __post_init__(self) -> None:
        for what in ("partition", "account", "qos", "constraint", "container", "python"):
            value = getattr(self, what)
            if value is not None:
                checks.text(self, what, value)
        checks.store(
            self,
            extra=self._checked_extra(),
            time=self._checked_time(),
            login=self._checked_login(),
            python=self.python or os.environ.get(PYTHON) or None,
        )
        if self.container is not None:
            checks.store(self, capabilities=replace(self.capabilities, mounts_folders=True))
        if self.timeout is not None:
            checks.store(self, timeout=checks.seconds(self, "timeout", self.timeout))

    def __repr__(self) -> str:
        return checks.shown(self)

    def _checked_extra(self) -> tuple[str, ...]:
        extra = checks.texts(self, "extra", self.extra)
        for option in extra:
            name = option.partition("=")[0] if option.startswith("--") else option[:2]
            if name in _OWNED:
                why = _OWNED[name] or "the pool needs it for itself"
                raise checks.refused(self, {"extra": extra}, f"leave {name} out: {why}")
            if not option.startswith("-"):
                raise checks.refused(
                    self,
                    {"extra": extra},
                    f"{option!r} is no option of sbatch; write each with its value, as in "
                    "'--nodelist=n1'",
                )
        return extra

    def _checked_time(self) -> str | None:
        if isinstance(self.time, datetime.timedelta):
            minutes, rest = divmod(int(self.time.total_seconds()), 60)
            if self.time <= datetime.timedelta(0):
                raise checks.refused(self, {"time": self.time}, "a time limit is above 0")
            return f"{minutes}:{rest:02}"
        if self.time is None or isinstance(self.time, str):
            return None if self.time is None else checks.text(self, "time", self.time)
        raise checks.refused(
            self,
            {"time": self.time},
            "write the time as Slurm does, 'hours:minutes:seconds', or give a timedelta",
        )

    def _checked_login(self) -> NamedHosts | None:
        given = self.login
        found: NamedHosts
        if given is None:
            return None
        ssh = find_provider("ssh")
        if isinstance(given, ssh):
            found = given
        elif isinstance(given, Mapping):
            found = ssh(**given)
        else:
            found = ssh([checks.text(self, "login", given)])
        if len(found.hosts) != 1:
            raise checks.refused(self, {"login": given}, "name one login node")
        return found

    @property
    def _ssh(self) -> NamedHosts | None:
        assert not isinstance(self.login, (str, Mapping))
        return self.login

    def _login(self) -> Login:
        """Where Slurm's commands run."""
        ssh = self._ssh
        return Here() if ssh is None else Remote(ssh.hosts[0], ssh.destination(0))

    async def ping(self) -> str:
        """Ask the controller, through the login node if there is one."""
        login = self._login()
        try:
            version = await login.call(["sinfo", "--version"])
            state = await login.call(["scontrol", "ping"])
        finally:
            await login.close()
        if state.status:
            check_has_cluster(state, login)
            said = (state.words or state.output).strip().rpartition("\n")[2]
            raise UnreachableError(
                f"Slurm: no controller answers on {login.name}: {said}; see `scontrol ping` there"
            )
        return f"{version.output.strip()} on {login.name}"

    @property
    def where(self) -> str:
        """Where `remains` looks, for people."""
        return "slurm" if self._ssh is None else f"slurm on {self._ssh.hosts[0]}"

    async def remains(self) -> Sequence[Remains]:
        """The jobs of all pools, by their names and comments."""
        from skyward.providers.slurm.remains import remains

        login = self._login()
        try:
            return await remains(SlurmCluster(login))
        finally:
            await login.close()

    def check(self, request: Request) -> None:
        """Refuse volumes that are elsewhere on the nodes; the rest only the cluster knows."""
        for volume in request.volumes:
            if volume.target != volume.source and self.container is None:
                raise ConfigurationError(
                    f"{volume}: the files of a cluster's nodes stay where they are; leave target "
                    "out and give the path as it is on the nodes, or give container="
                )

    def describe(self) -> Mapping[str, Any]:
        """The arguments; of a login, the paths of keys and never the keys."""
        return {
            "partition": self.partition,
            "account": self.account,
            "qos": self.qos,
            "constraint": self.constraint,
            "time": self.time,
            "login": None if self._ssh is None else self._ssh.describe(),
            "container": self.container,
            "extra": list(self.extra),
            "python": self.python,
            "timeout": self.timeout,
        }

    def price(self, request: Request) -> float | None:
        """None: what a cluster's nodes cost is unknown."""
        return None

    def allocate(self, pool: str) -> SlurmAllocation:
        """The jobs of the pool."""
        return SlurmAllocation(pool, self._login(), self._submission, self.timeout)

    @property
    def _submission(self) -> Submission:
        assert self.time is None or isinstance(self.time, str)
        return Submission(
            partition=self.partition,
            account=self.account,
            qos=self.qos,
            constraint=self.constraint,
            time=self.time,
            container=self.container,
            extra=tuple(self.extra),
            python=self.python,
            is_direct=self._ssh is None,
        )
