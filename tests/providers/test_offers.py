"""`sky.offers` and `sky offers`: what can be bought, the cheapest first."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import skyward as sky
from skyward import providers
from skyward.cli.main import sky as command
from skyward.providers import Request
from skyward.testing import Shop, an_offer


@pytest.fixture
def shop(only_shop: Shop) -> Shop:
    only_shop.stock.offers = [
        an_offer("m1.unknown", None),
        an_offer("m1.big", 2.0),
        an_offer("m1.big", 0.7, "spot"),
        an_offer("m1.small", 0.5),
    ]
    return only_shop


def told(offers: list[sky.Offer]) -> list[tuple[str, str, float | None]]:
    return [(each.instance_type, each.allocation, each.hourly_cost) for each in offers]


def test_all_offers_come_the_cheapest_first_and_unknown_prices_last(shop: Shop) -> None:
    assert told(sky.offers()) == [
        ("m1.small", "on-demand", 0.5),
        ("m1.big", "spot", 0.7),
        ("m1.big", "on-demand", 2.0),
        ("m1.unknown", "on-demand", None),
    ]


def test_the_provider_is_asked_for_what_is_wanted(shop: Shop) -> None:
    found = sky.offers(
        "a100-40gb:2",
        vcpus=8,
        memory_gb=64,
        region="there-2",
        allocation="spot",
        max_hourly_cost=0.9,
        providers=[shop],
    )
    assert told(found) == [("m1.big", "spot", 0.7)]
    assert found[0].region == "there-2"
    (request,) = shop.stock.requests
    assert request.accelerator == sky.accelerators.A100(2, memory="40GB")
    assert (request.vcpus, request.memory_gb) == (8, 64)
    assert (request.allocation, request.max_hourly_cost) == ("spot", 0.9)


def test_an_offer_that_two_requests_find_is_listed_once(shop: Shop) -> None:
    assert len(sky.offers(providers=[shop, shop])) == 4


def test_a_provider_that_does_not_answer_is_passed_over(
    shop: Shop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = Shop(root=str(tmp_path / "other"))
    other.stock.unpaid = [sky.errors.UnavailableError("the other shop is closed")]
    assert len(sky.offers(providers=[other, shop])) == 4
    assert "skyward: shop is passed over: the other shop is closed" in capsys.readouterr().err


def test_the_only_provider_that_does_not_answer_is_an_error(shop: Shop) -> None:
    shop.stock.unpaid = [sky.errors.UnavailableError("no credentials; run `aws configure`")]
    with pytest.raises(sky.errors.UnavailableError, match="aws configure"):
        sky.offers()


def test_without_a_shop_there_is_nothing_to_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(providers, "BUILT_IN", {"local": "skyward.providers.local:Local"})
    with pytest.raises(sky.errors.ConfigurationError, match="no provider that sells machines"):
        sky.offers()


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"accelerator": "Z9000"}, "no model called 'Z9000'"),
        ({"accelerator": 3}, r"offers\(accelerator=3\): expected sky.accelerators"),
        ({"accelerator": "L4:x"}, "'L4:x': the count 'x' is no whole number; write .* 'L4:8'"),
        ({"accelerator": sky.accelerators.L4}, r"write sky.accelerators.L4\(\)"),
        ({"vcpus": 0}, r"offers\(vcpus=0\): give a number above 0"),
        ({"memory_gb": "2"}, r"offers\(memory_gb='2'\): give a number"),
        ({"region": ""}, r"offers\(region=''\): give the provider's name"),
        ({"allocation": "cheap"}, r"offers\(allocation='cheap'\): choose"),
        ({"providers": [sky.Local()]}, r"it sells no machines; give instances of Shop"),
        ({"providers": [Shop]}, r"expected Shop\(\) \(give an instance"),
        ({"providers": ["aws"]}, r"offers\(provider='aws'\): "),
        ({"providers": "aws"}, r"give a list of providers, such as \[sky.AWS\(\)\]"),
        ({"providers": sky.Local()}, "give a list of providers"),
        ({"providers": 3}, r"offers\(providers=3\): give a list"),
    ],
)
def test_what_means_nothing_is_refused(shop: Shop, wanted: dict[str, Any], message: str) -> None:
    with pytest.raises(sky.errors.ConfigurationError, match=message):
        sky.offers(**wanted)


class TestCommand:
    def test_shows_a_table(self, shop: Shop) -> None:
        done = CliRunner().invoke(command, ["offers", "--spot"])
        assert done.output.splitlines() == [
            "PROVIDER  TYPE    ACCELERATOR  VCPUS  MEMORY  PLACE   ALLOCATION  $/HOUR",
            "shop      m1.big                   2    4 GB  here-1  spot         $0.70",
        ]

    def test_says_how_many_it_does_not_show(self, shop: Shop) -> None:
        done = CliRunner().invoke(command, ["offers", "--limit", "1"])
        assert len(done.stdout.splitlines()) == 2
        assert "3 more; --limit 0 shows all" in done.stderr
        everything = CliRunner().invoke(command, ["offers", "--limit", "0"])
        assert len(everything.stdout.splitlines()) == 5
        assert everything.stderr == ""

    def test_shows_a_type_once_for_all_its_zones(self, shop: Shop) -> None:
        spot = an_offer("m1.big", 0.7, "spot")
        shop.stock.offers = [
            replace(spot, zone=f"here-1{letter}", hourly_cost=cost)
            for letter, cost in (("a", 0.9), ("b", 0.7), ("c", 0.8))
        ]
        (line,) = CliRunner().invoke(command, ["offers"]).stdout.splitlines()[1:]
        assert line.endswith("here-1b and 2 more  spot         $0.70")
        assert len(json.loads(CliRunner().invoke(command, ["offers", "--json"]).stdout)) == 3

    def test_both_ways_to_buy_are_the_same_as_none(self, shop: Shop) -> None:
        both = CliRunner().invoke(command, ["offers", "--spot", "--on-demand"])
        assert both.stdout == CliRunner().invoke(command, ["offers"]).stdout
        assert both.stdout.splitlines()[-1].endswith("on-demand   unknown")

    def test_passes_its_options_on(self, shop: Shop) -> None:
        options = ["--region", "there-2", "--vcpus", "2", "--memory", "8", "--max-cost", "1.5"]
        done = CliRunner().invoke(command, ["offers", "L4", *options, "--on-demand", "--json"])
        (document,) = json.loads(done.output)
        assert document["region"] == "there-2"
        assert document["hourly_cost"] == 0.5
        assert document["accelerator"] is None
        (request,) = shop.stock.requests
        assert request.accelerator == sky.accelerators.L4()
        assert (request.vcpus, request.memory_gb, request.max_hourly_cost) == (2, 8, 1.5)

    def test_nothing_is_an_answer(self, shop: Shop) -> None:
        done = CliRunner().invoke(command, ["offers", "--max-cost", "0.01", "--spot"])
        assert done.exit_code == 0
        assert done.output == "no provider sells such a machine: --max-cost 0.01 --spot\n"

    def test_the_only_provider_says_why_it_has_nothing(
        self, shop: Shop, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def why_none(self: Shop, request: Request) -> str:
            return f"{self.region} has nothing for {request.max_hourly_cost} dollars"

        monkeypatch.setattr(Shop, "why_none", why_none)
        done = CliRunner().invoke(command, ["offers", "--max-cost", "0.01", "--region", "there-2"])
        assert done.output == (
            "no provider sells such a machine: shop: there-2 has nothing for 0.01 dollars\n"
        )

    def test_a_provider_that_does_not_answer_is_one_line(self, shop: Shop) -> None:
        shop.stock.unpaid = [sky.errors.UnavailableError("no credentials; run `aws configure`")]
        done = CliRunner().invoke(command, ["offers"])
        assert done.exit_code == 1
        assert done.stderr == "Error: no credentials; run `aws configure`\n"
