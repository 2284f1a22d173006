"""Bootstrap: from a machine with a shell to a running agent, in phases that can be told."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import os
import re
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from skyward.accelerators import Accelerator
from skyward.errors import ImageError, PoolError, PoolStartError
from skyward.providers import Machine, blame, includes, uv
from skyward.providers.courier import Report, consult, deliver
from skyward.providers.recipe import Recipe, assignments, script
from skyward.providers.wheel import Wheel, own_wheel
from skyward.spec import Image
from skyward.worker.config import AgentConfig

_NAMEABLE = re.compile(r"[A-Za-z0-9_-]{1,40}")

Told = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A machine on which an agent can be launched."""

    python: str
    """The interpreter that has skyward and the image."""
    folder: str
    """The node's own, private and short: sockets, the agent's log, and `work`."""
    accelerators: int
    accelerator: str | None
    hostname: str
    cached: bool
    """Whether nothing had to be installed."""

    @property
    def work(self) -> str:
        """The working directory, with the includes in it."""
        return f"{self.folder}/work"


@dataclass(frozen=True, slots=True)
class Announced:
    """An agent that listens."""

    endpoint: str
    """One place or several, separated by spaces: "tcp:10.0.0.5:4242 unix:/tmp/..."."""
    pid: int

    @property
    def endpoints(self) -> tuple[str, ...]:
        """The places one by one."""
        return tuple(self.endpoint.split(" "))


async def prepare(
    machine: Machine, pool: str, node: int, image: Image, phase: Told, note: Told
) -> Prepared:
    """Make the environment an image describes, and a folder for one node.

    Where both are there already, or `machine.python` says so, this is one command on the machine.
    `phase` hears what is being done, `note` what the user may want to know.
    """
    phase("looking at the machine")
    wheel = None if machine.python else await asyncio.to_thread(own_wheel)
    recipe = Recipe(image, wheel or Wheel("", b"", ""))
    bundle = None
    if image.includes:
        bundle = await asyncio.to_thread(includes.find, image.includes, image.excludes)
        note(bundle.describe())
    return await _Preparation(machine, pool, node, recipe, bundle, phase, note).carry_out()


def check_accelerators(prepared: Prepared, node: int, wanted: Accelerator | None) -> None:
    """Raise where a machine has fewer GPUs than were asked for; only NVIDIA's are known."""
    if wanted is None or wanted.cuda is None or os.environ.get("SKYWARD_DEVICE") == "cpu":
        return
    if prepared.accelerators < wanted.count:
        count = prepared.accelerators
        has = f"{count} x {prepared.accelerator}" if count else "no GPU that its driver knows"
        raise PoolStartError(
            f"accelerator={wanted}: node {node}, on {prepared.hostname}, has {has}; choose a "
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

    async def carry_out(self) -> Prepared:
        digest = await asyncio.to_thread(self._digest)
        report = await self._consult("ground", "settle", digest=digest)
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
            report = await self._consult("ground", "settle", digest=digest)
        if report.missing:
            raise ImageError(
                f"node {self.node}: what was just made is gone from {facts['cache']}: "
                f"{', '.join(sorted(report.missing))}; does something else clean that folder?"
            )
        facts = report.facts
        return Prepared(
            python=facts["python"],
            folder=facts["folder"],
            accelerators=int(facts["accelerators"]),
            accelerator=facts.get("accelerator")
            or ("NVIDIA" if facts["accelerators"] != "0" else None),
            hostname=facts["hostname"],
            cached=cached,
        )

    def _digest(self) -> str:
        return self.bundle.digest if self.bundle else ""

    async def _consult(self, *scripts: str, digest: str, instructions: str = "") -> Report:
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
        report = await consult(self.machine, text, self.phase)
        if instructions or (report.code == 0 and "settled" in report.facts):
            return report
        raise self._failure(report, "looking at the machine")

    async def _build(self, facts: dict[str, str], digest: str) -> Report:
        """Run the building script; once more for uv, and once more when the network failed."""
        with_uv, carried, repeated = True, False, False
        while True:
            instructions = self.recipe.instructions(uv=with_uv)
            report = await self._consult(
                "ground", "build", "settle", digest=digest, instructions=instructions
            )
            if report.code == 0 and "settled" in report.facts:
                return report
            if "uv" in report.missing and not carried:
                carried = True
                with_uv = await self._carry_uv(facts)
            elif "uv" in report.missing and with_uv:
                with_uv = False
                self.note(f"node {self.node}: uv does not run there; going on with pip")
            elif blame.looks_like_network(report.lines) and not repeated:
                repeated = True
                self.note(f"node {self.node}: {report.phase} failed on the network; once more")
            else:
                raise self._failure(report, "installing")

    async def _carry_uv(self, facts: dict[str, str]) -> bool:
        """Take uv there; False where it cannot be had, and pip must do."""
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
        return blame.failure(self.node, kind, phase, image, python, list(report.lines))


async def launch(machine: Machine, prepared: Prepared, config: AgentConfig) -> Announced:
    """Start the agent; it listens when this returns, and lives on when the connection ends.

    It listens on a Unix socket in its folder and, where `config.direct` names an address that the
    machine has, there as well, with TLS.
    """
    config = msgspec.structs.replace(
        config,
        address="unix",
        folder=prepared.folder,
        search_path=[prepared.work],
        working_directory=prepared.work,
        client_pid=0,
    )
    said: list[bytes] = []
    command = [prepared.python, "-P", "-m", "skyward.worker.agent", "--detached"]
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
    """End the node's agent and all it started, and delete the node's folder; fine if it was."""
    prelude = assignments(
        pool=_checked(pool),
        node=str(node),
        **dict.fromkeys(("key", "want", "apt", "wheel", "includes", "given_python"), ""),
    )
    report = await consult(machine, script("ground", "remove", prelude=prelude), lambda _: None)
    if "removed" not in report.facts:
        said = "\n".join(report.lines)[-2000:]
        raise PoolStartError(
            f"node {node}: its folder may still be on the machine {machine.id} (exit status "
            f"{report.code}); it said:\n{said}"
        )


async def take_down(machine: Machine, pool: str, seconds: float) -> None:
    """Remove the agent, for which there are so many seconds, and then the machine.

    Most machines go with all that is on them, so one that cannot be reached is no reason to stop.
    """
    with contextlib.suppress(PoolError, OSError, TimeoutError):
        async with asyncio.timeout(seconds):
            await remove(machine, pool, machine.node)
    await machine.destroy()


def _checked(pool: str) -> str:
    if not _NAMEABLE.fullmatch(pool):
        raise ValueError(f"a pool called {pool!r} cannot name a folder")
    return pool
