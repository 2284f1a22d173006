"""`python -m tests.soak`: pools on real machines with faults for a long time; nothing may grow.

On each provider that is there, a pool and a kept pool stay for the whole time. Round after round, a
seed chooses what they do at once, and what is killed, stopped or cut meanwhile. After each round it
counts what this client, the agents and the executors have. In the end, the last third of the counts
is compared with the first that came after warming up; then all ends, and nothing may be left.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import faulthandler
import gc
import os
import pickle
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import uuid
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import psutil
import pytest
import torch

import skyward as sky
from skyward.nodes.node import STEADY_SECONDS
from skyward.nodes.records import Journal
from skyward.providers import Provider

from . import memory
from .conftest import WORKER, wait_until
from .providers import kube, podman, ssh_hosts
from .providers.leftovers import podman_says, sky_says

MARK = "SKYWARD_SOAK"
RUN = uuid.uuid4().hex[:8]
"""In the environment of executors and of clients, in whatever container they are."""
MIB = 1 << 20
LONG = 240.0
"""How long something may take on a busy machine; then it hangs."""
LONGEST = 900.0
"""How long it may take until all nodes work again, or all pools are closed."""
WARM_ROUNDS = 5
"""Of each part, before counts are kept: most kinds of work have been done by then."""
OPTIONS = sky.Options(console=False, orphan_timeout=30.0)
ALLOWED = {
    "descriptors": 6,
    "threads": 4,
    "MiB": 64,
    "shared MiB": 16,
    "disk MiB": 16,
    "files": 24,
    "processes": 2,
}
"""How much more is not growth: what was never used in the first third and then is kept."""
LOSSES = (
    *(sky.NodeLostError, sky.WorkerDiedError, sky.BroadcastError, sky.errors.DeviceError),
    # A device is asked for whose node is being started again.
    sky.errors.ConfigurationError,
)
"""What work may end with when processes are killed; without that, everything has to succeed."""
CLIENT = """
import sys, time
import numpy as np
import skyward as sky

@sky.function(retries=20)
def total(values):
    return int(values.sum())

with sky.attach(sys.argv[1]) as compute:
    print("attached", flush=True)
    end = time.monotonic() + float(sys.argv[2])
    while time.monotonic() < end:
        assert total(np.ones(100_000, np.uint8)) >> compute == 100_000
        compute.keep("values", np.ones(100_000))
"""
OWNER = """
import pickle, sys, time
import skyward as sky

options = sky.Options(console=False, orphan_timeout=5.0)
provider, image = pickle.load(sys.stdin.buffer)
with sky.Compute(provider, image=image, options=options):
    print("up", flush=True)
    time.sleep(600)
