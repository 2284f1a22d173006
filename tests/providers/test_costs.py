"""What machines cost: said before they are made, counted while they are there, told at the end."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

import skyward as sky
from skyward import providers
from skyward.cli.main import sky as command
from skyward.nodes.briefing import TTL_GRACE_SECONDS
from skyward.nodes.host import Host, Ledger
from skyward.nodes.node import BOUGHT_IN_VAIN, RETRY_PAUSES, SPARE_SECONDS
from skyward.nodes.records import Journal
from skyward.providers import Offer, Order, money
from skyward.testing import Shop, an_offer, plain_request

LOUD = sky.Options(console=True)


@sky.function
def square(number: int) -> int:
    return number * number


def host_of(shop: Shop, state: Journal, ledger: Ledger) -> Host:
    """The host of the first node of a pool `p`, for whose machine the ledger is charged."""
    order = Order("p", 0, plain_request())
    return Host(shop, shop.allocate("p"), order, state, ledger=ledger)


class Clock:
    """A clock that a test moves, in minutes."""

    minutes = 0.0

    def __call__(self) -> float:
        return 60 * self.minutes


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ledger(clock: Clock) -> Ledger:
    return Ledger(lambda: None, clock)


class TestOffers:
    def test_an_offer_says_what_it_is_and_what_it_costs(self) -> None:
        l4 = sky.accelerators.L4()
        offer = Offer("aws", "us-east-1", None, "g6.xlarge", l4, 4, 16, "x86_64", "spot", 0.3291)
        assert str(offer) == (
            "g6.xlarge (L4-24GB, 4 vCPUs, 16 GB) in us-east-1, spot, $0.33 an hour"
        )
        assert offer.of(2).startswith("2 x g6.xlarge (L4-24GB, 4 vCPUs, 16 GB) in us-east-1, spot,")
        assert offer.of(2).endswith("$0.33 an hour each, $0.66 an hour in all")
        assert str(an_offer(cost=None)).endswith("on demand, price unknown")

    @pytest.mark.parametrize(
        ("dollars", "said"), [(0, "$0.00"), (0.0116, "$0.0116"), (0.5, "$0.50"), (40.9, "$40.90")]
    )
    def test_small_amounts_have_more_decimals(self, dollars: float, said: str) -> None:
        assert money(dollars) == said


class TestLedger:
    def test_a_machine_costs_from_its_making_to_its_end(self, ledger: Ledger, clock: Clock) -> None:
        first = ledger.begin(an_offer(cost=0.6))
        clock.minutes = 30
        second = ledger.begin(an_offer(cost=0.6))
        assert ledger.hourly_cost == pytest.approx(1.2)
        clock.minutes = 60
        ledger.end(first)
        ledger.end(first)
        assert ledger.cost == pytest.approx(0.9)
        assert ledger.hourly_cost == pytest.approx(0.6)
        clock.minutes = 90
        ledger.end(second)
        clock.minutes = 900
        assert ledger.cost == pytest.approx(1.2)
        assert ledger.hourly_cost == 0

    def test_the_receipt_says_what_was_bought_and_for_how_long(
        self, ledger: Ledger, clock: Clock
    ) -> None:
        assert ledger.receipt() == ""
        assert isinstance(ledger.cost, float)
        spot = [ledger.begin(an_offer("g6.xlarge", 0.5, "spot")) for _ in range(2)]
        clock.minutes = 12
        for entry in spot:
            ledger.end(entry)
        assert ledger.receipt() == "cost $0.20: 2 x g6.xlarge spot for 24 min in all"
        last = ledger.begin(an_offer("g6.xlarge", 1))
        clock.minutes = 12.5
        ledger.end(last)
        assert ledger.receipt().endswith("24 min in all, 1 x g6.xlarge on demand for 30 s")
        ledger.end(ledger.begin(an_offer("g6.xlarge", 0.5, "spot")))
        assert "3 x g6.xlarge spot for 24 min in all" in ledger.receipt()

    def test_an_unknown_price_is_not_taken_for_nothing(self, ledger: Ledger, clock: Clock) -> None:
        ledger.begin(an_offer(cost=None))
        clock.minutes = 60
        assert (ledger.cost, ledger.hourly_cost) == (None, None)
        assert ledger.receipt() == "cost unknown: 1 x m1.small on demand for 60 min"
        ledger.begin(an_offer(cost=1))
        assert ledger.receipt().startswith("cost at least $0.00: ")

    def test_the_providers_price_holds_for_machines_without_an_offer_alone(
        self, clock: Clock
    ) -> None:
        ledger = Ledger(lambda: 2.0, clock)
        ledger.begin(None)
        clock.minutes = 2
        assert ledger.hourly_cost == 2
        assert ledger.receipt() == "cost $0.0667: 1 machine for 2 min"
        ledger.begin(an_offer(cost=None))
        assert (ledger.cost, ledger.hourly_cost) == (None, None)
        assert ledger.receipt().startswith("cost at least $0.0667: 1 machine for 2 min, 1 x m1.")

    def test_machines_that_cost_nothing_have_no_receipt(self, clock: Clock) -> None:
        for price in (0.0, None):
            ledger = Ledger(lambda price=price: price, clock)  # type: ignore[misc]
            ledger.begin(None)
            assert ledger.receipt() == ""
            assert ledger.cost == price


class TestPools:
    def test_the_console_says_the_price_before_and_the_cost_after(
        self, shop: Shop, capsys: pytest.CaptureFixture[str]
    ) -> None:
        shop.stock.offers = [an_offer("m1.big", 3600.0)]
        with sky.Compute(shop, nodes=2, options=LOUD, name="p") as compute:
            stats = compute.stats()
            assert stats.hourly_cost == 7200
            assert stats.cost is not None
            assert stats.cost > 0
        said = capsys.readouterr().err
        assert (
            "skyward: p: starting 2 x m1.big (2 vCPUs, 4 GB) in here-1, on demand, "
            "$3600.00 an hour each, $7200.00 an hour in all\n"
        ) in said
        assert said.index("starting 2 x m1.big") < said.index("node 0: starting")
        assert ", $7200.00 an hour\n" in said, "when the nodes are ready"
        last = said.splitlines()[-1]
        assert "p: cost $" in last, "nothing of calls: there were none"
        assert ": 2 x m1.big on demand for " in last

    def test_without_a_price_it_says_so(
        self, shop: Shop, capsys: pytest.CaptureFixture[str]
    ) -> None:
        shop.stock.offers = [an_offer(cost=None)]
        with sky.Compute(shop, options=LOUD) as compute:
            assert compute.stats().cost is None
            shop.stock.offers = []
        said = capsys.readouterr().err
        assert "starting m1.small (2 vCPUs, 4 GB) in here-1, on demand, price unknown\n" in said
        assert ": cost unknown: 1 x m1.small" in said

    @pytest.mark.parametrize("nodes", [2, (0, 2)])
    def test_without_an_offer_it_says_so_and_names_no_price(
        self, shop: Shop, nodes: int | tuple[int, int], capsys: pytest.CaptureFixture[str]
    ) -> None:
        shop.stock.offers = []
        shop.stock.failures = [sky.errors.UnavailableError("there is no such machine")] * 2
        compute = sky.Compute(shop, nodes=nodes, options=LOUD, name="p")
        if nodes == 2:
            with pytest.raises(sky.errors.UnavailableError, match="there is no such machine"):
                compute.__enter__()
        else:
            with compute:
                pass
        count = "2 nodes" if nodes == 2 else "with no nodes"
        said = capsys.readouterr().err
        assert f"p: starting {count} (shop); no offer fulfils the request\n" in said
        assert "price" not in said

    def test_a_provider_that_does_not_answer_ends_the_start(self, shop: Shop) -> None:
        shop.stock.unpaid = [sky.errors.UnavailableError("no credentials")]
        with pytest.raises(sky.errors.UnavailableError, match="no credentials"):
            sky.Compute(shop, options=LOUD).__enter__()
        assert not shop.stock.orders

    def test_a_start_that_fails_has_cost_something(
        self, shop: Shop, capsys: pytest.CaptureFixture[str]
    ) -> None:
        shop.stock.offers = [an_offer("m1.big", 3600.0)]

        def broken(compute: sky.Compute) -> Iterator[None]:
            raise OSError("no licence")
            yield

        plugin = sky.Plugin.create("broken").with_around_client(broken)
        with pytest.raises(sky.errors.PluginError, match="no licence"):
            sky.Compute(shop, plugins=[plugin], options=LOUD, name="p").__enter__()
        last = capsys.readouterr().err.splitlines()[-1]
        assert "p: did not start; cost $" in last
        assert ": 1 x m1.big on demand for " in last

    def test_this_machine_costs_nothing_and_nothing_is_said(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with sky.Compute(options=LOUD) as compute:
            assert (compute.stats().cost, compute.stats().hourly_cost) == (0, 0)
        assert "$" not in capsys.readouterr().err


class TestBuyingInVain:
    @pytest.fixture
    def unreachable(self, shop: Shop, monkeypatch: pytest.MonkeyPatch) -> Shop:
        """A shop whose machines are bought, and never answer."""
        monkeypatch.setattr("skyward.nodes.node.RETRY_PAUSES", (0.0, 0.0))

        async def boot() -> None:
            raise sky.errors.UnreachableError("it does not answer")

        shop.stock.boot = boot
        return shop

    def test_after_three_machines_the_node_is_given_up_until_a_resize(
        self, unreachable: Shop, capsys: pytest.CaptureFixture[str], eventually
    ) -> None:
        said: list[str] = []

        def is_said(text: str) -> bool:
            said.append(capsys.readouterr().err)
            return text in "".join(said)

        with sky.Compute(unreachable, nodes=(0, 4), options=LOUD) as compute:
            for _ in range(2):
                with pytest.raises(sky.NodeLostError) as failed:
                    (square(2) > compute).result(100)
                assert "3 machines in a row were bought and did not become" in str(failed.value)
                assert "compute.resize" in str(failed.value)
                assert len(unreachable.stock.orders) == 3
            # The console has a thread of its own.
            eventually(lambda: is_said("so no more are bought; compute.resize tries again"))

            unreachable.stock.boot = None
            compute.resize(1)
            assert square(2) >> compute == 4

    def test_what_was_never_bought_is_tried_again(self, unreachable: Shop) -> None:
        unreachable.stock.boot = None
        unreachable.stock.failures = [sky.errors.UnavailableError("sold out")] * 5
        with sky.Compute(unreachable, nodes=(0, 1), options=LOUD) as compute:
            assert (square(2) > compute).result(100) == 4
        assert len(unreachable.stock.orders) == 6


class TestJournal:
    def test_machines_that_are_gone_still_count(
        self, state: Journal, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        now = 1000.0
        monkeypatch.setattr("skyward.nodes.records.time.time", lambda: now)
        state.open_pool("p", "mine", "shop", {}, None)
        for node, price in ((0, 1.0), (1, 2.0)):
            state.intend("p", node)
            state.made("p", node, f"m-{node}", "10.0.0.1", price)
        state.intend("p", 2)
        state.gone("p", 2)
        now += 3600
        state.gone("p", 0)
        now += 3600

        (record,) = state.pools()

        assert record.cost == pytest.approx(1 + 4)
        assert record.hourly_cost == 2
        state.gone("p", 1)
        assert state.pools()[0].cost == pytest.approx(5)
        assert CliRunner().invoke(command, ["ps"]).output.splitlines()[1].split()[-1] == "$5.00"

    def test_ps_shows_the_cost_so_far_and_by_the_hour(self, state: Journal) -> None:
        state.open_pool("p", "mine", "shop", {}, None)
        state.intend("p", 0)
        state.made("p", 0, "m-0", "10.0.0.1", 1.25)

        heads, row = CliRunner().invoke(command, ["ps"]).output.splitlines()

        assert heads.split()[-2:] == ["COST", "$/HOUR"]
        assert row.split()[-1] == "$1.25"

    def test_the_cost_of_a_pool_left_behind_is_an_upper_bound(
        self, state: Journal, clock: Clock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("skyward.nodes.records.time.time", lambda: 1000.0 + clock())
        state.open_pool("p", "mine", "shop", {}, None)
        state.intend("p", 0)
        state.made("p", 0, "m-0", "10.0.0.1", 1.2)
        clock.minutes = 60

        def shown() -> tuple[str, bool]:
            row = CliRunner().invoke(command, ["ps"]).output.splitlines()[1]
            (document,) = json.loads(CliRunner().invoke(command, ["ps", "--json"]).output)
            assert document["cost"] == pytest.approx(1.2)
            return row, document["cost_is_upper_bound"]

        row, bound = shown()
        assert ("at most" in row, bound) == (False, False), "its process watches its machines"
        monkeypatch.setattr("skyward.nodes.records._began", lambda pid: 0.0)
        row, bound = shown()
        assert ("at most $1.20" in row, bound) == (True, True)

    def test_a_host_writes_the_price_of_its_machine(self, shop: Shop, state: Journal) -> None:
        state.open_pool("p", "mine", "shop", shop.describe(), None)
        host = Host(shop, shop.allocate("p"), Order("p", 0, plain_request()), state)
        providers.submit(host.prepare()).result()
        assert state.pools()[0].machines[0].price == 0.5
        host.stop(0).result()
        (record,) = state.pools()
        assert record.machines == ()
        assert record.spent > 0
        assert not asyncio.run(shop.find("p"))

    def test_a_clock_that_jumps_back_makes_no_cost_negative(self, state: Journal) -> None:
        state.open_pool("p", "mine", "shop", {}, 0.5)
        state.intend("p", 0)
        state.made("p", 0, "m-0", "10.0.0.1", 1.2, created=time.time() + 3600)
        assert state.pools()[0].cost == 0
        state.gone("p", 0)
        assert state.pools()[0].spent == 0

    def test_a_machine_of_unknown_price_does_not_cost_what_its_pools_others_cost(
        self, state: Journal
    ) -> None:
        state.open_pool("p", "mine", "shop", {}, 0.5)
        state.intend("p", 0)
        assert state.pools()[0].hourly_cost == 0.5, "what it will probably cost"
        state.made("p", 0, "m-0", "10.0.0.1", None)
        (record,) = state.pools()
        assert (record.cost, record.hourly_cost) == (None, None)
        state.gone("p", 0)
        (record,) = state.pools()
        assert (record.spent, record.cost, record.hourly_cost) == (0, None, 0)

    def test_a_machine_costs_from_when_it_was_bought(
        self, shop: Shop, state: Journal, clock: Clock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("skyward.nodes.host.time.time", lambda: 1000.0 + clock())
        state.open_pool("p", "mine", "shop", shop.describe(), None)
        ledger = Ledger(lambda: None, clock)
        seen: list[tuple[str | None, float | None, float]] = []

        async def boot() -> None:
            host_noted = host._noting
            assert host_noted is not None
            await asyncio.wrap_future(host_noted)
            (machine,) = state.pools()[0].machines
            seen.append((machine.address, machine.price, machine.created))
            clock.minutes = 6

        shop.stock.boot = boot
        host = host_of(shop, state, ledger)
        providers.submit(host.prepare()).result()

        (machine,) = state.pools()[0].machines
        assert seen == [(None, 0.5, 1000.0)]
        assert (machine.created, machine.address) == (1000.0, "127.0.0.1")
        assert ledger.cost == pytest.approx(0.05)
        assert state.pools()[0].cost == pytest.approx(0.05)
        host.stop(0).result()
        assert state.pools()[0].spent == pytest.approx(0.05)

    def test_a_machine_that_was_bought_and_never_reached_has_cost_something(
        self, shop: Shop, state: Journal, clock: Clock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("skyward.nodes.host.time.time", lambda: 1000.0 + clock())
        state.open_pool("p", "mine", "shop", shop.describe(), None)
        ledger = Ledger(lambda: None, clock)

        async def boot() -> None:
            clock.minutes = 6
            raise sky.errors.UnreachableError("it does not answer")

        shop.stock.boot = boot
        host = host_of(shop, state, ledger)
        with pytest.raises(sky.errors.UnreachableError):
            providers.submit(host.prepare()).result()
        clock.minutes = 60

        assert ledger.receipt() == "cost $0.0500: 1 x m1.small on demand for 6 min"
        assert ledger.hourly_cost == 0
        (record,) = state.pools()
        assert (record.machines, record.spent) == ((), pytest.approx(0.05))

    def test_a_machine_that_is_bought_when_its_node_has_ended_is_not_charged(
        self, shop: Shop, state: Journal, ledger: Ledger
    ) -> None:
        state.open_pool("p", "mine", "shop", shop.describe(), None)
        host = host_of(shop, state, ledger)
        providers.submit(host.prepare()).result()
        host.stop(0).result()
        shop.stock.orders[0].bought("m-9", an_offer())
        assert ledger.hourly_cost == 0

    def test_a_journal_of_an_earlier_version_gets_the_new_columns(self, state: Journal) -> None:
        state.path.parent.mkdir(parents=True)
        with sqlite3.connect(state.path) as database:
            database.executescript(
                "create table pools (id text primary key, name text not null, provider text not "
                "null, arguments text not null, host text not null, pid integer not null, began "
                "real not null, created real not null, price real);"
                "create table machines (pool text not null references pools (id) on delete "
                "cascade, node integer not null, id text, address text, created real not null, "
                "primary key (pool, node));"
                "insert into pools values ('old', 'mine', 'shop', '{}', 'h', 1, 1.0, 1.0, 0.5);"
                "insert into machines values ('old', 0, 'm-0', '10.0.0.1', 1.0);"
            )
        database.close()

        (record,) = state.pools()

        assert (record.spent, record.machines[0].price, record.hourly_cost) == (0, None, 0.5)
        state.gone("old", 0)
        assert state.pools()[0].spent > 0
        state.open_pool("new", "mine", "shop", {}, None)
        assert [each.id for each in state.pools()] == ["old", "new"]


def test_the_page_has_the_times_of_the_code() -> None:
    page = Path(__file__).parents[2].joinpath("docs", "costs.md").read_text("utf-8")
    assert f"{SPARE_SECONDS:g} seconds before the end" in page
    assert f"{TTL_GRACE_SECONDS:g} s later each agent ends" in page
    assert f"idle_timeout={sky.Options().idle_timeout:g}" in page
    assert f"orphan_timeout={sky.Options().orphan_timeout:g}" in page
    assert f"up to {RETRY_PAUSES[1] / 60:g} minutes; the console" in page
    assert f"| {BOUGHT_IN_VAIN} machines in a row" in page
