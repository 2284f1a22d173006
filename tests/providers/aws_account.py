"""A new account in moto, for one gateway: its default networks, and what is left in it."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import boto3
import botocore.exceptions
from botocore.config import Config

LIVE = ["pending", "running", "stopping", "stopped", "shutting-down"]


class Account:
    """What an administrator does, with requests that no gateway sees."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.number = f"{random.randrange(10**11, 10**12)}"
        self._lock = threading.RLock()
        self._clients: dict[tuple[str, str], Any] = {}
        self._connected: set[str] = set()
        self._used: set[str] = set()
        """The regions in which something may be: to look at one takes ten requests."""
        self._zones: dict[str, str] = {}

    def client(self, service: str, region: str = "us-east-1") -> Any:
        """A client of the SDK, of this account."""
        with self._lock:
            client = self._clients.get((service, region))
            if client is None:
                session = boto3.Session("testing", "testing", region_name=region)
                client = session.client(
                    service,
                    endpoint_url=self.endpoint,
                    config=Config(retries={"total_max_attempts": 1}, max_pool_connections=32),
                )
                client.meta.events.register("before-send", self._name_account)
                self._clients[service, region] = client
            return client

    def _name_account(self, request: Any, **_: Any) -> None:
        request.headers["x-moto-account-id"] = self.number

    def ec2(self, region: str = "us-east-1") -> Any:
        """A client for EC2, once the default network of the region has a way out."""
        self.connect(region)
        return self.client("ec2", region)

    def connect(self, region: str) -> None:
        """Give the default network a way out, as AWS does in a new account."""
        with self._lock:
            self._used.add(region)
            if region in self._connected:
                return
            ec2 = self.client("ec2", region)
            default = [{"Name": "is-default", "Values": ["true"]}]
            vpc = ec2.describe_vpcs(Filters=default)["Vpcs"][0]["VpcId"]
            gateway = ec2.create_internet_gateway()["InternetGateway"]["InternetGatewayId"]
            ec2.attach_internet_gateway(InternetGatewayId=gateway, VpcId=vpc)
            own = [{"Name": "vpc-id", "Values": [vpc]}]
            for table in ec2.describe_route_tables(Filters=own)["RouteTables"]:
                ec2.create_route(
                    RouteTableId=table["RouteTableId"],
                    DestinationCidrBlock="0.0.0.0/0",
                    GatewayId=gateway,
                )
            self._connected.add(region)

    def zone_of(self, subnet: str, region: str) -> str:
        """The zone of a subnet; empty if there is none."""
        with contextlib.suppress(botocore.exceptions.ClientError):
            if subnet not in self._zones:
                found = self.ec2(region).describe_subnets(SubnetIds=[subnet])["Subnets"]
                self._zones[subnet] = found[0]["AvailabilityZone"]
        return self._zones.get(subnet, "")

    def tags_of(self, resources: Sequence[str], region: str) -> list[Mapping[str, str]]:
        """The tags of each resource."""
        if not resources:
            return []
        filters = [{"Name": "resource-id", "Values": list(resources)}]
        tags = self.ec2(region).describe_tags(Filters=filters)["Tags"]
        return [
            {tag["Key"]: tag["Value"] for tag in tags if tag["ResourceId"] == resource}
            for resource in resources
        ]

    def instances(self, *states: str, region: str = "") -> list[dict[str, Any]]:
        """The instances in some states, or all that are not terminated."""
        filters = [{"Name": "instance-state-name", "Values": list(states or LIVE)}]
        return [
            instance
            for each in ([region] if region else sorted(self._connected))
            for page in self.client("ec2", each).describe_instances(Filters=filters)["Reservations"]
            for instance in page["Instances"]
        ]

    def terminate(self, *instances: str) -> None:
        """End instances, whatever their region."""
        for region in sorted(self._connected):
            there = {each["InstanceId"] for each in self.instances(region=region)}
            if mine := sorted(there & set(instances)):
                self.ec2(region).terminate_instances(InstanceIds=mine)

    def leftovers(self) -> list[str]:
        """Everything that costs money or clutters the account, asked for type by type."""
        with self._lock:
            # Whatever is made while this looks has its region looked at the next time.
            regions, self._used = sorted(self._used), set()
        found = [
            f"{region}: {kind} {name}"
            for region in regions
            for kind, name in self._resources(region)
        ]
        if found:
            self._used.update(regions)
        return found

    def _resources(self, region: str) -> Iterator[tuple[str, str]]:
        ec2 = self.client("ec2", region)
        live = set()
        for instance in self.instances(region=region):
            live.add(instance["InstanceId"])
            yield "instance", f"{instance['InstanceId']} ({instance['State']['Name']})"
        for group in ec2.describe_security_groups()["SecurityGroups"]:
            if group["GroupName"] != "default":
                yield "security group", group["GroupId"]
        for pair in ec2.describe_key_pairs()["KeyPairs"]:
            yield "key pair", pair["KeyName"]
        for volume in ec2.describe_volumes()["Volumes"]:
            yield "volume", volume["VolumeId"]
        for interface in ec2.describe_network_interfaces()["NetworkInterfaces"]:
            # Those of terminated instances stay in moto, and say that they are attached.
            owner = interface.get("Attachment", {}).get("InstanceId")
            if owner is None or owner in live:
                yield "network interface", interface["NetworkInterfaceId"]
        for request in ec2.describe_spot_instance_requests()["SpotInstanceRequests"]:
            if request["State"] in ("open", "active"):
                yield "spot request", request["SpotInstanceRequestId"]
        for template in ec2.describe_launch_templates()["LaunchTemplates"]:
            yield "launch template", template["LaunchTemplateId"]
        for fleet in ec2.describe_fleets()["Fleets"]:
            if not fleet["FleetState"].startswith("deleted"):
                yield "fleet", fleet["FleetId"]
        for address in ec2.describe_addresses()["Addresses"]:
            yield "address", address["AllocationId"]

    def clean(self) -> None:
        """Remove what a test has left."""
        remove = {
            "security group": ("delete_security_group", "GroupId"),
            "key pair": ("delete_key_pair", "KeyName"),
            "volume": ("delete_volume", "VolumeId"),
            "network interface": ("delete_network_interface", "NetworkInterfaceId"),
            "launch template": ("delete_launch_template", "LaunchTemplateId"),
            "address": ("release_address", "AllocationId"),
        }
        for region in sorted(self._used):
            ec2 = self.client("ec2", region)
            if there := [each["InstanceId"] for each in self.instances(region=region)]:
                ec2.terminate_instances(InstanceIds=there)
            for kind, name in list(self._resources(region)):
                with contextlib.suppress(botocore.exceptions.ClientError):
                    if kind == "spot request":
                        ec2.cancel_spot_instance_requests(SpotInstanceRequestIds=[name])
                    elif kind == "fleet":
                        ec2.delete_fleets(FleetIds=[name], TerminateInstances=True)
                    elif kind in remove:
                        operation, argument = remove[kind]
                        getattr(ec2, operation)(**{argument: name})
