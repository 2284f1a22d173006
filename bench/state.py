"""Shared state and objects that live on a node, against a bare socket, a manager and a plain call.

As a program with a path it is the server at the other end: it echoes, or it is a manager.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.managers import BaseManager
from pathlib import Path
from typing import Any

from measure import interleave, p50, timed
from report import Row, absolute, compared, run_suite

import skyward as sky

WORKERS = 4
MESSAGE = 80
"""About how many bytes an increment has on the wire."""
SECRET = b"bench"


@dataclass(frozen=True)
class Scale:
    adds: int
    calls: int
    rounds: int


FULL = Scale(adds=2500, calls=2000, rounds=7)
QUICK = Scale(adds=200, calls=100, rounds=1)


class Total:
    """What a manager counts with."""

    def __init__(self) -> None:
        self._value, self._lock = 0, threading.Lock()

    def add(self, amount: int) -> int:
        """Add, and return the new value."""
        with self._lock:
            self._value += amount
            return self._value


def echo(path: str) -> None:
    """Send back what comes, on all connections, with one thread."""
    selector = selectors.DefaultSelector()
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(path)
    listening.listen()
    selector.register(listening, selectors.EVENT_READ)
    print(flush=True)
    while True:
        for key, _ in selector.select():
            end: Any = key.fileobj
            if end is listening:
                selector.register(listening.accept()[0], selectors.EVENT_READ)
            elif data := end.recv(65536):
                end.sendall(data)
            else:
                selector.unregister(end)
                end.close()


def manage(path: str) -> None:
    """Be a manager of `multiprocessing` with one counter."""
    total = Total()
    BaseManager.register("total", callable=lambda: total)
    server = BaseManager(path, SECRET).get_server()
    print(flush=True)
    server.serve_forever()


@contextlib.contextmanager
def served(kind: str) -> Iterator[str]:
    """The path of a server of this file."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "socket"))
        command = [sys.executable, __file__, kind, path]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            try:
                yield path
            finally:
                process.kill()


@sky.function
def adds(count: int) -> None:
    counter = sky.counter("total")
    for _ in range(count):
        counter.add()


@sky.function
def echoes(path: str, count: int) -> None:
    with socket.socket(socket.AF_UNIX) as end:
        end.connect(path)
        message = bytes(MESSAGE)
        for _ in range(count):
            end.sendall(message)
            left = MESSAGE
            while left:
                left -= len(end.recv(left))


@sky.function
def adds_with_a_manager(path: str, count: int) -> None:
    BaseManager.register("total")
    manager = BaseManager(path, SECRET)
    manager.connect()
    total = manager.total()  # type: ignore[attr-defined]
    for _ in range(count):
        total.add(1)


def increments(scale: Scale) -> list[Row]:
    """Increments of one counter from four workers at once."""
    worker = sky.Worker(concurrency=WORKERS)
    with (
        sky.Compute(worker=worker, options=sky.Options(console=False)) as compute,
        served("echo") as echoing,
        served("manage") as managing,
    ):

        def everywhere(call: Callable[[], sky.Pending[None]]) -> Callable[[], float]:
            return lambda: timed(lambda: sky.gather(*[call() for _ in range(WORKERS)]) >> compute)

        samples = interleave(
            {
                "ours": everywhere(lambda: adds(scale.adds)),
                "echo": everywhere(lambda: echoes(echoing, scale.adds)),
                "manager": everywhere(lambda: adds_with_a_manager(managing, scale.adds)),
            },
            rounds=scale.rounds,
        )
    rates = {name: each.per(WORKERS * scale.adds, "tasks/s") for name, each in samples.items()}
    what = f"`sky.counter`, {WORKERS} workers adding"
    return [
        absolute(what, rates["ours"], ">= 16,000 a second", 16_000),
        compared(what, rates["ours"], "a bare socket's echoes of the same bytes", rates["echo"]),
        compared(what, rates["ours"], "a counter of multiprocessing's Manager", rates["manager"]),
    ]


@sky.function
def plain(number: int) -> int:
    return number


@sky.cls
class Kept:
    """Has one method, which does nothing."""

    def plain(self, number: int) -> int:
        """Return the argument."""
        return number


@sky.function
def calls_in_a_task(kept: Kept, count: int) -> float:
    return p50(lambda: kept.plain(1), count)


def methods(scale: Scale) -> list[Row]:
    """A call of a method of an object on a node."""
    with sky.Compute(options=sky.Options(console=False)) as compute:
        kept = Kept() >> compute  # type: ignore[operator]
        samples = interleave(
            {
                "method": lambda: p50(lambda: kept.plain(1), scale.calls),
                "call": lambda: p50(lambda: plain(1) >> compute, scale.calls),
            },
            rounds=scale.rounds,
        )
    return [
        compared(
            "a method of a `@sky.cls` object",
            samples["method"],
            "a call of a function",
            samples["call"],
            "<= 1.1x",
        )
    ]


def handles(scale: Scale) -> list[Row]:
    """A call of a method by a task of another node, and by the client."""
    with sky.Compute(nodes=3, options=sky.Options(console=False)) as compute:
        # One each, and the client's calls of the one that tasks call, too.
        kept: Any = compute.run(Kept(), on=0)  # type: ignore[call-overload]
        shared: Any = compute.run(Kept(), on=1)  # type: ignore[call-overload]
        samples = interleave(
            {
                "client": lambda: p50(lambda: kept.plain(1), scale.calls),
                "task": lambda: compute.run(calls_in_a_task(shared, scale.calls), on=2),
                "shared": lambda: p50(lambda: shared.plain(1), scale.calls),
            },
            rounds=scale.rounds,
        )
    return [
        compared(
            "a method, called by its handle in a task of another node",
            samples["task"],
            "called by the client",
            samples["client"],
            "<= 1.5x",
        ),
        compared(
            "a method, called by the client, of an object that tasks call, too",
            samples["shared"],
            "of one that no task calls",
            samples["client"],
            "<= 1.15x",
        ),
    ]


if __name__ == "__main__":
    if sys.argv[1:2] in (["echo"], ["manage"]):
        {"echo": echo, "manage": manage}[sys.argv[1]](sys.argv[2])
    run_suite(
        "what shared state and objects on nodes cost",
        [increments, methods, handles],
        full=FULL,
        quick=QUICK,
    )
