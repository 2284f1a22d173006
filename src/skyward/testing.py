"""The tests that every provider passes, and a provider in memory that fails when a test says so.

Subclass `ProviderSuite` and give it your provider:

class TestMine(ProviderSuite):
    @pytest.fixture
    def provider(self):
        return Mine(region="here")

    @pytest.fixture
    def machine_request(self):
        return plain_request()

`Shop` is a provider to copy from. Its machines are those of `sky.Local`; what they cost, how long
they take and what goes wrong is what a test says.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import socket
import tempfile
import threading
import uuid
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterator,
    Sequence,
)
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from skyward.errors import (
    ConfigurationError,
    PoolStartError,
    UnavailableError,
    UnreachableError,
)
from skyward.providers import (
    Allocation,
    Capabilities,
    Machine,
    Offer,
    Order,
    Provider,
    Remains,
    Request,
    find_provider,
    moves,
    owner,
)
from skyward.providers.local import LocalMachine
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

    A subclass has two fixtures. `provider` must be able to make `machines` machines at once.
    `machine_request` is the request for each machine. A machine needs `sh`, `cat` and a Python,
    which runs a server to dial. The tests make their own event loops.
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

    _shared: ClassVar[tuple[asyncio.Runner, contextlib.AsyncExitStack, Machine] | None] = None

    def _on_a_machine(
        self,
        provider: Provider,
        machine_request: Request,
        scenario: Callable[[Machine], Coroutine[Any, Any, None]],
    ) -> None:
        """Run a scenario that leaves the machine unchanged, on a machine that all tests share."""
        kind = type(self)
        if kind._shared is None:
            runner, held = asyncio.Runner(), contextlib.AsyncExitStack()
            made = held.enter_async_context(_made(provider, _order(machine_request)))
            kind._shared = runner, held, runner.run(made)
        runner, _, machine = kind._shared
        runner.run(scenario(machine))

    @classmethod
    def teardown_class(cls) -> None:
        """Destroy the machine that the tests share, if there is one.

        Tests that want all machines do so, too: there may be none besides it. The next test that
        only runs commands has another one.
        """
        if cls._shared is not None:
            runner, held, _ = cls._shared
            cls._shared = None
            with runner:
                runner.run(held.aclose())

    def test_its_arguments_travel_as_json(self, provider: Provider) -> None:
        """`sky down` makes the provider again from its arguments."""
        described = json.loads(json.dumps(dict(provider.describe())))

        again = _again(provider)

        assert dict(again.describe()) == described
        assert again.name == provider.name
        if moves(provider):
            assert dict(provider.arguments_here(described, "")) == described, "on the same machine"

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
            "moves": "arguments_here",
            "here": "machine_at",
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
            async with _made(provider, order) as machine:
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
                assert await _left(provider, order.pool) == []
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
        self.teardown_class()

        async def scenario() -> None:
            pool = _order(machine_request).pool
            orders = [Order(pool, node, machine_request) for node in range(self.machines)]
            async with _allocated(provider, pool) as allocation:
                allocation.expect(order.node for order in orders)
                made = await asyncio.gather(*(allocation.get(order) for order in orders))
                try:
                    assert [machine.node for machine in made] == list(range(self.machines))
                    assert len({machine.id for machine in made}) == self.machines
                    assert await _left(provider, pool) == sorted(each.id for each in made)
                    assert await _left(provider, f"{pool}x") == []
                    assert await _left(provider, pool[:-1]) == []
                finally:
                    await asyncio.gather(*(machine.destroy() for machine in made))
                    await allocation.sweep()
            assert await _left(provider, pool) == []

        asyncio.run(scenario())

    def test_what_a_killed_client_made_is_found_and_destroyed(
        self, provider: Provider, machine_request: Request
    ) -> None:
        """A provider that another process makes from the description finds them."""
        self.teardown_class()
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
            async with _allocated(again, pool) as allocation:
                found = sorted(await allocation.find(), key=lambda machine: machine.node)
                assert [machine.node for machine in found] == list(range(self.machines))
                assert await found[0].alive()
                assert await found[0].run(["true"]) == 0
                await asyncio.gather(*(machine.destroy() for machine in found))
                assert await _left(again, pool) == []
                await allocation.sweep()

        asyncio.run(scenario())

    def test_a_create_that_is_cancelled_leaves_nothing_unknown(
        self, provider: Provider, machine_request: Request
    ) -> None:
        """Whenever an order is cancelled, `find` returns the machine if there is one."""

        async def scenario() -> None:
            for seconds in (0.0, 0.05, 0.2):
                order = _order(machine_request)
                async with _allocated(provider, order.pool) as allocation:
                    task = asyncio.create_task(allocation.get(order))
                    await asyncio.wait({task}, timeout=seconds)
                    task.cancel()
                    await asyncio.wait({task})
                    for machine in await allocation.find():
                        await machine.destroy()
                    if not task.cancelled():
                        await task.result().destroy()
                    assert await _left(provider, order.pool) == []
                    await allocation.sweep()

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


@contextlib.asynccontextmanager
async def _allocated(provider: Provider, pool: str) -> AsyncIterator[Allocation[Any]]:
    allocation = provider.allocate(pool)
    try:
        yield allocation
    finally:
        await allocation.close()


@contextlib.asynccontextmanager
async def _made(provider: Provider, order: Order) -> AsyncIterator[Machine]:
    """The machine of a pool with one node."""
    async with _allocated(provider, order.pool) as allocation:
        machine: Machine = await allocation.get(order)
        try:
            yield machine
        finally:
            await machine.destroy()
            await _swept(provider, order.pool)


async def _left(provider: Provider, pool: str) -> list[str]:
    """The machines of a pool that there are, as another client finds them."""
    async with _allocated(provider, pool) as allocation:
        return sorted(machine.id for machine in await allocation.find())


async def _swept(provider: Provider, pool: str) -> None:
    """Remove what a pool had besides machines, as another client would."""
    async with _allocated(provider, pool) as allocation:
        await allocation.sweep()


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


def an_offer(
    name: str = "m1.small",
    cost: float | None = 0.5,
    allocation: Literal["on-demand", "spot"] = "on-demand",
    region: str = "here-1",
) -> Offer:
    """A machine of two vCPUs that a shop sells."""
    return Offer("shop", region, None, name, None, 2, 4, "x86_64", allocation, cost)


@dataclass
class Stock:
    """What a shop has, what goes wrong there, and what it was asked for."""

    offers: list[Offer] = field(default_factory=lambda: [an_offer()])
    failures: list[Exception] = field(default_factory=list)
    """What the next calls of `create` raise."""
    unpaid: list[Exception] = field(default_factory=list)
    """What the next calls of `offers` raise."""
    unswept: list[Exception] = field(default_factory=list)
    """What the next calls of `sweep` raise."""
    watch: Callable[[], object] = lambda: None
    """Called when a machine is asked for."""
    boot: Callable[[], Awaitable[None]] | None = None
    """What a machine that was bought does before it is there, such as waiting, or raising."""
    out_of_reach: bool = False
    """Whether neither the shop nor its machines answer."""
    notice: str = ""
    """The module that the next machines run to learn that they are taken back."""
    orders: list[Order] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    swept: list[str] = field(default_factory=list)


_stocks: dict[str, Stock] = {}
"""What each shop has, by its root: a provider is a value, which may be made again."""


@dataclass(frozen=True)
class Shop:
    """A provider that sells machines, which are processes of this machine.

    Besides its machines, a pool in a shop has a rule, which must be swept up: a file below `root`.

    >>> shop = Shop(root=str(tmp_path))
    >>> shop.stock.failures = [sky.errors.UnavailableError("sold out")]
    >>> sky.Compute(shop).start()
    """

    root: str = field(default_factory=lambda: os.path.join(tempfile.gettempdir(), "skyward-shop"))
    region: str = "here-1"
    owner: str = field(default_factory=owner)

    name = "shop"
    instance_type = None
    capabilities = Capabilities(sells=True, collects=True, encrypted=False, mounts_folders=False)

    @property
    def stock(self) -> Stock:
        """What this shop has; a test changes it."""
        return _stocks.setdefault(self.root, Stock())

    def check(self, request: Request) -> None:
        """Refuse machines that stay: those of a shop end with their client."""
        if request.keep:
            raise ConfigurationError("Shop(): its machines end with their client; leave out keep")

    def describe(self) -> dict[str, Any]:
        """The arguments."""
        return {"root": self.root, "region": self.region}

    def price(self, request: Request) -> float | None:
        """The price of the first offer."""
        return next((each.hourly_cost for each in self.stock.offers), None)

    def in_region(self, region: str) -> Shop:
        """The same shop elsewhere."""
        return replace(self, region=region)

    def offers(self, request: Request) -> list[Offer]:
        """What is in stock."""
        self.stock.requests.append(request)
        if self.stock.unpaid:
            raise self.stock.unpaid.pop(0)
        kinds = {
            "on-demand": ("on-demand",),
            "spot": ("spot",),
            "spot-if-available": ("spot", "on-demand"),
        }[request.allocation]
        most = request.max_hourly_cost
        return [
            replace(each, region=self.region)
            for kind in kinds
            for each in self.stock.offers
            if each.allocation == kind
            and (most is None or (each.hourly_cost is not None and each.hourly_cost <= most))
        ]

    def why_none(self, request: Request) -> str:
        """Nothing: a shop does not say why."""
        return ""

    def allocate(self, pool: str) -> Allocation[ShopMachine]:
        """The pool's machines, sold one by one, and its rule."""
        return ShopAllocation(self, pool)

    async def create(self, order: Order) -> ShopMachine:
        """Sell a machine."""
        stock = self.stock
        stock.orders.append(order)
        stock.watch()
        # Before the machine: what a client leaves that is killed from here on, `remains` has.
        rule = {"owner": self.owner, "pid": os.getpid(), "name": order.name}
        self.rules.mkdir(parents=True, exist_ok=True)
        (self.rules / order.pool).write_text(json.dumps(rule))
        if stock.failures:
            raise stock.failures.pop(0)
        offer = next(iter(self.offers(order.request)), None)
        if offer is None and stock.offers:
            raise UnavailableError("the shop has nothing of that kind, or nothing so cheap")
        machine = ShopMachine.sold(order, stock)
        machine.offer, machine.notice = offer, stock.notice
        if stock.boot is not None:
            # It costs from now on, whether or not it is ever there.
            await asyncio.to_thread(order.bought, machine.id, offer)
            try:
                await stock.boot()
            except Exception:
                await machine.destroy()
                raise
        return machine

    async def find(self, pool: str) -> list[ShopMachine]:
        """The machines of a pool, whoever bought them."""
        self.answer()
        found = sorted(_folder_of_machines().glob(f"shop-{pool}-*"))
        return [ShopMachine(folder, self.stock) for folder in found]

    @property
    def where(self) -> str:
        """Where `remains` looks."""
        return self.name

    async def remains(self) -> list[Remains]:
        """The pools that have a rule, with their machines."""
        found = []
        for rule in sorted(self.rules.glob("*")):
            about = json.loads(rule.read_text())
            machines = [f"machine {each.id}" for each in await self.find(rule.name)]
            resources = (*machines, f"rule {rule.name}")
            found.append(Remains(rule.name, about["name"], about["owner"], about["pid"], resources))
        return found

    @property
    def rules(self) -> Path:
        """The folder of the rules, which are called as their pools."""
        return Path(self.root, "rules")

    def answer(self) -> None:
        """Raise if the shop does not answer."""
        if self.stock.out_of_reach:
            raise UnavailableError("the shop does not answer")


