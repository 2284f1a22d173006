"""SSH: a call through the program `ssh` beside one byte through it, and what a start takes.

python bench/ssh.py            # starts hosts of its own
"""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from measure import interleave, p50, timed
from report import Row, absent, compared, run_suite
from testbed import Hosts, NoTestbedError, ssh_hosts

import skyward as sky
from skyward.providers.hosts import openssh

QUIET = sky.Options(console=False)
CALL = "no-op call to an SSH host, through SSH"
ECHO = """
import socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
end = listener.accept()[0]
while data := end.recv(64):
    end.sendall(data)
"""


@sky.function
def nothing() -> None:
    """Do nothing."""
    return


class Cat:
    """OpenSSH's own client, with a byte sent to `cat` and back; others may share its connection."""

    def __init__(self, hosts: Hosts, control: Path) -> None:
        place = f"{hosts.user}@{hosts.names[0]}"
        self._process = subprocess.Popen(
            ["ssh", "-M", "-S", str(control), *hosts.options, place, "cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )

    def round_trip(self) -> None:
        """Send a byte, and wait for it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(b"x")
        assert self._process.stdout.read(1) == b"x"

    def __enter__(self) -> Cat:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=20)


@contextmanager
def forwarded(hosts: Hosts, folder: Path) -> Iterator[Callable[[], None]]:
    """A byte there and back through a Unix socket that `ssh` forwards to a program's."""
    there, here = folder / "echo", folder / "forwarded"
    place = f"{hosts.user}@{hosts.names[0]}"
    echo = subprocess.Popen([sys.executable, "-c", ECHO, str(there)])
    tunnel = subprocess.Popen(["ssh", *hosts.options, "-N", "-L", f"{here}:{there}", place])
    try:
        while not (there.exists() and here.exists()):
            time.sleep(0.01)
        with socket.socket(socket.AF_UNIX) as end:
            end.connect(str(here))

            def round_trip() -> None:
                end.sendall(b"x")
                assert end.recv(1) == b"x"

            yield round_trip
    finally:
        for process in (tunnel, echo):
            process.terminate()
            process.wait()


def ssh_calls(rounds: int, calls: int) -> Sequence[Row]:
    """A no-op call, and both floors: a byte through `ssh host cat`, and through a forwarded socket.

    The first floor is the one of the bar: no user can do with less, and it is what he would try. A
    byte and then a call on this machine are what a call cannot do without: one after the other,
    since each takes longer once the other has been in the processor's caches.
    """
    try:
        with (
            ssh_hosts() as hosts,
            tempfile.TemporaryDirectory(prefix="sky-", dir="/tmp") as folder,
            sky.Compute(hosts.provider(direct=False), options=QUIET) as compute,
            sky.Compute(options=QUIET) as near,
            Cat(hosts, Path(folder, "control")) as cat,
            forwarded(hosts, Path(folder)) as through_socket,
        ):
            taken = interleave(
                {
                    "call": lambda: p50(lambda: nothing() >> compute, calls),
                    "both": lambda: p50(lambda: (through_socket(), nothing() >> near), calls),
                    "cat": lambda: p50(cat.round_trip, calls),
                    "socket": lambda: p50(through_socket, calls),
                },
                rounds=rounds,
            )
    except NoTestbedError as problem:
        return [absent(CALL, "OpenSSH", str(problem))]
    return [
        compared(CALL, taken["call"], "a byte through `ssh host cat`", taken["cat"], "<= 2.5x"),
        compared(CALL, taken["call"], "a byte through a socket of `ssh -L`", taken["socket"]),
        compared(
            CALL, taken["call"], "a byte through that socket, then a call here", taken["both"]
        ),
    ]


def ssh_starts(rounds: int) -> Sequence[Row]:
    """A pool of 1 and of 2 hosts until it is ready, with `ssh` and with asyncssh."""
    found = openssh.program

    def start(hosts: Hosts, nodes: int, library: bool) -> float:
        # What decides which of them carries: as if there were no such program.
        openssh.program = (lambda: None) if library else found
        try:
            compute = sky.Compute(hosts.provider(), nodes=nodes, options=QUIET)
            taken = timed(compute.__enter__)
            compute.__exit__(None, None, None)
            return taken
        finally:
            openssh.program = found

    rows = []
    for nodes in (1, 2):
        what = f"SSH pool of {nodes}, environment there: until ready"
        try:
            with ssh_hosts() as hosts:
                taken = interleave(
                    {
                        "ssh": partial(start, hosts, nodes, False),
                        "asyncssh": partial(start, hosts, nodes, True),
                    },
                    rounds=rounds,
                )
        except NoTestbedError as problem:
            return [absent(what, "asyncssh", str(problem))]
        rows.append(compared(what, taken["ssh"], "by asyncssh", taken["asyncssh"], "<= 1x"))
    return rows


@dataclass(frozen=True)
class Size:
    """How much to measure."""

    rounds: int
    calls: int
    starts: int


FULL = Size(rounds=9, calls=200, starts=7)
QUICK = Size(rounds=2, calls=20, starts=2)


def calls(size: Size) -> Sequence[Row]:
    """Calls beside bytes."""
    return ssh_calls(size.rounds, size.calls)


def starts(size: Size) -> Sequence[Row]:
    """Starts with both carriers."""
    return ssh_starts(size.starts)


if __name__ == "__main__":
    run_suite("ssh", [calls, starts], full=FULL, quick=QUICK)
