"""Slurm's command line: the commands that this provider calls, and how their answers read.

Formats are asked for explicitly, so that the answers are the same in all versions.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field

from skyward.errors import ConfigurationError, PoolError, UnreachableError
from skyward.providers.on_node.keeper import seconds_of
from skyward.providers.on_node.relay import NO_KEEPER
from skyward.providers.slurm.login import CommandAnswer, Login
from skyward.providers.slurm.submission import relay_command

_FORMAT = "%i|%T|%r|%P|%L|%S|%N|%k"
_MARK = re.compile(r"skyward:([\d,-]+)")
_ABOUT = re.compile(r"skyward:[\d,-]+ by (\S+) process (\d+)(?: called (\S+))?")
_VERSION = re.compile(r"(\d+)\.(\d+)")
WAITING = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD")
RUNNING = ("RUNNING", "CONFIGURING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING", "STAGE_OUT")
ENDED = (
    *("COMPLETING", "COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "DEADLINE", "PREEMPTED"),
    *("NODE_FAIL", "BOOT_FAIL", "LAUNCH_FAILED", "RECONFIG_FAIL", "OUT_OF_MEMORY", "REVOKED"),
)
_OUT_OF_REACH = (
    "Unable to contact slurm controller",
    "Socket timed out",
    "Connection refused",
    "slurm_load_jobs error: Zero Bytes",
    "Communication connection failure",
    "Unexpected message received",
)
_UNKNOWN_JOB = ("Invalid job id", "Invalid job id specified", "Unable to look up job")
ANSWER_SECONDS = 8.0
"""How long a node may take to answer whether its keeper runs."""
_GREETED = "skyward "
_ADVICE = (
    ("PartitionTimeLimit", "the partition allows less time: give a shorter time="),
    ("PartitionNodeLimit", "the partition allows fewer nodes: ask for fewer, or another one"),
    ("PartitionConfig", "the partition allows no such job: see `scontrol show partition`"),
    ("BadConstraints", "no node has what is asked for: see `sinfo --Node --long`"),
    ("InvalidAccount", "give an account= of yours: see `sacctmgr show associations`"),
    ("InvalidQOS", "give a qos= that you may use: see `sacctmgr show qos`"),
    ("AccountNotAllowed", "the partition does not take this account: give another account="),
    ("QOSNotAllowed", "the partition does not take this QOS: give another qos="),
    ("DependencyNeverSatisfied", "the job that it depends on has failed"),
    ("JobHeldAdmin", "an administrator holds the job"),
    ("launch failed requeued held", "its nodes could not start it: see `scontrol show job`"),
    ("JobLaunchFailure", "its nodes could not start it: see `scontrol show job`"),
)
_HOPELESS = (
    *("PartitionTimeLimit", "PartitionNodeLimit", "BadConstraints", "InvalidAccount"),
    *("InvalidQOS", "AccountNotAllowed", "QOSNotAllowed", "DependencyNeverSatisfied"),
    *("launch failed requeued held", "JobLaunchFailure"),
)
"""Reasons that no waiting mends."""
_LIMITS = ("MaxGRESPerUser", "MaxCpuPerUser", "MaxJobsPerUser", "MaxMemoryPerUser", "GrpGRES")
_SOON = ("None", "")


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """A job as `squeue` shows it."""

    id: str
    state: str
    reason: str
    partition: str
    left: float | None
    """How many seconds of its time limit are left; None if it has none."""
    start: str
    """When it started or, if Slurm knows, will start: "2026-11-17T02:31:27", or "N/A"."""
    hosts: str
    """The names of its nodes, as Slurm shortens them: "n[1-2]"."""
    comment: str = field(default="", compare=False)

    @property
    def nodes(self) -> tuple[int, ...]:
        """The nodes of the pool that it is for, in the order of its tasks."""
        marked = _MARK.search(self.comment)
        return numbers(marked[1]) if marked else ()

    @property
    def about(self) -> tuple[str, int, str]:
        """Whose it is, the client's process and the pool's name, as far as its comment says."""
        found = _ABOUT.search(self.comment)
        return (found[1], int(found[2]), found[3] or "") if found else ("", 0, "")

    def comment_for(self, nodes: Sequence[int]) -> str:
        """Its comment, if it is for these nodes alone."""
        return _MARK.sub(f"skyward:{shortened(nodes)}", self.comment, count=1)

    @property
    def is_waiting(self) -> bool:
        """Whether it is in the queue."""
        return self.state in WAITING

    @property
    def is_running(self) -> bool:
        """Whether it has nodes."""
        return self.state in RUNNING

    @property
    def has_ended(self) -> bool:
        """Whether it has ended, or is ending; of a state that is not known, nothing is said."""
        return self.state.partition(" ")[0] in ENDED


@dataclass(frozen=True, slots=True)
class Greeting:
    """What a keeper says of itself and of its node."""

    node: int
    host: str
    address: str
    token: str
    """Another one for every keeper: a job that Slurm starts again has new ones."""
    home: dict[str, int]

    @classmethod
    def of(cls, text: str) -> Greeting:
        """Read what a relay has printed."""
        told = json.loads(text)
        return cls(
            node=int(told["node"]),
            host=str(told["slurm"]),
            address=str(told["address"]),
            token=str(told["token"]),
            home={str(name): int(number) for name, number in told["home"].items()},
        )


def numbers(text: str) -> tuple[int, ...]:
    """Numbers and ranges: "0-3,7"."""
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return tuple(found)


def shortened(nodes: Sequence[int]) -> str:
    """Numbers in their order, neighbours as ranges: the opposite of `numbers`."""
    ranges: list[list[int]] = []
    for node in nodes:
        if ranges and ranges[-1][1] + 1 == node:
            ranges[-1][1] = node
        else:
            ranges.append([node, node])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)


def comment(nodes: Sequence[int], owner: str, pid: int, name: str) -> str:
    """What a job says of itself: its nodes, and for `sky gc` whose it is."""
    called = re.sub(r"[^\w.-]", "-", name)
    whose = re.sub(r"[|\s]", "-", owner)
    about = f"skyward:{shortened(nodes)} by {whose} process {pid}"
    return f"{about} called {called}" if called else about


def read_jobs(output: str) -> list[SlurmJob]:
    """The jobs in an answer of `squeue`."""
    found = []
    for line in output.splitlines():
        parts = [part.strip() for part in line.split("|", 7)]
        if len(parts) == 8:
            id, state, reason, partition, left, start, hosts, comment = parts
            found.append(
                SlurmJob(id, state, reason, partition, seconds_of(left), start, hosts, comment)
            )
    return found


def first_words(answer: CommandAnswer) -> str:
    """What a command said about its failure, in one line."""
    text = answer.words.strip() or answer.output.strip()
    lines = [
        re.sub(r"^(sbatch|srun|squeue|scontrol|scancel|sinfo): ", "", line.strip())
        for line in text.splitlines()
    ]
    return "; ".join(dict.fromkeys(line.removeprefix("error: ") for line in lines if line))


def is_out_of_reach(answer: CommandAnswer) -> bool:
    """Whether a command failed because Slurm's controller did not answer it."""
    return bool(answer.status) and any(words in answer.words for words in _OUT_OF_REACH)


