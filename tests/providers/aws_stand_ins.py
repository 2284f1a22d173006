"""What AWS answers and moto does not: catalogue, prices, quotas, AMIs, sessions, groups.

The catalogue is that of `aws_answers/`, which has the field names of AWS's documentation, two dozen
types and plausible prices. Regions without files of their own sell what us-east-1 sells.
"""

from __future__ import annotations

import functools
import json
import threading
import uuid
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from .aws_messages import Answer, Call, accepted, refusal

ANSWERS = Path(__file__).parent / "aws_answers"
PAGE = 20
"""How many there are on a page at most: fewer than AWS has, so that there are several."""
IMAGES = {"x86_64": "ami-1e749f67", "arm64": "ami-0e9271c829888680e"}
"""AMIs that moto knows in every region."""


@functools.cache
def recorded(kind: str, region: str = "") -> list[dict[str, Any]]:
    """What a recorded answer lists, of a region if it differs between regions."""
    if not region:
        path = ANSWERS / f"{kind}.json"
    elif not (path := ANSWERS / f"{kind}.{region}.json").exists():
        text = (ANSWERS / f"{kind}.us-east-1.json").read_text().replace("us-east-1", region)
        return next(iter(json.loads(text).values()))
    return next(iter(json.loads(path.read_text()).values()))


