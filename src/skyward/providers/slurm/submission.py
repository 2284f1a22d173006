"""The submission: the call of `sbatch` that asks for the nodes of a pool."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from skyward.errors import (
    ConfigurationError,
    PoolError,
    PoolStartError,
    UnavailableError,
    UnreachableError,
)
from skyward.providers import Order, Request, owner
from skyward.providers.slurm import resources, steps
from skyward.providers.slurm.commands import (
    SlurmCluster,
    check,
    comment,
    first_words,
    is_out_of_reach,
)
from skyward.providers.slurm.login import CommandAnswer
from skyward.providers.slurm.script import SIGNAL, batch_script

PREFIX = "sky-"
"""How the names of the pools' jobs begin."""
_NOT_THERE = "Requested node configuration is not available"
_FOR_A_WHILE = ("MaxSubmit", "Resource temporarily unavailable", "try again", "Slurm is in")
"""Refusals that other jobs' ends may mend."""


@dataclass(frozen=True, slots=True)
class Submission:
    """What the user said about the jobs of a pool."""

    partition: str | None
    account: str | None
    qos: str | None
    constraint: str | None
    time: str | None
    container: str | None
    extra: tuple[str, ...]
    python: str | None
    is_direct: bool
    """Whether this process can connect to the nodes."""

    def job_name(self, pool: str) -> str:
        """The name of a pool's jobs."""
        return f"{PREFIX}{pool}"

    async def submit(
        self,
        cluster: SlurmCluster,
        pool: str,
        nodes: Sequence[int],
        order: Order,
        known: Collection[str] = (),
    ) -> str:
        """Submit a job for some nodes, and give its number; raises with Slurm's own words.

        `known` has the numbers of the pool's other jobs.
        """
        request = order.request
        there = await self._nodes(cluster, request)
        asked = resources.options(request, there)
        about = comment(nodes, owner(), os.getpid(), order.name)
        command = ["sbatch", *self._options(pool, nodes, request, about), *asked, *self.extra]
        script = await self._script(cluster, pool, nodes, request, asked)
        # A job that can never run is accepted by `sbatch`, but not by its test.
        test = await cluster.login.call([*command, "--test-only"], script)
        if test.status:
            if _NOT_THERE in first_words(test) and await self._some_are_away(cluster):
                order.tell("waiting for nodes that are down")
            else:
                self._refuse(cluster, test, there)
        try:
            answer = await cluster.login.call([*command, "--parsable"], script)
            if answer.status:
                self._refuse(cluster, answer, there)
        except UnreachableError as problem:
            return await self._accepted(cluster, pool, nodes, known, problem)
        id = answer.output.strip().splitlines()[-1].partition(";")[0] if answer.output else ""
        if not id.isdigit():
            raise PoolStartError(f"`sbatch` gave no number of a job, but {answer.output!r}")
        return id

    async def _accepted(
        self,
        cluster: SlurmCluster,
        pool: str,
        nodes: Sequence[int],
        known: Collection[str],
        problem: UnreachableError,
    ) -> str:
        """The job of an `sbatch` that got no answer, if Slurm has accepted it all the same."""
        try:
            jobs = await cluster.jobs_called(self.job_name(pool))
        except PoolError:
            jobs = []
        for job in jobs:
            if job.id not in known and job.nodes == tuple(nodes):
                return job.id
        # The controller may come to it later.
        problem.leaves_machine = True
        raise problem

    async def _some_are_away(self, cluster: SlurmCluster) -> bool:
        """Whether nodes that are down at the moment might have what is asked for.

        The test of `sbatch` knows only nodes that are up; a job may wait for the others.
        """
        answer = await cluster.login.call(self._sinfo("%T"))
        words = ("down", "drain", "fail", "maint", "unk", "inval", "power", "boot", "plan")
        return any(
            state.endswith("*") or any(word in state for word in words)
            for state in answer.output.lower().split()
        )

    def _sinfo(self, format: str) -> list[str]:
        where = [] if self.partition is None else [f"--partition={self.partition}"]
        return ["sinfo", "--noheader", "--Node", f"--format={format}", *where]

    def _refuse(
        self, cluster: SlurmCluster, answer: CommandAnswer, there: Sequence[resources.NodeKind]
    ) -> None:
        said = first_words(answer)
        if any(words in said for words in _FOR_A_WHILE):
            raise UnavailableError(f"Slurm on {cluster.login.name} said: {said}")
        if is_out_of_reach(answer):
            check(answer, "submitting a job", cluster.login)
        has = f"; the GPUs there: {resources.described(there)}" if there else ""
        raise ConfigurationError(
            f"Slurm on {cluster.login.name} refuses the job: {said}{has}; see `sinfo` for what "
            "there is, and change the request"
        )

    async def _nodes(self, cluster: SlurmCluster, request: Request) -> list[resources.NodeKind]:
        """The nodes that the job may get, if the request is for GPUs."""
        if request.accelerator is None:
            return []
        command = self._sinfo(resources.FORMAT)
        try:
            answer = check(await cluster.login.call(command), "asking for nodes", cluster.login)
        except PoolError:
            return []  # What is wrong, `sbatch` will say.
        return resources.read_nodes(answer.output)

    def _options(self, pool: str, nodes: Sequence[int], request: Request, about: str) -> list[str]:
        given = {
            "partition": self.partition,
            "account": self.account,
            "qos": self.qos,
            "constraint": self.constraint,
            "time": self.time or _minutes(request.ttl),
        }
        return [
            f"--job-name={self.job_name(pool)}",
            f"--comment={about}",
            f"--nodes={len(nodes)}",
            "--ntasks-per-node=1",
            # A node that is lost does not take the others with it; a preempted job comes back.
            *("--no-kill", "--requeue", SIGNAL),
            *("--output=/dev/null", "--error=/dev/null", "--chdir=/"),
            *(f"--{name}={value}" for name, value in given.items() if value is not None),
        ]

    async def _script(
        self,
        cluster: SlurmCluster,
        pool: str,
        nodes: Sequence[int],
        request: Request,
        asked: Sequence[str],
    ) -> bytes:
        config: dict[str, object] = {
            "pool": pool,
            "nodes": list(nodes),
            "idle": request.idle_timeout,
        }
        launch = [
            *("--ntasks-per-node=1", "--no-kill", "--wait=0", "--kill-on-bad-exit=0"),
            *("--mpi=none", "--cpu-bind=none", "--quiet"),
            # From 22.05 on, the step does not get all processors of the job by itself.
            *(each for each in asked if each.startswith("--cpus-per-task=")),
        ]
        if self.container is not None:
            mounts = [
                f"{each.source}:{each.target}{':ro' if each.read_only else ''}"
                for each in request.volumes
            ]
            if await cluster.has_pyxis():
                # The sockets of the node's processes are in /tmp, its environments below the home.
                launch += [
                    f"--container-image={self.container.removeprefix('docker://')}",
                    f"--container-mounts={','.join(['/tmp:/tmp', *mounts])}",
                    "--container-mount-home",
                ]
            else:
                config["container"] = _apptainer_image(self.container)
                config["container_options"] = [
                    *(["--nv"] if request.accelerator is not None else []),
                    *(f"--bind={each}" for each in mounts),
                ]
        return batch_script(config, launch, await steps.options(cluster))


def _minutes(seconds: float | None) -> str | None:
    """A time to live as a time limit, which Slurm counts in minutes."""
    return None if seconds is None else str(math.ceil(seconds / 60) + 1)


def _apptainer_image(image: str) -> str:
    """A file, or an address; a bare name is one of Docker's."""
    if "://" in image or image.startswith(("/", "./", "~")) or image.endswith(".sif"):
        return image
    return f"docker://{image}"