"""


@sky.function(retries=50)
def returned(value: Any, seconds: float) -> Any:
    import time

    time.sleep(seconds)
    return value


@sky.function
def counted(count: int) -> Iterator[bytes]:
    for number in range(count):
        yield number.to_bytes(4, "big") * 1000


@sky.function
def summed(items: Iterator[Any]) -> int:
    return sum(int(item.sum()) for item in items)


@sky.function
def everything() -> int:
    """Has an executor import and allocate what others will: one that is new is as large then."""
    import gc

    import numpy
    import torch

    gc.collect()
    return int((torch.ones(256, 256) @ torch.ones(256, 256)).sum()) + len(numpy.ones(MIB))


@sky.function
def loaded(store: sky.ModelStore, name: str) -> Any:
    return store.load_model(name)


class Model(torch.nn.Sequential):
    """Half a megabyte of parameters."""

    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(256, 256), torch.nn.Linear(256, 256))


# The providers.


Left = Callable[[], list[str]]
"""What a provider has besides processes and folders of this machine."""


@contextlib.contextmanager
def on_local() -> Iterator[tuple[Provider, Left]]:
    yield sky.Local(transport="tcp"), list


@contextlib.contextmanager
def on_containers() -> Iterator[tuple[Provider, Left]]:
    with podman.running():
        yield podman.provider(), lambda: podman_says("ps", "-aq").split()


@contextlib.contextmanager
def on_ssh() -> Iterator[tuple[Provider, Left]]:
    with ssh_hosts.running() as hosts:
        yield hosts.provider(), list


@contextlib.contextmanager
def on_pods() -> Iterator[tuple[Provider, Left]]:
    kube.skip_if_absent()
    try:
        namespace = kube.Namespace(kube.start())
        try:
            yield namespace.provider(), lambda: sorted(namespace.objects())
        finally:
            namespace.remove()
    finally:
        kube.stop()


PROVIDERS = {"local": on_local, "container": on_containers, "ssh": on_ssh, "kubernetes": on_pods}


@dataclass
class Part:
    """A provider, and what it has for the whole time: a pool of two nodes and a kept one."""

    name: str
    provider: Provider
    left: Left
    pool: sky.Compute
    rounds: int = 0

    @property
    def kept(self) -> str:
        """The name of the kept pool."""
        return f"kept-{self.name}-{RUN}"


def image(name: str, kind: str) -> sky.Image:
    """Marks the executors of a pool; has what a host lacks on which only Skyward is installed."""
    here = [f"{each}=={metadata.version(each).partition('+')[0]}" for each in ("torch", "numpy")]
    pip = here if name == "ssh" else []
    return sky.Image(pip=pip, env={MARK: mark(name, kind)})


def mark(*words: str) -> str:
    return " ".join((RUN, *words))


@contextlib.contextmanager
def opened(name: str) -> Iterator[Part]:
    """A provider that is there, with its pools."""
    with PROVIDERS[name]() as (provider, left):
        with sky.Compute(provider, nodes=2, image=image(name, "pool"), options=OPTIONS) as pool:
            part = Part(name, provider, left, pool)
            more = {"name": part.kept, "keep": True, "image": image(name, "kept")}
            sky.Compute(provider, **more, options=OPTIONS).start().close()
            try:
                yield part
            finally:
                # One whose machines are gone has been told of by then.
                with contextlib.suppress(sky.errors.PoolError):
                    sky.attach(part.kept).down(force=True)
        wait_until(lambda: not left(), what=f"the end of what {name} has: {left()}")


# What a part does. Each gets a seeded source of chance, and raises if something is not right.


def calls(part: Part, chance: random.Random) -> None:
    values = [np.frombuffer(chance.randbytes(chance.randrange(300_000)), np.uint8)] * 20
    futures = [returned(each, chance.random() / 50) > part.pool for each in values]
    for value, future in zip(values, futures, strict=True):
        assert np.array_equal(future.result(LONG), value)


def broadcasts(part: Part, chance: random.Random) -> None:
    value = np.frombuffer(chance.randbytes(2 * MIB), np.uint8)
    assert all(np.array_equal(each, value) for each in returned(value, 0.1) @ part.pool)


def streams(part: Part, chance: random.Random) -> None:
    count = chance.randrange(500)
    assert [item[:4] for item in counted(count) >> part.pool] == [
        number.to_bytes(4, "big") for number in range(count)
    ]
    assert summed(np.ones(size) for size in range(count)) >> part.pool == sum(range(count))


def cancels(part: Part, chance: random.Random) -> None:
    futures = [returned(None, 60.0) > part.pool for _ in range(3)]
    time.sleep(chance.random())
    for future in futures:
        future.cancel()


def devices(part: Part, chance: random.Random) -> None:
    here = torch.rand(128, 128, generator=torch.Generator().manual_seed(chance.randrange(99)))
    there = here.to(part.pool.device("cpu"))
    for _ in range(chance.randrange(200)):
        here, there = (here @ here).sin(), (there @ there).sin()
    assert torch.allclose(here, there.cpu(), atol=1e-3)


def stores(part: Part, chance: random.Random) -> None:
    store, name = sky.ModelStore(os.environ["SKYWARD_STATE"] + "-models"), part.name
    model = Model()
    store.save_model(model, name)
    seen = {"local": True, "ssh": True}.get(part.name, False)
    found = loaded(store, name) >> part.pool if seen else store.load_model(name)
    assert torch.equal(found["0.weight"], model.state_dict()["0.weight"])
    store.delete(name)
    store.gc(older_than=0)


def keeps(part: Part, chance: random.Random) -> None:
    values = np.frombuffer(chance.randbytes(chance.randrange(MIB)), np.uint8)
    with sky.attach(part.kept) as compute:
        compute.keep("own values", values)
        assert np.array_equal(returned(values, 0.1) >> compute, values)
        assert np.array_equal(compute.kept("own values"), values)


def clients(part: Part, chance: random.Random) -> None:
    """Another process uses the kept pool, and is killed or ends by itself."""
    seconds, killed = chance.random() * 3, chance.random() < 0.7
    with program(CLIENT, part.kept, str(seconds)) as process:
        if killed:
            time.sleep(chance.random() * 4)
        else:
            assert process.wait(LONG) == 0


def owners(part: Part, chance: random.Random) -> None:
    """Another process has a pool of its own, and is killed while it starts or afterwards."""
    given = pickle.dumps((part.provider, image(part.name, "other")))
    with program(OWNER, stdin=given) as other:
        if chance.random() < 0.7:
            assert other.stdout.readline() == b"up\n"
        time.sleep(chance.random() * 2)
    sky_says("down", "--yes")


def pools(part: Part, chance: random.Random) -> None:
    """A pool of a moment."""
    with sky.Compute(part.provider, image=image(part.name, "other"), options=OPTIONS) as compute:
        assert returned(7, chance.random()) >> compute == 7


@contextlib.contextmanager
def program(code: str, *words: str, stdin: bytes = b"") -> Iterator[subprocess.Popen[bytes]]:
    """A process with another client, which is killed in the end."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        process.stdin.write(stdin)
        process.stdin.close()
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