class StandIns:
    """Answers in place of moto, of one account."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.quotas: dict[str, float] = {}
        """By code; any other is 1000 vCPUs."""
        self.groups: dict[tuple[str, str], dict[str, Any]] = {}
        """Placement groups, by region and name."""
        self.reservations: dict[str, dict[str, Any]] = {}
        """Capacity reservations and blocks, by id, as AWS describes them."""
        self.sessions: dict[str, dict[str, str]] = {}
        """Answers that began sessions of Systems Manager, by id."""

    def answer(self, call: Call) -> Answer | None:
        """The answer to a call; None if moto has one."""
        method = getattr(self, f"_{call.service}_{call.action}", None)
        return method(call) if method else None

    def _ec2_DescribeInstanceTypes(self, call: Call) -> Answer:  # noqa: N802
        sold = {each["InstanceType"] for each in recorded("offerings", call.region)}
        asked = call.listed("InstanceType")
        if unknown := [name for name in asked if name not in sold]:
            named = ", ".join(unknown)
            message = f"The following supplied instance types do not exist: [{named}]"
            return refusal(call, "InvalidInstanceType", message, 400)
        wanted = asked or sold
        found = [each for each in recorded("instance_types") if each["InstanceType"] in wanted]
        return _page(call, "InstanceTypes", found)

    def _ec2_DescribeInstanceTypeOfferings(self, call: Call) -> Answer:  # noqa: N802
        found = recorded("offerings", call.region)
        if names := call.filters().get("instance-type"):
            found = [
                each
                for each in found
                if any(fnmatchcase(each["InstanceType"], name) for name in names)
            ]
        return _page(call, "InstanceTypeOfferings", found)

    def _ec2_DescribeSpotPriceHistory(self, call: Call) -> Answer:  # noqa: N802
        names, zone = call.listed("InstanceType"), call.parameters.get("AvailabilityZone")
        zones = call.filters().get("availability-zone", [zone] if zone else [])
        found = [
            each
            for each in recorded("spot_prices", call.region)
            if (not names or each["InstanceType"] in names)
            and (not zones or each["AvailabilityZone"] in zones)
        ]
        return _page(call, "SpotPriceHistory", found)

    def _pricing_GetProducts(self, call: Call) -> Answer:  # noqa: N802
        filters = {each["Field"]: each["Value"] for each in call.parameters.get("Filters", [])}
        found = [
            json.dumps(each)
            for each in recorded("products", filters.get("regionCode", "us-east-1"))
            if all(each["product"]["attributes"].get(k) == v for k, v in filters.items())
        ]
        return _page(call, "PriceList", found)

    def _servicequotas_GetServiceQuota(self, call: Call) -> Answer:  # noqa: N802
        code = call.parameters["QuotaCode"]
        quota = {
            "ServiceCode": call.parameters["ServiceCode"],
            "QuotaCode": code,
            "Value": self.quotas.get(code, 1000.0),
            "Unit": "None",
            "Adjustable": True,
        }
        return accepted(call, {"Quota": quota})

    def _ssm_GetParameter(self, call: Call) -> Answer | None:  # noqa: N802
        found = _parameter(call.parameters["Name"])
        return accepted(call, {"Parameter": found}) if found else None

    def _ssm_GetParameters(self, call: Call) -> Answer | None:  # noqa: N802
        names = call.parameters["Names"]
        found = [_parameter(name) for name in names]
        if not any(found):
            return None
        missing = [name for name, value in zip(names, found, strict=True) if value is None]
        there = [value for value in found if value is not None]
        return accepted(call, {"Parameters": there, "InvalidParameters": missing})

    def _ssm_StartSession(self, call: Call) -> Answer:  # noqa: N802
        session = f"tester-{uuid.uuid4().hex[:17]}"
        url = f"wss://ssmmessages.{call.region}.amazonaws.com/v1/data-channel/{session}"
        result = {"SessionId": session, "StreamUrl": url, "TokenValue": uuid.uuid4().hex}
        self.sessions[session] = result
        return accepted(call, result)

    def _ssm_TerminateSession(self, call: Call) -> Answer:  # noqa: N802
        return accepted(call, {"SessionId": call.parameters["SessionId"]})

    def _ec2_CreatePlacementGroup(self, call: Call) -> Answer:  # noqa: N802
        name = str(call.parameters["GroupName"])
        with self._lock:
            if (call.region, name) in self.groups:
                message = f"The placement group '{name}' already exists."
                return refusal(call, "InvalidPlacementGroup.Duplicate", message, 400)
            group = self.groups[call.region, name] = {
                "GroupName": name,
                "GroupId": f"pg-{uuid.uuid4().hex[:17]}",
                "State": "available",
                "Strategy": call.parameters.get("Strategy", "cluster"),
                "Tags": [{"Key": key, "Value": value} for key, value in call.tags().items()],
            }
        return accepted(call, {"PlacementGroup": group})

    def _ec2_DescribePlacementGroups(self, call: Call) -> Answer:  # noqa: N802
        names, ids = call.listed("GroupName"), call.listed("GroupId")
        with self._lock:
            there = [group for (region, _), group in self.groups.items() if region == call.region]
        for name in names:
            if name not in [group["GroupName"] for group in there]:
                message = f"The Placement Group '{name}' is unknown."
                return refusal(call, "InvalidPlacementGroup.Unknown", message, 400)
        found = [
            group
            for group in there
            if (not names or group["GroupName"] in names)
            and (not ids or group["GroupId"] in ids)
            and _has_tags(group["Tags"], call.filters())
        ]
        return accepted(call, {"PlacementGroups": found})

    def _ec2_DeletePlacementGroup(self, call: Call) -> Answer:  # noqa: N802
        name = str(call.parameters["GroupName"])
        with self._lock:
            if self.groups.pop((call.region, name), None) is None:
                message = f"The Placement Group '{name}' is unknown."
                return refusal(call, "InvalidPlacementGroup.Unknown", message, 400)
        return accepted(call, {})

    def _ec2_DescribeCapacityReservations(self, call: Call) -> Answer:  # noqa: N802
        ids = call.listed("CapacityReservationId") or list(self.reservations)
        if unknown := [each for each in ids if each not in self.reservations]:
            message = f"The capacity reservation ID '{unknown[0]}' does not exist"
            return refusal(call, "InvalidCapacityReservationId.NotFound", message, 400)
        return accepted(call, {"CapacityReservations": [self.reservations[each] for each in ids]})


def reservation(
    instance_type: str, zone: str, *, count: int = 1, block: bool = False, **changed: Any
) -> dict[str, Any]:
    """A capacity reservation, or a capacity block, as AWS describes it."""
    return {
        "CapacityReservationId": f"cr-{uuid.uuid4().hex[:17]}",
        "InstanceType": instance_type,
        "InstancePlatform": "Linux/UNIX",
        "AvailabilityZone": zone,
        "TotalInstanceCount": count,
        "AvailableInstanceCount": count,
        "State": "active",
        "InstanceMatchCriteria": "targeted",
        "ReservationType": "capacity-block" if block else "default",
        **changed,
    }


def _parameter(name: str) -> dict[str, Any] | None:
    """A public parameter that names an AMI; None for any other, and for those that moto has."""
    mine = name.startswith("/aws/service/") and "ami" in name
    if not mine or name.startswith("/aws/service/ami-amazon-linux-latest/"):
        return None
    arm = "arm64" in name or "aarch64" in name
    value = IMAGES["arm64" if arm else "x86_64"]
    return {"Name": name, "Type": "String", "Value": value, "Version": 1}


def _page(call: Call, key: str, found: Sequence[Any]) -> Answer:
    start = int(call.parameters.get("NextToken") or 0)
    size = min(PAGE, int(call.parameters.get("MaxResults") or PAGE))
    result: dict[str, Any] = {key: list(found[start : start + size])}
    if start + size < len(found):
        result["NextToken"] = str(start + size)
    return accepted(call, result)


def _has_tags(tags: Sequence[Mapping[str, str]], filters: Mapping[str, Sequence[str]]) -> bool:
    mine = {tag["Key"]: tag["Value"] for tag in tags}
    for name, values in filters.items():
        if name == "tag-key" and not set(values) & set(mine):
            return False
        if name.startswith("tag:"):
            value = mine.get(name.removeprefix("tag:"))
            if value is None or not any(fnmatchcase(value, each) for each in values):
                return False
    return True