class ShopAllocation(Allocation["ShopMachine"]):
    """The machines of one pool in a shop, and its rule."""

    def __init__(self, shop: Shop, pool: str) -> None:
        super().__init__(shop, pool)
        self._shop = shop

    async def sweep(self) -> None:
        """Remove the rule of the pool."""
        self._shop.answer()
        stock = self._shop.stock
        if stock.unswept:
            raise stock.unswept.pop(0)
        stock.swept.append(self.pool)
        (self._shop.rules / self.pool).unlink(missing_ok=True)


class ShopMachine(LocalMachine):
    """A folder in which commands run, as a machine of `sky.Local`, unless the shop is cut off."""

    def __init__(self, folder: Path, stock: Stock) -> None:
        super().__init__(folder)
        self._stock = stock

    @classmethod
    def sold(cls, order: Order, stock: Stock) -> ShopMachine:
        """Make a folder whose name says whose it is, so that it can be found after a crash."""
        prefix = f"shop-{order.pool}-{order.node}."
        try:
            folder = tempfile.mkdtemp(prefix=prefix, dir=_folder_of_machines())
        except OSError as problem:
            raise PoolStartError(f"node {order.node}: {problem}") from problem
        return cls(Path(folder), stock)

    async def run(
        self,
        command: Sequence[str],
        *,
        input: bytes = b"",
        output: Callable[[bytes], None] | None = None,
    ) -> int:
        """Run a child process in the folder."""
        await self.alive()
        return await super().run(command, input=input, output=output)

    async def dial(self, endpoint: str) -> socket.socket:
        """Connect to a socket of this machine."""
        if not await self.alive():
            raise UnreachableError(f"{self.id} is gone")
        return await super().dial(endpoint)

    async def alive(self) -> bool:
        """Whether the folder is there, if the shop answers."""
        if self._stock.out_of_reach:
            raise UnreachableError(f"{self.id} does not answer")
        return await super().alive()


def _folder_of_machines() -> Path:
    """Where machines are; a short path, since a Unix socket's may have 107 characters."""
    return Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
