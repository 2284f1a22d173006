"""Slurm: nodes as tasks of a job on a cluster, through nothing but Slurm's own commands."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

from skyward import checks
from skyward.errors import (
    ConfigurationError,
    PoolError,
    PoolStartError,
    UnavailableError,
    UnreachableError,
)
from skyward.providers import (
    Capabilities,
    Machine,
    Order,
    Remains,
    Request,
    find_provider,
    gathered,
    owner,
)
from skyward.providers.allocation import GATHER_SECONDS, SharedAllocation
from skyward.providers.hosts import NamedHosts
from skyward.providers.piped import Kept
from skyward.providers.slurm import submission
from skyward.providers.slurm.commands import (
    Greeting,
    SlurmCluster,
    SlurmJob,
    check,
    check_has_cluster,
    comment,
    first_words,
    hopeless,
    how_it_ended,
    is_out_of_reach,
    told_waiting,
)
from skyward.providers.slurm.login import CommandAnswer, Here, Login, Remote
from skyward.wire.handshake import host_and_port

__all__ = ["Slurm"]

PYTHON = "SKYWARD_SLURM_PYTHON"
NOTICE = "skyward.providers.on_node.keeper"
PREFIX = "sky-"
"""How the names of the pools' jobs begin."""
POLL_SECONDS, LONGEST_POLL_SECONDS = 0.1, 2.0
"""How often the client asks for a job that waits or is ending: at first, and after some time."""
PLACE_SECONDS = 15.0
"""How often the client asks for the place of a job in the queue."""
GREETING_SECONDS = 60.0
"""How long a job that runs may take to start its keepers."""
GONE_SECONDS = 20.0
"""How long the client waits for the end of a job that it cancelled; an epilog may take more."""
ENDING_SECONDS = 45.0
"""How long a job may be ending: by default, Slurm kills its processes after 30 s."""
STATE_SECONDS = 0.5
"""For how long an answer about a job's state is used again."""
AT_ONCE, STEP_SECONDS = 32, 0.25
"""How many steps may be starting at the same time, and how long one counts as starting.

All of them ask the one controller, and nothing says when it has answered.
"""
_NOT_THERE = "Requested node configuration is not available"
_FOR_A_WHILE = ("MaxSubmit", "Resource temporarily unavailable", "try again", "Slurm is in")
"""Refusals that other jobs' ends may mend."""
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
    capabilities = Capabilities(answers=True, collects=True, moves=True, mounts_folders=False)

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
        login = self._login()
        try:
            jobs = await SlurmCluster(login).jobs_of_pools()
        finally:
            await login.close()
        found = []
        for name, user, job in jobs:
            pool = name.removeprefix(PREFIX)
            if pool != name:
                whose, pid, called = job.about
                found.append(Remains(pool, called, whose or user, pid, (f"job {job.id}",)))
        return gathered(found)

    def check(self, request: Request) -> None:
        """Refuse nothing: only the cluster knows."""

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

    @classmethod
    def arguments_here(cls, arguments: Mapping[str, Any], home: str) -> Mapping[str, Any]:
        """The way to the login node, with the files that are here."""
        login = arguments.get("login")
        here = login and find_provider("ssh").arguments_here(login, home)
        return {**arguments, "login": here}

    def price(self, request: Request) -> float | None:
        """None: what a cluster's nodes cost is unknown."""
        return None

    def allocate(self, pool: str) -> SlurmAllocation:
        """The jobs of the pool."""
        return SlurmAllocation(self, pool)


