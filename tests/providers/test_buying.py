"""Machines that cost money: what may be asked for, and what ends them in time."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward import kernel
from skyward.nodes.records import Journal
from skyward.testing import Shop, an_offer
from skyward.worker.usage import memory_there

from ..conftest import Eventually

QUIET = sky.Options(console=False, idle_timeout=77)


@sky.function
def wait_for(path: str) -> bool:
    while not os.path.exists(path):
        time.sleep(0.01)
    return True


class TestArguments:
    def test_a_seller_gets_what_was_asked_for(self, shop: Shop) -> None:
        compute = sky.Compute(
            shop,
            name="mine",
            allocation="spot-if-available",
            region="there-2",
            max_hourly_cost=0.75,
            disk_gb=200,
            ttl=600,
            options=QUIET,
        )
        with compute:
            (order,) = shop.stock.orders
        request = order.request
        assert (request.allocation, request.max_hourly_cost) == ("spot-if-available", 0.75)
        assert (request.disk_gb, request.ttl, request.idle_timeout) == (200, 600, 77)
        assert order.name == "mine"
        assert compute._spec.provider == shop.in_region("there-2")

    def test_a_shop_sells_nothing_that_the_request_forbids(self, shop: Shop) -> None:
        shop.stock.offers = [an_offer("dear", 1.0)]
        for forbids in ({"max_hourly_cost": 0.1}, {"allocation": "spot"}):
            with pytest.raises(
                sky.errors.PoolStartError, match="nothing of that kind, or nothing so"
            ):
                sky.Compute(shop, options=QUIET, **forbids).start()
        shop.stock.offers.append(an_offer("free", 0.0))
        with sky.Compute(shop, max_hourly_cost=0.1, options=QUIET) as compute:
            assert compute.stats().hourly_cost == 0.0

    def test_a_provider_can_tell_the_user_something(
        self, shop: Shop, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with sky.Compute(shop, options=QUIET):
            shop.stock.orders[0].note("m1.large is passed over: there is none")
        assert "skyward: m1.large is passed over: there is none" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("what", "value"),
        [
            ("allocation", "spot"),
            ("allocation", "spot-if-available"),
            ("region", "us-east-1"),
            ("max_hourly_cost", 2.0),
            ("disk_gb", 100),
        ],
    )
    def test_what_only_a_seller_understands_is_refused_by_others(
        self, shop: Shop, what: str, value: Any
    ) -> None:
        with pytest.raises(sky.errors.ConfigurationError) as refused:
            sky.Compute(sky.SSH(["host"]), **{what: value})
        assert f"Compute({what}={value!r}): the provider 'ssh' sells no machines" in str(
            refused.value
        )
        assert "shop" in str(refused.value), "a provider that does"

    def test_a_program_for_a_cloud_runs_on_this_machine_and_says_once_what_it_does_not_get(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        there = kernel.processors()
        cloud = sky.Compute(
            nodes=2,
            vcpus=there + 14,
            memory_gb=4_000_000,
            allocation="spot",
            region="us-east-1",
            max_hourly_cost=2.0,
            disk_gb=100,
            options=QUIET,
        )
        with cloud:
            threads = sky.function(os.getenv)("OMP_NUM_THREADS") @ cloud
        assert threads == [str(there)] * 2
        lines = capsys.readouterr().err.splitlines()
        assert [line.partition(f"{cloud.name}: ")[2] for line in lines] == [
            "allocation='spot', region='us-east-1', max_hourly_cost=2.0, disk_gb=100: ignored, "
            "since this machine is not bought",
            f"vcpus={there + 14}: this machine has {there}, and workers use those",
            f"memory_gb=4e+06: this machine has {memory_there() / 1e9:.3g} GB",
        ]

    @pytest.mark.parametrize(
        ("what", "value", "advice"),
        [
            ("allocation", "cheap", "choose 'on-demand', 'spot'"),
            ("allocation", None, "choose 'on-demand', 'spot'"),
            ("region", "", "give the provider's name of a region"),
            ("region", 3, "give the provider's name of a region"),
            ("max_hourly_cost", 0, "give a number above 0"),
            ("max_hourly_cost", "2", "give a number above 0"),
            ("ttl", -1, "give a number above 0"),
            ("ttl", True, "give a number above 0"),
            ("ttl", float("nan"), "give a number above 0"),
            ("disk_gb", float("inf"), "give a number above 0"),
        ],
    )
    def test_a_value_that_means_nothing_is_refused(
        self, shop: Shop, what: str, value: Any, advice: str
    ) -> None:
        with pytest.raises(sky.errors.ConfigurationError) as refused:
            sky.Compute(shop, **{what: value})
        assert f"Compute({what}={value!r}): {advice}" in str(refused.value)


class TestTimeToLive:
    def test_ends_the_pool_and_its_tasks(
        self,
        shop: Shop,
        state: Journal,
        tmp_path: Path,
        eventually: Eventually,
        capsys: pytest.CaptureFixture[str],
        nothing_left: None,
    ) -> None:
        with sky.Compute(shop, ttl=600, options=QUIET, name="mine") as compute:
            running, waiting = (wait_for(str(tmp_path / "never")) > compute for _ in range(2))
            compute._open_fleet._expire(600)
            for future in (running, waiting):
                with pytest.raises(
                    sky.errors.PoolClosedError, match="time to live of 600 s is over"
                ):
                    future.result(100)
            eventually(lambda: not state.pools())
            with pytest.raises(
                sky.errors.PoolClosedError, match=r"is over; give Compute a larger ttl"
            ):
                wait_for("/") >> compute
        assert "mine: its time to live of 600 s is over; it ends" in capsys.readouterr().err

    def test_leaving_the_block_waits_for_the_machines_that_it_removes(
        self, state: Journal, shop: Shop
    ) -> None:
        with sky.Compute(shop, options=QUIET) as compute:
            compute._open_fleet._expire(600)
        assert not state.pools()

    def test_ends_a_start_that_takes_longer(self, shop: Shop, nothing_left: None) -> None:
        with pytest.raises(
            sky.errors.PoolStartError, match=r"did not start: .*time to live of 0.05 s"
        ):
            sky.Compute(shop, ttl=0.05, options=QUIET).__enter__()