WORK = (calls, broadcasts, streams, cancels, devices, stores, keeps, clients, owners, pools)


# Faults. Each returns whether there was something for it.


def marked() -> dict[psutil.Process, str]:
    """This run's processes that have its mark in their environment, in whatever container."""
    found = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            said = process.environ().get(MARK, "")
            if said.startswith(RUN) and process.status() != psutil.STATUS_ZOMBIE:
                found[process] = said
    return found


def agents_and_executors(*words: str) -> tuple[list[psutil.Process], list[psutil.Process]]:
    """Those of a pool, or of all; the oldest first."""
    agents, executors = {}, {}
    for process, said in marked().items():
        with contextlib.suppress(psutil.Error, OSError):
            if said.startswith(mark(*words)) and is_worker(process):
                parent = process.parent()
                if parent is not None and is_worker(parent):
                    agents[parent] = executors[process] = process.create_time()
    for agent in list(agents):
        with contextlib.suppress(psutil.Error, OSError):
            for process in filter(is_worker, agent.children()):
                executors[process] = process.create_time()
    return sorted(agents, key=lambda each: each.create_time()), sorted(executors, key=executors.get)


def is_worker(process: psutil.Process) -> bool:
    return any(WORKER.search(part) for part in process.cmdline())


def executor_killed(part: Part, chance: random.Random) -> bool:
    _, executors = agents_and_executors(part.name, chance.choice(("pool", "kept")))
    if executors:
        chance.choice(executors).kill()
    return bool(executors)


def agent_killed(part: Part, chance: random.Random) -> bool:
    """The younger one: the other lives as long as the pool, and would show what grows.

    A node that is lost again before it has served for long is not started for ever.
    """
    agents, _ = agents_and_executors(part.name, "pool")
    may = len(agents) > 1 and time.time() - agents[-1].create_time() > STEADY_SECONDS + 10
    if may:
        agents[-1].kill()
    return may