class SlurmMachine(Kept, Machine):
    """One node of a job, for one node of the pool."""

    # On a busy machine, Slurm may end a step as it begins.
    begins_again = True

    def __init__(
        self, jobs: SlurmAllocation, job: str, node: int, keeper: Greeting | None = None
    ) -> None:
        """Without the greeting of its keeper, the job waits, or the node does not answer."""
        self._jobs, self.job = jobs, job
        self.host, self.token = (keeper.host, keeper.token) if keeper else ("", "")
        self.id = f"{job}.{node}"
        self.node, self.python = node, jobs.provider.python
        known = keeper.address if keeper else ""
        self.address = known or self.host or "pending"
        # Without a way of its own to the nodes, the client goes through the login node.
        is_direct = jobs.provider._ssh is None
        self.direct = known if is_direct and known else None
        self.forwards_to = "" if is_direct else self.address
        self.notice = NOTICE
        self._destroyed = False

    def __repr__(self) -> str:
        return f"SlurmMachine({self.id!r})"

    async def why_lost(self) -> str:
        """What Slurm says of the job, and of the node."""
        return (
            f"job {self.job}: a command on {self.host} ended with its connection; "
            f"{await self._jobs.how_it_is(self.job, self.host)}"
        )

    async def dial(self, endpoint: str) -> socket.socket:
        """Connect through a step of the job on that node, also to its keeper."""
        self._check()
        return await self._jobs.pipe(self.job, self.host, endpoint)

    async def forward(self, endpoint: str) -> socket.socket:
        """Connect through the login node; if that forwards nothing, through a step."""
        self._check()
        host, port = host_and_port(endpoint)
        try:
            return await self._jobs.login.connect(host, port)
        except UnreachableError:
            return await self.dial(endpoint)

    async def alive(self) -> bool:
        """Whether the job has this node, and its keeper runs."""
        if self._destroyed or not self.host:
            return False
        return await self._jobs.has(self.job, self.host, self.token)

    async def destroy(self) -> None:
        """Give the node back, and with the last node of the job the job."""
        if not self._destroyed:
            await self._jobs.end(self.job, self.node, self.host)
            self._destroyed = True

    def _check(self) -> None:
        if self._destroyed or not self.host:
            state = "is gone" if self._destroyed else "waits in the queue"
            raise UnreachableError(f"node {self.node}: job {self.job} {state}")


@dataclass(eq=False)
class AskedJob:
    """One job of the pool."""

    nodes: list[int]
    """The nodes of the pool that it has room for."""
    id: str = ""
    """Its number; empty until Slurm has accepted it."""
    hosts: dict[int, str] = field(default_factory=dict)
    has_run: bool = False
    is_cancelled: bool = False
    """Whether the pool itself has cancelled it."""
    following: asyncio.Task[None] | None = None
    """The task that waits until it runs."""

    @property
    def is_followed(self) -> bool:
        """Whether somebody waits until it runs."""
        return self.following is not None and not self.following.done()


