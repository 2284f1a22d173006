"""What the provider asks of AWS, without any machine."""

from __future__ import annotations

import ast
import asyncio
import base64
import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import botocore
import botocore.session
import pytest

import skyward as sky
from skyward import accelerators
from skyward.providers import Order
from skyward.providers import aws as aws_module
from skyward.providers.allocation import GATHER_SECONDS
from skyward.providers.aws import interruption
from skyward.providers.aws.account import Account

from ..conftest import only_in_all
from .aws_gateway import Gateway
from .aws_orders import Outcome, a_request, attempt, making, remove
from .aws_stand_ins import IMAGES, reservation


def run_instances(aws: Gateway) -> dict[str, str]:
    """What the only request for instances says."""
    (call,) = aws.made("RunInstances")
    return dict(call.parameters)


def tags(parameters: dict[str, str]) -> dict[str, dict[str, str]]:
    """The tags of a request, by the kind of what gets them."""
    found: dict[str, dict[str, str]] = {}
    for key, kind in parameters.items():
        if key.endswith(".ResourceType"):
            prefix = key.removesuffix("ResourceType") + "Tag."
            names = {k: v for k, v in parameters.items() if k.startswith(prefix)}
            found[kind] = {
                value: parameters[name.removesuffix("Key") + "Value"]
                for name, value in names.items()
                if name.endswith(".Key")
            }
    return found


# What is asked for.


def test_an_instance_is_asked_for_with_all_that_keeps_it_safe_and_short_lived(
    aws: Gateway,
) -> None:
    outcome = attempt(sky.AWS(), a_request(disk_gb=70, ttl=3600, idle_timeout=200), nodes=2)

    asked = run_instances(aws)
    assert asked["MinCount"] == asked["MaxCount"] == "2"
    assert asked["InstanceType"] == outcome.offer.instance_type == "c7i.xlarge"
    assert asked["KeyName"] == f"skyward-{outcome.pool}"
    assert asked["MetadataOptions.HttpTokens"] == "required"
    assert asked["InstanceInitiatedShutdownBehavior"] == "terminate"
    volume = {k.split(".")[-1]: v for k, v in asked.items() if k.startswith("BlockDevice")}
    assert volume == {
        "DeviceName": "/dev/sda1",
        "VolumeSize": "70",
        "VolumeType": "gp3",
        "Encrypted": "true",
        "DeleteOnTermination": "true",
    }
    assert asked["NetworkInterface.1.AssociatePublicIpAddress"] == "true"
    assert asked["NetworkInterface.1.DeleteOnTermination"] == "true"
    assert not any(key.startswith(("IamInstanceProfile", "InstanceMarket")) for key in asked)
    given = tags(asked)
    assert list(given) == ["instance", "volume", "network-interface"]
    for each in given.values():
        assert each["skyward:pool"] == outcome.pool
        assert each["skyward:name"] == "mine"
        assert each["skyward:nodes"] == "0-1"
        assert each["skyward:pid"] == str(os.getpid())


def test_the_security_group_admits_the_client_and_the_pool_itself(aws: Gateway) -> None:
    outcome = attempt(sky.AWS())

    (made,) = aws.made("CreateSecurityGroup")
    assert made.tags()["skyward:pool"] == outcome.pool
    asked = run_instances(aws)
    (rules,) = aws.made("AuthorizeSecurityGroupIngress")
    group = rules.parameters["GroupId"]
    assert asked["NetworkInterface.1.SecurityGroupId.1"] == group
    admitted = {k: v for k, v in rules.parameters.items() if k.endswith("CidrIp")}
    assert admitted
    assert all(value.endswith("/32") for value in admitted.values())
    ports = [v for k, v in rules.parameters.items() if k.endswith("FromPort")]
    assert ports == ["22", "1024"]
    itself = [v for k, v in rules.parameters.items() if ".Groups." in k and k.endswith("GroupId")]
    assert itself == [group]
    assert aws.made("AuthorizeSecurityGroupEgress") == []


