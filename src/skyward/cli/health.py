"""The health of this machine, and the reach of providers and pools: what `sky doctor` finds."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Literal

import psutil

from skyward import __version__
from skyward.compute import reach
from skyward.compute.arguments import arguments_of
from skyward.console.measures import size
from skyward.device import build, torch_build
from skyward.device.build import cache
from skyward.errors import ConfigurationError, SkywardError
from skyward.nodes import records
from skyward.nodes.records import Journal
from skyward.providers import Provider, answers, find_provider, state_folder
from skyward.providers.hosts import openssh
from skyward.providers.local import measured_cards
from skyward.settings import read_settings
from skyward.wire import native

State = Literal["ok", "not set up", "problem", "broken"]

_LITTLE_MEMORY, _LITTLE_SHARED, _LITTLE_DISK = 1 << 30, 256 << 20, 2 << 30
_FEW_FILES = 1024
_WORKER_SECONDS = 60.0
_TORCH_SECONDS = 120.0
_WORKER = """
import skyward as sky
@sky.function
def answer(): return 42
with sky.Compute(options=sky.Options(console=False)) as compute:
    assert answer() >> compute == 42
"""
_TORCH = """
import json, torch
from skyward.device import build
print(json.dumps({
    "cuda": torch.version.cuda, "gpus": torch.cuda.device_count(),
    "core": all(map(build.is_there, build.PARTS)),
}))
"""


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found, and what to do about it."""

    check: str
    state: State
    """ "not set up" is no fault; a "problem" leaves the rest usable; with "broken" nothing runs."""
    found: str
    advice: str = ""


Check = Callable[[], list[Finding]]


def machine_checks() -> dict[str, Check]:
    """The checks of this machine, by name; each may be run in a thread of its own."""
    return {
        "versions": _versions,
        "local": _local_worker,
        "torch": _torch,
        "links": lambda: [_links()],
        "gpu": _gpus,
        "memory": lambda: [*_memory(), *_shared_memory()],
        "limits": _limits,
        "disk": _disk,
    }


def _versions() -> list[Finding]:
    home = Path(__file__).parents[1]
    return [
        Finding("python", "ok", f"{platform.python_version()} at {sys.executable}"),
        Finding("skyward", "ok", f"{__version__} at {home}"),
        *_namesakes(),
        Finding("system", "ok", f"{platform.system()} {platform.release()} {platform.machine()}"),
    ]


def _namesakes() -> Iterator[Finding]:
    """Packages of others whose files or command have the same name as ours."""
    installed = {(each.name or "").lower(): each.version for each in metadata.distributions()}
    if version := installed.get("skyward"):
        yield Finding(
            "skyward",
            "problem",
            f"the package skyward {version} of another project is installed, too; one has "
            "overwritten files of the other",
            "pip uninstall skyward skyward-torch, and install skyward-torch again; to have both, "
            "make an environment for each",
        )
    if version := installed.get("skypilot"):
        yield Finding(
            "skyward",
            "problem",
            f"SkyPilot {version} is installed, too; the command `sky` is the last one's",
            "write `python -m skyward` for our `sky`",
        )


def _child(program: str, seconds: float) -> subprocess.CompletedProcess[str]:
    """Run a program with this interpreter in an empty folder, where no module is in its way."""
    with tempfile.TemporaryDirectory() as folder:
        return subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            timeout=seconds,
            cwd=folder,
            stdin=subprocess.DEVNULL,
        )


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip() if lines else "it said nothing"


def _local_worker() -> list[Finding]:
    """Start the pool that `sky.Compute()` means, and call a function."""
    try:
        done = _child(_WORKER, _WORKER_SECONDS)
    except subprocess.TimeoutExpired:
        return [
            Finding(
                "local",
                "broken",
                f"a worker on this machine did not answer in {_WORKER_SECONDS:g} s",
                "see whether the machine is overloaded, and run `sky doctor` again",
            )
        ]
    if done.returncode == 0:
        return [Finding("local", "ok", "a worker on this machine ran a function")]
    return [
        Finding(
            "local",
            "broken",
            "a worker on this machine does not start",
            f"{_last_line(done.stderr)}; run `python -c 'import skyward as sky; "
            "sky.Compute().__enter__()'` to see all of it",
        )
    ]


def _torch() -> list[Finding]:
    if importlib.util.find_spec("torch") is None:
        return [
            Finding(
                "torch",
                "not set up",
                "not installed; functions without torch run",
                "pip install 'skyward-torch[torch]' to send models and to use the torch device",
            )
        ]
    version = metadata.version("torch")
    try:
        done = _child(_TORCH, _TORCH_SECONDS)
    except subprocess.TimeoutExpired:
        return [Finding("torch", "problem", f"{version}: import took over {_TORCH_SECONDS:g} s")]
    if done.returncode:
        told = _last_line(done.stderr)
        return [
            Finding("torch", "problem", f"{version} cannot be imported: {told}", "reinstall torch")
        ]
    known = json.loads(done.stdout.splitlines()[-1])
    built = f"CUDA {known['cuda']}" if known["cuda"] else "CPU build"
    return [
        Finding("torch", "ok", f"{version} ({built})"),
        *_blind_torch(known["gpus"]),
        *_untried_torch(version),
        _core(known["core"]),
    ]


