"""The device over a real delay: client and worker in two network namespaces, a slow link between.

The parent puts up the testbed's link and runs this file inside the client's namespace. There it
has two pools: one whose agent runs in the other namespace, behind the delay, and one on the
loopback of its own. Both use TLS over TCP, and take turns.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measure import Sample, interleave, p50
from training import QUIET, mlp, stepper

import skyward as sky
from skyward.providers import Allocation, Capabilities, Order, Request

HERE = Path(__file__).parent
ROUND_TRIP = 0.020


class NoLinkError(RuntimeError):
    """There is no slow link to be had here; the message says why."""


@dataclass(frozen=True)
class Ends:
    """The two namespaces of a link, and the far one's address."""

    near: str
    far: str
    far_address: str


@contextlib.contextmanager
def slow_link(
    round_trip: float = ROUND_TRIP, *, loss: float = 0.0, mbit: float = 0.0
) -> Iterator[Ends]:
    """The testbed's link, taken down afterwards; it has no limit without `mbit`."""
    folder = os.environ.get("SKYWARD_TESTBED") or HERE.parents[1] / "shared" / "testbed"
    script = Path(folder, "delay-link")
    if not script.exists():
        raise NoLinkError("no testbed here; name its folder with SKYWARD_TESTBED")
    if os.geteuid():
        raise NoLinkError("network namespaces need root")
    if Path("/run/netns/sky-a").exists():
        raise NoLinkError(f"the testbed's link is in use, or left over: try {script} down")
    up = [str(script), "up", *(f"{each:g}" for each in (round_trip * 1e3 / 2, loss, mbit))]
    done = subprocess.run(up, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoLinkError(f"the testbed's link did not come up: {done.stderr.strip()}")
    said = dict(re.findall(r"export (\w+)='(.*)'", done.stdout))
    try:
        yield Ends(said["SKY_LINK_NS_A"], said["SKY_LINK_NS_B"], said["SKY_LINK_ADDR_B"])
    finally:
        subprocess.run([str(script), "down"], capture_output=True, check=False)


def steps_over(ends: Ends, steps: int, rounds: int) -> Mapping[str, Sample]:
    """Seconds per training step, "far" over the link or "near", "read" every time or "free".

    And of a plain "round trip" over the link.
    """
    return taken_behind(ends, __file__, ends.far, ends.far_address, str(steps), str(rounds))


def taken_behind(ends: Ends, script: str, *arguments: str) -> dict[str, Sample]:
    """What `tell` says in a script that is run at the near end."""
    command = ["ip", "netns", "exec", ends.near, sys.executable, script, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    return {name: Sample(tuple(values)) for name, values in json.loads(done.stdout).items()}


def tell(samples: Mapping[str, Sample]) -> None:
    """Print samples for the script that has called this one."""
    print(json.dumps({name: sample.values for name, sample in samples.items()}))


@contextlib.contextmanager
def far_and_near(far: str, far_address: str) -> Iterator[dict[str, sky.Compute]]:
    """A pool at the far end of a link, and one at the near end."""
    # On a machine of few cores the link's own process needs one, too.
    image = sky.Image(env={"OMP_NUM_THREADS": "1"})
    places = {"far": Beyond(far, far_address), "near": sky.Local(transport="tcp")}
    with contextlib.ExitStack() as pools:
        yield {
            place: pools.enter_context(sky.Compute(provider, image=image, options=QUIET))
            for place, provider in places.items()
        }


@dataclass(frozen=True)
class Beyond:
    """A provider: agents in another network namespace of this machine."""

    namespace: str
    address: str

    name = "beyond"
    capabilities = Capabilities(here=True)

    def check(self, request: Request) -> None:
        """Any request is fine: the machine is this one."""

    def describe(self) -> dict[str, str]:
        """The arguments."""
        return {"namespace": self.namespace, "address": self.address}

    def price(self, request: Request) -> float | None:
        """This machine is paid for."""
        return 0.0

    def allocate(self, pool: str) -> Allocation[Any]:
        """The pool's machines, made one by one."""
        return Allocation(self, pool)

    async def create(self, order: Order) -> BeyondMachine:
        """Make a folder of this machine whose commands run in the namespace."""
        return BeyondMachine(self, await sky.Local().create(order))

    async def find(self, pool: str) -> list[BeyondMachine]:
        """The folders of a pool."""
        return [BeyondMachine(self, machine) for machine in await sky.Local().find(pool)]


class BeyondMachine:
    """A local machine whose commands run in another network namespace."""

    def __init__(self, place: Beyond, machine: Any) -> None:
        self._machine = machine
        self._enter = ["ip", "netns", "exec", place.namespace]
        self.address = self.direct = place.address

    def __getattr__(self, name: str) -> Any:
        return getattr(self._machine, name)

    async def run(self, command: Sequence[str], **streams: Any) -> int:
        """Run a command in the namespace."""
        return int(await self._machine.run([*self._enter, *command], **streams))


@contextlib.contextmanager
def served(namespace: str, address: str, answer: str) -> Iterator[int]:
    """The port of a process over there, which does with each connection, `end`, as given."""
    serve = (
        "import socket, sys\n"
        "server = socket.create_server((sys.argv[1], 0))\n"
        "print(server.getsockname()[1], flush=True)\n"
        "while True:\n"
        "    end, _ = server.accept()\n"
        "    with end:\n"
    )
    script = serve + textwrap.indent(answer, " " * 8)
    command = ["ip", "netns", "exec", namespace, sys.executable, "-c", script, address]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.kill()


@contextlib.contextmanager
def echo(namespace: str, address: str) -> Iterator[Callable[[], float]]:
    """Seconds of a plain round trip: one byte to a process over there, and back."""
    answer = "while byte := end.recv(1): end.sendall(byte)"
    with (
        served(namespace, address, answer) as port,
        socket.create_connection((address, port)) as end,
    ):
        yield lambda: p50(lambda: (end.sendall(b"."), end.recv(1)), 20)


def main(far: str, far_address: str, steps: int, rounds: int) -> None:
    """Measure seconds per training step, and print the samples."""
    with echo(far, far_address) as round_trip, far_and_near(far, far_address) as pools:
        contenders = {"round trip": round_trip}
        for place, compute in pools.items():
            device = compute.device("cpu")
            contenders[f"{place}, free"] = stepper(mlp, device, steps, item=False)
            contenders[f"{place}, read"] = stepper(mlp, device, max(5, steps // 20), item=True)
        tell(interleave(contenders, rounds=rounds))


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(int, sys.argv[3:5]))
