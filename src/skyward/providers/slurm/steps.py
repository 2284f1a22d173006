"""Steps of a running job: commands of `srun` that lead to the keepers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass

from skyward.errors import UnreachableError
from skyward.providers.on_node.relay import NO_KEEPER
from skyward.providers.slurm.commands import SlurmCluster, first_words
from skyward.providers.slurm.script import relay_command

ANSWER_SECONDS = 8.0
"""How long a node may take to answer whether its keeper runs."""
_HELLO = '{"ask": "hello"}'
_END = '{"ask": "end"}'
_MARK = "skyward "


@dataclass(frozen=True, slots=True)
class Greeting:
    """What a keeper says of itself and of its node."""

    node: int
    host: str
    address: str
    token: str
    """Another one for every keeper: a job that Slurm starts again has new ones."""
    home: dict[str, int]


async def options(cluster: SlurmCluster) -> list[str]:
    """The options of every step beside the keepers': they take nothing for themselves."""
    return [
        *await cluster.overlap(),
        *("--mpi=none", "--gres=none", "--cpu-bind=none", "--chdir=/", "--quiet"),
    ]


async def relaying(cluster: SlurmCluster, job: str, host: str, target: str) -> list[str]:
    """The command whose standard streams lead to a socket on a node."""
    place = [f"--jobid={job}", f"--nodelist={host}", "--nodes=1", "--ntasks=1"]
    # With buffers, Slurm passes output on line by line.
    return [
        *("srun", *await options(cluster), *place, "--unbuffered"),
        *relay_command(target),
    ]


async def greet(
    cluster: SlurmCluster, job: str, hosts: Sequence[str], keeper: str = "keeper"
) -> tuple[list[Greeting], str]:
    """The greetings of the keepers of a job, and what Slurm said if some are missing."""
    count = len(hosts)
    place = [f"--jobid={job}", f"--nodelist={','.join(hosts)}", f"--nodes={count}"]
    command = ["srun", *await options(cluster), *place, "--ntasks-per-node=1", f"--ntasks={count}"]
    answer = await cluster.login.call([*command, *relay_command(keeper, _HELLO)])
    found = [
        _greeting(line[len(_MARK) :])
        for line in answer.output.splitlines()
        if line.startswith(_MARK)
    ]
    if not found and answer.status == NO_KEEPER:
        return [], "no keeper runs there"
    return found, first_words(answer)


def _greeting(text: str) -> Greeting:
    told = json.loads(text)
    return Greeting(
        node=int(told["node"]),
        host=str(told["slurm"]),
        address=str(told["address"]),
        token=str(told["token"]),
        home={str(name): int(number) for name, number in told["home"].items()},
    )


async def greet_one(cluster: SlurmCluster, job: str, host: str) -> Greeting | None:
    """The greeting of the keeper on one node; None if none runs there."""
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            found, words = await greet(cluster, job, [host], "keeper-now")
    except TimeoutError:
        raise UnreachableError(f"job {job}: {host} does not answer") from None
    if not found and words != "no keeper runs there":
        raise UnreachableError(f"job {job}: {host} does not answer: {words}")
    return found[0] if found else None


async def end(cluster: SlurmCluster, job: str, host: str) -> None:
    """Have the keeper on a node end, with all that it runs."""
    place = [f"--jobid={job}", f"--nodelist={host}", "--nodes=1", "--ntasks=1"]
    command = ["srun", *await options(cluster), *place, *relay_command("keeper-now", _END)]
    await cluster.login.call(command)
