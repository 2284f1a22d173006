"""What the provider says when AWS refuses, or cannot give, what was asked for."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

import skyward as sky
from skyward import accelerators
from skyward.nodes.records import Journal
from skyward.providers.aws.account import Account, RequestError

from ..conftest import only_in_all, other_case
from .aws_gateway import Gateway
from .aws_orders import Outcome, a_request, attempt, making
from .aws_stand_ins import IMAGES, reservation

QUIET = sky.Options(console=False)
ZONES = [f"us-east-1{letter}" for letter in "abcdf"]
"""Those that have the usual types."""


@pytest.fixture
def profiles(aws: Gateway, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A file with profiles of one test, whose logins nobody has made."""
    file = tmp_path / "config"
    file.write_text(_SSO)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(file))
    monkeypatch.setenv("HOME", str(tmp_path))
    return file


# Who asks.


def test_without_credentials_it_says_what_to_run(
    aws: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(sky.errors.UnavailableError) as caught:
        with sky.Compute(sky.AWS(), nodes=2, options=QUIET):
            pass
    assert "no AWS credentials were found for the default profile" in str(caught.value)
    assert "`aws configure` or `aws sso login`" in str(caught.value)
    assert aws.calls == []
    assert Journal().pools() == []


_SSO = """
[profile corp]
region = us-east-1
sso_session = ours
sso_account_id = 123456789012
sso_role_name = dev
[sso-session ours]
sso_region = us-east-1
sso_start_url = https://example.awsapps.com/start
sso_registration_scopes = sso:account:access
[profile old]
region = us-east-1
sso_start_url = https://example.awsapps.com/start
sso_region = us-east-1
sso_account_id = 123456789012
sso_role_name = dev
"""


@pytest.mark.parametrize("profile", ["corp", "old"])
def test_a_login_that_has_expired_says_how_to_log_in_again(profiles: Path, profile: str) -> None:
    with pytest.raises(sky.errors.UnavailableError) as caught:
        Account(profile=profile).call("ec2", "describe_subnets")
    assert f"the AWS login of the profile '{profile}' has expired" in str(caught.value)
    assert f"`aws sso login --profile {profile}`" in str(caught.value)
    assert "`sky ps` works without one" in str(caught.value)


@only_in_all
def test_credentials_that_have_expired_end_a_launch_with_advice(aws: Gateway) -> None:
    aws.fail("*", "RequestExpired", when=lambda call: call.service == "ec2", times=2)
    with pytest.raises(sky.errors.UnavailableError) as caught:
        Account().call("ec2", "describe_subnets")
    assert "credentials of the default profile have expired" in str(caught.value)
    assert "a running pool goes on with the new ones by itself" in str(caught.value)
    assert len(aws.calls) == 2


@other_case
def test_new_credentials_are_read_when_the_old_ones_have_expired(
    aws: Gateway, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    file = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))

    def give(name: str) -> None:
        file.write_text(f"[default]\naws_access_key_id = {name}\naws_secret_access_key = x\n")

    give("OLD")
    account = Account()
    account.call("ec2", "describe_subnets")
    aws.fail("*", "ExpiredToken", when=lambda call: call.key == "OLD")
    with pytest.raises(sky.errors.UnavailableError, match="have expired: run `aws sso login`"):
        account.call("ec2", "describe_subnets")
    give("NEW")
    assert account.call("ec2", "describe_subnets")["Subnets"]
    assert [call.key for call in aws.calls] == ["OLD", "OLD", "OLD", "OLD", "NEW"]