def stopped(part: Part, chance: random.Random) -> bool:
    """For a while."""
    agents, executors = agents_and_executors(part.name, chance.choice(("pool", "kept")))
    if agents:
        process = chance.choice([*agents, *executors])
        process.suspend()
        try:
            time.sleep(chance.random() * 4)
        finally:
            process.resume()
    return bool(agents)


def cut(part: Part, chance: random.Random) -> bool:
    """Connections of this process, or a process that carries some for it, end at once."""
    me = psutil.Process()
    for connection in me.net_connections("tcp"):
        if connection.status == psutil.CONN_ESTABLISHED and chance.random() < 0.5:
            with contextlib.suppress(OSError):
                with socket.socket(fileno=os.dup(connection.fd)) as end:
                    # Another may have the number by now.
                    if end.getpeername()[:2] == tuple(connection.raddr):
                        end.shutdown(socket.SHUT_RDWR)
    for child in me.children():
        with contextlib.suppress(psutil.Error):
            words = child.cmdline()
            carries = words[:1] == ["ssh"] or any(word.endswith("streams.py") for word in words)
            if carries and chance.random() < 0.5:
                child.kill()
    return True


FAULTS = (cut, cut, cut, stopped, stopped, executor_killed, executor_killed, agent_killed)
KILLS = (executor_killed, agent_killed)


# What is counted.


def counts(folder: Path) -> dict[str, float]:
    """What this client, the agents and the executors have, and what is in folders of theirs."""
    gc.collect()
    agents, executors = agents_and_executors()
    found: dict[str, float] = {"processes": len({*marked(), *agents, *executors})}
    shared: dict[tuple[int, int], int] = {}
    roles = {"client": [psutil.Process()], "agents": agents, "executors": executors}
    for role, processes in roles.items():
        for kind in ("descriptors", "threads", "MiB"):
            found[f"{role} {kind}"] = 0
        for process in processes:
            with contextlib.suppress(psutil.Error, OSError):
                found[f"{role} descriptors"] += process.num_fds()
                found[f"{role} threads"] += process.num_threads()
                found[f"{role} MiB"] += memory.in_use(process) / MIB
                for link in Path(f"/proc/{process.pid}/fd").iterdir():
                    with contextlib.suppress(OSError):
                        if os.readlink(link).startswith(("/memfd:", "/dev/shm/")):
                            about = link.stat()
                            shared[about.st_dev, about.st_ino] = about.st_blocks * 512
    found["shared MiB"] = sum(shared.values()) / MIB
    files = list(files_of(folder, [*agents, *executors]))
    found["files"], found["disk MiB"] = len(files), sum(files) / MIB
    return found


def files_of(folder: Path, processes: list[psutil.Process]) -> Iterator[int]:
    """The bytes of each file that belongs to this run, here and in containers."""
    roots = {(folder.stat().st_dev, folder.stat().st_ino): folder}
    for pool in Journal().pools():
        for path in Path("/tmp").glob(f"sky?{pool.id}?*"):
            roots[path.stat().st_dev, path.stat().st_ino] = path
    here = Path("/tmp").stat()
    for process in processes:
        for name in ("tmp", "var/tmp", "dev/shm"):
            with contextlib.suppress(OSError):
                path = Path(f"/proc/{process.pid}/root/{name}")
                about = path.stat()
                # A container has folders of its own, which all its processes share.
                if Path(f"/proc/{process.pid}/root/tmp").stat() != here:
                    roots[about.st_dev, about.st_ino] = path
    for root in roots.values():
        for within, _, names in os.walk(root):
            for name in names:
                if name.endswith(".gone"):
                    # A deleted version's mark, which a store keeps for a day.
                    continue
                with contextlib.suppress(OSError):
                    yield os.lstat(os.path.join(within, name)).st_blocks * 512