def test_networks_that_are_named_are_admitted_and_no_others(aws: Gateway) -> None:
    attempt(sky.AWS(admit=["203.0.113.0/24"]))

    (rules,) = aws.made("AuthorizeSecurityGroupIngress")
    admitted = {v for k, v in rules.parameters.items() if k.endswith("CidrIp")}
    assert admitted == {"203.0.113.0/24"}


def test_with_systems_manager_the_group_admits_no_network(
    aws: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skyward.providers.aws.session.is_installed", lambda: True)
    attempt(sky.AWS(access="ssm", instance_profile="managed"))

    (rules,) = aws.made("AuthorizeSecurityGroupIngress")
    assert not any("CidrIp" in key for key in rules.parameters)
    assert run_instances(aws)["IamInstanceProfile.Name"] == "managed"


def test_access_through_systems_manager_needs_its_plugin(
    aws: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(
        sky.errors.ConfigurationError, match="session-manager-plugin, which is not on"
    ):
        sky.Compute(sky.AWS(access="ssm"))
    assert aws.calls == []


@only_in_all
def test_a_key_of_the_users_is_imported_and_stays_where_it_is(aws: Gateway, tmp_path: Path) -> None:
    own = tmp_path / "own"
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(own)]
    subprocess.run(command, check=True, timeout=200)

    attempt(sky.AWS(key=str(own)))

    (imported,) = aws.made("ImportKeyPair")
    public = base64.b64decode(imported.parameters["PublicKeyMaterial"]).decode()
    assert public.split()[:2] == Path(f"{own}.pub").read_text().split()[:2]
    assert own.exists()


def test_a_key_that_is_not_there_is_refused_before_anything_is_made(aws: Gateway) -> None:
    problem = attempt(sky.AWS(key="/nowhere/key")).problem
    assert "AWS(key='/nowhere/key'): No such file or directory" in problem
    assert making(aws) == []


def test_a_spot_instance_is_asked_for_at_no_more_than_the_limit(aws: Gateway) -> None:
    request = a_request(accelerators.L4(), allocation="spot", max_hourly_cost=0.3)
    outcome = attempt(sky.AWS(), request)

    asked = run_instances(aws)
    options = {k.split(".")[-1]: v for k, v in asked.items() if k.startswith("InstanceMarket")}
    assert options == {
        "MarketType": "spot",
        "SpotInstanceType": "one-time",
        "InstanceInterruptionBehavior": "terminate",
        "MaxPrice": "0.3",
    }
    assert "spot-instances-request" in tags(asked)
    (machine,) = outcome.machines
    assert (outcome.offer.zone, outcome.offer.hourly_cost) == ("us-east-1d", 0.257536)
    assert machine.notice == "skyward.providers.aws.interruption"


def test_a_placement_group_is_made_used_and_removed(aws: Gateway) -> None:
    async def then(outcome: Outcome) -> None:
        (group,) = aws.stand_ins.groups.values()
        assert (group["GroupName"], group["Strategy"]) == (f"skyward-{outcome.pool}", "cluster")
        (remains,) = await provider.remains()
        assert f"placement group skyward-{outcome.pool}" in remains.resources

    provider = sky.AWS(placement_group="cluster")
    outcome = attempt(provider, nodes=2, then=then)

    assert run_instances(aws)["Placement.GroupName"] == f"skyward-{outcome.pool}"
    assert aws.stand_ins.groups == {}


@only_in_all
def test_a_placement_group_that_exists_is_used_and_stays(aws: Gateway) -> None:
    Account().call("ec2", "create_placement_group", GroupName="ours", Strategy="cluster")

    attempt(sky.AWS(placement_group="ours"))

    assert run_instances(aws)["Placement.GroupName"] == "ours"
    assert len(aws.made("CreatePlacementGroup")) == 1
    assert list(aws.stand_ins.groups) == [("us-east-1", "ours")]
    aws.stand_ins.groups.clear()


@pytest.mark.parametrize("block", [False, True])
@only_in_all
def test_a_reservation_names_the_type_and_the_zone(aws: Gateway, block: bool) -> None:
    held = reservation("p5.48xlarge", "us-east-1c", block=block)
    name = held["CapacityReservationId"]
    aws.stand_ins.reservations[name] = held

    outcome = attempt(sky.AWS(reservation=name), a_request(accelerators.H100(8)))

    asked = run_instances(aws)
    target = "CapacityReservationSpecification.CapacityReservationTarget.CapacityReservationId"
    assert asked[target] == name
    assert asked["InstanceType"] == "p5.48xlarge"
    assert outcome.offer.zone == "us-east-1c"
    market = asked.get("InstanceMarketOptions.MarketType")
    assert market == ("capacity-block" if block else None)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"State": "pending", "StartDate": "2027-01-01"}, "it is pending, not active, and begins"),
        ({"State": "expired"}, "it is expired, not active"),
        ({"AvailableInstanceCount": 0}, "all its c7i.xlarge are in use"),
        ({"InstanceType": "m7i.large"}, "it is for m7i.large, which is not what this pool asks"),
    ],
)
def test_a_reservation_that_cannot_be_used_says_why(
    aws: Gateway, changed: dict[str, Any], says: str
) -> None:
    held = reservation("c7i.xlarge", "us-east-1a", **changed)
    name = held["CapacityReservationId"]
    aws.stand_ins.reservations[name] = held

    problem = attempt(sky.AWS(reservation=name), a_request(vcpus=4)).problem

    assert f"AWS(reservation='{name}')" in problem
    assert says in problem
    assert making(aws) == []