def test_credentials_that_come_later_are_read(
    aws: Gateway, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In a notebook, the user runs `aws configure` and then the cell again."""
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    file = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    account = Account()
    with pytest.raises(sky.errors.UnavailableError, match="no AWS credentials were found"):
        account.call("ec2", "describe_subnets")
    file.write_text("[default]\naws_access_key_id = NEW\naws_secret_access_key = x\n")
    assert account.call("ec2", "describe_subnets")["Subnets"]


def test_credentials_that_aws_does_not_know_are_told_from_expired_ones(aws: Gateway) -> None:
    aws.fail("DescribeSubnets", "AuthFailure")
    problem = attempt(sky.AWS()).problem
    assert "AWS does not accept the credentials of the default profile (AuthFailure)" in problem
    assert making(aws) == []


def test_a_right_that_is_missing_is_named(aws: Gateway) -> None:
    aws.fail("RunInstances", "UnauthorizedOperation")
    problem = attempt(sky.AWS()).problem
    assert "the default profile may not do ec2:RunInstances: ask for that permission" in problem
    assert "docs/aws.md has the whole policy" in problem


def test_a_right_that_is_missing_before_anything_is_made_is_named(aws: Gateway) -> None:
    aws.fail("DescribeSubnets", "UnauthorizedOperation")
    assert "may not do ec2:DescribeSubnets" in attempt(sky.AWS()).problem
    assert making(aws) == []


def test_a_message_that_hides_the_action_still_names_it(aws: Gateway) -> None:
    aws.fail("DescribeSubnets", "UnauthorizedOperation", "Encoded message: abc")
    assert "may not do ec2:DescribeSubnets" in attempt(sky.AWS()).problem


def test_a_profile_that_does_not_exist_names_those_that_do(profiles: Path) -> None:
    with pytest.raises(sky.errors.ConfigurationError) as caught:
        sky.Compute(sky.AWS(profile="mine"))
    assert "(mine) could not be found; there are: corp, old" in str(caught.value)


def test_an_endpoint_that_does_not_answer_says_so(
    aws: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(sky.errors.UnreachableError) as caught:
        Account("us-moon-1").call("ec2", "describe_subnets", attempts=1)
    assert "AWS does not answer" in str(caught.value)
    assert "that the region's name is right" in str(caught.value)


def test_too_many_requests_are_repeated(aws: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    faults = [
        aws.fail(action, "RequestLimitExceeded", times=3)
        for action in ("DescribeSubnets", "RunInstances", "CreateSecurityGroup")
    ]
    assert attempt(sky.AWS()).offer.instance_type == "c7i.xlarge"
    assert [fault.hits for fault in faults] == [3, 3, 3]


def test_a_purchase_whose_answer_is_lost_is_not_made_twice(
    aws: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    aws.lose("RunInstances")
    aws.fail("RunInstances", "InternalError", status=500, times=1)
    new = aws.fail("AuthorizeSecurityGroupIngress", "InvalidGroup.NotFound", times=2)

    async def then(outcome: Outcome) -> None:
        assert len(aws.account.instances()) == 2

    attempt(sky.AWS(), nodes=2, then=then)
    assert len({call.parameters["ClientToken"] for call in aws.made("RunInstances")}) == 1
    assert len(aws.made("RunInstances")) == 3
    assert new.hits == 2, "AWS may not know a new group everywhere"


# What is named and is not there.


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"subnet": "subnet-0123456789abcdef0"}, "name a subnet of this region with subnet="),
        ({"ami": "ami-0123456789abcdef0"}, "name one of this region with ami="),
        ({"reservation": "cr-0123456789abcdef0"}, "'cr-0123456789abcdef0' does not exist"),
        ({"instance_type": "g6.xlrge"}, "EC2 sells no such type in us-east-1; there is g6.xlarge"),
    ],
)
def test_what_is_named_and_is_not_there_is_refused_before_anything_is_made(
    aws: Gateway, arguments: dict[str, Any], says: str
) -> None:
    problem = attempt(sky.AWS(**arguments)).problem
    assert says in problem
    assert next(iter(arguments.values())) in problem
    assert making(aws) == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"region": "moon"}, "not a region; write one such as 'us-east-1'"),
        ({"subnet": "mine"}, "not an id of AWS; write one like 'subnet-0abc'"),
        ({"ami": "ubuntu"}, "not an id of AWS; write one like 'ami-0abc'"),
        ({"access": "telnet"}, "choose 'ssh' or 'ssm'"),
        ({"architecture": "sparc"}, "choose 'x86_64' or 'arm64'"),
        ({"admit": ["203.0.113.1/24"]}, "write one such as '203.0.113.0/24'"),
    ],
)
def test_arguments_that_mean_nothing_are_refused_at_once(
    arguments: dict[str, Any], says: str
) -> None:
    with pytest.raises(sky.errors.ConfigurationError) as caught:
        sky.AWS(**arguments)
    assert says in str(caught.value)


@pytest.mark.parametrize("arguments", [{}, {"instance_type": "c7i.xlarge"}])
def test_an_ami_for_another_processor_is_refused_before_anything_is_made(
    aws: Gateway, arguments: dict[str, str]
) -> None:
    """Without a type, one is chosen that can boot it."""
    outcome = attempt(sky.AWS(ami=IMAGES["arm64"], **arguments))
    if not arguments:
        assert outcome.offer.instance_type == "c7g.xlarge"
        return
    assert f"AWS(ami='{IMAGES['arm64']}'): that AMI is for arm64" in outcome.problem
    assert "c7i.xlarge is x86_64; name an AMI for it, or leave ami out" in outcome.problem
    assert making(aws) == []


def test_an_ami_for_another_processor_than_the_reserved_one_is_refused(aws: Gateway) -> None:
    held = reservation("c7i.xlarge", "us-east-1a")
    aws.stand_ins.reservations[held["CapacityReservationId"]] = held
    provider = sky.AWS(reservation=held["CapacityReservationId"], ami=IMAGES["arm64"])
    problem = attempt(provider).problem
    assert "that AMI is for arm64, and c7i.xlarge is x86_64" in problem
    assert making(aws) == []


# What cannot be had.


def no_capacity(aws: Gateway, *types: str, zone: str = "", code: str = "") -> None:
    aws.fail(
        "RunInstances",
        code or "InsufficientInstanceCapacity",
        when=lambda call: (
            (not types or call.instance_type in types) and (not zone or call.zone == zone)
        ),
    )


def test_a_zone_without_capacity_is_passed_over(aws: Gateway) -> None:
    no_capacity(aws, zone="us-east-1a")
    outcome = attempt(sky.AWS(), nodes=2)
    assert (outcome.offer.instance_type, outcome.offer.zone) == ("c7i.xlarge", "us-east-1b")
    assert outcome.notes == []


def test_a_type_without_capacity_in_any_zone_is_replaced_by_the_next_with_a_note(
    aws: Gateway,
) -> None:
    no_capacity(aws, "c7i.xlarge")
    outcome = attempt(sky.AWS())
    assert outcome.offer.instance_type == "m7i.xlarge"
    (note,) = outcome.notes
    assert note.startswith("bought m7i.xlarge on demand, $0.20 an hour instead: ")
    for zone in ZONES:
        assert f"c7i.xlarge in {zone}: no capacity" in note


def test_capacity_nowhere_lists_every_offer_that_was_tried(aws: Gateway) -> None:
    no_capacity(aws)
    problem = attempt(sky.AWS(), a_request(max_hourly_cost=0.3)).problem
    assert "AWS has no such machine now: c7i.xlarge in us-east-1a: no capacity" in problem
    for kind in ("c7i.xlarge", "m7i.xlarge"):
        for zone in ZONES:
            assert f"{kind} in {zone}: no capacity" in problem
    assert "c7i.2xlarge" not in problem
    assert "try again later, in another region" in problem


def test_a_type_that_is_not_sold_in_a_zone_says_so(aws: Gateway) -> None:
    no_capacity(aws, code="Unsupported")
    problem = attempt(sky.AWS(instance_type="g6.xlarge")).problem
    assert "g6.xlarge in us-east-1d: not sold there" in problem


def test_nodes_are_spread_over_zones_if_no_zone_has_them_all(aws: Gateway) -> None:
    aws.room = dict.fromkeys(ZONES, 0) | {"us-east-1b": 2, "us-east-1d": 1}
    outcome = attempt(sky.AWS(instance_type="c7i.xlarge"), nodes=3)
    assert outcome.problems == []
    where = [machine.offer.zone for machine in outcome.machines if machine.offer]
    assert where == ["us-east-1b", "us-east-1b", "us-east-1d"]
    assert [machine.node for machine in outcome.machines] == [0, 1, 2]


def test_part_of_the_nodes_is_no_pool(aws: Gateway) -> None:
    """Those that could be had are there, for the pool to keep or to end."""
    aws.room = dict.fromkeys(ZONES, 0) | {"us-east-1b": 2}
    outcome = attempt(sky.AWS(instance_type="c7i.xlarge"), nodes=3)
    assert len(outcome.machines) == 2
    (problem,) = outcome.problems
    assert "AWS has no such machine now" in str(problem)


def test_a_quota_is_named_with_its_code_and_the_command_that_asks_for_more(aws: Gateway) -> None:
    aws.fail("RunInstances", "VcpuLimitExceeded")
    aws.stand_ins.quotas["L-417A185B"] = 0.0
    problem = attempt(sky.AWS(), a_request(accelerators.H100(8))).problem
    assert (
        "p5.48xlarge in us-east-1a: above the quota 'Running On-Demand P instances' (L-417A185B), "
        "which is 0 vCPUs: ask for more with `aws service-quotas request-service-quota-increase"
    ) in problem
    assert "--quota-code L-417A185B" in problem
    assert len(aws.made("RunInstances")) == 1, "a quota is the same in every zone"


def test_a_quota_whose_value_may_not_be_read_is_named_all_the_same(aws: Gateway) -> None:
    aws.fail("RunInstances", "MaxSpotInstanceCountExceeded")
    aws.fail("GetServiceQuota", "AccessDeniedException")
    problem = attempt(sky.AWS(), a_request(accelerators.L4(), allocation="spot")).problem
    assert "above the quota 'All G and VT Spot Instance Requests' (L-3819A6DF): ask" in problem


def test_a_price_above_the_limit_is_refused_before_anything_is_made(aws: Gateway) -> None:
    problem = attempt(sky.AWS(), a_request(max_hourly_cost=0.05)).problem
    assert "the cheapest is c7i.xlarge at $0.18 an hour, above max_hourly_cost=$0.05" in problem
    assert making(aws) == []


@only_in_all
def test_a_spot_price_that_has_risen_above_the_limit_is_passed_over(aws: Gateway) -> None:
    aws.fail("RunInstances", "SpotMaxPriceTooLow")
    request = a_request(accelerators.L4(), allocation="spot", max_hourly_cost=0.28)
    problem = attempt(sky.AWS(), request).problem
    assert "g6.xlarge in us-east-1d: its spot price is above max_hourly_cost" in problem
    assert "allocation='spot-if-available' also buys on demand" in problem


def test_every_error_survives_a_pickle() -> None:
    problem = RequestError("AWS: no", "Code")
    again = pickle.loads(pickle.dumps(problem))
    assert (str(again), again.code) == ("AWS: no", "Code")
