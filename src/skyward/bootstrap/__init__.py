"""Turns a bare machine that has a shell into a node with a running agent."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import gzip
import os
import re
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from skyward.accelerators import Accelerator, Card, describe, matching
from skyward.bootstrap import uv
from skyward.bootstrap.recipe import Recipe, assignments, normalised, project_name, script
from skyward.bootstrap.wheel import Wheel, own_wheel
from skyward.errors import ImageError, PoolStartError, SkywardError
from skyward.files import includes
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
            elif looks_like_network(report.lines) and not repeated:
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
        return failure(self.node, kind, phase, image, python, list(report.lines))


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


_MARK = "@sky "
_KEPT_LINES = 400
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_DOWNLOADING = re.compile(r"\s*Downloading (\S+ \([\d.]+ ?[KMG]i?B\))")
"""What uv says of files that take a while."""
_RECEIVE = (
    'umask 077; mkdir -p "${1%/*}" && cat >"$1.$$" && '
    '[ "$(wc -c <"$1.$$")" -eq "$2" ] && chmod "$3" "$1.$$" && mv -f "$1.$$" "$1"'
)
_RECEIVE_PRESSED = _RECEIVE.replace("cat >", "gzip -dc >")


class Report:
    """The facts that a script reports, and apart from them what else was printed."""

    def __init__(self, phase: Callable[[str], None]) -> None:
        self.facts: dict[str, str] = {}
        self.missing: set[str] = set()
        self.cards: list[str] = []
        self.phase = ""
        self.lines: deque[str] = deque(maxlen=_KEPT_LINES)
        """The lines that were printed in the present phase."""
        self.code = 0
        self._told_phase = phase
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""

    def feed(self, data: bytes, last: bool = False) -> None:
        """Read the next piece of output."""
        *lines, self._rest = (self._rest + self._decoder.decode(data, last)).split("\n")
        if last and self._rest:
            lines.append(self._rest)
        for line in lines:
            self._take(line.rpartition("\r")[2] if "\r" in line.rstrip("\r") else line.rstrip("\r"))

    def _take(self, line: str) -> None:
        before, mark, told = line.partition(_MARK)
        if not mark or before.strip():
            if line.strip():
                self.lines.append(_CONTROL.sub("", line))
                if large := _DOWNLOADING.match(line):
                    self._told_phase(f"{self.phase}: {large[1]}")
            return
        name, _, value = told.partition(" ")
        if name == "phase":
            self.phase = value
            self.lines.clear()
            self._told_phase(value)
        elif name == "missing":
            self.missing.add(value)
        elif name == "card":
            self.cards.append(value)
        else:
            self.facts[name] = value


async def run_script(machine: Machine, script: bytes, phase: Callable[[str], None]) -> Report:
    """Run a script there; it is sent as input, so that no list of processes shows it."""
    report = Report(phase)
    report.code = await machine.run(["sh", "-s"], input=script, output=report.feed)
    report.feed(b"", last=True)
    return report


async def deliver(
    machine: Machine, path: str, data: bytes, *, size: int | None = None, mode: str = "600"
) -> None:
    """Write a file there, whole or not at all; `size` is that of `data` when it is unpacked."""
    said: list[bytes] = []
    command: Sequence[str] = [
        "sh",
        "-c",
        _RECEIVE if size is None else _RECEIVE_PRESSED,
        "sh",
        path,
        str(len(data) if size is None else size),
        mode,
    ]
    if await machine.run(command, input=data, output=said.append):
        words = b"".join(said).decode(errors="replace").strip()[-2000:]
        raise ImageError(
            f"node {machine.node}: {path} could not be written on the machine; check its disk space"
            + (f"; it said:\n{words}" if words else "")
        )


SHOWN_LINES = 20
_NETWORK = re.compile(
    r"timed? ?out|temporary failure|connection (reset|refused|aborted|closed)|dns error|"
    r"could not resolve|unreachable|broken pipe|error sending request|incomplete ?read|"
    r"failed to fetch|\b50[234]\b",
    re.IGNORECASE,
)
_USER_INFORMATION = re.compile(r"(?<=://)[^/\s@]+@")
_SHORTEST_SECRET = 5
_MODULES = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def looks_like_network(lines: Sequence[str]) -> bool:
    """Whether a failure looks like one of the network, which may pass."""
    if any("certificate" in line for line in lines):
        return False
    return any(_NETWORK.search(line) for line in lines)


def failure(
    node: int, kind: str, phase: str, image: Image, python: str, lines: Sequence[str]
) -> ImageError:
    """The error for a failed phase: the node, the line of the image, the output, the next step."""
    cause, advice = _cause(kind, image, python, lines)
    where = f"node {node}: {phase} failed" + (f" for Image({cause})" if cause else "")
    if any("No space left" in line for line in lines):
        advice = "make room on the machine; environments are in ~/.cache/skyward and ~/.cache/uv"
    elif any("certificate" in line for line in lines):
        advice = (
            "the machine does not trust the index's certificate; add its authority to those of the "
            "system, or name a file there that has it with Image(env={'SSL_CERT_FILE': ...})"
        )
    elif looks_like_network(lines):
        advice = (
            "the network or an index did not answer, twice; check that the machine reaches it, "
            "with Image(env={'HTTPS_PROXY': ...}) if it takes a proxy; or " + advice
        )
    output = [f"  {line}" for line in scrubbed(lines, image)[-SHOWN_LINES:]]
    return ImageError("\n".join([where, *(output or ["  it said nothing"]), advice]))


def scrubbed(lines: Sequence[str], image: Image) -> list[str]:
    """The lines without the secrets of the image: values of variables, and passwords in URLs."""
    secrets = [value for value in image.env.values() if len(value) >= _SHORTEST_SECRET]
    for index in image.pip_indexes:
        user = _USER_INFORMATION.search(index.url)
        secrets += re.split("[:@]", user[0])[:-1] if user else []
    shown = []
    for line in lines:
        for secret in filter(None, secrets):
            line = line.replace(secret, "***")
        shown.append(_USER_INFORMATION.sub("***@", line))
    return shown


def _cause(kind: str, image: Image, python: str, lines: Sequence[str]) -> tuple[str, str]:
    match kind:
        case "root":
            return (
                f"apt={list(image.apt)}",
                "have them installed on the machine by its owner, or log in there as root",
            )
        case "apt":
            mentioned = _mentioned(
                list(image.apt), [re.split("[=/:]", p)[0] for p in image.apt], lines
            )
            return (
                f"apt={mentioned}",
                "check the names with `apt-cache search` on the machine, take out of apt what it "
                "cannot have, or choose a machine image that has it",
            )
        case "packages":
            mentioned = _mentioned(
                list(image.pip), [project_name(p) or p for p in image.pip], lines
            )
            named = next((project_name(line) for line in mentioned), None) or "name"
            return (
                f"pip={mentioned}" if image.pip else "",
                "check the name and the version; a package from another index takes "
                f"pip_indexes=[PipIndex(url, packages=[{named!r}])]",
            )
        case "python":
            return (
                f"python={python!r}",
                f"install Python {python} on the machine, choose a machine image that has it, or "
                "ask for the version it has and run this script with that",
            )
        case "uv":
            return (
                "",
                "install uv on the machine (https://docs.astral.sh/uv), or Python's venv and pip "
                f"(on Debian: apt install python{python}-venv)",
            )
        case "environment":
            pip = f"pip={list(image.pip)}" if image.pip else ""
            return (
                pip,
                "everything was installed, and does not work together; a library that is missing "
                "belongs to the system: Image(apt=[...]) installs it, or a machine image has it",
            )
        case "includes":
            return f"includes={list(image.includes)}", "check the disk space on the machine"
        case _:
            return "", "check that the machine has a POSIX shell, a home or /tmp, and disk space"


def _mentioned(entries: list[str], names: list[str], lines: Sequence[str]) -> list[str]:
    """The entries that the first complaint mentions; all entries where no line mentions any."""
    for telling in (_complaints(lines), list(lines)):
        for line in telling:
            words = {normalised(word) for word in _MODULES.findall(line)}
            mentioned = [
                entry
                for entry, name in zip(entries, names, strict=True)
                if normalised(name) in words or entry in line
            ]
            if mentioned:
                return mentioned
    return entries


def _complaints(lines: Sequence[str]) -> list[str]:
    """The lines that complain: installers name the package there."""
    said = re.compile(r"error|no solution|not found|because|unable|failed|hint", re.IGNORECASE)
    return [line for line in lines if said.search(line)]
