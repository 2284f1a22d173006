"""A client in one network namespace whose packets to and from the other vanish for a while.

Run as a script in the near namespace, with what to do as JSON; prints what came of it as JSON. With
several providers it does so on as many pools at the same time, and prints a list.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil

import skyward as sky

LATE_SECONDS = 20.0
"""How much longer a network stays cut until a pool has noticed it."""


@sky.function
def tallied(file: str, seconds: float) -> int:
    with open(file, "a") as lines:
        lines.write(f"{os.getpid()}\n")
    time.sleep(seconds)
    return 7


@sky.function
def counting(count: int) -> Iterator[int]:
    for number in range(count):
        time.sleep(0.02)
        yield number


@sky.function
def summed(numbers: Iterator[int]) -> int:
    return sum(numbers)


@sky.function
def checksum(data: bytes, seconds: float = 0.0) -> int:
    time.sleep(seconds)
    return zlib.crc32(data)


@sky.function
def repeated(block: bytes, count: int) -> bytes:
    return block * count


@sky.function
def processes() -> tuple[int, int]:
    return os.getpid(), os.getppid()


def slowly(count: int) -> Iterator[int]:
    for number in range(count):
        time.sleep(0.02)
        yield number


class Network:
    """What joins the two namespaces."""

    def __init__(self, namespaces: list[str], users: int) -> None:
        self._namespaces = namespaces
        self._all = threading.Barrier(users)

    @contextlib.contextmanager
    def cut(self) -> Iterator[None]:
        """Packets leave, and do not arrive; nobody is told. Everybody who uses it cuts at once."""
        if self._all.wait() == 0:
            self._rules("-I")
        self._all.wait()
        try:
            yield
        finally:
            if self._all.wait() == 0:
                self._rules("-D")
            self._all.wait()

    def _rules(self, change: str) -> None:
        for name in self._namespaces:
            rule = ["iptables", "-w", change, "INPUT", "!", "-i", "lo", "-j", "DROP"]
            subprocess.run(["ip", "netns", "exec", name, *rule], check=True)


class Doings:
    """What goes on at the same time, and what came of each."""

    def __init__(self) -> None:
        self.outcome: dict[str, Any] = {}
        self._threads: list[threading.Thread] = []

    def run(self, name: str, action: Callable[[], Any]) -> None:
        def act() -> None:
            began = time.monotonic()
            try:
                self.outcome[name] = action()
            except Exception as problem:
                self.outcome[name] = f"{type(problem).__name__}: {problem}"
            self.outcome[f"{name} took"] = round(time.monotonic() - began, 1)

        self._threads.append(threading.Thread(target=act))
        self._threads[-1].start()

    @property
    def going(self) -> int:
        return sum(thread.is_alive() for thread in self._threads)

    def join(self) -> None:
        for thread in self._threads:
            thread.join()


def work(pool: sky.Compute, doings: Doings, told: dict[str, Any]) -> None:
    """A task, a stream each way and a broadcast."""
    data = os.urandom(told["size"])
    doings.outcome["sent"] = zlib.crc32(data)
    doings.run("task", lambda: tallied(told["file"], 5.0) >> pool)
    doings.run("stream", lambda: sum(counting(200) >> pool))
    doings.run("fed", lambda: summed(slowly(200)) >> pool)
    doings.run("broadcast", lambda: checksum(data, 4.0) @ pool)


def transfers(pool: sky.Compute, doings: Doings, told: dict[str, Any]) -> None:
    """A large argument and a large result."""
    block, count = os.urandom(1 << 16), told["size"] >> 16
    data = block * count
    doings.outcome["right"] = zlib.crc32(data)
    doings.run("up", lambda: checksum(data) >> pool)
    doings.run("down", lambda: zlib.crc32(repeated(block, count) >> pool))


def everything(pool: sky.Compute, doings: Doings, told: dict[str, Any]) -> None:
    """All of it at a time."""
    work(pool, doings, told)
    transfers(pool, doings, told)


def outlast(pool: sky.Compute, network: Network, told: dict[str, Any]) -> dict[str, Any]:
    """Cut the network while something goes on, and see it through."""
    doings = Doings()
    states: set[str] = set()
    globals()[told["doing"]](pool, doings, told)
    time.sleep(told["after"])
    doings.outcome["cut short"] = doings.going
    with network.cut():
        dark_until = time.monotonic() + told["seconds"]
        # A busy machine may notice it late.
        while time.monotonic() < dark_until or (
            "reconnecting" not in states and time.monotonic() < dark_until + LATE_SECONDS
        ):
            states.update(node.state for node in pool.nodes)
            time.sleep(0.05)
    restored = time.monotonic()
    while {node.state for node in pool.nodes} != {"ready"}:
        time.sleep(0.05)
    doings.outcome["ready after"] = round(time.monotonic() - restored, 1)
    doings.join()
    doings.outcome["done after"] = round(time.monotonic() - restored, 1)
    return doings.outcome | {"states": sorted(states), "lost": pool.stats().nodes_lost}


def watch(pool: sky.Compute, network: Network, told: dict[str, Any]) -> dict[str, Any]:
    """Nothing is cut: see whether anybody thinks so."""
    doings = Doings()
    states: set[str] = set()
    globals()[told["doing"]](pool, doings, told)
    while doings.going:
        states.update(node.state for node in pool.nodes)
        time.sleep(0.05)
    return doings.outcome | {"states": sorted(states), "lost": pool.stats().nodes_lost}


def give_up(pool: sky.Compute, network: Network, told: dict[str, Any]) -> dict[str, Any]:
    """Cut the network for longer than a node lives without its client."""
    there = [psutil.Process(pid) for pair in processes() @ pool for pid in pair]
    outcome: dict[str, Any] = {}
    future = tallied(told["file"], 600.0) > pool
    time.sleep(1.0)
    with network.cut():
        began = time.monotonic()
        try:
            future.result(told["seconds"])
        except sky.SkywardError as problem:
            outcome["said"] = f"{type(problem).__name__}: {problem}"
        outcome["given up after"] = round(time.monotonic() - began, 1)
        psutil.wait_procs(there, max(0.1, began + told["seconds"] - time.monotonic()))
        outcome["ended after"] = round(time.monotonic() - began, 1)
        outcome["left"] = sum(process.is_running() for process in there)
    began = time.monotonic()
    outcome["again"] = checksum(b"after", 0.0) @ pool
    outcome["back after"] = round(time.monotonic() - began, 1)
    return outcome


def providers(told: dict[str, Any]) -> list[Any]:
    if "beyond" in told:
        from slow_link import Beyond  # from bench/, which is on the path

        return [Beyond(*told["beyond"])]
    return [sky.SSH(**told["ssh"], direct=direct) for direct in told["direct"]]


def main(told: dict[str, Any]) -> None:
    with contextlib.ExitStack() as stack:
        pools = [
            stack.enter_context(
                sky.Compute(
                    provider,
                    nodes=told.get("nodes", 2),
                    worker=sky.Worker(concurrency=4),
                    options=sky.Options(orphan_timeout=told.get("orphan_timeout", 60.0)),
                )
            )
            for provider in providers(told)
        ]
        network = Network(told["namespaces"], len(pools))
        actors = stack.enter_context(ThreadPoolExecutor(len(pools)))
        act = globals()[told["act"]]
        outcomes = actors.map(
            lambda pool, number: act(pool, network, told | {"file": f"{told['file']}{number}"}),
            pools,
            range(len(pools)),
        )
        print(json.dumps(list(outcomes)))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
