"""Requests to AWS and its answers, as they look on the wire."""

from __future__ import annotations

import functools
import json
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl
from xml.sax.saxutils import escape

_SCOPE = re.compile(r"Credential=([^/]+)/\d+/([^/]+)/([^/]+)/aws4_request")


@dataclass(frozen=True)
class Call:
    """One request: which operation of which service, and with what."""

    service: str
    """As IAM calls it, such as "ec2" or "servicequotas"."""
    action: str
    """Such as "RunInstances"; the method for a service that has paths instead."""
    parameters: Mapping[str, Any]
    """Flat for EC2, such as "Filter.1.Value.1"; the JSON for others."""
    region: str = ""
    key: str = ""
    """The access key that signed it."""
    zone: str = field(default="", compare=False)
    """Where an instance is to run, if the request says it, also by its subnet."""

    @property
    def name(self) -> str:
        """The operation as a policy has it, such as "ec2:RunInstances"."""
        return f"{self.service}:{self.action}"

    @property
    def instance_type(self) -> str:
        return str(self.parameters.get("InstanceType", ""))

    @property
    def spot(self) -> bool:
        return self.parameters.get("InstanceMarketOptions.MarketType") == "spot"

    @property
    def count(self) -> int:
        """How many instances are asked for."""
        return int(self.parameters.get("MaxCount", 0))

    @property
    def subnet(self) -> str:
        given = self.parameters.get("SubnetId") or self.parameters.get(
            "NetworkInterface.1.SubnetId"
        )
        return str(given or "")

    def listed(self, name: str) -> list[str]:
        """The values of a flat list, such as "InstanceId" for InstanceId.1, InstanceId.2."""
        return [
            str(value)
            for key, value in self.parameters.items()
            if re.fullmatch(rf"{name}\.\d+", key)
        ]

    def filters(self) -> dict[str, list[str]]:
        """The filters of a request that describes something."""
        found: dict[str, list[str]] = {}
        for key, name in self.parameters.items():
            if numbered := re.fullmatch(r"Filter\.(\d+)\.Name", key):
                found[str(name)] = self.listed(rf"Filter\.{numbered[1]}\.Value")
        return found

    def tags(self) -> dict[str, str]:
        """The tags that the request gives to what it makes or names."""
        found: dict[str, str] = {}
        for key, name in self.parameters.items():
            if key.endswith(".Key") and ("Tag." in key):
                value = self.parameters.get(key.removesuffix(".Key") + ".Value", "")
                found[str(name)] = str(value)
        return found


@dataclass
class Answer:
    """What goes back."""

    status: int
    body: bytes
    headers: list[tuple[str, str]]


def read_call(method: str, path: str, headers: Mapping[str, str], body: bytes) -> Call:
    """The call that a request makes."""
    scope = _SCOPE.search(headers.get("Authorization", ""))
    key, region, service = scope.groups() if scope else ("", "", "")
    target = headers.get("X-Amz-Target", "")
    if target:
        parameters = json.loads(body or b"{}")
        return Call(service, target.rpartition(".")[2], parameters, region, key)
    if headers.get("Content-Type", "").startswith("application/x-www-form-urlencoded"):
        fields = dict(parse_qsl(body.decode(), keep_blank_values=True))
        action = fields.pop("Action", "")
        fields.pop("Version", None)
        if action:
            return Call(service, action, fields, region, key)
    return Call(service, method, {"path": path}, region, key)


def refusal(call: Call, code: str, message: str, status: int) -> Answer:
    """An error, as the service of a call writes it."""
    request = uuid.uuid4().hex
    if call.service == "ec2":
        text = (
            '<?xml version="1.0" encoding="UTF-8"?>\n<Response><Errors><Error>'
            f"<Code>{code}</Code><Message>{escape(message)}</Message></Error></Errors>"
            f"<RequestID>{request}</RequestID></Response>"
        )
        return Answer(status, text.encode(), [("Content-Type", "text/xml;charset=UTF-8")])
    if call.service in ("sts", "iam"):
        text = (
            f"<ErrorResponse><Error><Type>Sender</Type><Code>{code}</Code>"
            f"<Message>{escape(message)}</Message></Error><RequestId>{request}</RequestId>"
            "</ErrorResponse>"
        )
        return Answer(status, text.encode(), [("Content-Type", "text/xml")])
    return _json({"__type": code, "message": message}, status)


def accepted(call: Call, result: Mapping[str, Any]) -> Answer:
    """A result with the field names of the documentation, as the service of a call writes it."""
    if call.service != "ec2":
        return _json(result)
    from moto.core.serialize import EC2Serializer

    written = EC2Serializer(operation_model=_ec2().operation_model(call.action)).serialize(result)
    return Answer(200, str(written["body"]).encode(), [("Content-Type", "text/xml;charset=UTF-8")])


def _json(result: Any, status: int = 200) -> Answer:
    body = json.dumps(result).encode()
    return Answer(status, body, [("Content-Type", "application/x-amz-json-1.1")])


@functools.cache
def _ec2() -> Any:
    from moto.core.utils import get_service_model

    return get_service_model("ec2")