def _blind_torch(gpus: int) -> Iterator[Finding]:
    cards = len(measured_cards())
    if cards and not gpus:
        yield Finding(
            "torch",
            "problem",
            f"torch sees none of this machine's {cards} GPUs",
            "install a CUDA build of torch that the driver supports; see pytorch.org/get-started",
        )


def _untried_torch(version: str) -> Iterator[Finding]:
    if not torch_build.is_in_range(version):
        first, last = torch_build.TRIED[0], torch_build.TRIED[-1]
        yield Finding(
            "device",
            "problem",
            f"the torch device has been tried with {torch_build.tried()}, and torch {version} is "
            "outside of these versions",
            f"pip install 'torch>={first[0]}.{first[1]},<{last[0]}.{last[1] + 1}' if the torch "
            "device does not do what torch does elsewhere",
        )


def _core(there: bool) -> Finding:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    tried = f"tried with {torch_build.tried()}"
    if there:
        return Finding("device", "ok", f"the compiled core for this torch is there; {tried}")
    if compiler:
        return Finding("device", "ok", f"the first use compiles its core with {compiler}; {tried}")
    return Finding(
        "device",
        "not set up",
        "no compiled core for this torch, and no C++ compiler",
        "apt-get install g++ (or name a compiler with CXX) to use the torch device",
    )


