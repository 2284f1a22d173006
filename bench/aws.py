"""What a launch on AWS costs, in a simulated account: requests, and many nodes against one.

    python bench/aws.py [--quick]

The account is a gateway before the testbed's EC2, whose instances are containers on this machine.
They boot at once, so the gateway calls them pending for 30 s, which EC2 takes at least to boot one.
Starting the containers, and the agents in them, is work for the processors of this machine alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measure import Sample
from report import Row, absent, absolute, compared, run_suite
from testbed import NoTestbedError

import skyward as sky
from skyward.providers import Order, Request
from skyward.spec import Image

HERE = Path(__file__).parent
MANY = 16
QUIET = sky.Options(console=False)
REQUEST = Request(None, None, None, Image(), (), most_nodes=MANY)


@dataclass(frozen=True)
class Size:
    """How much to measure."""

    boot_seconds: float
    rounds: int
    listings: int


FULL = Size(boot_seconds=30.0, rounds=3, listings=7)
QUICK = Size(boot_seconds=5.0, rounds=1, listings=2)


@contextlib.contextmanager
def account() -> Iterator[Any]:
    """A simulated account, to which the environment leads; its gateway counts the requests."""
    if str(HERE.parent) not in sys.path:
        sys.path.append(str(HERE.parent))
    tests = importlib.import_module("tests.providers.ec2")
    gateways = importlib.import_module("tests.providers.aws_gateway")
    before = dict(os.environ)
    try:
        tests.skip_if_absent()
        upstream = tests.start()
    except BaseException as problem:
        # What skips a test is an exception that means to end the process.
        if type(problem).__name__ != "Skipped":
            raise
        raise NoTestbedError(str(problem)) from None
    gateway = gateways.Gateway(upstream)
    try:
        with tempfile.TemporaryDirectory() as folder:
            os.environ.update(tests.variables(gateway, Path(folder)))
            os.environ["SKYWARD_STATE"] = os.environ["SKYWARD_CACHE"] = folder
            yield gateway
    finally:
        os.environ.clear()
        os.environ.update(before)
        gateway.close()
        tests.stop()


def launches(size: Size) -> Sequence[Row]:
    """Requests for many nodes, and the time of many against the time of one."""
    what = f"{MANY} instances that boot in {size.boot_seconds:g} s"
    try:
        with account() as gateway:
            provider = sky.AWS(python=sys.executable)
            provider.offers(REQUEST)
            made: dict[int, list[float]] = {1: [], MANY: []}
            ready: dict[int, list[float]] = {1: [], MANY: []}
            requests = []
            for _ in range(size.rounds):
                for nodes in (1, MANY):
                    gateway.reset()
                    gateway.slow_boot(size.boot_seconds)
                    seconds, calls = asyncio.run(created(provider, nodes, gateway))
                    made[nodes].append(seconds)
                    if nodes == MANY:
                        requests.append(float(calls))
                    ready[nodes].append(started(provider, nodes))
            assert not gateway.leftovers()
    except NoTestbedError as problem:
        return [absent(what, "", str(problem))]
    one, many = (Sample(tuple(made[nodes])) for nodes in (1, MANY))
    one_ready, many_ready = (Sample(tuple(ready[nodes])) for nodes in (1, MANY))
    return [
        absolute(f"requests to launch {MANY}", Sample(tuple(requests), " requests"), "<= 20", 20),
        compared(f"{what}: until logged in", many, "one instance", one, "<= 1.3x"),
        compared(f"{what}: until the pool is ready", many_ready, "one node", one_ready, "<= 1.3x"),
    ]


async def created(provider: sky.AWS, nodes: int, gateway: Any) -> tuple[float, int]:
    """How long it takes to make so many machines, and how many requests."""
    pool = uuid.uuid4().hex[:12]
    began = time.monotonic()
    allocation = provider.allocate(pool)
    allocation.expect(range(nodes))
    orders = [Order(pool, node, REQUEST) for node in range(nodes)]
    machines = await asyncio.gather(*map(allocation.get, orders))
    seconds = time.monotonic() - began
    calls = gateway.counted().total()
    await asyncio.gather(*(each.destroy() for each in machines))
    await allocation.sweep()
    await allocation.close()
    return seconds, calls


def started(provider: sky.AWS, nodes: int) -> float:
    """How long it takes until a pool of so many nodes is ready."""
    began = time.monotonic()
    with sky.Compute(provider, nodes=nodes, options=QUIET):
        return time.monotonic() - began


def listing(size: Size) -> Sequence[Row]:
    """The command that lists what is sold, with the catalogue kept from the first time."""
    what = "`sky offers L4`, the second time"
    command = [sys.executable, "-m", "skyward", "offers", "L4", "--json"]
    try:
        with account() as gateway:
            subprocess.run(command, check=True, capture_output=True)
            gateway.reset()
            seconds = []
            for _ in range(size.listings):
                began = time.monotonic()
                subprocess.run(command, check=True, capture_output=True)
                seconds.append(time.monotonic() - began)
            asked = gateway.counted().total()
    except NoTestbedError as problem:
        return [absent(what, "", str(problem))]
    return [absolute(f"{what} ({asked} requests)", Sample(tuple(seconds)), "< 1 s", 1)]


if __name__ == "__main__":
    run_suite("aws", [launches, listing], full=FULL, quick=QUICK)
