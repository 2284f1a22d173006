"""Preparation: makes a machine that has a shell into a node with a running agent."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import os
import re
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from skyward import includes
from skyward.accelerators import Accelerator, Card, describe, matching
from skyward.bootstrap import diagnosis, uv
from skyward.bootstrap.courier import Report, deliver, run_script
from skyward.bootstrap.recipe import Recipe, assignments, script
from skyward.bootstrap.wheel import Wheel, own_wheel
from skyward.errors import ImageError, PoolStartError, SkywardError
from skyward.providers import Machine
from skyward.spec import Image
from skyward.worker.config import AgentConfig

_NAMEABLE = re.compile(r"[A-Za-z0-9_-]{1,40}")

Told = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Environment:
    """What a prepared machine has: an interpreter, the node's folder, its cards."""

    python: str
    """The interpreter that has skyward and the image."""
    folder: str
    """The node's folder, private and with a short path: sockets, the agent's log, and `work`."""
    cards: tuple[Card, ...]
    hostname: str
    cached: bool
    """Whether nothing had to be installed."""

    @property
    def accelerators(self) -> int:
        """How many cards the machine has."""
        return len(self.cards)

    @property
    def accelerator(self) -> str | None:
        """The model of its first card."""
        return self.cards[0].name if self.cards else None

    @property
    def work(self) -> str:
        """The working directory, with the includes in it."""
        return f"{self.folder}/work"


@dataclass(frozen=True, slots=True)
class Announced:
    """An agent that listens, as it announced itself."""

    endpoint: str
    """One place or several, separated by spaces: "tcp:10.0.0.5:4242 unix:/tmp/..."."""
    pid: int

    @property
    def endpoints(self) -> tuple[str, ...]:
        """The places one by one."""
        return tuple(self.endpoint.split(" "))


async def prepare(
    machine: Machine, pool: str, node: int, image: Image, phase: Told, note: Told
) -> Environment:
    """Make the environment an image describes, and a folder for one node.

    This takes one command on the machine where both exist, or where `machine.python` is given.
    `phase` is called with what is being done, `note` with what the user may want to know.
    """
    phase("looking at the machine")
    wheel = None if machine.python else await asyncio.to_thread(own_wheel)
    recipe = Recipe(image, wheel or Wheel("", b"", ""))
    bundle = None
    if image.includes:
        bundle = await asyncio.to_thread(includes.find, image.includes, image.excludes)
        note(bundle.describe())
    return await _Preparation(machine, pool, node, recipe, bundle, phase, note).run()


def check_accelerators(environment: Environment, node: int, wanted: Accelerator | None) -> None:
    """Raise where a machine has too few of the cards asked for; only NVIDIA's can be judged."""
    if wanted is None or not wanted.is_nvidia or os.environ.get("SKYWARD_DEVICE") == "cpu":
        return
    if len(matching(wanted, environment.cards)) < wanted.count:
        has = describe(environment.cards) or "no GPU that its driver knows"
        raise PoolStartError(
            f"accelerator={wanted}: node {node}, on {environment.hostname}, has {has}; choose a "
            "machine that has it, look at `nvidia-smi` there, or set SKYWARD_DEVICE=cpu here to "
            "try GPU code without"
        )


