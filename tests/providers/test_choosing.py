"""`Compute.any`: one of several kinds of machines, whichever can be had."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward.nodes.records import Journal
from skyward.testing import Shop, an_offer

QUIET = sky.Options(console=False)


@pytest.fixture
def dear(shop: Shop) -> Shop:
    shop.stock.offers = [an_offer("dear", 2.0)]
    return shop


@pytest.fixture
def cheap(dear: Shop, tmp_path: Path) -> Shop:
    shop = Shop(root=str(tmp_path / "cheap"))
    shop.stock.offers = [an_offer("cheap", 1.0)]
    return shop


@pytest.fixture
def unknown(dear: Shop, tmp_path: Path) -> Shop:
    shop = Shop(root=str(tmp_path / "unknown"))
    shop.stock.offers = [an_offer("unknown", None)]
    return shop


def bought(compute: sky.Compute) -> str:
    with compute:
        return compute._open_fleet.ledger.receipt().partition(" x ")[2].split()[0]


def specs(*shops: Shop) -> list[sky.Spec]:
    return [sky.Spec(shop) for shop in shops]


def test_the_cheapest_is_tried_first_and_an_unknown_price_last(
    dear: Shop, cheap: Shop, unknown: Shop
) -> None:
    assert bought(sky.Compute.any(specs(unknown, dear, cheap), options=QUIET)) == "cheap"
    assert bought(sky.Compute.any(specs(unknown, dear), options=QUIET)) == "dear"
    assert not unknown.stock.orders


def test_or_the_first(dear: Shop, cheap: Shop) -> None:
    assert bought(sky.Compute.any(specs(dear, cheap), choose="first", options=QUIET)) == "dear"


@pytest.mark.parametrize("problem", [sky.errors.UnavailableError, sky.errors.UnreachableError])
def test_what_cannot_be_had_is_passed_over_with_a_line(
    dear: Shop,
    cheap: Shop,
    state: Journal,
    problem: type[Exception],
    capsys: pytest.CaptureFixture[str],
) -> None:
    cheap.stock.failures = [problem("sold out")]
    on_record: list[list[str]] = []
    dear.stock.watch = lambda: on_record.append([pool.id for pool in state.pools()])

    pool = sky.Compute.any(specs(cheap, dear), options=QUIET, name="p")
    assert bought(pool) == "dear"

    assert (
        "skyward: p: shop on demand in here-1 is passed over: sold out" in capsys.readouterr().err
    )
    assert on_record == [[dear.stock.orders[0].pool]], "the first was removed before"


def test_a_provider_that_tells_no_price_is_passed_over(
    dear: Shop, cheap: Shop, capsys: pytest.CaptureFixture[str]
) -> None:
    cheap.stock.unpaid = [sky.errors.UnavailableError("no credentials")]
    assert bought(sky.Compute.any(specs(cheap, dear), options=QUIET)) == "dear"
    assert "is passed over: no credentials" in capsys.readouterr().err


def test_if_none_can_be_had_the_error_has_every_reason(
    dear: Shop, cheap: Shop, state: Journal, nothing_left: None
) -> None:
    cheap.stock.failures = [sky.errors.UnavailableError("sold out")]
    dear.stock.failures = [sky.errors.UnreachableError("no answer")]
    pool = sky.Compute.any(
        [
            sky.Spec(cheap, region="there-2"),
            sky.Spec(dear, allocation="spot-if-available"),
        ],
        options=QUIET,
        name="p",
    )
    with pytest.raises(sky.errors.UnavailableError) as failed:
        pool.__enter__()
    assert str(failed.value) == (
        "p did not start: none of its 2 specs is available; add another spec, or try again later:"
        "\n- shop on demand in there-2: sold out"
        "\n- shop spot-if-available in here-1: no answer"
    )
    assert not state.pools()


def test_a_single_spec_is_told_in_the_same_way(dear: Shop) -> None:
    dear.stock.failures = [sky.errors.UnreachableError("no answer")]
    with pytest.raises(
        sky.errors.UnavailableError,
        match=r"its only spec is not.*\n- shop on demand in here-1: no a",
    ):
        sky.Compute.any(specs(dear), options=QUIET).__enter__()


def test_specs_are_told_apart_by_what_they_ask_for(dear: Shop) -> None:
    l4 = sky.accelerators.L4(2)
    aws = sky.AWS(region="us-east-1", instance_type="g6.xlarge")
    assert str(sky.Spec(sky.Local())) == "local"
    assert str(sky.Spec(sky.Local(), vcpus=2)) == "local 2 vCPUs"
    assert str(sky.Spec(aws)) == "aws g6.xlarge on demand in us-east-1"
    assert (
        str(sky.Spec(sky.AWS(), l4, vcpus=8, memory_gb=1.5, region="r", allocation="spot"))
        == "aws L4-24GB:2, 8 vCPUs, 1.5 GB, spot in r"
    )


def test_another_failure_is_raised_at_once(dear: Shop, cheap: Shop) -> None:
    cheap.stock.failures = [sky.errors.ImageError("no such package")]
    with pytest.raises(sky.errors.ImageError, match="no such package"):
        sky.Compute.any(specs(cheap, dear), options=QUIET).__enter__()
    assert not dear.stock.orders


def test_calls_run_on_what_was_chosen(dear: Shop, cheap: Shop) -> None:
    cheap.stock.failures = [sky.errors.UnavailableError("sold out")] * 2
    with sky.Compute.any(specs(cheap, dear), nodes=2, options=QUIET) as compute:
        assert len(sky.function(os.getpid)() @ compute) == 2


def test_everything_is_checked_when_it_is_made(dear: Shop) -> None:
    wrong: list[tuple[Any, dict[str, Any], str]] = [
        ([], {}, r"Compute.any\(\[\]\): give a list"),
        (dear, {}, "give a list of at least one"),
        ([dear], {}, r"expected sky.Spec\(provider"),
        (specs(dear), {"choose": "best"}, r"choose='best'\): choose 'cheapest'"),
        ([sky.Spec(sky.SSH(["host"]), region="x")], {}, "sells no machines"),
        (specs(dear), {"nodes": -1}, "must be at least"),
        (specs(dear), {"ttl": 0}, "give a number above 0"),
    ]
    for given, more, message in wrong:
        with pytest.raises(sky.errors.ConfigurationError, match=message):
            sky.Compute.any(given, **more)
    for arguments, message in (
        ({"provider": sky.Local}, "give an instance, not the class"),
        ({"provider": dear, "vcpus": 0}, r"Spec\(vcpus=0\): give a number above 0"),
        ({"provider": dear, "accelerator": "L4"}, r"expected sky.accelerators.L4\(\)"),
        ({"provider": "aws"}, r"Spec\(provider='aws'\): expected sky.AWS\(\)$"),
        ({"provider": sky.AWS}, r"expected sky.AWS\(\) \(give an instance"),
        ({"provider": sky.SSH}, r"expected sky.SSH\(...\) \(give an instance"),
        ({"provider": dear, "allocation": "cheap"}, r"Spec\(allocation='cheap'\): choose"),
    ):
        with pytest.raises(sky.errors.ConfigurationError, match=message):
            sky.Spec(**arguments)  # type: ignore[arg-type]
    assert not dear.stock.requests


def test_a_pool_on_this_machine_costs_nothing_and_comes_first(dear: Shop) -> None:
    with sky.Compute.any([sky.Spec(dear), sky.Spec(sky.Local())], options=QUIET) as compute:
        assert compute.stats().cost == 0
    assert not dear.stock.orders
