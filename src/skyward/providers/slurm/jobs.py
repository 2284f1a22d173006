"""The jobs of a pool: nodes that are ordered together share one, and each has a keeper there."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from skyward.errors import PoolError, PoolStartError, UnavailableError, UnreachableError
from skyward.providers import Order
from skyward.providers.allocation import GATHER_SECONDS, SharedAllocation
from skyward.providers.slurm import pending, steps
from skyward.providers.slurm.commands import SlurmCluster, SlurmJob
from skyward.providers.slurm.login import Login
from skyward.providers.slurm.machine import SlurmMachine
from skyward.providers.slurm.spares import Spares
from skyward.providers.slurm.states import JobStates, how_it_ended
from skyward.providers.slurm.steps import Greeting
from skyward.providers.slurm.submission import Submission

POLL_SECONDS, LONGEST_POLL_SECONDS = 0.1, 2.0
"""How often the client asks for a job that waits: at first, and after some time."""
PLACE_SECONDS = 15.0
"""How often the client asks for the place of a job in the queue."""
GREETING_SECONDS = 60.0
"""How long a job that runs may take to start its keepers."""


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

    def __init__(
        self, pool: str, login: Login, submission: Submission, timeout: float | None
    ) -> None:
        super().__init__(pool)
        self.timeout = timeout
        self.login = login
        self.cluster = SlurmCluster(login)
        self.states = JobStates(self.cluster, self._begin)
        """What Slurm says of the jobs."""
        self._submission = submission
        self._jobs: list[AskedJob] = []
        self._places: dict[int, AskedJob] = {}
        """The job that each node belongs to; of a job's nodes, the others are to be given back."""
        self._spares = Spares(self._pipe)
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
        """The node of a job that is there although its agent is lost, in a pool that stays."""
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
        known = {each.id for each in self._jobs}
        self._jobs.append(job)
        self._places |= dict.fromkeys(nodes, job)
        self._tell(job, "submitting a job")
        order = self.wanted[nodes[0]].order
        try:
            job.id = await self._submission.submit(self.cluster, self.pool, job.nodes, order, known)
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
                state = await self.states.settled(job.id)
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
                job = await self.states.get(asked.id, fresh=True)
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
            if why := pending.hopeless(job):
                raise PoolStartError(f"job {job.id} will not run: {why}")
            waited = time.monotonic() - began
            if job.is_waiting and waited > 1 and time.monotonic() - placed > PLACE_SECONDS:
                placed = time.monotonic()
                with contextlib.suppress(UnreachableError):
                    place = await self.cluster.place_in_line(job)
            if job.is_waiting:
                words = pending.told(job, place)
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
                in_container = self._submission.container and await self.cluster.has_pyxis()
                doing = "starting the container" if in_container else "starting on the nodes"
                if told != (told := doing):
                    self._tell(asked, told)
                hosts = await self.cluster.hostnames(job.hosts)
                self._spares.prepare(job.id, hosts)
                greetings, words = await steps.greet(self.cluster, job.id, hosts)
                if len(greetings) == len(hosts):
                    break
                self._spares.close(job.id)
                found = await self.states.get(job.id, fresh=True)
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
            self.give(node, self._machine(job.id, node, by_node.get(node)))
        if self._unwanted(asked):
            # In a task of its own: a node that is ordered meanwhile would wait for nobody.
            self._begin(self._give_back_now())

    def _machine(self, job: str, node: int, greeting: Greeting | None) -> SlurmMachine:
        """A node of a job; without a greeting, one that is known by its number alone."""
        return SlurmMachine(
            self,
            job,
            node,
            greeting.host if greeting else "",
            greeting.address if greeting else "",
            greeting.token if greeting else "",
            python=self._submission.python,
            direct=self._submission.is_direct,
        )

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
        jobs = await self.cluster.jobs_called(self._submission.job_name(self.pool))
        for asked, job in self._known(jobs):
            greetings: list[Greeting] = []
            if job.is_running and job.state != "CONFIGURING":
                with contextlib.suppress(PoolError):
                    hosts = await self.cluster.hostnames(job.hosts)
                    greetings, _ = await steps.greet(self.cluster, job.id, hosts)
            by_node = {each.node: each for each in greetings}
            asked.hosts |= {each.node: each.host for each in greetings}
            for node in asked.nodes:
                if self._places.get(node) is asked:
                    found[node] = self._machine(job.id, node, by_node.get(node))
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
        return await self._pipe(job, host, target)

    async def _pipe(self, job: str, host: str, target: str = "keeper") -> socket.socket:
        return await self.login.pipe(await steps.relaying(self.cluster, job, host, target))

    async def connect(self, address: str, port: int) -> socket.socket:
        """Connect to a port of a node from the login node."""
        return await self.login.connect(address, port)

    # The end of nodes and jobs.

    async def end(self, job: str, node: int, host: str) -> None:
        """Give a node back; with the last node of a job, cancel it and wait for its end."""
        asked = next((each for each in self._jobs if each.id == job), None)
        if asked is None:
            return  # Its job has ended.
        found = await self.states.settled(job) if host and asked.has_run else None
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
            job = await self.states.settled(asked.id)
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
                await steps.end(self.cluster, job.id, host)

    async def _cancel(self, asked: AskedJob, job: SlurmJob | None) -> None:
        """Cancel a job unless it has ended, and wait until nothing of it runs."""
        asked.is_cancelled = True
        if asked.following is not None:
            self.refuse(self._waiting(asked), PoolStartError(how_it_ended(asked.id, job)))
            asked.following.cancel()
            await asyncio.wait({asked.following})
        await self.states.cancel(asked.id, job)
        self._forget(asked)

    def _forget(self, asked: AskedJob) -> None:
        self._spares.close(asked.id)
        self._jobs.remove(asked)
        self._places = {node: job for node, job in self._places.items() if job is not asked}

    async def _close_if_unused(self) -> None:
        """Leave the login node if nothing of the pool is there; a later order comes back."""
        if not self._jobs and not self.wanted:
            await self.login.close()
