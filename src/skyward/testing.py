"""The tests that every provider passes: subclass `ProviderSuite` and give it your provider.

class TestMine(ProviderSuite):
    @pytest.fixture
    def provider(self):
        return Mine(region="here")

    @pytest.fixture
    def machine_request(self):
        return plain_request()
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import socket
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from typing import Any, ClassVar

from skyward.errors import PoolStartError, UnreachableError
from skyward.providers import Machine, Order, Provider, Request, find_provider
from skyward.spec import Image

PATIENCE = 30.0
"""How many seconds a test waits for a condition before it fails."""

_ECHO = """
import os, socket, sys, tempfile, threading
def serve(end):
    got = bytearray()
    while data := end.recv(1 << 20):
        got += data
    end.sendall(bytes(got[::-1]))
    end.close()
if sys.argv[1] == "unix":
    folder = tempfile.mkdtemp(dir="." if os.access(".", os.W_OK) else None)
    path = os.path.abspath(os.path.join(folder, "s"))
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    endpoint = "unix:" + path
else:
    listener = socket.create_server(("127.0.0.1", 0))
    endpoint = "tcp:127.0.0.1:%d" % listener.getsockname()[1]
listener.listen(64)
print(endpoint, flush=True)
while True:
    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
"""
_ENDED = 'kill -0 "$1" 2>/dev/null && ! grep -q "^State:.Z" "/proc/$1/status" && exit 1; exit 0'


def plain_request() -> Request:
    """A request for a machine without any special properties."""
    return Request(None, None, None, Image(), ())


class ProviderSuite:
    """Tests for pytest of everything that a pool needs from a provider.

    A subclass has two fixtures. `provider` must be able to make `machines` machines at once, and
    one more, which the tests share that only run commands. `machine_request` is the request for
    each machine. A machine needs `sh`, `cat` and a Python, which runs a server to dial. The tests
    make their own event loops.
    """

    machines = 2
    python = "python3"
    """The interpreter on a machine that does not name one."""

    @contextlib.contextmanager
    def out_of_reach(self) -> Iterator[bool]:
        """Cut off the machine of node 0, and the service that knows whether the machine exists.

        Yields whether that was done. A subclass that can cut them off overrides this method.
        """
        yield False

    _shared: ClassVar[tuple[asyncio.Runner, Provider, Order, Machine] | None] = None

    def _on_a_machine(
        self,
        provider: Provider,
        machine_request: Request,
        scenario: Callable[[Machine], Coroutine[Any, Any, None]],
    ) -> None:
        """Run a scenario that leaves the machine unchanged, on a machine that all tests share."""
        kind = type(self)
        if kind._shared is None:
            runner, order = asyncio.Runner(), _order(machine_request)
            kind._shared = runner, provider, order, runner.run(_ordered(provider, order))
        runner, _, _, machine = kind._shared
        runner.run(scenario(machine))

    @classmethod
    def teardown_class(cls) -> None:
        """Destroy the machine that the tests shared, if there is one."""
        if cls._shared is not None:
            runner, provider, order, machine = cls._shared
            cls._shared = None
            with runner:
                runner.run(machine.destroy())
                runner.run(_swept(provider, order.pool))

    def test_its_arguments_travel_as_json(self, provider: Provider) -> None:
        """`sky down` makes the provider again from its arguments."""
        described = json.loads(json.dumps(dict(provider.describe())))

        again = _again(provider)

        assert dict(again.describe()) == described
        assert again.name == provider.name

    def test_it_is_found_by_its_name(self, provider: Provider) -> None:
        """The provider is in the registry, or registered as an entry point."""
        assert find_provider(provider.name) is type(provider)

    def test_it_states_what_it_can_do(self, provider: Provider) -> None:
        """A method beyond the protocol is used only if the capabilities name it."""
        methods = {
            "sells": "offers",
            "answers": "ping",
            "collects": "remains",
            "stops": "stop",
            "holds_keys": "export_keys",
        }
        for stated, method in methods.items():
            assert getattr(provider.capabilities, stated) == hasattr(provider, method), method

    def test_its_price_is_a_number_or_unknown(
        self, provider: Provider, machine_request: Request
    ) -> None:
        """The provider also accepts a request that it can fulfil."""
        provider.check(machine_request)
        price = provider.price(machine_request)

        assert price is None or price >= 0

    def test_a_machine_knows_its_node_and_how_it_is_reached(
        self, provider: Provider, machine_request: Request
    ) -> None:
        """A machine has its node's number, an id to destroy it by, and an address for its peers."""

        async def scenario() -> None:
            order = _order(machine_request)
            async with _made(provider, order) as machine:
                assert machine.node == order.node
                assert machine.id
                assert machine.address
                assert machine.direct is None or machine.direct
                assert await machine.alive()

        asyncio.run(scenario())

    def test_a_command_returns_its_exit_status(
        self, provider: Provider, machine_request: Request
    ) -> None:
        """The status is the one that a shell reports."""

        async def scenario(machine: Machine) -> None:
            assert await machine.run(["true"]) == 0
            assert await machine.run(["sh", "-c", "exit 7"]) == 7
            assert await machine.run(["sh", "-c", "kill -9 $$"]) == 137
            assert await machine.run(["no-such-command-here"]) == 127

        self._on_a_machine(provider, machine_request, scenario)

    def test_arguments_arrive_as_they_are(
        self, provider: Provider, machine_request: Request
    ) -> None:
        """No shell on the way interprets the arguments."""
        arguments = ["a b", "'", '"', "$HOME", "`id`", "\\n", "*", "", "~", ";", "ä\n!x", "-n"]

        async def scenario(machine: Machine) -> None:
            said = bytearray()
            command = ["sh", "-c", 'printf "<%s>" "$@"', "sh", *arguments]
            assert await machine.run(command, output=said.extend) == 0
            assert said.decode() == "".join(f"<{each}>" for each in arguments)

        self._on_a_machine(provider, machine_request, scenario)

    def test_both_streams_of_a_command_come_out(
        self, provider: Provider, machine_request: Request
    ) -> None:
        """The caller gets stdout and stderr."""

        async def scenario(machine: Machine) -> None:
            said = bytearray()
            command = ["sh", "-c", "echo out; echo err >&2"]
            assert await machine.run(command, output=said.extend) == 0
            assert sorted(said.split()) == [b"err", b"out"], f"it said {bytes(said)!r}"

        self._on_a_machine(provider, machine_request, scenario)

    def test_input_and_output_may_be_large_and_binary(
        self, provider: Provider, machine_request: Request
    ) -> None:
        """The client sends a wheel to the machine in this way."""
        data = os.urandom(1 << 20) * 8

        async def scenario(machine: Machine) -> None:
            said = bytearray()
            assert await machine.run(["cat"], input=data, output=said.extend) == 0
            assert said == data
            assert await machine.run(["true"], input=data) == 0

        self._on_a_machine(provider, machine_request, scenario)

    def test_cancelling_a_command_ends_it(
        self, provider: Provider, machine_request: Request
    ) -> None:
        """The processes that the command started end, too."""
        script = "sleep 600 & echo $! $$; wait"

        async def scenario(machine: Machine) -> None:
            said = bytearray()
            task = asyncio.create_task(machine.run(["sh", "-c", script], output=said.extend))
            await _until(lambda: b"\n" in said)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            assert task.cancelled()
            for pid in said.decode().split():
                await _until_status(machine, ["sh", "-c", _ENDED, "sh", pid], 0)
            assert await machine.run(["true"]) == 0

        self._on_a_machine(provider, machine_request, scenario)

    def test_dialling_a_unix_socket(self, provider: Provider, machine_request: Request) -> None:
        """Bytes travel both ways, and each end can close its own direction alone."""
        self._dial(provider, machine_request, "unix", 1, 8 << 20)

    def test_dialling_a_port(self, provider: Provider, machine_request: Request) -> None:
        """The port is on the machine's own loopback."""
        self._dial(provider, machine_request, "tcp", 1, 1 << 20)

    def test_many_dial_at_once(self, provider: Provider, machine_request: Request) -> None:
        """Each connection gets its own bytes."""
        self._dial(provider, machine_request, "unix", 16, 64 << 10)

    def _dial(
        self, provider: Provider, machine_request: Request, family: str, times: int, size: int
    ) -> None:
        async def scenario(machine: Machine) -> None:
            async with self._listening(machine, family) as endpoint:
                ends = await asyncio.gather(*(machine.dial(endpoint) for _ in range(times)))
                data = [os.urandom(size) for _ in ends]
                exchanges = zip(ends, data, strict=True)
                answers = await asyncio.gather(
                    *(asyncio.to_thread(_exchanged, end, sent) for end, sent in exchanges)
                )
                assert answers == [sent[::-1] for sent in data]
                assert all(end.getblocking() for end in ends)
                for end in ends:
                    end.close()

        self._on_a_machine(provider, machine_request, scenario)

    def test_dialling_nobody_says_so(self, provider: Provider, machine_request: Request) -> None:
        """The caller gets an error or an end of file, and does not wait for ever."""

        async def scenario(machine: Machine) -> None:
            try:
                end = await machine.dial("unix:/nowhere/at/all")
            except OSError:
                return
            end.settimeout(PATIENCE)
            with contextlib.suppress(ConnectionError):
                assert await asyncio.to_thread(end.recv, 1) == b""
            end.close()

        self._on_a_machine(provider, machine_request, scenario)

    def test_destroying_is_final_and_may_be_repeated(
        self, provider: Provider, machine_request: Request
    ) -> None:
        """A machine can also be destroyed while a command runs there."""

        async def scenario() -> None:
            order = _order(machine_request)
            machine = await _ordered(provider, order)
            said = bytearray()
            script = "echo on; sleep 600"
            task = asyncio.create_task(machine.run(["sh", "-c", script], output=said.extend))
            await _until(lambda: b"on" in said)

            await machine.destroy()

            await asyncio.wait({task}, timeout=PATIENCE)
            assert task.done()
            with contextlib.suppress(UnreachableError, OSError):
                assert task.result() != 0
            assert not await machine.alive()
            assert list(await provider.allocate(order.pool).find()) == []
            await machine.destroy()
            for _ in range(2):
                await _swept(provider, order.pool)

        asyncio.run(scenario())

    def test_a_machine_out_of_reach_is_not_taken_for_gone(
        self, provider: Provider, machine_request: Request
    ) -> None:
        """The machine may come back, with everything that runs on it."""
        self.teardown_class()  # the connection to the shared machine would be cut as well

        async def scenario() -> None:
            async with _made(provider, _order(machine_request)) as machine:
                with self.out_of_reach() as cut:
                    if cut:
                        with contextlib.suppress(PoolStartError):
                            assert await machine.alive()
                assert await machine.alive()

        asyncio.run(scenario())

    def test_machines_of_a_pool_are_made_and_destroyed_side_by_side(
        self, provider: Provider, machine_request: Request
    ) -> None:
        """`find` returns the machines of the pool, and no others."""

        async def scenario() -> None:
            pool = _order(machine_request).pool
            orders = [Order(pool, node, machine_request) for node in range(self.machines)]
            allocation = provider.allocate(pool)
            allocation.expect(order.node for order in orders)
            made = await asyncio.gather(*(allocation.get(order) for order in orders))
            try:
                assert [machine.node for machine in made] == list(range(self.machines))
                assert len({machine.id for machine in made}) == self.machines
                found = await provider.allocate(pool).find()
                assert sorted(each.id for each in found) == sorted(each.id for each in made)
                assert list(await provider.allocate(f"{pool}x").find()) == []
                assert list(await provider.allocate(pool[:-1]).find()) == []
            finally:
                await asyncio.gather(*(machine.destroy() for machine in made))
                await _swept(provider, pool)
            assert list(await provider.allocate(pool).find()) == []

        asyncio.run(scenario())

    def test_what_a_killed_client_made_is_found_and_destroyed(
        self, provider: Provider, machine_request: Request
    ) -> None:
        """A provider that another process makes from the description finds them."""
        pool = _order(machine_request).pool
        orders = [Order(pool, node, machine_request) for node in range(self.machines)]
        client = multiprocessing.get_context("spawn").Process(
            target=_create_and_die, args=(provider, orders)
        )
        client.start()
        client.join(2 * PATIENCE)
        assert client.exitcode == 9

        async def scenario() -> None:
            again = _again(provider)
            found = sorted(await again.allocate(pool).find(), key=lambda machine: machine.node)
            assert [machine.node for machine in found] == list(range(self.machines))
            assert await found[0].alive()
            assert await found[0].run(["true"]) == 0
            await asyncio.gather(*(machine.destroy() for machine in found))
            assert list(await again.allocate(pool).find()) == []
            await _swept(again, pool)

        asyncio.run(scenario())

    def test_a_create_that_is_cancelled_leaves_nothing_unknown(
        self, provider: Provider, machine_request: Request
    ) -> None:
        """Whenever an order is cancelled, `find` returns the machine if there is one."""

        async def scenario() -> None:
            for seconds in (0.0, 0.05, 0.2):
                order = _order(machine_request)
                allocation = provider.allocate(order.pool)
                task = asyncio.create_task(allocation.get(order))
                await asyncio.wait({task}, timeout=seconds)
                task.cancel()
                await asyncio.wait({task})
                for machine in await allocation.find():
                    await machine.destroy()
                if not task.cancelled():
                    await task.result().destroy()
                assert list(await provider.allocate(order.pool).find()) == []
                await _swept(provider, order.pool)

        asyncio.run(scenario())

    @contextlib.asynccontextmanager
    async def _listening(self, machine: Machine, family: str) -> AsyncIterator[str]:
        """A server on the machine that sends the bytes that it gets back, reversed."""
        said = bytearray()
        command = [machine.python or self.python, "-c", _ECHO, family]
        task = asyncio.create_task(machine.run(command, output=said.extend))
        try:
            await _until(lambda: b"\n" in said or task.done())
            assert not task.done(), said.decode(errors="replace")
            yield said.decode().splitlines()[0]
        finally:
            task.cancel()
            await asyncio.wait({task})