def check(answer: CommandAnswer, what: str, login: Login) -> CommandAnswer:
    """The answer, unless the command failed; raises `UnreachableError` if nobody answered it."""
    if answer.status == 0:
        return answer
    check_has_cluster(answer, login)
    said = first_words(answer) or f"exit status {answer.status}"
    if is_out_of_reach(answer):
        raise UnreachableError(
            f"Slurm's controller does not answer on {login.name}: {said}; see `scontrol ping`"
        )
    raise PoolError(f"{what}: Slurm on {login.name} said: {said}")


def check_has_cluster(answer: CommandAnswer, login: Login) -> None:
    """Raise `ConfigurationError` if Slurm's commands are there, but belong to no cluster."""
    if answer.status and "configuration source" in answer.words + answer.output:
        raise ConfigurationError(
            f"Slurm's commands are on {login.name}, but they know no cluster: there is no "
            "slurm.conf, and no controller in its network's DNS; run this on a login node, or name "
            'one: Slurm(login="me@cluster")'
        )


class SlurmCluster:
    """The commands of one cluster."""

    def __init__(self, login: Login) -> None:
        self.login = login
        self._version: tuple[int, int] | None = None
        self._has_pyxis: bool | None = None

    async def version(self) -> tuple[int, int]:
        """The version of Slurm, such as (22, 5)."""
        if self._version is None:
            answer = check(
                await self.login.call(["sinfo", "--version"]), "asking for its version", self.login
            )
            found = _VERSION.search(answer.output)
            self._version = (int(found[1]), int(found[2])) if found else (99, 0)
        return self._version

    async def has_pyxis(self) -> bool:
        """Whether `srun` starts containers itself, by the plugin pyxis."""
        if self._has_pyxis is None:
            answer = await self.login.call(["srun", "--help"])
            self._has_pyxis = "--container-image" in answer.output + answer.words
        return self._has_pyxis

    async def overlap(self) -> list[str]:
        """The option with which a step uses what other steps of the job use as well."""
        # Before 20.11 all steps did.
        return ["--overlap"] if await self.version() >= (20, 11) else []

    async def jobs_called(self, name: str) -> list[SlurmJob]:
        """The jobs with a name that have not ended."""
        command = ["squeue", "--noheader", f"--name={name}", f"--format={_FORMAT}"]
        answer = check(await self.login.call(command), "looking for jobs", self.login)
        return [job for job in read_jobs(answer.output) if not job.has_ended]

    async def jobs_of_pools(self) -> list[tuple[str, str, SlurmJob]]:
        """The jobs of any pool that have not ended, each with its name and its user."""
        answer = await self.login.call(["squeue", "--noheader", f"--format=%j|%u|{_FORMAT}"])
        check(answer, "looking for jobs", self.login)
        found = []
        for line in answer.output.splitlines():
            name, _, rest = line.partition("|")
            user, _, about = rest.partition("|")
            for job in read_jobs(about):
                if job.nodes and not job.has_ended:
                    found.append((name.strip(), user.strip(), job))
        return found

    async def job(self, id: str) -> SlurmJob | None:
        """A job, also one that has ended; None if Slurm has forgotten it."""
        command = ["squeue", "--noheader", f"--jobs={id}", "--states=all", f"--format={_FORMAT}"]
        answer = await self.login.call(command)
        if answer.status and any(words in answer.words for words in _UNKNOWN_JOB):
            return None
        check(answer, f"asking for job {id}", self.login)
        return next(iter(read_jobs(answer.output)), None)

    async def place_in_line(self, job: SlurmJob) -> tuple[int, int] | None:
        """The place of a job among those that wait in its partition, and how many there are."""
        command = ["squeue", "--noheader", "--states=PENDING", f"--partition={job.partition}"]
        answer = await self.login.call([*command, "--sort=-p,i", "--format=%i"])
        # With SLURM_CLUSTERS, a line with the name of the cluster comes first.
        waiting = [line.strip() for line in answer.output.splitlines() if line[:1].isdigit()]
        if answer.status or job.id not in waiting:
            return None
        return waiting.index(job.id) + 1, len(waiting)

    async def hostnames(self, hosts: str) -> list[str]:
        """The names of nodes, one by one: "n[1-2]" is n1 and n2."""
        if not re.search(r"[\[,]", hosts):
            return [hosts] if hosts else []
        command = ["scontrol", "show", "hostnames", hosts]
        return check(await self.login.call(command), "reading names", self.login).output.split()

    async def is_down(self, host: str) -> bool:
        """Whether Slurm has given a node up."""
        command = ["sinfo", "--noheader", f"--nodes={host}", "--format=%T"]
        answer = check(await self.login.call(command), f"asking for node {host}", self.login)
        lines = answer.output.splitlines()
        states = [line.strip() for line in lines if line and not line.startswith("CLUSTER:")]
        return bool(states) and all(state.startswith(("down", "powered_down")) for state in states)

    async def cancel(self, id: str) -> None:
        """End a job."""
        answer = await self.login.call(["scancel", id])
        if answer.status and not any(words in answer.words for words in _UNKNOWN_JOB):
            check(answer, f"cancelling job {id}", self.login)

    async def shrink(self, id: str, hosts: Sequence[str], comment: str) -> bool:
        """Give back all nodes of a job but these; whether Slurm did that."""
        command = ["scontrol", "update", f"JobId={id}", f"NodeList={','.join(hosts)}"]
        return (await self.login.call([*command, f"Comment={comment}"])).status == 0

    # Steps of a running job, which lead to its keepers.

    async def step_options(self) -> list[str]:
        """The options of every step beside the keepers': they take nothing for themselves."""
        return [
            *await self.overlap(),
            *("--mpi=none", "--gres=none", "--cpu-bind=none", "--chdir=/", "--quiet"),
        ]

    async def _step(self, job: str, *hosts: str) -> list[str]:
        """The command that runs another one on each of these nodes."""
        place = [f"--jobid={job}", f"--nodelist={','.join(hosts)}", f"--nodes={len(hosts)}"]
        tasks = ["--ntasks-per-node=1", f"--ntasks={len(hosts)}"]
        return ["srun", *await self.step_options(), *place, *tasks]

    async def pipe(self, job: str, host: str, target: str = "keeper") -> socket.socket:
        """A socket whose other end is one on a node."""
        # With buffers, Slurm passes output on line by line.
        step = [*await self._step(job, host), "--unbuffered"]
        return await self.login.pipe([*step, *relay_command(target)])

    async def greet(
        self, job: str, hosts: Sequence[str], keeper: str = "keeper"
    ) -> tuple[list[Greeting], str]:
        """The greetings of the keepers of a job, and what Slurm said if some are missing."""
        asked = relay_command(keeper, '{"ask": "hello"}')
        answer = await self.login.call([*await self._step(job, *hosts), *asked])
        found = [
            Greeting.of(line.removeprefix(_GREETED))
            for line in answer.output.splitlines()
            if line.startswith(_GREETED)
        ]
        if not found and answer.status == NO_KEEPER:
            return [], "no keeper runs there"
        return found, first_words(answer)

    async def greet_one(self, job: str, host: str) -> Greeting | None:
        """The greeting of the keeper on one node; None if none runs there."""
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                found, words = await self.greet(job, [host], "keeper-now")
        except TimeoutError:
            raise UnreachableError(f"job {job}: {host} does not answer") from None
        if not found and words != "no keeper runs there":
            raise UnreachableError(f"job {job}: {host} does not answer: {words}")
        return found[0] if found else None

    async def end_keeper(self, job: str, host: str) -> None:
        """Have the keeper on a node end, with all that it runs."""
        asked = relay_command("keeper-now", '{"ask": "end"}')
        await self.login.call([*await self._step(job, host), *asked])