def _links() -> Finding:
    """What moves the bytes that go to other machines."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if not build.is_there(build.LINK):
        if compiler:
            return Finding(
                "links",
                "ok",
                f"calls go through Python's ssl; the first torch device over a network compiles a "
                f"faster core with {compiler}, or now: python -m skyward.device.build",
            )
        return Finding(
            "links",
            "not set up",
            "no compiled core, and no C++ compiler: Python encrypts, and no torch device is "
            "reached over a network",
            "install the wheel for this platform, or apt-get install g++ (or name one with CXX)",
        )
    path = build.library(build.LINK)
    origin = "of the wheel" if path.parent == native.SHIPPED else "that was compiled here"
    try:
        core = native.LinkCore(path)
    except OSError as problem:
        return Finding(
            "links",
            "problem",
            f"the core {origin} cannot be loaded: {problem}",
            f"remove {path}, and `sky doctor` says what comes in its place",
        )
    if core.openssl is None:
        return Finding(
            "links",
            "not set up",
            f"Python encrypts for the core {origin}, which finds no OpenSSL 3 "
            f"({core.openssl_name})",
            "install one for more speed, for example apt-get install libssl3",
        )
    return Finding("links", "ok", f"the core {origin} with {core.openssl_name}{_kernel_tls()}")


def _kernel_tls() -> str:
    if not native.wants_kernel_tls():
        return ""
    there = Path("/proc/sys/net/ipv4/tcp_available_ulp")
    has_it = there.exists() and "tls" in there.read_text().split()
    return (
        "; kernel TLS where its ciphers fit" if has_it else "; this kernel has no TLS: modprobe tls"
    )


def _gpus() -> list[Finding]:
    cards = measured_cards()
    if not cards:
        return [Finding("gpu", "ok", "none: functions run on processors")]
    names = ", ".join(card.name for card in cards)
    if shutil.which("nvidia-smi") is None:
        return [
            Finding(
                "gpu",
                "problem",
                f"{names}, but there is no nvidia-smi",
                "install the tools of the NVIDIA driver",
            )
        ]
    done = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        timeout=30,
    )
    if done.returncode:
        said = _last_line(done.stdout + done.stderr)
        return [Finding("gpu", "problem", f"{names}: {said}", "mend or reinstall the driver")]
    return [Finding("gpu", "ok", f"{names}, driver {_last_line(done.stdout)}")]


def _memory() -> Iterator[Finding]:
    memory = psutil.virtual_memory()
    found = f"{size(memory.available)} free of {size(memory.total)}"
    if memory.available < _LITTLE_MEMORY:
        yield Finding("memory", "problem", found, "a worker with torch needs about 500 MB; free it")
    else:
        yield Finding("memory", "ok", found)


def _shared_memory() -> Iterator[Finding]:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return
    usage = shutil.disk_usage(folder)
    found = f"{size(usage.free)} free of {size(usage.total)}"
    if usage.total < _LITTLE_SHARED:
        advice = "in a container, start it with --shm-size=1g; DataLoader workers need it"
        yield Finding("shared memory", "problem", found, advice)
    else:
        yield Finding("shared memory", "ok", found)


def _limits() -> list[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{soft:,} open files" if soft != resource.RLIM_INFINITY else "no limit of open files"
    if 0 <= soft < _FEW_FILES:
        most = "more" if hard == resource.RLIM_INFINITY else f"up to {hard:,}"
        advice = f"ulimit -n {_FEW_FILES} ({most} is allowed): a pool needs several for each node"
        return [Finding("limits", "problem", found, advice)]
    return [Finding("limits", "ok", found)]


def _disk() -> list[Finding]:
    return [
        _folder("state folder", state_folder(), "SKYWARD_STATE"),
        _folder("cache folder", cache().parent, "SKYWARD_CACHE"),
        _folder("temporary folder", Path(tempfile.gettempdir()), "TMPDIR"),
    ]


def _folder(check: str, folder: Path, variable: str) -> Finding:
    existing = next(each for each in (folder, *folder.parents) if each.exists())
    elsewhere = f"make it writable, or name another with {variable}"
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        # Without the state folder no pool can be written down; without a place for files none runs.
        state: State = "problem" if variable == "SKYWARD_CACHE" else "broken"
        return Finding(check, state, f"{folder} cannot be written", elsewhere)
    free = shutil.disk_usage(existing).free
    found = f"{folder}, {size(free)} free"
    if free < _LITTLE_DISK:
        return Finding(check, "problem", found, f"free some space, or name another: {variable}")
    return Finding(check, "ok", found)


def provider(name: str) -> list[Finding]:
    """Ask a provider as the environment describes it."""
    if name == "ssh":
        return [_ssh()]
    try:
        made = find_provider(name)()
    except ImportError as problem:
        return [Finding(name, "problem", "its package cannot be imported", str(problem))]
    except TypeError:
        return [Finding(name, "ok", "it needs arguments, so pools of skyward.toml are checked")]
    except ConfigurationError as problem:
        return [Finding(name, "not set up", "see below", str(problem))]
    return [_answer(name, made)]


def _answer(check: str, provider: Provider) -> Finding:
    if not answers(provider):
        return Finding(check, "ok", "it has no question to ask")
    try:
        return Finding(check, "ok", asyncio.run(provider.ping()))
    except ConfigurationError as problem:
        return Finding(check, "not set up", "see below", str(problem))
    except SkywardError as problem:
        return Finding(check, "problem", "it does not answer as it should", str(problem))


def _ssh() -> Finding:
    """What logins would use; which hosts there are only a pool of the settings says."""
    try:
        openssh.check("SSH")
    except ConfigurationError as problem:
        return Finding("ssh", "not set up", openssh.why_not(), str(problem))
    why = openssh.why_not()
    carried = f"by asyncssh, since {why}" if why else f"by {openssh.program()}"
    folder = Path.home() / ".ssh"
    keys = [each.stem for each in sorted(folder.glob("id_*.pub"))]
    agent = os.environ.get("SSH_AUTH_SOCK")
    ways = [f"keys {', '.join(keys)}"] * bool(keys) + ["an ssh agent"] * bool(agent)
    if not ways:
        return Finding(
            "ssh",
            "not set up",
            f"no ssh agent, and no key in {folder}",
            "ssh-keygen makes a key, and ssh-copy-id HOST brings it to a host",
        )
    ways.append("hosts are checked with their pools")
    return Finding("ssh", "ok", f"{carried}; {'; '.join(ways)}")


def described_pools() -> list[str]:
    """The pools of the settings file; a file that cannot be read is one pool that cannot be."""
    try:
        settings = read_settings()
    except ConfigurationError:
        return ["?"]
    return [] if settings is None else sorted(settings.pools)


def described(name: str) -> list[Finding]:
    """A pool of the settings file: its arguments, and its provider's answer."""
    check = f"pool {name}"
    try:
        arguments = arguments_of(name)
    except ConfigurationError as problem:
        return [Finding(check, "problem", "its settings cannot be used", str(problem))]
    if "provider" not in arguments:
        return [Finding(check, "ok", "on this machine")]
    answer = _answer(check, arguments["provider"])
    # Whoever describes a pool means to use it.
    return [replace(answer, state="problem") if answer.state == "not set up" else answer]


def kept(name: str) -> list[Finding]:
    """A kept pool: whether the agent of each of its nodes answers."""
    check = f"kept {name}"
    try:
        with reach(name) as pool:
            for node in pool.nodes:
                with pool.service(node, "about") as service:
                    service.ask("facts")
            count = len(pool.nodes)
    except SkywardError as problem:
        advice = str(problem)
        if "`sky down" not in advice:
            advice += f"; `sky down {name}` removes it"
        return [Finding(check, "problem", "kept, but does not answer", advice)]
    return [Finding(check, "ok", f"kept, and answers: {count} node{'s' * (count != 1)}")]


def recorded() -> list[Finding]:
    """The pools that have machines, from the journal."""
    pools = Journal().pools()
    left = [pool for pool in pools if pool.client == "gone" and records.find(pool.id) is None]
    if not left:
        return [Finding("pools", "ok", f"{len(pools) or 'none'} on record, none left behind")]
    names = ", ".join(pool.name for pool in left)
    advice = f"`sky down` removes what was left behind ({names}); `sky ps` lists it"
    return [Finding("pools", "problem", f"{len(left)} left behind of {len(pools)}", advice)]