def grown(before: list[dict[str, float]], after: list[dict[str, float]]) -> list[str]:
    """What is more than it ever was before, in most of the counts; in words."""
    found = []
    for name in before[0]:
        most = max(each[name] for each in before)
        now = statistics.median(each[name] for each in after)
        allowed = ALLOWED[name.partition(" ")[2] if name not in ALLOWED else name]
        # A client that was killed a moment ago has an executor for some seconds yet.
        if now > most + max(allowed, most / 10):
            found.append(f"{name} grew from at most {most:.0f} to {now:.0f}")
    return found


# The run.


def give_up(what: str, problems: list[str]) -> threading.Timer:
    """A timer that ends this process: the main thread waits for something that may never come."""

    def end() -> None:
        faulthandler.dump_traceback()
        print("\n".join([*problems, f"{what}: no end after {LONGEST:g} s"]), flush=True)
        end_now(1)

    timer = threading.Timer(LONGEST, end)
    timer.daemon = True
    return timer


def end_now(status: int) -> NoReturn:
    """End this process and those of its pools, whatever its threads wait for."""
    agents, executors = agents_and_executors()
    children = psutil.Process().children(recursive=True)
    for process in {*agents, *executors, *marked(), *children} - {psutil.Process()}:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    os._exit(status)


@dataclass
class Soak:
    """The parts, and what has happened so far."""

    seed: int
    folder: Path
    parts: list[Part] = field(default_factory=list)
    threads: list[threading.Thread] = field(default_factory=list)
    """Those of the last round."""
    done: collections.Counter[str] = field(default_factory=collections.Counter)
    faults: collections.Counter[str] = field(default_factory=collections.Counter)
    lost: int = 0
    problems: list[str] = field(default_factory=list)

    def round(self, part: Part) -> None:
        """Do several things at once with a part, and faults meanwhile; ends when it is whole."""
        chance = random.Random(f"{self.seed} {part.name} {part.rounds}")
        work = chance.sample(WORK, chance.randrange(2, 5))
        faults = [chance.choice(FAULTS) for _ in range(chance.randrange(4))]
        chances = [random.Random(chance.random()) for _ in (*work, *faults)]
        kills = bool(set(faults) & set(KILLS))
        title = f"--seed {self.seed}, {part.name}, round {part.rounds}: "
        title += ", ".join(each.__name__ for each in (*work, *faults))
        self.threads = [
            threading.Thread(
                target=self._do, args=(each, part, chances.pop(), kills, title), daemon=True
            )
            for each in work
        ]
        for thread in self.threads:
            thread.start()
        for fault in faults:
            time.sleep(chance.random())
            with contextlib.suppress(psutil.NoSuchProcess):
                self.faults[fault.__name__.replace("_", " ")] += fault(part, chances.pop())
        for thread in self.threads:
            thread.join(LONG)
            if thread.is_alive():
                faulthandler.dump_traceback()
                raise AssertionError(f"{title}: does not end")
        self.until_whole(part, title)
        part.rounds += 1

    def _do(self, work: Any, part: Part, chance: random.Random, kills: bool, title: str) -> None:
        try:
            work(part, chance)
            self.done[work.__name__] += 1
        except BaseException as problem:
            if kills and isinstance(problem, LOSSES):
                self.lost += 1
                return
            self.problems.append(f"{title}: {work.__name__}: {problem!r}")
            print(f"{title}: {work.__name__}:\n{traceback.format_exc()}", flush=True)

    def until_whole(self, part: Part, title: str) -> None:
        """Until all nodes work, and have what executors get when they are used."""

        problem: BaseException | None = None

        def whole() -> bool:
            nonlocal problem
            try:
                there = torch.ones(4, device=part.pool.device("cpu"))
                assert (there + there).cpu().sum() == 8
                with sky.attach(part.kept) as compute:
                    return [len(everything() @ each) for each in (part.pool, compute)] == [2, 1]
            except LOSSES as lost:
                problem = lost
                return False

        timer = give_up(f"{title}: waiting until all nodes work", self.problems)
        timer.start()
        try:
            wait_until(whole, what=f"{title}: that all of its nodes work")
        except pytest.fail.Exception as late:
            raise AssertionError(str(late)) from problem
        finally:
            timer.cancel()

    def line(self, found: dict[str, float]) -> str:
        """What was done, and what is there."""
        each = ", ".join(f"{part.name} {part.rounds}" for part in self.parts)
        done = ", ".join(f"{count} {name}" for name, count in sorted(self.done.items()))
        faults = ", ".join(f"{count} {name}" for name, count in sorted(self.faults.items()))
        there = ", ".join(f"{count:.0f} {name}" for name, count in found.items())
        return f"rounds: {each}; {done}; {self.lost} lost; faults: {faults}; now: {there}"


