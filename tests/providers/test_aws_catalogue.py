"""What EC2 sells, and what is chosen of it, over recorded answers."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from skyward import accelerators
from skyward.accelerators import Accelerator
from skyward.errors import ConfigurationError, UnavailableError
from skyward.providers import Offer, Request
from skyward.providers.aws import AWS
from skyward.providers.aws import catalogue as module
from skyward.providers.aws.catalogue import Catalogue, place
from skyward.spec import Image

from .aws_stand_ins import recorded


class RecordedAccess:
    """An account that answers with the recorded answers, and counts the requests."""

    def __init__(self, region: str = "us-east-1") -> None:
        self.region, self.endpoint, self.profile = region, "", None
        self.calls: Counter[str] = Counter()
        self.refuses: set[str] = set()

    def pages(
        self, service: str, operation: str, key: str, *, region: str = "", **arguments: Any
    ) -> list[Any]:
        self.calls[operation] += 1
        if operation in self.refuses:
            raise UnavailableError(f"you may not do {operation}")
        if operation == "get_products":
            assert (service, region) == ("pricing", "us-east-1")
            return [json.dumps(each) for each in recorded("products", self.region)]
        if operation == "describe_instance_types":
            sold = {each["InstanceType"] for each in recorded("offerings", self.region)}
            return [each for each in recorded("instance_types") if each["InstanceType"] in sold]
        if operation == "describe_spot_price_history":
            names = arguments["InstanceTypes"]
            found = recorded("spot_prices", self.region)
            return [each for each in found if each["InstanceType"] in names]
        assert operation == "describe_instance_type_offerings"
        return list(recorded("offerings", self.region))


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYWARD_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("AWS_PROFILE", raising=False)


@pytest.fixture
def access() -> RecordedAccess:
    return RecordedAccess()


def a_request(accelerator: Accelerator | None = None, **changed: Any) -> Request:
    given: dict[str, Any] = {"vcpus": None, "memory_gb": None, "image": Image(), "volumes": ()}
    return Request(accelerator, **{**given, **changed})


def catalogue(access: RecordedAccess, **arguments: Any) -> Catalogue:
    return Catalogue(access, AWS(**arguments))  # type: ignore[arg-type]


def offers(
    access: RecordedAccess, request: Request, *, fresh: bool = False, **arguments: Any
) -> list[Offer]:
    return catalogue(access, **arguments).offers(request, fresh=fresh)


def names(found: list[Offer]) -> list[str]:
    return [offer.instance_type for offer in found]


def why(access: RecordedAccess, request: Request, **arguments: Any) -> str:
    assert offers(access, request, **arguments) == []
    return catalogue(access, **arguments).why_none(request)


# What is chosen.


def test_a_plain_machine_has_four_cpus_and_is_cheap_current_and_steady(
    access: RecordedAccess,
) -> None:
    found = offers(access, a_request())
    assert names(found) == ["c7i.xlarge", "m7i.xlarge", "c7i.2xlarge"]
    assert str(found[0]) == ("c7i.xlarge (4 vCPUs, 8 GB) in us-east-1, on demand, $0.18 an hour")
    assert found[0].architecture == "x86_64"


def test_fewer_cpus_are_sold_to_who_asks_for_them(access: RecordedAccess) -> None:
    assert names(offers(access, a_request(vcpus=2)))[0] == "m7i.large"
    assert names(offers(access, a_request(memory_gb=10))) == ["m7i.xlarge", "c7i.2xlarge"]


def test_an_architecture_is_chosen_by_name(access: RecordedAccess) -> None:
    [offer] = offers(access, a_request(), architecture="arm64")
    assert (offer.instance_type, offer.architecture) == ("c7g.xlarge", "arm64")


@pytest.mark.parametrize(
    ("wanted", "types", "has"),
    [
        (accelerators.T4(), ["g4dn.xlarge"], "T4-16GB"),
        (accelerators.A10G(), ["g5.xlarge", "g5.12xlarge"], "A10G-24GB"),
        (accelerators.A10G(2), ["g5.12xlarge"], "A10G-24GB:4"),
        (accelerators.L4(), ["g6.xlarge"], "L4-24GB"),
        (accelerators.A100(memory="40GB"), ["p4d.24xlarge"], "A100-40GB:8"),
        (accelerators.A100(8), ["p4de.24xlarge"], "A100-80GB:8"),
        (accelerators.H100(), ["p5.48xlarge"], "H100-80GB:8"),
        (accelerators.H200(4), ["p5en.48xlarge"], "H200-141GB:8"),
        (accelerators.TRAINIUM(), ["trn1.2xlarge"], "TRAINIUM-32GB"),
        (accelerators.INFERENTIA(), ["inf1.xlarge"], "INFERENTIA-8GB"),
        (accelerators.INFERENTIA2(), ["inf2.xlarge"], "INFERENTIA2-32GB"),
        (accelerators.Custom("T4g", "16GB"), ["g5g.xlarge"], "T4g-16GB"),
    ],
    ids=str,
)
def test_an_accelerator_is_of_the_model_the_memory_and_at_least_the_number(
    access: RecordedAccess, wanted: Accelerator, types: list[str], has: str
) -> None:
    found = offers(access, a_request(wanted, max_hourly_cost=100))
    assert names(found) == types
    assert str(found[0].accelerator) == has


def test_a_named_type_is_the_only_one_even_if_nobody_would_choose_it(
    access: RecordedAccess,
) -> None:
    for name in ("t3.medium", "m4.xlarge", "c7i.metal-24xl", "g6f.large", "trn2.48xlarge"):
        assert names(offers(access, a_request(), instance_type=name)) == [name]
    [part] = offers(access, a_request(), instance_type="g6f.large")
    assert str(part.accelerator) == "L4-3GB"


def test_spot_instances_are_offered_zone_by_zone_cheapest_first(access: RecordedAccess) -> None:
    request = a_request(accelerators.A10G(), allocation="spot", max_hourly_cost=100)
    found = offers(access, request)
    assert [(each.instance_type, each.zone, each.hourly_cost) for each in found[:2]] == [
        ("g5.xlarge", "us-east-1d", 0.32192),
        ("g5.xlarge", "us-east-1b", 0.34204),
    ]
    assert {each.allocation for each in found} == {"spot"}
    assert len(found) == 10


def test_spot_if_available_tries_every_spot_offer_before_the_others(
    access: RecordedAccess,
) -> None:
    found = offers(access, a_request(accelerators.L4(), allocation="spot-if-available"))
    assert [each.allocation for each in found] == ["spot"] * 4 + ["on-demand"]
    assert (found[-1].zone, found[-1].hourly_cost) == (None, 0.8048)


def test_a_limit_leaves_out_what_costs_more(access: RecordedAccess) -> None:
    wanted = a_request(max_hourly_cost=0.2)
    assert names(offers(access, wanted)) == ["c7i.xlarge"]
    spot = a_request(accelerators.A10G(), allocation="spot", max_hourly_cost=0.35)
    assert [each.zone for each in offers(access, spot)] == ["us-east-1d", "us-east-1b"]


def test_a_type_says_what_a_launch_needs_to_know(access: RecordedAccess) -> None:
    sold = catalogue(access)
    kind = sold.type("p4d.24xlarge")
    assert (kind.efa_interfaces, kind.network_cards, kind.architectures) == (4, 4, ("x86_64",))
    assert kind.usages == ("on-demand", "spot", "capacity-block")
    assert "cluster" in kind.placement_strategies
    assert sold.type("c7i.metal-24xl").bare_metal
    assert sold.type("t3.medium").burstable
    assert sold.type("c7i.xlarge").efa_interfaces == 0
    (offer,) = catalogue(access, instance_type="p4de.24xlarge").offers(a_request())
    assert sold.zones_of(offer) == ["us-east-1c", "us-east-1d"]
    assert sold.zones_of(replace(offer, instance_type="none.such")) == ()


# What is said if there is nothing.


@pytest.mark.parametrize(
    ("region", "request_", "said"),
    [
        (
            "us-east-1",
            a_request(accelerators.A100(16)),
            "no type has 16 x A100-80GB; the most is 8 (p4de.24xlarge)",
        ),
        (
            "eu-north-1",
            a_request(accelerators.A100()),
            "A100 is not sold in eu-north-1; types of A100: p4d.24xlarge, p4de.24xlarge",
        ),
        (
            "us-east-1",
            a_request(accelerators.H100(memory="94GB")),
            "no type in us-east-1 has H100-94GB; there is H100-80GB (p5.48xlarge)",
        ),
        (
            "us-east-1",
            a_request(accelerators.H100(), max_hourly_cost=10),
            "the cheapest is p5.48xlarge at $55.04 an hour, above max_hourly_cost=$10.00",
        ),
        (
            "us-east-1",
            a_request(accelerators.L4(), allocation="spot", max_hourly_cost=0.01),
            "the cheapest is g6.xlarge as a spot instance at $0.26 an hour, above "
            "max_hourly_cost=$0.0100",
        ),
        (
            "us-east-1",
            a_request(accelerators.TRAINIUM2()),
            "trn2.48xlarge: sold in capacity blocks alone; buy one and name it with "
            "AWS(reservation=...)",
        ),
        (
            "us-east-1",
            a_request(vcpus=64),
            "no such type has 64 vCPUs; the most is 8 (c7i.2xlarge)",
        ),
        (
            "us-east-1",
            a_request(memory_gb=2000),
            "no such type has 2000 GB of memory; the most is 16 GB (c7i.2xlarge)",
        ),
        (
            "us-east-1",
            a_request(accelerators.TPU_V4()),
            "TPU_V4 is not sold in us-east-1",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_if_there_is_nothing_the_reason_is_said(region: str, request_: Request, said: str) -> None:
    assert why(RecordedAccess(region), request_) == said


def test_an_accelerator_with_another_architecture_is_said(access: RecordedAccess) -> None:
    assert why(access, a_request(accelerators.T4()), architecture="arm64") == (
        "g4dn.xlarge: sold with x86_64, not with arm64"
    )


def test_a_named_type_without_what_is_asked_for_is_said(access: RecordedAccess) -> None:
    wanted = a_request(accelerators.A100())
    assert why(access, wanted, instance_type="g4dn.xlarge") == (
        "g4dn.xlarge has T4-16GB, not A100-80GB"
    )
    assert why(access, wanted, instance_type="c7i.xlarge") == (
        "c7i.xlarge has no accelerator, not A100-80GB"
    )


def test_an_unknown_type_is_refused_with_names_that_are_close(access: RecordedAccess) -> None:
    with pytest.raises(ConfigurationError) as caught:
        offers(access, a_request(), instance_type="g5.xlrage")
    assert str(caught.value) == (
        "AWS(instance_type='g5.xlrage'): EC2 sells no such type in us-east-1; there is g5.xlarge, "
        "g5g.xlarge, g5.12xlarge, g6.xlarge"
    )


# What is kept.


def test_answers_are_kept_for_the_next_time(access: RecordedAccess) -> None:
    wanted = a_request(accelerators.A10G(), allocation="spot")
    first = offers(access, wanted)
    assert sum(access.calls.values()) == 4
    again = RecordedAccess()
    assert offers(again, wanted) == first
    assert not again.calls


def test_each_region_has_its_own_file(access: RecordedAccess) -> None:
    offers(access, a_request())
    assert names(offers(RecordedAccess("eu-north-1"), a_request(accelerators.T4())))
    files = {path.name for path in place(access).parent.iterdir()}  # type: ignore[arg-type]
    assert files == {"us-east-1.json", "eu-north-1.json"}


def test_before_a_purchase_spot_prices_are_of_the_last_minutes(
    access: RecordedAccess, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = a_request(accelerators.A10G(), allocation="spot")
    offers(access, wanted)
    now = time.time()
    monkeypatch.setattr(module.time, "time", lambda: now + 900)
    offers(access, wanted)
    assert access.calls["describe_spot_price_history"] == 1
    offers(access, wanted, fresh=True)
    assert access.calls["describe_spot_price_history"] == 2
    monkeypatch.setattr(module.time, "time", lambda: now + 86_500)
    offers(access, a_request())
    assert (access.calls["get_products"], access.calls["describe_instance_types"]) == (2, 1)
    monkeypatch.setattr(module.time, "time", lambda: now + 8 * 86_400)
    offers(access, a_request())
    assert access.calls["describe_instance_types"] == 2


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"format": 99}', b"\xff\xff"])
def test_a_damaged_file_is_asked_for_again(access: RecordedAccess, content: bytes) -> None:
    first = offers(access, a_request())
    place(access).write_bytes(content)  # type: ignore[arg-type]
    assert offers(access, a_request()) == first
    assert access.calls["describe_instance_types"] == 2
    offers(access, a_request())
    assert access.calls["describe_instance_types"] == 2


def test_a_cache_that_cannot_be_written_is_no_problem(
    access: RecordedAccess, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SKYWARD_CACHE", str(tmp_path / "file"))
    assert offers(access, a_request())


# What AWS does not say.


def test_without_prices_the_smallest_comes_first_and_the_reason_is_logged_once(
    access: RecordedAccess, caplog: pytest.LogCaptureFixture
) -> None:
    access.refuses = {"get_products"}
    with caplog.at_level(logging.WARNING, "skyward"):
        found = offers(access, a_request())
        offers(access, a_request())
    assert names(found) == ["c7i.xlarge", "m7i.xlarge", "c7i.2xlarge"]
    assert {each.hourly_cost for each in found} == {None}
    assert [each.getMessage() for each in caplog.records] == [
        "prices of AWS are unknown, so its machines are chosen by size: you may not do get_products"
    ]


def test_without_spot_prices_every_zone_that_has_the_type_is_offered(
    access: RecordedAccess,
) -> None:
    access.refuses = {"describe_spot_price_history"}
    found = offers(access, a_request(accelerators.L4(), allocation="spot"))
    assert [(each.zone, each.hourly_cost) for each in found] == [
        (f"us-east-1{letter}", None) for letter in "abcd"
    ]


def test_a_price_in_a_form_that_nobody_knows_is_unknown(
    access: RecordedAccess, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = json.dumps(recorded("products", "us-east-1")[5])
    strange = ["{", "[]", "{}", '{"product": {"attributes": {"instanceType": "m7i.xlarge"}}}']
    strange.append(good.replace("c7i.xlarge", "m7i.xlarge").replace("USD", "CNY"))
    answers = {"get_products": [*strange, good]}
    pages = access.pages
    monkeypatch.setattr(
        access,
        "pages",
        lambda service, operation, key, **given: (
            answers.get(operation) or pages(service, operation, key, **given)
        ),
    )
    found = offers(access, a_request())
    assert [(each.instance_type, each.hourly_cost) for each in found[:2]] == [
        ("c7i.xlarge", 0.1785),
        ("m7i.xlarge", None),
    ]


def test_a_limit_cannot_be_kept_without_prices(access: RecordedAccess) -> None:
    access.refuses = {"get_products"}
    with pytest.raises(UnavailableError, match=r"max_hourly_cost=\$1.00 cannot be kept: allow"):
        offers(access, a_request(max_hourly_cost=1))
    access.refuses.clear()
    assert offers(access, a_request(max_hourly_cost=1)), "the permission was given meanwhile"


def test_without_the_catalogue_itself_there_are_no_offers(access: RecordedAccess) -> None:
    access.refuses = {"describe_instance_types"}
    with pytest.raises(UnavailableError, match="you may not do describe_instance_types"):
        offers(access, a_request())


def test_the_second_listing_asks_nobody_and_imports_little(access: RecordedAccess) -> None:
    offers(access, a_request())
    code = """
import sys
from skyward.providers import Request
from skyward.providers.aws import AWS
from skyward.providers.aws.catalogue import Catalogue
from skyward.spec import Image
class Access:
    region, endpoint, profile = "us-east-1", "", None
assert Catalogue(Access(), AWS()).offers(Request(None, None, None, Image(), ()))
print(*sorted({"boto3", "botocore", "torch", "numpy"} & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not done.stdout.strip(), "these take a second to import"