class SlurmAllocation(SharedAllocation[SlurmMachine]):
    """The jobs of one pool: nodes that are ordered later have a job of their own."""

    def __init__(self, provider: Slurm, pool: str) -> None:
        super().__init__(pool)
        self.timeout = provider.timeout
        self.provider = provider
        self.login = provider._login()
        self.cluster = SlurmCluster(self.login)
        self._states: dict[str, tuple[float, asyncio.Task[SlurmJob | None]]] = {}
        """What Slurm said last of each job, and when it was asked."""
        self._jobs: list[AskedJob] = []
        self._places: dict[int, AskedJob] = {}
        """The job that each node belongs to; of a job's nodes, the others are to be given back."""
        self._spares = Spares(self.cluster)
        self._finding: asyncio.Task[list[SlurmMachine]] | None = None
        """The task that looks for nodes, unless it has begun."""
        self._stopped = ""
        """A job that somebody else cancelled: the pool asks for no new ones."""
        self._told_home = False

    # Nodes.

    async def get(self, order: Order) -> SlurmMachine:
        """A node of a job, submitted if necessary; raises with Slurm's reason if there is none."""
        if order.request.keep and (there := await self._still_there(order.node)) is not None:
            self.expect_no_more(order.node)
            return there
        return await super().get(order)

    async def _still_there(self, node: int) -> SlurmMachine | None:
        """The node of a job that is there although its agent is lost, in a kept pool."""
        for machine in await self.find():
            if machine.node == node and await machine.alive():
                return machine
        return None

    async def ask(self, nodes: Sequence[int]) -> None:
        """Wait for jobs that Slurm starts again, and submit one for all other nodes."""
        self.login.open()
        returning = await self._returning(nodes)
        # Some nodes may have been given back meanwhile.
        nodes = [each for each in self.waiting if each in nodes and each not in returning]
        if not nodes:
            return
        if self._stopped:
            stopped = UnavailableError(
                f"job {self._stopped} was cancelled, and not by this pool: no new one is "
                "submitted; enter a new Compute to start again"
            )
            stopped.passing = False
            self.refuse(nodes, stopped)
            return
        job = AskedJob(list(nodes))
        self._jobs.append(job)
        self._places |= dict.fromkeys(nodes, job)
        self._tell(job, "submitting a job")
        try:
            job.id = await self.submit(job.nodes, self.wanted[nodes[0]].order)
        except Exception as problem:
            self._forget(job)
            self.refuse(nodes, problem)
            return
        job.following = self.start(self._follow(job))

    async def _returning(self, nodes: Sequence[int]) -> set[int]:
        """The nodes whose jobs Slurm starts again, or that nobody can ask for at the moment."""
        found = set()
        for job in dict.fromkeys(self._places[each] for each in nodes if each in self._places):
            of_job = [each for each in nodes if self._places.get(each) is job]
            try:
                state = await self._settled(job.id)
            except PoolError as problem:
                # The job is left as it is.
                found.update(of_job)
                for node in of_job:
                    if node in self.wanted:
                        self.wanted[node].asked = False
                self.refuse(of_job, problem)
                continue
            is_followed = job.is_followed
            if state is not None and (state.is_waiting or (state.is_running and is_followed)):
                found.update(of_job)
                if not is_followed:
                    job.following = self.start(self._follow(job))
            else:
                self._note_cancellation(job, state)
        return found

    def _note_cancellation(self, asked: AskedJob, job: SlurmJob | None) -> None:
        was_cancelled = job is not None and job.state.startswith("CANCELLED")
        if was_cancelled and asked.has_run and not asked.is_cancelled:
            self._stopped = asked.id

    def late(self, order: Order, seconds: float) -> PoolStartError:
        """Say which job did not run in time."""
        job = self._places.get(order.node)
        which = f"job {job.id}" if job is not None and job.id else "the job"
        return PoolStartError(
            f"{which} did not run within {seconds:.0f} s; give a longer timeout=, or ask for less"
        )

    def _waiting(self, job: AskedJob) -> list[int]:
        """The nodes that wait for a job."""
        return [node for node in self.waiting if self._places.get(node) is job]

    def _tell(self, job: AskedJob, what: str) -> None:
        for node in self._waiting(job):
            self.wanted[node].order.tell(what)

    # From the request to the keepers.

    @property
    def _job_name(self) -> str:
        """The name of the pool's jobs."""
        return f"{PREFIX}{self.pool}"

    async def submit(self, nodes: Sequence[int], order: Order) -> str:
        """Submit a job for some nodes, and give its number; raises with Slurm's own words."""
        request = order.request
        there = await self._nodes_there(request)
        asked = submission.options(request, there)
        about = comment(nodes, owner(), os.getpid(), order.name)
        given = [*self._options(nodes, request, about), *asked, *self.provider.extra]
        command = ["sbatch", *given]
        script = await self._script(nodes, request, asked)
        # A job that can never run is accepted by `sbatch`, but not by its test.
        test = await self.login.call([*command, "--test-only"], script)
        if test.status:
            if _NOT_THERE in first_words(test) and await self._some_are_away():
                order.tell("waiting for nodes that are down")
            else:
                self._refuse(test, there)
        try:
            answer = await self.login.call([*command, "--parsable"], script)
            if answer.status:
                self._refuse(answer, there)
        except UnreachableError as problem:
            return await self._accepted(nodes, problem)
        id = answer.output.strip().splitlines()[-1].partition(";")[0] if answer.output else ""
        if not id.isdigit():
            raise PoolStartError(f"`sbatch` gave no number of a job, but {answer.output!r}")
        return id

    async def _accepted(self, nodes: Sequence[int], problem: UnreachableError) -> str:
        """The job of an `sbatch` that got no answer, if Slurm has accepted it all the same."""
        known = {each.id for each in self._jobs}
        try:
            jobs = await self.cluster.jobs_called(self._job_name)
        except PoolError:
            jobs = []
        for job in jobs:
            if job.id not in known and job.nodes == tuple(nodes):
                return job.id
        # The controller may come to it later.
        problem.leaves_machine = True
        raise problem

    async def _some_are_away(self) -> bool:
        """Whether nodes that are down at the moment might have what is asked for.

        The test of `sbatch` knows only nodes that are up; a job may wait for the others.
        """
        answer = await self.login.call(self._sinfo("%T"))
        words = ("down", "drain", "fail", "maint", "unk", "inval", "power", "boot", "plan")
        return any(
            state.endswith("*") or any(word in state for word in words)
            for state in answer.output.lower().split()
        )

    def _sinfo(self, format: str) -> list[str]:
        partition = self.provider.partition
        where = [] if partition is None else [f"--partition={partition}"]
        return ["sinfo", "--noheader", "--Node", f"--format={format}", *where]

    def _refuse(self, answer: CommandAnswer, there: Sequence[submission.NodeKind]) -> None:
        said = first_words(answer)
        if any(words in said for words in _FOR_A_WHILE):
            raise UnavailableError(f"Slurm on {self.login.name} said: {said}")
        if is_out_of_reach(answer):
            check(answer, "submitting a job", self.login)
        has = f"; the GPUs there: {submission.described(there)}" if there else ""
        raise ConfigurationError(
            f"Slurm on {self.login.name} refuses the job: {said}{has}; see `sinfo` for what "
            "there is, and change the request"
        )

    async def _nodes_there(self, request: Request) -> list[submission.NodeKind]:
        """The nodes that the job may get, if the request is for GPUs."""
        if request.accelerator is None:
            return []
        command = self._sinfo(submission.FORMAT)
        try:
            answer = check(await self.login.call(command), "asking for nodes", self.login)
        except PoolError:
            return []  # What is wrong, `sbatch` will say.
        return submission.read_nodes(answer.output)

    def _options(self, nodes: Sequence[int], request: Request, about: str) -> list[str]:
        slurm = self.provider
        given = {
            "partition": slurm.partition,
            "account": slurm.account,
            "qos": slurm.qos,
            "constraint": slurm.constraint,
            "time": slurm.time or submission.minutes(request.ttl),
        }
        return [
            f"--job-name={self._job_name}",
            f"--comment={about}",
            f"--nodes={len(nodes)}",
            "--ntasks-per-node=1",
            # A node that is lost does not take the others with it; a preempted job comes back.
            *("--no-kill", "--requeue", submission.SIGNAL),
            *("--output=/dev/null", "--error=/dev/null", "--chdir=/"),
            *(f"--{name}={value}" for name, value in given.items() if value is not None),
        ]

    async def _script(self, nodes: Sequence[int], request: Request, asked: Sequence[str]) -> bytes:
        container = self.provider.container
        config: dict[str, object] = {
            "pool": self.pool,
            "nodes": list(nodes),
            "idle": request.idle_timeout,
        }
        launch = [
            *("--ntasks-per-node=1", "--no-kill", "--wait=0", "--kill-on-bad-exit=0"),
            *("--mpi=none", "--cpu-bind=none", "--quiet"),
            # From 22.05 on, the step does not get all processors of the job by itself.
            *(each for each in asked if each.startswith("--cpus-per-task=")),
        ]
        if container is not None:
            mounts = [
                f"{each.source}:{each.target}{':ro' if each.read_only else ''}"
                for each in request.volumes
            ]
            if await self.cluster.has_pyxis():
                # The sockets of the node's processes are in /tmp, its environments below the home.
                launch += [
                    f"--container-image={container.removeprefix('docker://')}",
                    f"--container-mounts={','.join(['/tmp:/tmp', *mounts])}",
                    "--container-mount-home",
                ]
            else:
                config["container"] = submission.apptainer_image(container)
                config["container_options"] = [
                    *(["--nv"] if request.accelerator is not None else []),
                    *(f"--bind={each}" for each in mounts),
                ]
        return submission.batch_script(config, launch, await self.cluster.step_options())

    async def _follow(self, asked: AskedJob) -> None:
        try:
            job = await self._until_running(asked)
            await self._greet(asked, job)
        except Exception as problem:
            # With the last of its nodes, the job is given back.
            self.refuse(self._waiting(asked), problem)

    async def _until_running(self, asked: AskedJob) -> SlurmJob:
        began = time.monotonic()
        told, place, placed = "", None, 0.0
        while True:
            try:
                job = await self._state(asked.id, fresh=True)
            except UnreachableError as problem:
                # The job keeps its place in the queue: a controller that restarts knows it again.
                if told != (told := str(problem)):
                    self._tell(asked, told)
                await asyncio.sleep(LONGEST_POLL_SECONDS)
                continue
            if job is None or job.has_ended:
                raise PoolStartError(how_it_ended(asked.id, job))
            if job.is_running and job.state != "CONFIGURING":
                return job
            if why := hopeless(job):
                raise PoolStartError(f"job {job.id} will not run: {why}")
            waited = time.monotonic() - began
            if job.is_waiting and waited > 1 and time.monotonic() - placed > PLACE_SECONDS:
                placed = time.monotonic()
                with contextlib.suppress(UnreachableError):
                    place = await self.cluster.place_in_line(job)
            if job.is_waiting:
                words = told_waiting(job, place)
            elif job.is_running:
                words = "its nodes are being made ready"
            else:
                words = f"job {job.id} is {job.state}"
            if words != told:
                told = words
                self._tell(asked, words)
            await asyncio.sleep(min(max(POLL_SECONDS, waited / 20), LONGEST_POLL_SECONDS))

    async def _greet(self, asked: AskedJob, job: SlurmJob) -> None:
        """Find the keepers of a job that runs, and give its nodes out."""
        deadline = time.monotonic() + GREETING_SECONDS
        told = ""
        while True:
            try:
                # An image that the nodes do not have yet may take longer than any keeper. If it
                # cannot be had, the job ends.
                in_container = self.provider.container and await self.cluster.has_pyxis()
                doing = "starting the container" if in_container else "starting on the nodes"
                if told != (told := doing):
                    self._tell(asked, told)
                hosts = await self.cluster.hostnames(job.hosts)
                self._spares.prepare(job.id, hosts)
                greetings, words = await self.cluster.greet(job.id, hosts)
                if len(greetings) == len(hosts):
                    break
                self._spares.close(job.id)
                found = await self._state(job.id, fresh=True)
            except UnreachableError as problem:
                self._spares.close(job.id)
                if told != (told := str(problem)):
                    self._tell(asked, told)
                await asyncio.sleep(LONGEST_POLL_SECONDS)
                deadline = time.monotonic() + GREETING_SECONDS
                continue
            if found is None or found.is_waiting or found.has_ended:
                raise PoolStartError(how_it_ended(job.id, found))
            job = found
            if time.monotonic() > deadline and not in_container:
                raise PoolStartError(
                    f"job {job.id} runs on {job.hosts}, but no command can be run there: "
                    f"{words or 'Slurm did not say why'}"
                )
        asked.has_run = True
        asked.hosts = {each.node: each.host for each in greetings}
        await self._compare_homes(asked, greetings)
        by_node = {each.node: each for each in greetings}
        for node in self._waiting(asked):
            self.give(node, SlurmMachine(self, job.id, node, by_node.get(node)))
        if self._unwanted(asked):
            # In a task of its own: a node that is ordered meanwhile would wait for nobody.
            self._begin(self._give_back_now())

    async def _compare_homes(self, asked: AskedJob, greetings: list[Greeting]) -> None:
        """Say it if the nodes do not have the home folder of the login node."""
        if self._told_home:
            return
        self._told_home = True
        with contextlib.suppress(PoolError, OSError):
            here = await self.login.home()
            apart = [each.host for each in greetings if each.home != here]
            orders = [self.wanted[each].order for each in asked.nodes if each in self.wanted]
            if here and apart and orders:
                alike = len({json.dumps(each.home, sort_keys=True) for each in greetings}) == 1
                where = "once, in theirs" if alike and greetings[0].home else "on each node's disk"
                orders[0].note(
                    f"the home folder of {self.login.name} is not that of {', '.join(apart)}: "
                    f"files that you put there are not here; environments are built {where}"
                )

    async def find(self) -> list[SlurmMachine]:
        """The nodes of the pool's jobs, also of those that another process submitted."""
        # All nodes of a pool that ends ask. An answer that was begun earlier may lack a new job.
        if self._finding is None:
            self._finding = self._begin(self._find())
        return list(await asyncio.shield(self._finding))

    async def _find(self) -> list[SlurmMachine]:
        await asyncio.sleep(GATHER_SECONDS)
        self._finding = None
        found: dict[int, SlurmMachine] = {}
        jobs = await self.cluster.jobs_called(self._job_name)
        for asked, job in self._known(jobs):
            greetings: list[Greeting] = []
            if job.is_running and job.state != "CONFIGURING":
                with contextlib.suppress(PoolError):
                    hosts = await self.cluster.hostnames(job.hosts)
                    greetings, _ = await self.cluster.greet(job.id, hosts)
            by_node = {each.node: each for each in greetings}
            asked.hosts |= {each.node: each.host for each in greetings}
            for node in asked.nodes:
                if self._places.get(node) is asked:
                    found[node] = SlurmMachine(self, job.id, node, by_node.get(node))
        await self._close_if_unused()
        return [found[node] for node in sorted(found)]

    def _known(self, jobs: Sequence[SlurmJob]) -> list[tuple[AskedJob, SlurmJob]]:
        """What is known of these jobs; others than those that were asked for here are noted."""
        there = {job.id for job in jobs}
        # A node that was lost has a job of its own since: the newest is the one that has it.
        for job in sorted(jobs, key=lambda job: int(job.id), reverse=True):
            taken = {node for node, each in self._places.items() if not each.id or each.id in there}
            nodes = [node for node in job.nodes if node not in taken]
            if nodes and all(each.id != job.id for each in self._jobs):
                self._jobs.append(AskedJob(nodes, job.id))
                self._places |= dict.fromkeys(nodes, self._jobs[-1])
        by_id = {job.id: job for job in jobs}
        return [(each, by_id[each.id]) for each in self._jobs if each.id in there]

    # What runs on a node.

    async def pipe(self, job: str, host: str, target: str) -> socket.socket:
        """A socket whose other end is one on a node."""
        if target == "keeper" and (spare := await self._spares.take(job, host)) is not None:
            return spare
        return await self.cluster.pipe(job, host, target)

    # What Slurm says of jobs.

    async def _state(self, id: str, *, fresh: bool = False) -> SlurmJob | None:
        """A job's state; nodes that ask at the same time share the answer."""
        asked = self._states.get(id)
        usable = asked is not None and (
            not asked[1].done() if fresh else time.monotonic() - asked[0] < STATE_SECONDS
        )
        if asked is None or not usable:
            asked = self._states[id] = time.monotonic(), self._begin(self.cluster.job(id))
        return await asyncio.shield(asked[1])

    async def _settled(self, id: str) -> SlurmJob | None:
        """A job that is not ending: what it was for Slurm while its processes ended says little.

        A preempted job goes back into the queue, and one that has failed is over.
        """
        deadline = time.monotonic() + ENDING_SECONDS
        while True:
            job = await self._state(id, fresh=True)
            if job is None or job.state != "COMPLETING" or time.monotonic() > deadline:
                return job
            await asyncio.sleep(POLL_SECONDS)

    async def has(self, job: str, host: str, token: str) -> bool:
        """Whether a job has a node, and the keeper there is the one with this token."""
        found = await self._state(job)
        if found is None or found.is_waiting or found.has_ended:
            return False
        if host not in await self.cluster.hostnames(found.hosts):
            return False
        if await self.cluster.is_down(host):
            return False
        keeper = await self.cluster.greet_one(job, host)
        return keeper is not None and token in ("", keeper.token)

    async def how_it_is(self, job: str, host: str) -> str:
        """What Slurm says of a job and a node of it."""
        found = await self._state(job, fresh=True)
        if found is None or found.is_waiting or found.has_ended:
            waits = found is not None and found.is_waiting
            return "Slurm has put it back into the queue" if waits else how_it_ended(job, found)
        is_down = await self.cluster.is_down(host)
        return f"Slurm has given {host} up" if is_down else "it still runs"

    # The end of nodes and jobs.

    async def end(self, job: str, node: int, host: str) -> None:
        """Give a node back; with the last node of a job, cancel it and wait for its end."""
        asked = next((each for each in self._jobs if each.id == job), None)
        if asked is None:
            return  # Its job has ended.
        found = await self._settled(job) if host and asked.has_run else None
        if self._places.get(node) is not asked:
            await self._give_back_now()  # The node has another job since.
        elif host and node in self._waiting(asked):
            pass  # This was a node of its job's earlier run, and the next run is waited for.
        else:
            self.refuse(
                [node],
                PoolStartError(
                    f"job {job} was given up, because its nodes were ended; enter a new Compute "
                    "to ask again"
                ),
            )
            # Slurm may have put the job back into the queue. Its nodes are ordered again, or nobody
            # wants it.
            await self.release(node, lost=found is not None and found.is_waiting)

    async def release(self, node: int, *, lost: bool = False) -> None:
        """Give a node back, and its job with it if no other node has it."""
        if not lost or self.closed:
            self._places.pop(node, None)
        await super().release(node, lost=lost)

    async def shrink(self, gone: Sequence[int]) -> None:
        """Give these nodes back, and the jobs that have no other."""
        await self._give_back()

    async def remove(self) -> None:
        """Give back what was released: nodes that were only found are nobody's here, and stay."""
        await self._give_back()

    async def close(self) -> None:
        """Leave the login node; jobs that are there stay."""
        try:
            await super().close()
        finally:
            for job in self._jobs:
                self._spares.close(job.id)
            await self.login.close()

    def _unwanted(self, job: AskedJob) -> list[int]:
        """The nodes of a job that are to be given back."""
        return [node for node in job.nodes if self._places.get(node) is not job]

    async def _give_back_now(self) -> None:
        async with self._changing:
            await self._give_back()

    async def _give_back(self) -> None:
        """Give back every node that has left its job."""
        ending = [self._reduce(job) for job in self._jobs if self._unwanted(job)]
        failures = await asyncio.gather(*ending, return_exceptions=True)
        for failure in failures:
            if failure is not None:
                raise failure
        await self._close_if_unused()

    async def _reduce(self, asked: AskedJob) -> None:
        """Have a job without the nodes that have left it; without any, no job."""
        gone = self._unwanted(asked)
        try:
            job = await self._settled(asked.id)
            # Another process may have given nodes back as well.
            left = asked.nodes if job is None else job.nodes or asked.nodes
            kept = [node for node in left if node in asked.nodes and node not in gone]
            if job is None or job.has_ended or not kept:
                self._note_cancellation(asked, job)
                await self._cancel(asked, job)
            elif job.is_running and not asked.is_followed:
                # Before, nobody knows which host is for which node.
                await self._shrink(asked, job, kept)
                asked.nodes = kept
        except PoolError as failure:
            # The job still has the nodes that it had.
            self._places = dict.fromkeys(gone, asked) | self._places
            if len(gone) < len(asked.nodes):
                raise
            raise PoolError(
                f"job {asked.id} could not be cancelled, and may still be there: {failure}; "
                f"see `squeue --jobs={asked.id}`"
            ) from failure

    async def _shrink(self, asked: AskedJob, job: SlurmJob, kept: list[int]) -> None:
        """Keep only some nodes of a job; if Slurm refuses, end what runs on the others."""
        left = [node for node in asked.nodes if node not in kept]
        gone = [asked.hosts[node] for node in left if node in asked.hosts]
        there = await self.cluster.hostnames(job.hosts)
        hosts = [host for host in there if host not in gone]
        comment = job.comment_for(kept)
        if hosts == there or await self.cluster.shrink(job.id, hosts, comment):
            return
        # The job's script runs on its first node, which it cannot give back.
        if there[0] in gone and len(hosts) + 1 < len(there):
            await self.cluster.shrink(job.id, [there[0], *hosts], comment)
        for host in set(gone) & set(there):
            with contextlib.suppress(PoolError):
                await self.cluster.end_keeper(job.id, host)

    async def _cancel(self, asked: AskedJob, job: SlurmJob | None) -> None:
        """Cancel a job unless it has ended, and wait until nothing of it runs."""
        asked.is_cancelled = True
        if asked.following is not None:
            self.refuse(self._waiting(asked), PoolStartError(how_it_ended(asked.id, job)))
            asked.following.cancel()
            await asyncio.wait({asked.following})
        deadline = time.monotonic() + GONE_SECONDS
        if job is None or not job.has_ended:
            await self.cluster.cancel(asked.id)
        pause = 0.05
        while (job := await self._state(asked.id, fresh=True)) is not None:
            if job.has_ended and (job.state != "COMPLETING" or time.monotonic() > deadline):
                break
            if time.monotonic() > deadline:
                raise PoolError(f"job {asked.id} does not end: it is {job.state}; see `squeue`")
            await asyncio.sleep(pause)
            pause = min(2 * pause, 1.0)
        self._forget(asked)

    def _forget(self, asked: AskedJob) -> None:
        self._spares.close(asked.id)
        self._jobs.remove(asked)
        self._places = {node: job for node, job in self._places.items() if job is not asked}

    async def _close_if_unused(self) -> None:
        """Leave the login node if nothing of the pool is there; a later order comes back."""
        if not self._jobs and not self.wanted:
            await self.login.close()