# Why a job waits, in Slurm's own words, and what may be done about it.


def told_waiting(job: SlurmJob, place: tuple[int, int] | None) -> str:
    """Why a job waits, for people: "job 42 waits: Priority (3rd of 12 in main)"."""
    if job.reason in _SOON:
        return f"job {job.id} is submitted"
    details = []
    if place is not None and place[1] > 1:
        details.append(f"{ordinal(place[0])} of {place[1]} in {job.partition}")
    if (start := expected(job.start)) is not None:
        details.append(f"expected to start at {start}")
    if any(limit in job.reason for limit in _LIMITS):
        details.append("a limit of your account: it runs when your other jobs have ended")
    more = f" ({', '.join(details)})" if details else ""
    return f"job {job.id} waits: {job.reason}{more}"


def ordinal(number: int) -> str:
    """A place in a line: "1st"."""
    teen = number % 100 in (11, 12, 13)
    return f"{number}{'th' if teen else {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th')}"


def expected(start: str) -> str | None:
    """When Slurm expects a job to start, without the date if that is today."""
    try:
        when = datetime.datetime.fromisoformat(start)
    except ValueError:
        return None
    today = when.date() == datetime.datetime.now().date()
    return when.strftime("%H:%M" if today else "%Y-%m-%d %H:%M")


def hopeless(job: SlurmJob) -> str:
    """Why a job will never run, with the next step; empty if it may yet."""
    if not any(job.reason.startswith(words) for words in _HOPELESS):
        return ""
    return f"{job.reason}{advice(job.reason)}"


def advice(reason: str) -> str:
    """The next step for a reason."""
    return next((f"; {step}" for words, step in _ADVICE if reason.startswith(words)), "")


def how_it_ended(id: str, job: SlurmJob | None) -> str:
    """How a job has ended, for people."""
    if job is None:
        return f"job {id} is gone; see `sacct --jobs={id}`"
    said = "" if job.comment in ("", "(null)") or job.nodes else f"; it said: {job.comment}"
    # What it has come to is known only when all its processes have ended.
    state = "" if job.state == "COMPLETING" else f": {job.state}"
    return f"job {id} has ended{state}{said}; see `sacct --jobs={id}`"