def test_reserved_capacity_is_no_spot_capacity(aws: Gateway) -> None:
    with pytest.raises(
        sky.errors.ConfigurationError, match="reserved capacity is no spot capacity"
    ):
        sky.AWS(reservation="cr-1").check(a_request(allocation="spot"))


# Networks.


def network(aws: Gateway, way: str) -> str:
    """A subnet with a way out, or without one."""
    ec2 = aws.account.ec2()
    vpc = ec2.create_vpc(CidrBlock="10.77.0.0/16")["Vpc"]["VpcId"]
    subnet = ec2.create_subnet(VpcId=vpc, CidrBlock="10.77.1.0/24", AvailabilityZone="us-east-1b")[
        "Subnet"
    ]["SubnetId"]
    table = ec2.create_route_table(VpcId=vpc)["RouteTable"]["RouteTableId"]
    ec2.associate_route_table(RouteTableId=table, SubnetId=subnet)
    where = {"RouteTableId": table, "DestinationCidrBlock": "0.0.0.0/0"}
    if way == "internet":
        gateway = ec2.create_internet_gateway()["InternetGateway"]["InternetGatewayId"]
        ec2.attach_internet_gateway(InternetGatewayId=gateway, VpcId=vpc)
        ec2.create_route(**where, GatewayId=gateway)
    elif way == "nat":
        transit = ec2.create_transit_gateway()["TransitGateway"]["TransitGatewayId"]
        ec2.create_route(**where, TransitGatewayId=transit)
    return str(subnet)


def test_a_subnet_without_a_route_out_is_refused_before_anything_is_made(aws: Gateway) -> None:
    subnet = network(aws, "none")
    problem = attempt(sky.AWS(subnet=subnet)).problem
    assert f"{subnet} has no route out" in problem
    assert "name another subnet with subnet=" in problem
    assert making(aws) == []


def test_a_subnet_behind_a_nat_has_no_public_addresses(aws: Gateway) -> None:
    subnet = network(aws, "nat")
    problem = attempt(sky.AWS(subnet=subnet, public_ip=True)).problem
    assert f"{subnet} has a route out through a NAT" in problem
    assert "leave public_ip out" in problem
    assert making(aws) == []

    outcome = attempt(sky.AWS(subnet=subnet))
    assert outcome.offer.zone == "us-east-1b"
    assert run_instances(aws)["NetworkInterface.1.AssociatePublicIpAddress"] == "false"


