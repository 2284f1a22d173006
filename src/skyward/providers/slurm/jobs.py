"""The jobs of a pool: nodes that are ordered together share one, and each has a keeper there."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Callable, Coroutine
from typing import Any

from skyward.errors import PoolError, PoolStartError, UnavailableError, UnreachableError
from skyward.providers import Order
from skyward.providers.slurm import pending, steps
from skyward.providers.slurm.asked import AskedJob
from skyward.providers.slurm.commands import SlurmCluster, SlurmJob
from skyward.providers.slurm.login import Login
from skyward.providers.slurm.machine import SlurmMachine
from skyward.providers.slurm.spares import Spares
from skyward.providers.slurm.states import JobStates, how_it_ended
from skyward.providers.slurm.steps import Greeting
from skyward.providers.slurm.submission import Submission
from skyward.providers.together import GATHER_SECONDS, gather

POLL_SECONDS, LONGEST_POLL_SECONDS = 0.1, 2.0
"""How often the client asks for a job that waits: at first, and after some time."""
PLACE_SECONDS = 15.0
"""How often the client asks for the place of a job in the queue."""
GREETING_SECONDS = 60.0
"""How long a job that runs may take to start its keepers."""
REORDER_SECONDS = 10.0
"""How long a job that Slurm has put back into the queue waits for its nodes to be ordered again."""

_stopped: dict[str, str] = {}
"""The jobs that somebody else cancelled, by pool: such a pool asks for no new ones."""


class Jobs:
    """The jobs of one pool, as one event loop sees them."""

    def __init__(
        self, login: Login, submission: Submission, pool: str, forget: Callable[[Jobs], None]
    ) -> None:
        """`forget` is called when the pool has no jobs any more."""
        self.login, self.pool = login, pool
        self.cluster = SlurmCluster(login)
        self._submission, self._forget = submission, forget
        self._asked: list[AskedJob] = []
        self.states = JobStates(self.cluster, self._start)
        """What Slurm says of the jobs."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._spares = Spares(self._pipe)
        self._finding: asyncio.Task[list[SlurmMachine]] | None = None
        """The task that looks for nodes, unless it has begun."""
        self._told_home = False
        self.closed = False

    # Nodes.

    async def get(self, order: Order, seconds: float | None) -> SlurmMachine:
        """A node of a job, submitted if necessary; raises with Slurm's reason if there is none."""
        self.login.open()
        if order.request.keep and (there := await self._still_there(order.node)) is not None:
            return there
        asked = await self._asked_for(order.node)
        future = asked.add(order)
        if asked.following is None or asked.following.done():
            asked.following = self._start(self._follow(asked))
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.shield(future)
        except TimeoutError:
            which = f"job {asked.id}" if asked.id else "the job"
            problem = PoolStartError(
                f"{which} did not run within {seconds:.0f} s; give a longer timeout=, or "
                "ask for less"
            )
            if not asked.is_being_given_up:
                asked.giving_up = self._start(self._give_up(asked, problem))
            assert asked.giving_up is not None
            await asyncio.shield(asked.giving_up)
            # Nodes that waited too long together have one problem.
            was_told = future.done() and not future.cancelled()
            raise (future.exception() if was_told else None) or problem from None
        except asyncio.CancelledError:
            await self._settle(asked, order.node)
            raise

    async def _still_there(self, node: int) -> SlurmMachine | None:
        """The node of a job that is there although its agent is lost, in a pool that stays."""
        if not any(node in asked.nodes and asked.id for asked in self._asked):
            return None
        for machine in await self.find():
            if machine.node == node and await machine.alive():
                return machine
        return None

    async def _asked_for(self, node: int) -> AskedJob:
        """The job that is to have a node: one that Slurm starts again, or a new one."""
        for asked in list(self._asked):
            if not asked.is_closed:
                return asked
            if node in asked.nodes and asked.id:
                job = await self.states.settled(asked.id)
                is_followed = asked.following is not None and not asked.following.done()
                if job is not None and (job.is_waiting or (job.is_running and is_followed)):
                    return asked
                self._note_cancellation(asked, job)
        if self.pool in _stopped:
            stopped = UnavailableError(
                f"job {_stopped[self.pool]} was cancelled, and not by this pool: no new one is "
                "submitted; enter a new Compute to start again"
            )
            stopped.passing = False
            raise stopped
        # Another order may have been as quick.
        if self._asked and not self._asked[-1].is_closed:
            return self._asked[-1]
        self._asked.append(AskedJob())
        return self._asked[-1]

    def _note_cancellation(self, asked: AskedJob, job: SlurmJob | None) -> None:
        was_cancelled = job is not None and job.state.startswith("CANCELLED")
        if was_cancelled and asked.has_run and not asked.is_cancelled:
            _stopped[self.pool] = asked.id

    async def _settle(self, asked: AskedJob, node: int) -> None:
        """After a cancelled `get`, have the job include the node, or know nothing of it."""
        # A node that still waited would not be given back by the machine that `find` has for it.
        if (waiting := asked.waiting.pop(node, None)) is not None:
            waiting.cancel()
        if asked.is_closed:
            await asked.submitted.wait()
        else:
            asked.nodes.remove(node)
            asked.orders.pop(node)

    async def _give_up(self, asked: AskedJob, problem: BaseException) -> None:
        """Leave nothing of a job that does not run, and tell its nodes why."""
        following = asked.following
        if following is not None and following is not asyncio.current_task():
            following.cancel()
            await asyncio.wait({following})
        try:
            await self._cancel(asked)
        except PoolError as failure:
            if isinstance(problem, PoolStartError):
                problem.leaves_machine = True
            problem.add_note(
                f"job {asked.id} could not be cancelled, and may still be there: {failure}; "
                f"see `squeue --jobs={asked.id}`"
            )
        asked.fail(problem)

    # From the request to the keepers.

    async def _follow(self, asked: AskedJob) -> None:
        try:
            if not asked.id:
                await gather(lambda: asked.is_complete)
                asked.is_closed = True
                if not asked.nodes:
                    self._remove(asked)
                    return
                asked.nodes.sort()
                order = asked.orders[asked.nodes[0]]
                self._tell(asked, "submitting a job")
                await self._submit(asked, order)
                asked.submitted.set()
            job = await self._until_running(asked)
            await self._greet(asked, job)
        except asyncio.CancelledError:
            if not asked.is_being_given_up:
                which = f"job {asked.id}" if asked.id else "the job"
                asked.fail(
                    PoolStartError(
                        f"{which} was given up, because its nodes were ended; enter a new Compute "
                        "to ask again"
                    )
                )
            raise
        except Exception as problem:
            await self._give_up(asked, problem)
        finally:
            asked.submitted.set()

    async def _submit(self, asked: AskedJob, order: Order) -> None:
        """Submit the job; who is cancelled meanwhile still learns its number."""
        known = {each.id for each in self._asked}
        submitting = self._start(
            self._submission.submit(self.cluster, self.pool, asked.nodes, order, known)
        )
        try:
            asked.id = await asyncio.shield(submitting)
        except asyncio.CancelledError:
            with contextlib.suppress(Exception):
                asked.id = await submitting
            raise

    def _tell(self, asked: AskedJob, what: str) -> None:
        for node, future in asked.waiting.items():
            if not future.done():
                asked.orders[node].tell(what)

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
        for node, future in list(asked.waiting.items()):
            if not future.done():
                future.set_result(self.machine(job.id, node, by_node.get(node)))
        asked.waiting.clear()
        # In a task of its own: a node that is ordered meanwhile would wait for nobody.
        if asked.released and (asked.settling is None or asked.settling.done()):
            asked.settling = self._start(self._give_back(asked))

    def machine(self, job: str, node: int, greeting: Greeting | None) -> SlurmMachine:
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
            if here and apart:
                alike = len({json.dumps(each.home, sort_keys=True) for each in greetings}) == 1
                where = "once, in theirs" if alike and greetings[0].home else "on each node's disk"
                asked.orders[asked.nodes[0]].note(
                    f"the home folder of {self.login.name} is not that of {', '.join(apart)}: "
                    f"files that you put there are not here; environments are built {where}"
                )

    async def find(self) -> list[SlurmMachine]:
        """The nodes of the pool's jobs, also of those that another process submitted."""
        # All nodes of a pool that ends ask. An answer that was begun earlier may lack a new job.
        if self._finding is None:
            self._finding = self._start(self._find())
        return list(await asyncio.shield(self._finding))

    async def _find(self) -> list[SlurmMachine]:
        await asyncio.sleep(GATHER_SECONDS)
        self._finding = None
        found: dict[int, SlurmMachine] = {}
        jobs = await self.cluster.jobs_called(self._submission.job_name(self.pool))
        for job in sorted(jobs, key=lambda job: int(job.id)):
            asked = self._known(job)
            greetings: list[Greeting] = []
            if job.is_running and job.state != "CONFIGURING":
                with contextlib.suppress(PoolError):
                    hosts = await self.cluster.hostnames(job.hosts)
                    greetings, _ = await steps.greet(self.cluster, job.id, hosts)
            by_node = {each.node: each for each in greetings}
            asked.hosts |= {each.node: each.host for each in greetings}
            for node in asked.nodes:
                # A node that was lost has a job of its own since.
                if node not in asked.released:
                    found[node] = self.machine(job.id, node, by_node.get(node))
        if not found:
            self._close_if_unused()
        return [found[node] for node in sorted(found)]

    def _known(self, job: SlurmJob) -> AskedJob:
        for asked in self._asked:
            if asked.id == job.id:
                return asked
        asked = AskedJob(nodes=list(job.nodes), id=job.id, is_closed=True)
        asked.submitted.set()
        self._asked.append(asked)
        return asked

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
        asked = next((each for each in self._asked if each.id == job), None)
        if asked is None:
            return  # Its job has ended.
        if host and node in asked.waiting:
            return  # This was a node of its job's earlier run, and the next run is waited for.
        if not host and asked.has_run:
            asked.is_given_up = True
        asked.released.add(node)
        if asked.settling is None or asked.settling.done():
            asked.settling = self._start(self._give_back(asked))
        await asyncio.shield(asked.settling)

    async def _give_back(self, asked: AskedJob) -> None:
        await asyncio.sleep(GATHER_SECONDS)
        asked.settling = None
        job = await self.states.settled(asked.id)
        kept = [node for node in asked.nodes if node not in asked.released]
        was_requeued = job is not None and job.is_waiting and asked.has_run
        if was_requeued and not asked.is_given_up:
            # Slurm has put it back into the queue. Its nodes are ordered again, or nobody wants it.
            self._start(self._cancel_later(asked))
        elif job is None or job.has_ended or not kept:
            self._note_cancellation(asked, job)
            await self._cancel(asked, job)
        elif job.is_running:
            await self._shrink(asked, job, kept)

    async def _shrink(self, asked: AskedJob, job: SlurmJob, kept: list[int]) -> None:
        """Keep only some nodes of a job; if Slurm refuses, end what runs on the others."""
        gone = [asked.hosts[node] for node in asked.released if node in asked.hosts]
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

    async def _cancel_later(self, asked: AskedJob) -> None:
        await asyncio.sleep(REORDER_SECONDS)
        # A node that was ordered again is no longer among the released ones, also when it runs.
        is_unwanted = set(asked.nodes) <= asked.released and not asked.waiting
        if is_unwanted and asked in self._asked:
            with contextlib.suppress(PoolError):
                await self._cancel(asked)

    async def _cancel(self, asked: AskedJob, job: SlurmJob | None = None) -> None:
        """Cancel a job unless it has ended, and wait until nothing of it runs."""
        if asked.following is not None and asked.following is not asyncio.current_task():
            asked.following.cancel()
            await asyncio.wait({asked.following})
        asked.is_cancelled = True
        if not asked.id:
            self._remove(asked)
            return
        # If Slurm does not cancel it, the job still has the nodes that it had.
        released = set(asked.released)
        asked.released.update(asked.nodes)
        try:
            await self.states.cancel(asked.id, job)
        except PoolError:
            asked.released = released
            raise
        self._remove(asked)

    def _remove(self, asked: AskedJob) -> None:
        self._spares.close(asked.id)
        if asked in self._asked:
            self._asked.remove(asked)
        self._close_if_unused()

    def _close_if_unused(self) -> None:
        if not self._asked and not self.closed:
            self.closed = True
            self._forget(self)
            self._start(self.login.close())

    def _start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # Who waits for the task has it.