def run(soak: Soak, names: list[str], minutes: float) -> list[str]:
    """Run for so long; gives what went wrong or grew."""
    samples: list[dict[str, float]] = []
    closing = give_up("closing all pools", soak.problems)
    with contextlib.ExitStack() as stack:
        stack.callback(closing.cancel)
        for name in names:
            try:
                soak.parts.append(stack.enter_context(opened(name)))
                # A host without a compiled core for devices makes one: that is no round.
                soak.until_whole(soak.parts[-1], f"start on {name}")
            except pytest.skip.Exception as missing:
                print(f"{name} is left out: {missing.msg}", flush=True)
        assert soak.parts, "no provider is there"
        stack.callback(closing.start)
        chance = random.Random(soak.seed)
        began = told = time.monotonic()
        while time.monotonic() - began < 60 * minutes:
            try:
                soak.round(chance.choice(soak.parts))
            except Exception as problem:
                soak.problems.append(str(problem))
                traceback.print_exc()
                break
            found = counts(soak.folder)
            if min(part.rounds for part in soak.parts) >= WARM_ROUNDS:
                samples.append(found)
            if time.monotonic() - told >= 60:
                told = time.monotonic()
                print(f"minute {(told - began) / 60:.0f}: {soak.line(found)}", flush=True)
        print(f"end: {soak.line(counts(soak.folder))}", flush=True)
    third = len(samples) // 3
    if third < 2:
        return [*soak.problems, f"only {len(samples)} rounds after warming up: give it more time"]
    return [*soak.problems, *grown(samples[:third], samples[-third:])]


def remains(folder: Path) -> list[str]:
    """What is there after the end of all pools."""
    found = [f"process {' '.join(each.cmdline())}" for each in marked() if each.pid != os.getpid()]
    found += [f"pool {pool.id} in the journal" for pool in Journal().pools()]
    return found + [str(path) for path in folder.rglob("sky-*")]


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, help="what another run printed")
    parser.add_argument("--on", help=f"providers, with commas between; of {', '.join(PROVIDERS)}")
    told = parser.parse_args()
    names = (told.on or ",".join(PROVIDERS)).split(",")
    seed = random.randrange(10_000) if told.seed is None else told.seed
    print(f"{told.minutes:g} min on {', '.join(names)}, --seed {seed}", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="skys-", dir="/tmp"))
    for name in ("state", "run"):
        (folder / name).mkdir(mode=0o700)
    os.environ.update(
        {
            MARK: RUN,
            "SKYWARD_STATE": str(folder / "state"),
            "XDG_RUNTIME_DIR": str(folder / "run"),
        }
    )
    faulthandler.register(signal.SIGUSR1)
    # Each look whether all is well reads a value of a device.
    warnings.filterwarnings("ignore", "this loop waits", UserWarning)
    soak = Soak(seed, folder)
    problems = run(soak, names, told.minutes)
    with contextlib.suppress(pytest.fail.Exception):
        wait_until(lambda: not remains(folder), what="the end of everything")
    problems += [f"left behind: {each}" for each in remains(folder)]
    shutil.rmtree(folder, ignore_errors=True)
    print("\n".join(problems) or "all flat, nothing left", flush=True)
    status = 1 if problems else 0
    if any(each.is_alive() for each in soak.threads):
        end_now(status)
    return status


if __name__ == "__main__":
    sys.exit(main())