@only_in_all
def test_a_subnet_with_an_internet_gateway_takes_public_addresses(aws: Gateway) -> None:
    subnet = network(aws, "internet")
    problem = attempt(sky.AWS(subnet=subnet, public_ip=False)).problem
    assert f"{subnet} has a route out through an internet gateway only" in problem
    assert making(aws) == []

    attempt(sky.AWS(subnet=subnet, public_ip=True))
    assert run_instances(aws)["NetworkInterface.1.AssociatePublicIpAddress"] == "true"


def test_efa_takes_one_interface_with_a_public_address(aws: Gateway) -> None:
    outcome = attempt(sky.AWS(), a_request(accelerators.A100(8), most_nodes=2), nodes=2)

    assert outcome.offer.instance_type == "p4de.24xlarge"
    asked = run_instances(aws)
    assert asked["NetworkInterface.1.InterfaceType"] == "efa"
    assert asked["NetworkInterface.1.AssociatePublicIpAddress"] == "true"
    assert "NetworkInterface.2.SubnetId" not in asked
    assert len(aws.made("AuthorizeSecurityGroupEgress")) == 1


def test_efa_takes_an_interface_on_each_card_of_a_private_instance(aws: Gateway) -> None:
    aws.fail("RunInstances", "Stop")
    subnet = network(aws, "nat")
    attempt(sky.AWS(subnet=subnet, efa=True, instance_type="p4d.24xlarge"))
    asked = run_instances(aws)
    kinds = [v for k, v in asked.items() if k.endswith("InterfaceType")]
    assert kinds == ["efa"] * 4
    cards = [v for k, v in asked.items() if k.endswith("NetworkCardIndex")]
    assert cards == ["1", "2", "3"]
    assert not any("AssociatePublicIpAddress" in key for key in asked)


def test_efa_is_refused_for_a_type_that_has_none(aws: Gateway) -> None:
    problem = attempt(sky.AWS(efa=True)).problem
    assert "AWS(efa=True): c7i.xlarge has no Elastic Fabric Adapter" in problem
    assert aws.made("RunInstances") == []


# Spot capacity.


def test_spot_if_available_falls_back_to_on_demand_with_a_note(aws: Gateway) -> None:
    aws.fail("RunInstances", "InsufficientInstanceCapacity", when=lambda call: call.spot)
    outcome = attempt(sky.AWS(), a_request(accelerators.L4(), allocation="spot-if-available"))
    assert (outcome.offer.instance_type, outcome.offer.allocation) == ("g6.xlarge", "on-demand")
    (note,) = outcome.notes
    assert note.startswith("bought g6.xlarge on demand, $0.80 an hour instead: ")
    assert outcome.machines[0].notice == ""


def test_spot_alone_does_not_fall_back(aws: Gateway) -> None:
    aws.fail("RunInstances", "InsufficientInstanceCapacity", when=lambda call: call.spot)
    problem = attempt(sky.AWS(), a_request(accelerators.L4(), allocation="spot")).problem
    assert "g6.xlarge in us-east-1a: no capacity" in problem
    assert all(call.spot for call in aws.made("RunInstances"))


