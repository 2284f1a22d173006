"""The gateway that stands for AWS in tests answers the SDK as AWS does."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import boto3
import botocore.exceptions
import pytest
from botocore.config import Config

from .aws_gateway import Gateway


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    """A gateway before nothing: it knows the catalogue, and no machines."""
    found = Gateway()
    try:
        yield found
    finally:
        found.close()


def client(gateway: Gateway, service: str, region: str = "us-east-1") -> Any:
    session = boto3.Session("testing", "testing", region_name=region)
    once = Config(retries={"total_max_attempts": 1})
    return session.client(service, endpoint_url=gateway.url, config=once)


def refusal_of(call: Any, **arguments: Any) -> tuple[str, str]:
    with pytest.raises(botocore.exceptions.ClientError) as caught:
        call(**arguments)
    error = caught.value.response["Error"]
    return error["Code"], error["Message"]


def test_it_serves_a_catalogue_in_pages_and_counts_the_calls(gateway: Gateway) -> None:
    pages = client(gateway, "ec2").get_paginator("describe_instance_types").paginate()
    names = [each["InstanceType"] for page in pages for each in page["InstanceTypes"]]
    assert {"c7i.xlarge", "p4d.24xlarge", "trn1.2xlarge"} < set(names)
    assert gateway.counted() == {"ec2:DescribeInstanceTypes": 2}
    assert gateway.calls[0].region == "us-east-1"


def test_a_fault_answers_as_often_as_it_is_told(gateway: Gateway) -> None:
    ec2 = client(gateway, "ec2")
    arguments = {"ImageId": "ami-1", "InstanceType": "g5.xlarge", "MinCount": 1, "MaxCount": 1}
    gateway.fail(
        "RunInstances",
        "InsufficientInstanceCapacity",
        times=1,
        when=lambda call: call.zone == "us-east-1a" and call.instance_type == "g5.xlarge",
    )
    there = {**arguments, "Placement": {"AvailabilityZone": "us-east-1a"}}
    elsewhere = {**arguments, "Placement": {"AvailabilityZone": "us-east-1b"}}
    assert refusal_of(ec2.run_instances, **elsewhere)[0] == "ServiceUnavailable"
    code, message = refusal_of(ec2.run_instances, **there)
    assert code == "InsufficientInstanceCapacity"
    assert "g5.xlarge capacity in the Availability Zone you requested (us-east-1a)" in message
    assert refusal_of(ec2.run_instances, **there)[0] == "ServiceUnavailable"


def test_a_policy_names_the_action_that_it_does_not_allow(gateway: Gateway) -> None:
    tagged = {"StringEquals": {"ec2:CreateAction": "CreatePlacementGroup"}}
    gateway.policy = {
        "Statement": [
            {"Effect": "Allow", "Action": ["ec2:Describe*", "ec2:CreatePlacementGroup"]},
            {"Effect": "Allow", "Action": "ec2:CreateTags", "Condition": tagged},
        ]
    }
    ec2 = client(gateway, "ec2")
    ec2.describe_instance_types()
    tags = [{"ResourceType": "placement-group", "Tags": [{"Key": "a", "Value": "b"}]}]
    ec2.create_placement_group(GroupName="x", TagSpecifications=tags)
    code, message = refusal_of(ec2.delete_placement_group, GroupName="x")
    assert code == "UnauthorizedOperation"
    assert "not authorized to perform: ec2:DeletePlacementGroup" in message
    code, message = refusal_of(
        client(gateway, "pricing").get_products, ServiceCode="AmazonEC2", Filters=[]
    )
    assert code == "AccessDeniedException"
    assert gateway.denied == ["ec2:DeletePlacementGroup", "pricing:GetProducts"]


def test_instances_learn_of_an_interruption_with_a_token_alone(gateway: Gateway) -> None:
    url = f"{gateway.metadata.local_url}/latest/meta-data/spot/instance-action"

    def status(**headers: str) -> int:
        try:
            request = urllib.request.Request(url, headers=headers)
            with urllib.request.urlopen(request) as reply:
                return int(reply.status)
        except urllib.error.HTTPError as problem:
            with problem:
                return problem.code

    asking = urllib.request.Request(
        f"{gateway.metadata.local_url}/latest/api/token",
        method="PUT",
        headers={"X-aws-ec2-metadata-token-ttl-seconds": "60"},
    )
    with urllib.request.urlopen(asking) as reply:
        token = {"X-aws-ec2-metadata-token": reply.read().decode()}
    assert status() == 401
    assert status(**token) == 404
    gateway.metadata.announce(120)
    assert status(**token) == 200