class Spares:
    """Connections to keepers ahead: one for each of the first two commands of every node.

    The first command prepares the node, the second starts its agent. Each would wait for a step of
    Slurm's and for a Python to start.
    """

    def __init__(self, cluster: SlurmCluster) -> None:
        self._cluster = cluster
        self._limit = asyncio.Semaphore(AT_ONCE)
        self._opening: dict[tuple[str, str], asyncio.Task[socket.socket]] = {}
        self._first: set[asyncio.Task[socket.socket]] = set()

    def prepare(self, job: str, hosts: Sequence[str]) -> None:
        """Begin to connect to keepers that will be asked for something soon."""
        for host in hosts:
            self._first.add(self._open(job, host))

    def _open(self, job: str, host: str) -> asyncio.Task[socket.socket]:
        opening = asyncio.get_running_loop().create_task(self._connected(job, host))
        self._opening[job, host] = opening
        return opening

    async def _connected(self, job: str, host: str) -> socket.socket:
        await self._limit.acquire()
        try:
            return await self._cluster.pipe(job, host)
        finally:
            asyncio.get_running_loop().call_later(STEP_SECONDS, self._limit.release)

    async def take(self, job: str, host: str) -> socket.socket | None:
        """A connection to a keeper; None if there is none ahead."""
        spare = self._opening.pop((job, host), None)
        if spare is None:
            return None
        if spare in self._first:
            self._first.discard(spare)
            self._open(job, host)
        try:
            return await asyncio.shield(spare)
        except asyncio.CancelledError:
            spare.add_done_callback(_close)
            raise
        except (OSError, PoolError):
            return None

    def close(self, job: str) -> None:
        """Close the connections to a job's keepers that nobody took."""
        for key in [each for each in self._opening if each[0] == job]:
            spare = self._opening.pop(key)
            self._first.discard(spare)
            spare.add_done_callback(_close)


def _close(opening: asyncio.Task[socket.socket]) -> None:
    with contextlib.suppress(OSError, PoolError, asyncio.CancelledError):
        opening.result().close()