def test_an_instance_learns_from_its_metadata_that_it_is_taken_back(
    aws: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", aws.metadata.local_url)
    assert interruption.notice() is None
    aws.metadata.announce(120)
    found = interruption.notice()
    assert found is not None
    assert 100 < found[0] <= 120
    assert found[1] == "AWS will terminate the spot instance"


def test_the_module_that_waits_for_the_notice_prints_one_line_and_ends(aws: Gateway) -> None:
    aws.metadata.announce(-5)
    done = subprocess.run(
        [sys.executable, "-m", interruption.__name__],
        env=os.environ | {"AWS_EC2_METADATA_SERVICE_ENDPOINT": aws.metadata.local_url},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert (done.returncode, done.stdout) == (0, "0 AWS will terminate the spot instance\n")


def test_without_a_metadata_service_there_is_no_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://127.0.0.1:1")
    paused: list[float] = []

    def pause(seconds: float) -> None:
        paused.append(seconds)
        raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", pause)
    with contextlib.suppress(KeyboardInterrupt):
        interruption.main()
    assert paused == [interruption.PAUSE_SECONDS]


# How often AWS is asked.


def test_sixteen_nodes_take_at_most_twenty_calls(aws: Gateway) -> None:
    sky.AWS().offers(a_request())
    aws.calls.clear()
    counted: list[int] = []

    async def then(outcome: Outcome) -> None:
        counted.append(aws.counted().total())
        assert len({machine.id for machine in outcome.machines}) == 16

    attempt(sky.AWS(), a_request(most_nodes=16), nodes=16, then=then)

    assert counted[0] <= 10
    assert aws.counted().total() <= 20, "with all that ends them"


@only_in_all
def test_a_launch_with_an_empty_catalogue_takes_few_calls_more(
    aws: Gateway, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its pages are as long as the gateway makes them, which is shorter than AWS's."""
    monkeypatch.setenv("SKYWARD_CACHE", str(tmp_path / "cold"))
    attempt(sky.AWS(), a_request(most_nodes=16), nodes=16)
    catalogue = {"DescribeInstanceTypes", "DescribeInstanceTypeOfferings", "GetProducts"}
    pages = sum(len(aws.made(action)) for action in catalogue)
    assert aws.counted().total() - pages <= 20
    assert all(aws.made(action) for action in catalogue)


def test_the_catalogue_is_asked_for_once_by_all_processes(aws: Gateway) -> None:
    found = sky.AWS().offers(a_request())
    assert [offer.instance_type for offer in found[:2]] == ["c7i.xlarge", "m7i.xlarge"]
    costs = [offer.hourly_cost or 0.0 for offer in found]
    assert costs == sorted(costs)
    aws.calls.clear()

    code = (
        "import skyward as sky; from tests.providers.aws_orders import a_request; "
        "print(sky.AWS().offers(a_request())[0].instance_type)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == "c7i.xlarge\n", done.stderr
    assert aws.calls == []


def test_a_price_for_the_console_is_that_of_the_first_offer(aws: Gateway) -> None:
    assert sky.AWS().price(a_request()) == 0.1785
    assert sky.AWS().price(a_request(accelerators.L4(), allocation="spot")) == 0.257536


# What it may do.


@pytest.fixture(scope="module")
def policy() -> dict[str, Any]:
    """The one in the documentation."""
    page = Path(__file__).parents[2] / "docs" / "aws.md"
    (found,) = re.findall(r"```json\n(.*?)```", page.read_text(), re.DOTALL)
    read: dict[str, Any] = json.loads(found)
    return read


@only_in_all
def test_the_policy_in_the_documentation_is_enough(
    aws: Gateway, policy: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """For all that a pool may have: first plain, then with everything, then beyond a quota."""
    monkeypatch.setenv("SKYWARD_CACHE", str(tmp_path / "cold"))
    held = reservation("p5.48xlarge", "us-east-1c", count=2)
    aws.stand_ins.reservations[held["CapacityReservationId"]] = held
    reserved = sky.AWS(
        reservation=held["CapacityReservationId"], placement_group="cluster", efa=True
    )
    aws.policy = policy

    async def then(outcome: Outcome) -> None:
        machine = outcome.machines[0]
        call = machine._instances.account.call
        assert await reserved.remains()
        assert len(await sky.AWS().allocate(outcome.pool).find()) == 2
        call("ec2", "get_console_output", InstanceId=machine.id)
        call("ssm", "start_session", Target=machine.id, DocumentName="AWS-StartSSHSession")
        await sky.AWS().spare(outcome.pool, True)
        assert await sky.AWS().stop(outcome.pool) is not None
        stopped = (await machine._instances.look(fresh=True))[machine.id]
        assert stopped["State"]["Name"] == "stopped"
        await machine._instances.start(stopped)

    assert sky.AWS().offers(a_request(accelerators.L4(), allocation="spot-if-available"))
    assert attempt(sky.AWS(), nodes=2, then=then).problems == []
    assert attempt(reserved, a_request(accelerators.H100(8)), nodes=2, then=then).problems == []
    aws.fail("RunInstances", "VcpuLimitExceeded")
    assert "which is 1000 vCPUs" in attempt(sky.AWS()).problem
    assert aws.denied == []
    used = set(aws.counted()) | IMPLIED
    assert used == allowed(policy)


def allowed(policy: dict[str, Any]) -> set[str]:
    """The actions of a policy."""
    found: set[str] = set()
    for statement in policy["Statement"]:
        actions = statement["Action"]
        found |= {actions} if isinstance(actions, str) else set(actions)
    return found


IMPLIED = {"ec2:CreateTags", "iam:CreateServiceLinkedRole"}
"""What AWS asks for besides the operations: tags of what is made, and the first spot instance."""


def test_the_policy_in_the_documentation_allows_what_the_code_does_and_no_more(
    policy: dict[str, Any],
) -> None:
    assert allowed(policy) == operations() | IMPLIED


def operations() -> set[str]:
    """Every operation of AWS that the code of the provider names."""
    names = {"ec2": "ec2", "ssm": "ssm", "pricing": "pricing", "service-quotas": "servicequotas"}
    loader = botocore.session.Session()
    known = {
        botocore.xform_name(operation): f"{prefix}:{operation}"
        for service, prefix in names.items()
        for operation in loader.get_service_model(service).operation_names
    }
    words = {
        node.value
        for path in Path(aws_module.__file__).parent.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    return {known[word] for word in words & known.keys()}


def test_what_others_have_made_is_out_of_its_reach(aws: Gateway, policy: dict[str, Any]) -> None:
    ec2 = aws.account.ec2()
    (other,) = ec2.run_instances(ImageId=IMAGES["x86_64"], MinCount=1, MaxCount=1)["Instances"]
    aws.policy = policy
    with pytest.raises(sky.errors.UnavailableError, match="may not do ec2:TerminateInstances"):
        Account().call("ec2", "terminate_instances", InstanceIds=[other["InstanceId"]])
    ec2.terminate_instances(InstanceIds=[other["InstanceId"]])


# What is left.


def test_remains_are_found_by_their_tags(aws: Gateway) -> None:
    async def then(outcome: Outcome) -> None:
        (remains,) = await sky.AWS().remains()
        assert (remains.pool, remains.name) == (outcome.pool, "mine")
        assert remains.pid == os.getpid()
        assert "@" in remains.owner
        kinds = [each.rpartition(" ")[0] for each in remains.resources]
        assert kinds == ["instance", "instance", "key pair", "security group"]

    attempt(sky.AWS(), nodes=2, then=then)
    assert list(asyncio.run(sky.AWS().remains())) == []


def test_remains_leave_out_what_may_not_be_listed(
    aws: Gateway, caplog: pytest.LogCaptureFixture
) -> None:
    aws.fail("DescribePlacementGroups", "UnauthorizedOperation")
    assert list(asyncio.run(sky.AWS().remains())) == []
    assert "may not do ec2:DescribePlacementGroups" in caplog.text


def test_nodes_that_are_ordered_together_are_one_launch_however_late_an_order_is(
    aws: Gateway,
) -> None:
    async def scenario() -> None:
        allocation = sky.AWS().allocate("t-late")
        orders = [Order("t-late", node, a_request()) for node in (0, 1)]
        allocation.expect([0, 1])
        first = asyncio.create_task(allocation.get(orders[0]))
        await asyncio.sleep(6 * GATHER_SECONDS)
        await asyncio.gather(first, allocation.get(orders[1]))
        await remove(allocation)

    asyncio.run(scenario())
    assert [call.count for call in aws.made("RunInstances")] == [2]


def test_an_instance_that_aws_does_not_list_yet_is_waited_for(aws: Gateway) -> None:
    aws.slow_to_appear(2)
    assert attempt(sky.AWS()).offer.instance_type == "c7i.xlarge"
    assert len(aws.made("DescribeInstances")) > 3


def test_a_cancelled_order_ends_an_instance_that_aws_does_not_list_yet(
    aws: Gateway,
) -> None:
    async def scenario() -> None:
        allocation, order = sky.AWS().allocate("t-cancelled"), Order("t-cancelled", 0, a_request())
        with aws.holding("RunInstances") as hold:
            task = asyncio.create_task(allocation.get(order))
            assert await asyncio.to_thread(hold.reached.wait, 30)
            task.cancel()
            aws.slow_to_appear(2)
        await asyncio.wait({task})
        assert task.cancelled()
        assert await allocation.find() == []
        await remove(allocation)

    asyncio.run(scenario())


def test_a_launch_that_nobody_waits_for_is_tried_nowhere_else(aws: Gateway) -> None:
    async def scenario() -> None:
        allocation, order = sky.AWS().allocate("t-given-up"), Order("t-given-up", 0, a_request())
        aws.fail("RunInstances", "InsufficientInstanceCapacity")
        with aws.holding("RunInstances", done_first=False) as hold:
            task = asyncio.create_task(allocation.get(order))
            assert await asyncio.to_thread(hold.reached.wait, 30)
            task.cancel()
            while not allocation.wanted[0].is_given_up:
                await asyncio.sleep(0.001)
        await asyncio.wait({task})
        assert task.cancelled()
        await remove(allocation)

    asyncio.run(scenario())
    assert len(aws.made("RunInstances")) == 1


def test_a_node_that_is_ordered_again_leaves_no_instance_of_the_first_order(
    aws: Gateway,
) -> None:
    async def scenario() -> None:
        allocation, order = sky.AWS().allocate("t-twice"), Order("t-twice", 0, a_request())
        with aws.holding("RunInstances") as hold:
            first = asyncio.create_task(allocation.get(order))
            assert await asyncio.to_thread(hold.reached.wait, 30)
            second = asyncio.create_task(allocation.get(order))
            await asyncio.wait({first})
        assert first.cancelled()
        machine = await second
        assert [each.id for each in await allocation.find()] == [machine.id]
        await remove(allocation)

    asyncio.run(scenario())
    assert len(aws.made("RunInstances")) == 2


def test_an_instance_that_cannot_be_ended_yet_is_ended_in_the_end(
    aws: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AWS may not know a new instance everywhere, and says that there is none."""
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    unknown = aws.fail("TerminateInstances", "InvalidInstanceID.NotFound", times=3)
    attempt(sky.AWS(), nodes=2)
    assert unknown.hits == 3


@only_in_all
def test_sweeping_waits_while_the_group_is_in_use(
    aws: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    busy = aws.fail("DeleteSecurityGroup", "DependencyViolation", times=3)
    attempt(sky.AWS())
    assert busy.hits == 3


@only_in_all
def test_a_second_region_has_machines_of_its_own(aws: Gateway) -> None:
    outcome = attempt(sky.AWS().in_region("eu-north-1"))
    assert (outcome.offer.region, outcome.offer.zone) == ("eu-north-1", "eu-north-1a")
    with pytest.raises(sky.errors.ConfigurationError, match="two regions; give only one") as caught:
        sky.AWS(region="us-east-1").in_region("eu-north-1")
    assert "with AWS(region='us-east-1'):" in str(caught.value)