@dataclass(frozen=True, slots=True)
class _Preparation:
    machine: Machine
    pool: str
    node: int
    recipe: Recipe
    bundle: includes.Bundle | None
    phase: Told
    note: Told

    async def run(self) -> Environment:
        digest = await asyncio.to_thread(self._digest)
        report = await self._run_scripts("paths", "cards", "folder", digest=digest)
        cached = "environment" not in report.missing
        facts = report.facts
        if "includes" in report.missing:
            assert self.bundle is not None
            self.phase(f"sending {includes.shown_size(self.bundle.size)} of files")
            data, digest = await asyncio.to_thread(self.bundle.archive)
            await deliver(self.machine, f"{facts['cache']}/includes/{digest}.tgz", data)
        if "wheel" in report.missing:
            self.phase("sending skyward")
            wheel = self.recipe.wheel
            path = f"{facts['cache']}/wheels/{wheel.digest}/{wheel.name}"
            await deliver(self.machine, path, wheel.data)
        if not cached:
            report = await self._build(facts, digest)
        elif report.missing:
            report = await self._run_scripts("paths", "cards", "folder", digest=digest)
        if report.missing:
            raise ImageError(
                f"node {self.node}: what was just made is gone from {facts['cache']}: "
                f"{', '.join(sorted(report.missing))}; does something else clean that folder?"
            )
        facts = report.facts
        return Environment(
            python=facts["python"],
            folder=facts["folder"],
            cards=tuple(_card(line) for line in report.cards),
            hostname=facts["hostname"],
            cached=cached,
        )

    def _digest(self) -> str:
        return self.bundle.digest if self.bundle else ""

    async def _run_scripts(self, *scripts: str, digest: str, instructions: str = "") -> Report:
        text = script(
            *scripts,
            prelude=assignments(
                pool=_checked(self.pool),
                node=str(self.node),
                includes=digest,
                given_python=self.machine.python or "",
            )
            + "\n"
            + self.recipe.facts(),
            between=instructions,
        )
        report = await run_script(self.machine, text, self.phase)
        if instructions or (report.code == 0 and "prepared" in report.facts):
            return report
        raise self._failure(report, "looking at the machine")

    async def _build(self, facts: dict[str, str], digest: str) -> Report:
        """Run the build script; again after sending uv, and again after a network failure."""
        with_uv, sent, repeated = True, False, False
        while True:
            instructions = self.recipe.instructions(uv=with_uv)
            report = await self._run_scripts(
                "paths", "build", "cards", "folder", digest=digest, instructions=instructions
            )
            if report.code == 0 and "prepared" in report.facts:
                return report
            if "uv" in report.missing and not sent:
                sent = True
                with_uv = await self._send_uv(facts)
            elif "uv" in report.missing and with_uv:
                with_uv = False
                self.note(f"node {self.node}: uv does not run there; going on with pip")
            elif diagnosis.looks_like_network(report.lines) and not repeated:
                repeated = True
                self.note(f"node {self.node}: {report.phase} failed on the network; once more")
            else:
                raise self._failure(report, "installing")

    async def _send_uv(self, facts: dict[str, str]) -> bool:
        """Send uv to the machine; False where it cannot be fetched, so that pip is used."""
        self.phase("sending uv")
        try:
            program = await uv.program_for(*facts["platform"].split(" "))
        except ImageError as problem:
            self.note(f"node {self.node}: {problem}; going on with pip")
            return False
        path = f"{facts['cache']}/uv/uv"
        if "gzip" in facts:
            pressed = await asyncio.to_thread(gzip.compress, program, 1)
            await deliver(self.machine, path, pressed, size=len(program), mode="700")
        else:
            await deliver(self.machine, path, program, mode="700")
        return True

    def _failure(self, report: Report, phase: str) -> ImageError:
        kind = report.facts.get("failed", "")
        phase = report.phase or phase
        image, python = self.recipe.image, self.recipe.python
        return diagnosis.failure(self.node, kind, phase, image, python, list(report.lines))


async def launch(machine: Machine, environment: Environment, config: AgentConfig) -> Announced:
    """Start the agent; it listens when this returns, and outlives the connection.

    It listens on a Unix socket in its folder and, where `config.direct` names an address that the
    machine has, there as well, with TLS.
    """
    config = msgspec.structs.replace(
        config,
        address="unix",
        folder=environment.folder,
        search_path=[environment.work],
        working_directory=environment.work,
        client_pid=0,
    )
    said: list[bytes] = []
    command = [environment.python, "-P", "-m", "skyward.worker.agent", "--detached"]
    code = await machine.run(command, input=msgspec.json.encode(config), output=said.append)
    words = b"".join(said)
    if code == 0:
        for line in reversed(words.splitlines()):
            if line.startswith(b'{"endpoint":'):
                return msgspec.json.decode(line, type=Announced)
    raise PoolStartError(
        f"node {machine.node}: its agent did not start (exit status {code}); it said:\n"
        + words.decode(errors="replace").strip()[-2000:]
    )


async def remove(machine: Machine, pool: str, node: int) -> None:
    """End the node's agent and all it started, and delete the node's folder, if they exist."""
    prelude = assignments(
        pool=_checked(pool),
        node=str(node),
        **dict.fromkeys(("key", "want", "apt", "wheel", "includes", "given_python"), ""),
    )
    report = await run_script(machine, script("paths", "remove", prelude=prelude), lambda _: None)
    if "removed" not in report.facts:
        said = "\n".join(report.lines)[-2000:]
        raise PoolStartError(
            f"node {node}: its folder may still be on the machine {machine.id} (exit status "
            f"{report.code}); it said:\n{said}"
        )


async def take_down(machine: Machine, pool: str, seconds: float) -> None:
    """Remove the agent within so many seconds, and then the machine.

    An agent that cannot be reached is no reason to stop: most machines take all with them.
    """
    await end_agent(machine, pool, seconds)
    await machine.destroy()


async def end_agent(machine: Machine, pool: str, seconds: float) -> None:
    """Remove the agent within so many seconds, if it can be reached."""
    with contextlib.suppress(SkywardError, OSError, TimeoutError):
        async with asyncio.timeout(seconds):
            await remove(machine, pool, machine.node)


def _card(line: str) -> Card:
    """A card as the scripts tell it: "143771, NVIDIA H200", or "?, NVIDIA H200"."""
    memory, _, name = line.partition(", ")
    return Card(name, int(memory) if memory.isdigit() else None)


def _checked(pool: str) -> str:
    if not _NAMEABLE.fullmatch(pool):
        raise ValueError(f"a pool called {pool!r} cannot name a folder")
    return pool
