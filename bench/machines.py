"""What other machines cost: starting pools on them, calls and bytes over SSH and over TLS."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from broadcast import broadcasts_over
from floors import RawLink, change, touch
from measure import Sample, interleave, p50, timed
from report import Row, absent, absolute, compared, run_suite
from slow_link import NoLinkError, slow_link
from ssh import Cat
from testbed import Hosts, NoTestbedError, containers, forgetful_host, ssh_hosts

import skyward as sky

QUIET = sky.Options(console=False)
IMAGE = sky.Image(pip=["numpy"])
MIB = 2**20
ROUND_TRIP = "no-op call to an SSH host"


@dataclass(frozen=True)
class Size:
    """How much to measure."""

    payload: int
    rounds: int
    calls: int
    starts: int
    firsts: int
    broadcast: int
    broadcasts: int
    distant: int


FULL = Size(
    payload=256 * MIB,
    rounds=9,
    calls=200,
    starts=5,
    firsts=3,
    broadcast=256 * 10**6,
    broadcasts=3,
    distant=128 * 10**6,
)
QUICK = Size(
    payload=64 * MIB,
    rounds=2,
    calls=20,
    starts=1,
    firsts=1,
    broadcast=16 * 10**6,
    broadcasts=1,
    distant=16 * 10**6,
)


@sky.function
def read_pages(floats: Any) -> float:
    """Read one value of every page, so that the pages really have to be there."""
    return float(floats[::1024].sum())


def containers_start(size: Size) -> Sequence[Row]:
    """From nothing to two nodes that take calls, in containers whose Python is ready."""
    what = "container pool of 2 nodes, image there: until ready"
    try:
        with containers() as provider:
            starts = started(provider, sky.Image(), size.starts)
    except NoTestbedError as problem:
        return [absent(what, "", str(problem))]
    return [absolute(what, starts, "< 5 s", 5)]


def hosts_start(size: Size) -> Sequence[Row]:
    """The same on SSH hosts that have built the environment before."""
    what = "SSH pool of 2 hosts, environment there: until ready"
    try:
        with ssh_hosts() as hosts:
            starts = started(hosts.provider(), IMAGE, size.starts)
    except NoTestbedError as problem:
        return [absent(what, "", str(problem))]
    return [absolute(what, starts, "< 3 s", 3)]


def first_and_second(size: Size) -> Sequence[Row]:
    """A host on which uv, the packages and skyward have to be installed, and the same host again.

    Before each first start the folder with all of that is deleted, what was downloaded included.
    """
    what = "SSH host, image with numpy: first start"
    try:
        with forgetful_host() as (provider, cache):

            def first() -> float:
                shutil.rmtree(cache, ignore_errors=True)
                return start(provider, IMAGE, nodes=1)

            # One after the other: what a second start finds, the first has left.
            pairs = [(first(), start(provider, IMAGE, nodes=1)) for _ in range(size.firsts)]
    except NoTestbedError as problem:
        return [absent(what, "the second", str(problem))]
    firsts, seconds = (Sample(values) for values in zip(*pairs, strict=True))
    return [compared(what, firsts, "the second with the same image", seconds, ">= 5x")]


def start(provider: sky.Container | sky.SSH, image: sky.Image, nodes: int) -> float:
    """Seconds until a pool is ready."""
    compute = sky.Compute(provider, nodes=nodes, image=image, options=QUIET)
    taken = timed(compute.__enter__)
    compute.__exit__(None, None, None)
    return taken


def started(provider: sky.Container | sky.SSH, image: sky.Image, times: int) -> Sample:
    """Seconds until a pool is ready; the first time is not counted."""
    contenders = {"start": lambda: start(provider, image, nodes=2)}
    return interleave(contenders, rounds=times)["start"]


def calls_and_bytes(size: Size) -> Sequence[Row]:
    """A pool through SSH and one straight to the same host, in turns with the plain."""
    label = f"{size.payload // MIB} MiB to an SSH host"
    tunnelled = f"{label}, through SSH"
    try:
        with ExitStack() as stack:
            hosts = stack.enter_context(ssh_hosts())
            through = opened(stack, hosts.provider(direct=False))
            straight = opened(stack, hosts.provider(direct=True))
            link = stack.enter_context(RawLink(tls=True))
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
            channel = stack.enter_context(Cat(hosts, folder / "control"))
            calls = interleave(
                {
                    "tunnel": lambda: p50(lambda: nothing() >> through, size.calls),
                    "straight": lambda: p50(lambda: nothing() >> straight, size.calls),
                    "channel": lambda: p50(channel.round_trip, size.calls),
                },
                rounds=size.rounds,
            )
            floats = np.random.default_rng(0).random(size.payload // 4, np.float32)
            floats[::1024] = 1
            seconds = interleave(
                {
                    "tunnel": sending(floats, through),
                    "straight": sending(floats, straight),
                    "scp": copying(floats, folder, hosts),
                    "tls": plainly(floats, link),
                },
                rounds=size.rounds,
            )
    except NoTestbedError as problem:
        what = (
            *(f"{ROUND_TRIP}, {way}" for way in ("through SSH", "direct TLS")),
            tunnelled,
            f"{label}, direct TLS",
        )
        return [absent(each, "OpenSSH", str(problem)) for each in what]
    rate = {name: sample.per(size.payload, "B/s") for name, sample in seconds.items()}
    return [
        compared(
            f"{ROUND_TRIP}, through SSH",
            calls["tunnel"],
            "a byte there and back through `ssh`",
            calls["channel"],
            "<= 2.5x",
        ),
        compared(
            f"{ROUND_TRIP}, direct TLS",
            calls["straight"],
            "a byte there and back through `ssh`",
            calls["channel"],
            "<= 2x",
        ),
        compared(
            tunnelled,
            rate["tunnel"],
            "scp",
            rate["scp"],
            ">= 0.8x",
        ),
        compared(f"{label}, direct TLS", rate["straight"], "scp", rate["scp"], ">= 3x"),
        compared(
            f"{label}, direct TLS",
            rate["straight"],
            "plain TLS sockets, into a new buffer",
            rate["tls"],
            ">= 0.8x",
        ),
    ]


def opened(stack: ExitStack, provider: sky.SSH) -> sky.Compute:
    return stack.enter_context(sky.Compute(provider, image=IMAGE, options=QUIET))


@sky.function
def nothing() -> None:
    return None


def sending(floats: Any, compute: sky.Compute) -> Callable[[], float]:
    """Times a call with the array as argument, new on every page."""

    def send() -> float:
        change(floats)
        start = time.perf_counter()
        seen = read_pages(floats) >> compute
        taken = time.perf_counter() - start
        assert seen == touch(floats)
        return taken

    return send


def copying(floats: Any, folder: Path, hosts: Hosts) -> Callable[[], float]:
    """Times `scp` of the same bytes, from memory to memory."""
    source, target = folder / "source", folder / "target"
    command = ["scp", "-q", "-o", f"ControlPath={folder / 'control'}", *hosts.options, str(source)]
    command.append(f"{hosts.user}@{hosts.names[0]}:{target}")

    def copy() -> float:
        change(floats)
        source.write_bytes(memoryview(floats).cast("B"))
        target.unlink(missing_ok=True)
        return timed(lambda: subprocess.run(command, check=True))

    return copy


def plainly(floats: Any, link: RawLink) -> Callable[[], float]:
    def send() -> float:
        change(floats)
        return timed(lambda: link.exchange([floats], reused=False))

    return send


def broadcasts(size: Size) -> Sequence[Row]:
    """Four nodes behind a link of 100 Mbit/s and 2 ms, which carries the argument once."""
    what = f"{size.broadcast // 10**6} MB to 4 nodes through a client link of 100 Mbit/s"
    once = "a plain socket, once"
    try:
        with slow_link(0.002, mbit=100) as ends:
            seconds = broadcasts_over(ends, size.broadcast, size.broadcasts)
    except NoLinkError as problem:
        return [absent(what, once, str(problem))]
    return [
        compared(what, seconds["four"], once, seconds["socket"], "<= 1.25x"),
        compared(what, seconds["four"], "a call on one of them", seconds["one"], "<= 1.25x"),
    ]


def distant(size: Size) -> Sequence[Row]:
    """One node at the end of a link of 1 Gbit/s and 100 ms, where one connection is too few."""
    what = f"{size.distant // 10**6} MB to a node 100 ms away, over 1 Gbit/s"
    plain = "a plain socket"
    try:
        with slow_link(0.1, mbit=1000) as ends:
            seconds = broadcasts_over(ends, size.distant, size.broadcasts)
    except NoLinkError as problem:
        return [absent(what, plain, str(problem))]
    rate = {name: sample.per(size.distant, "B/s") for name, sample in seconds.items()}
    return [compared(what, rate["one"], plain, rate["socket"])]


if __name__ == "__main__":
    run_suite(
        "other machines",
        [
            containers_start,
            hosts_start,
            first_and_second,
            calls_and_bytes,
            broadcasts,
            distant,
        ],
        full=FULL,
        quick=QUICK,
    )