def _order(machine_request: Request) -> Order:
    return Order(f"suite-{uuid.uuid4().hex[:8]}", 0, machine_request)


def _again(provider: Provider) -> Provider:
    kind: Any = type(provider)
    made: Provider = kind(**json.loads(json.dumps(dict(provider.describe()))))
    return made


async def _ordered(provider: Provider, order: Order) -> Machine:
    """The machine of a pool with one node."""
    machine: Machine = await provider.allocate(order.pool).get(order)
    return machine


@contextlib.asynccontextmanager
async def _made(provider: Provider, order: Order) -> AsyncIterator[Machine]:
    machine = await _ordered(provider, order)
    try:
        yield machine
    finally:
        await machine.destroy()
        await _swept(provider, order.pool)


async def _swept(provider: Provider, pool: str) -> None:
    """Remove what a pool had besides machines, as the pool does at its end."""
    await provider.allocate(pool).sweep()


def _create_and_die(provider: Provider, orders: Sequence[Order]) -> None:
    async def create() -> None:
        allocation = provider.allocate(orders[0].pool)
        allocation.expect(order.node for order in orders)
        await asyncio.gather(*(allocation.get(order) for order in orders))
        os._exit(9)

    asyncio.run(create())


def _exchanged(end: socket.socket, data: bytes) -> bytes:
    """Send the data, close the sending direction, and read until the other end closes."""
    end.settimeout(PATIENCE)
    sending = threading.Thread(target=_send, args=(end, data))
    sending.start()
    got = bytearray()
    while piece := end.recv(1 << 20):
        got += piece
    sending.join()
    end.settimeout(None)
    return bytes(got)


def _send(end: socket.socket, data: bytes) -> None:
    end.sendall(data)
    end.shutdown(socket.SHUT_WR)


async def _until(condition: Any) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.005)


async def _until_status(machine: Machine, command: Sequence[str], status: int) -> None:
    async with asyncio.timeout(PATIENCE):
        while await machine.run(command) != status:
            await asyncio.sleep(0.02)
